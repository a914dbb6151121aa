"""A gate for groups: a run cannot get past it, in whatever process, before the test has done what it does to the run.

gate = Gate(tmp_path / "gate")
with start(replace(plan, make_rollout=gate.before(20, plan.make_rollout))) as run:
    ...                     # at most the first 20 groups are generated
    gate.open()             # all others, now and later, of this run or of the one that resumes it
"""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.ids import GroupId
from engine.protocols import Generated, GroupWork
from engine.workers.plan import Rollout


class Gate:
    """A named pipe: what is written into it stays there, so that it is open for good."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._pipe = path.open("r+b", buffering=0)

    def open(self) -> None:
        self._pipe.write(b"open")

    def before(self, first: GroupId, make: Callable[[int], Rollout]) -> Callable[[int], Rollout]:
        """Rollouts that begin the groups from `first` on when the gate is open."""
        return partial(_gated, make, self.path, first)


def _gated(make: Callable[[int], Rollout], gate: Path, first: GroupId, replica: int) -> Rollout:
    made = make(replica)
    return Rollout(generator=GatedGenerator(made.generator, gate, first), evaluator=made.evaluator)


class GatedGenerator:
    """Passes every call on. Only for `sync_mode: keep`: groups at the gate cannot be aborted."""

    def __init__(self, generator: Any, gate: Path, first: GroupId) -> None:
        self._generator = generator
        self._gate = gate
        self._first = first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def generate(self, work: GroupWork) -> Generated:
        if work.group >= self._first:
            await _opened(self._gate)
        generated: Generated = await self._generator.generate(work)
        return generated


async def _opened(gate: Path) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    pipe = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    loop.add_reader(pipe, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe)
        os.close(pipe)
