"""One pool for replicas and trainer, in one process: replicas sleep while it trains, and no group is lost by it."""

from typing import Any

import pytest
from sleepy_generator import Sleepy, check_asleep_at_each_step

import engine.runtime.local
from engine.protocols import Batch
from engine.runtime.local import SimpleTrainer
from engine.states.limits import Limits, Pool

STEPS = 4


class Counting(SimpleTrainer):
    """Is on the accelerator only while every replica sleeps; weights are the steps done."""

    def __init__(self, replicas: list[Sleepy]) -> None:
        self.replicas = replicas
        self.steps = 0
        self.loaded = True
        """It is made there; replicas have not begun."""

    def offload(self) -> None:
        assert self.loaded and (not self.steps or self.asleep())
        self.loaded = False

    def onload(self) -> None:
        assert not self.loaded and self.asleep()
        self.loaded = True

    def asleep(self) -> bool:
        return all(replica.asleep for replica in self.replicas)

    def train(self, batch: Batch) -> dict[str, float]:
        assert self.loaded and self.asleep()
        self.steps += 1
        return {}

    def weights(self) -> Any:
        return self.steps


@pytest.mark.parametrize("apart", [0, 1], ids=["colocated", "lending"])
def test_replicas_sleep_while_the_trainer_has_their_pool(apart: int) -> None:
    """`apart` replicas stand in a pool of their own and generate on: the others are lent hardware of the trainer."""
    made = [Sleepy(length=10, free=True, pace_s=0.001, stretch=60) for _ in range(2 + apart)]
    shared = Pool(tasks=("rollout", "train"), replicas=(0, 1))
    own = (Pool(tasks=("rollout",), replicas=(2,)),) * apart
    limits = Limits(
        train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, max_steps=STEPS, pools=(shared, *own)
    )
    trainer = Counting(made[:2])
    result = engine.runtime.local.run(
        generators=made, trainer=trainer, prompts=[f"question {n}" for n in range(40)], limits=limits,
        samples=2, slots=4,
    )  # fmt: skip
    assert (result.outcome, result.steps, result.groups["consumed"]) == ("finished", STEPS, 4 * STEPS)
    check_asleep_at_each_step(result.record, STEPS)
    assert not trainer.loaded
    assert [replica.naps > 0 for replica in made] == [True, True, *[False] * apart]
