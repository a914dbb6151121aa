"""A run whose user code forks and whose child returns. Prints how each process ended: `python forking_run.py PLACE`."""

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import engine.runtime.local
from engine.protocols import Batch, GroupWork
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.states.limits import Limits
from engine.states.timeouts import Timeouts
from engine.trajectory import Trajectory

PLACE = sys.argv[1]


def fork(place: str) -> None:
    """Fork once, and wait for the child."""
    global PLACE
    if place == PLACE:
        PLACE = ""
        if child := os.fork():
            os.waitpid(child, 0)


class Generator(SimpleGenerator):
    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        fork("sample")
        await asyncio.sleep(0)
        return [response([1], reward=1.0, version=version) for _ in range(work.samples)]


class Trainer(SimpleTrainer):
    def train(self, batch: Batch) -> dict[str, float]:
        fork("train")
        return {}

    def weights(self) -> Any:
        return {}


limits = Limits(
    train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=2, timeouts=Timeouts.every(None)
)
parent = os.getpid()
try:
    result = engine.runtime.local.run(
        generators=[Generator()], trainer=Trainer(), prompts=["?"] * 8, limits=limits, samples=2
    )
    outcome = f"{result.outcome} {result.steps}"
except BaseException as error:
    outcome = repr(error)
print("parent" if os.getpid() == parent else "child", outcome, flush=True)
