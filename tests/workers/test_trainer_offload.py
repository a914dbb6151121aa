"""A trainer that shares its pool with replicas is on the accelerator only while it works."""

from typing import Any

import pytest

from engine.protocols import Batch
from engine.states.limits import Limits, Pool
from engine.workers.trainer import with_offloading

BATCH = Batch(step=0, groups=[], staleness=[])


class Plain:
    """As little as a trainer can be."""

    def score(self, batch: Batch, task: str) -> None: ...

    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> Any: ...

    def save(self, directory: str, step: int) -> None: ...


class Noting(Plain):
    """Notes what is asked of it."""

    def __init__(self, fail: str = "") -> None:
        self.noted: list[str] = []
        self.fail = fail

    def _note(self, what: str) -> None:
        self.noted.append(what)
        if what == self.fail:
            self.fail = ""
            raise RuntimeError(what)

    def score(self, batch: Batch, task: str) -> None:
        assert (batch, task) == (BATCH, "old_logprobs")
        self._note("score")

    def train(self, batch: Batch) -> dict[str, float]:
        self._note("train")
        return {"loss": 0.5}

    def weights(self) -> Any:
        self._note("weights")

    def save(self, directory: str, step: int) -> None:
        self._note("save")

    def offload(self) -> None:
        self._note("offload")

    def onload(self) -> None:
        self._note("onload")


def test_it_is_there_from_the_first_score_to_the_end_of_training() -> None:
    inner = Noting()
    trainer = with_offloading(inner)
    assert inner.noted == ["offload"], "replicas generate first"
    trainer.score(BATCH, "old_logprobs")
    assert trainer.train(BATCH) == {"loss": 0.5}
    trainer.weights()
    trainer.save("somewhere", 1)
    assert inner.noted[1:] == ["onload", "score", "train", "offload", "weights", "save"]


@pytest.mark.parametrize("fail", ["score", "train"])
def test_one_that_fails_leaves_and_comes_back(fail: str) -> None:
    inner = Noting(fail)
    trainer = with_offloading(inner)
    with pytest.raises(RuntimeError, match=fail):
        trainer.score(BATCH, "old_logprobs") if fail == "score" else trainer.train(BATCH)
    assert inner.noted == ["offload", "onload", fail, "offload"]
    trainer.train(BATCH)
    assert inner.noted[4:] == ["onload", "train", "offload"]


def test_one_that_cannot_leave_stays() -> None:
    trainer = Plain()
    assert with_offloading(trainer) is trainer


def test_a_trainer_takes_turns_where_replicas_stand_in_its_pool() -> None:
    figures = {"train_batch_size": 1, "max_staleness_steps": 0, "max_concurrent_groups": 1}
    train, both = Pool(tasks=("train",)), Pool(tasks=("rollout", "train"), replicas=(0,))
    scored = Pool(tasks=("rollout", "ref_logprobs"), replicas=(0,))
    assert Limits(**figures, pools=(both,)).trains_in_turns  # type: ignore[arg-type]
    for pools in ((), (train,), (train, scored)):
        assert not Limits(**figures, pools=pools).trains_in_turns  # type: ignore[arg-type]
