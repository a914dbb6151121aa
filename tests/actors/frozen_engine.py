"""A replica whose engine's process stands still in the middle of generating, once, so that a test can kill it there.
The other replicas generate nothing before that, however late the first one is up."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from group_gate import Gate

from engine.ids import GroupId
from engine.protocols import Generated, GroupWork
from engine.runtime.plan import Rollout
from engine.trajectory import TrajectoryGroup

SAVES = 2
"""So many saved prefixes of one group, and the engine stands still."""


class FrozenEngine:
    """`frozen`: a file that the replica writes once: the group it saved and the process identifier of its engine."""

    def __init__(self, directory: Path) -> None:
        self.frozen = directory / "frozen"
        self._gate = Gate(directory / "killed")

    def rollouts(self, make: Callable[[int], Rollout]) -> Callable[[int], Rollout]:
        """The first replica freezes its engine; the others wait for `kill`."""
        return partial(_rollout, make, self._gate.before(GroupId(0), make), self.frozen)

    def group(self) -> GroupId | None:
        """The group that is half generated in the frozen engine; None: it still runs."""
        return GroupId(int(self.frozen.read_text().split()[0])) if self.frozen.exists() else None

    def kill(self) -> None:
        os.kill(int(self.frozen.read_text().split()[1]), signal.SIGKILL)
        self._gate.open()


def _rollout(make: Callable[[int], Rollout], gated: Callable[[int], Rollout], frozen: Path, replica: int) -> Rollout:
    if replica > 0:
        return gated(replica)
    made = make(replica)
    return Rollout(generator=Freezing(made.generator, frozen), evaluator=made.evaluator)


class Freezing:
    """Passes every call on."""

    def __init__(self, generator: Any, frozen: Path) -> None:
        self._generator = generator
        self._frozen = frozen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def generate(self, work: GroupWork) -> Generated:
        save, saves = work.save, 0

        def save_and_freeze(group: TrajectoryGroup) -> None:
            nonlocal saves
            saves += 1
            if save is not None:
                save(group)
            if saves == SAVES and not self._frozen.exists():
                (engine,) = (p for p in psutil.Process().children(recursive=True) if "EngineCor" in p.name())
                os.kill(engine.pid, signal.SIGSTOP)
                unfinished = self._frozen.with_suffix(".tmp")
                unfinished.write_text(f"{work.group} {engine.pid}")
                unfinished.rename(self._frozen)

        generated: Generated = await self._generator.generate(replace(work, save=save_and_freeze))
        return generated
