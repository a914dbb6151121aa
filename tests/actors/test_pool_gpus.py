"""GPUs by the shares of pools, on nodes that say that they have some."""

from dataclasses import replace
from pathlib import Path

import pytest
from ray_plans import plan

from engine.actors.placement import with_gpus
from engine.states.limits import Limits, Pool

LIMITS = Limits(
    train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, scoring_tasks=("ref_logprobs",),
    pools=(
        Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",)), Pool(tasks=("rollout",), replicas=(0, 1)),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "shares", "trainer", "scorer", "rollout"),
    [
        (2.0, (0.25, 0.125, 0.625), 0.5, 0.25, 0.5),
        (8.0, (0.25, 0.25, 0.5), 1.0, 1.0, 1.0),
        (2.0, (), 0.5, 0.5, 0.5),
    ],
)
def test_each_pool_has_its_share(
    monkeypatch: pytest.MonkeyPatch,
    gpus: float,
    shares: tuple[float, ...],
    trainer: float,
    scorer: float,
    rollout: float,
) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [gpus])
    given = with_gpus(plan(Path(), limits=LIMITS, pool_shares=shares))
    assert (given.trainer_gpus, given.scorer_gpus, given.rollout_gpus) == (trainer, scorer, rollout)


def test_replicas_and_trainer_of_one_pool_have_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [3.0])
    shared = replace(LIMITS, pools=(Pool(tasks=("rollout", "ref_logprobs", "train"), replicas=(0, 1)),))
    given = with_gpus(plan(Path(), limits=shared, pool_shares=(1.0,)))
    assert (given.trainer_gpus, given.scorer_gpus, given.rollout_gpus) == (1.0, 0.0, 1.0)
