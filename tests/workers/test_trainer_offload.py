"""A trainer that shares its pool with replicas is on the accelerator only while it works."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from event_loops import played
from test_trainer_worker import Bench, Scribe, save, train

from engine.commands import PublishWeights, ScoreBatch
from engine.errors import TrainerSpoiled
from engine.events import StepFailed
from engine.states.limits import Limits, Pool

SCORE = ScoreBatch(step=0, attempt=1, task="old_logprobs", groups=(4, 2), cause=0)

TOGETHER = (Pool(tasks=("rollout", "train"), replicas=(0,)),)


class Leaving(Scribe):
    """Can leave the accelerator; what is asked of it is written down without arguments."""

    def offload(self) -> None:
        self._note("offload")

    async def onload(self) -> None:
        self._note("onload")

    @property
    def noted(self) -> list[str]:
        return [call.split()[0] for call in self.calls]


async def in_turns(trainer: Any, folder: Path, *orders: Any) -> list[Any]:
    """The events that answer the orders to a trainer that takes turns."""
    bench = await Bench(trainer, folder / "checkpoints", pools=TOGETHER).open()
    await bench.fill(2, 4)
    events = await bench.answer(*orders)
    await bench.worker.close()
    return events


@played
async def test_it_is_there_from_the_first_score_to_the_end_of_training(tmp_path: Path) -> None:
    trainer = Leaving()
    await in_turns(
        trainer,
        tmp_path / "checkpoints",
        SCORE,
        train(),
        PublishWeights(version=1, attempt=1, steps=1, cause=0),
        save(1),
    )
    assert trainer.noted == ["offload", "onload", "score", "train", "offload", "weights", "save"]


@pytest.mark.parametrize(("fail", "order"), [("score", SCORE), ("train", train())])
@played
async def test_one_that_fails_leaves_and_comes_back(tmp_path: Path, fail: str, order: Any) -> None:
    class Once(Leaving):
        def _note(self, call: str) -> None:
            try:
                super()._note(call)
            finally:
                self.fails = "" if call.startswith(fail) else fail

    trainer = Once(fails=fail)
    failed, _ = await in_turns(trainer, tmp_path, order, train(attempt=2))
    assert isinstance(failed, StepFailed)
    assert trainer.noted == ["offload", "onload", fail, "offload", "onload", "train", "offload"]


@played
async def test_one_that_is_spoiled_is_not_asked_to_leave(tmp_path: Path) -> None:
    trainer = Leaving(fails="train", error=TrainerSpoiled("out of memory"))
    bench = await Bench(trainer, tmp_path / "checkpoints", pools=TOGETHER).open()
    await bench.fill(2, 4)
    bench.carry_out(train())
    while not bench.worker.broken:
        await asyncio.sleep(0)
    await bench.worker.close()
    assert trainer.noted == ["offload", "onload", "train"]


@played
async def test_one_that_cannot_leave_stays(tmp_path: Path) -> None:
    trainer = Scribe()
    await in_turns(trainer, tmp_path, train())
    assert [call.split()[0] for call in trainer.calls] == ["train"]


def test_a_trainer_takes_turns_where_replicas_stand_in_its_pool() -> None:
    figures = {"train_batch_size": 1, "max_staleness_steps": 0, "max_concurrent_groups": 1}
    train, both = Pool(tasks=("train",)), Pool(tasks=("rollout", "train"), replicas=(0,))
    scored = Pool(tasks=("rollout", "ref_logprobs"), replicas=(0,))
    assert Limits(**figures, pools=(both,)).trains_in_turns  # type: ignore[arg-type]
    for pools in ((), (train,), (train, scored)):
        assert not Limits(**figures, pools=pools).trains_in_turns  # type: ignore[arg-type]
