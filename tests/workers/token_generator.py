"""A small generator that keeps the whole of `engine.protocols.Generator`: tokens one by one, at the test's own pace.

Each token is its position; its log-prob says the version it was sampled under. A token is sampled when the test calls
`tick`, or at once where `free` is set; paused it samples none.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.ids import GroupId, Version
from engine.protocols import Generated, GroupWork
from engine.storage.trajectories import copy_group
from engine.trajectory import Span, Trajectory, TrajectoryGroup


@dataclass
class Running:
    group: TrajectoryGroup
    work: GroupWork
    cut: str = ""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class TokenGenerator:
    """Every trajectory ends after `length` tokens, `stretch` more in every third group, with reward 1 for even
    samples."""

    def __init__(self, length: int = 6, free: bool = False, pace_s: float = 0.0, stretch: int = 0) -> None:
        self.length = length
        self.free = free
        self.pace_s = pace_s
        self.stretch = stretch
        self.version: Version = 0
        self.frozen = False
        self.staged: dict[Version, Any] = {}
        self.calls: list[str] = []
        self.works: list[GroupWork] = []
        self._running: dict[GroupId, Running] = {}

    async def generate(self, work: GroupWork) -> Generated:
        self.works.append(work)
        group = (
            copy_group(work.partial)
            if work.partial
            else TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[])
        )
        group.trajectories += [Trajectory(prompt_ids=[1]) for _ in range(work.samples - len(group.trajectories))]
        running = self._running[work.group] = Running(group, work, "truncate" if work.truncate else "")
        try:
            while not running.cut and not all(
                len(t.token_ids) >= self.length_of(work.group) for t in group.trajectories
            ):
                if self.free and not self.frozen:
                    await asyncio.sleep(self.pace_s)
                    self._sample(running)
                else:
                    running.wake.clear()
                    await running.wake.wait()
        finally:
            del self._running[work.group]
        if running.cut == "abort":
            return Generated(group=group, aborted=True)
        for index, trajectory in enumerate(group.trajectories):
            whole = len(trajectory.token_ids) >= self.length_of(work.group)
            trajectory.finish_reason = "stop" if whole else "truncated"
            trajectory.reward = 1.0 if index % 2 == 0 else 0.0
        return Generated(group=group)

    def length_of(self, group: GroupId) -> int:
        return self.length + (self.stretch if group % 3 == 0 else 0)

    def tick(self, tokens: int = 1) -> None:
        """Sample tokens for every running trajectory."""
        for running in list(self._running.values()):
            for _ in range(tokens):
                self._sample(running)
            running.wake.set()

    def _sample(self, running: Running) -> None:
        for trajectory in running.group.trajectories:
            if not self.frozen and len(trajectory.token_ids) < self.length_of(running.group.group):
                trajectory.extend([len(trajectory.token_ids)], [-float(self.version)], [Span(0, 1, self.version)])
        work, tokens = running.work, running.group.tokens
        if work.save is not None and tokens % (work.save_every_tokens * work.samples) == 0 and not self.frozen:
            work.save(copy_group(running.group))

    def _cut(self, groups: Sequence[GroupId], how: str) -> None:
        for group in groups:
            if group in self._running:
                self._running[group].cut = how
                self._running[group].wake.set()

    async def abort(self, groups: Sequence[GroupId]) -> None:
        self.calls.append("abort")
        self._cut(groups, "abort")

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        self.calls.append("truncate")
        self._cut(groups, "truncate")

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        if mode == "abort":
            self._cut(list(self._running), "abort")
        if mode != "wait":
            self.frozen = True

    async def stage(self, version: Version, weights: Any) -> None:
        self.calls.append(f"stage {version}")
        self.staged = {version: weights}

    async def install(self, version: Version) -> None:
        self.calls.append(f"install {version}")
        self.staged.pop(version)
        self.version = version

    async def resume(self) -> None:
        self.calls.append("resume")
        self.frozen = False
        for running in self._running.values():
            running.wake.set()

    async def close(self) -> None:
        self.calls.append("close")
