"""The evaluator of several validation sets: each prompt goes to the generator of its set."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.errors import EngineError
from engine.protocols import GroupWork
from engine.rollout.evaluator import SetEvaluator
from engine.runtime.local import SimpleGenerator, response
from engine.trajectory import Prompt, Trajectory


class Named(SimpleGenerator):
    def __init__(self, reward: float) -> None:
        super().__init__()
        self.reward = reward

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        if self.reward < 0:
            await asyncio.Event().wait()
        return [response([1], reward=self.reward, version=version)]


def work(name: str, group: int = -1) -> GroupWork:
    prompt = Prompt(row=0, text="")
    return GroupWork(group=group, attempt=1, prompt=prompt, samples=1, held_out=True, validation_set=name)


def test_each_set_is_answered_by_its_generator_and_aborts_reach_all() -> None:
    async def scene() -> None:
        evaluator = SetEvaluator({"one": Named(1.0), "two": Named(2.0), "stuck": Named(-1.0)})
        for name, reward in (("one", 1.0), ("two", 2.0)):
            made = await evaluator.generate(work(name))
            assert made.group.trajectories[0].reward == reward
        with pytest.raises(EngineError, match="no validation set 'three'"):
            await evaluator.generate(work("three"))
        stuck = asyncio.create_task(evaluator.generate(work("stuck", -7)))
        await asyncio.sleep(0)
        await evaluator.abort([-7])
        assert (await stuck).aborted

    asyncio.run(scene())
