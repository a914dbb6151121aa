"""GPUs by the shares of pools and for large replicas, on nodes that say that they have some."""

from dataclasses import replace
from pathlib import Path

import pytest
from ray_plans import plan

from engine.actors.placement import shortfall, with_gpus
from engine.errors import ConfigError
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


@pytest.mark.parametrize(
    ("gpus", "replicas", "part"), [(2.0, 2, 0.5), (3.0, 2, 1.0), (1.0, 2, 0.25), (5.0, 6, 0.5), (8.0, 1, 1.0)]
)
def test_parts_fill_whole_gpus(monkeypatch: pytest.MonkeyPatch, gpus: float, replicas: int, part: float) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [gpus])
    given = with_gpus(plan(Path(), replicas=replicas))
    assert (given.trainer_gpus, given.rollout_gpus) == (part, part)
    assert gpus * int(1 / part) >= replicas + 1, "each actor can be placed"


def test_scorers_and_trainer_fill_whole_gpus_of_what_large_replicas_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [6.0])
    three = replace(LIMITS, scoring_tasks=("ref_logprobs", "old_logprobs"), pools=(
        *LIMITS.pools[:2], Pool(tasks=("old_logprobs",)), Pool(tasks=("rollout",), replicas=(0, 1)),
    ))  # fmt: skip
    given = with_gpus(plan(Path(), limits=three, replicas=2, rollout_gpus=2.0))
    assert (given.trainer_gpus, given.scorer_gpus) == (0.5, 0.5), "three on two, and 2/3 of a GPU fits once only"
    more = replace(three, pools=(*three.pools[:3], Pool(tasks=("rollout",), replicas=(0, 1, 2))))
    none = with_gpus(plan(Path(), limits=more, replicas=3, rollout_gpus=2.0))
    assert (none.trainer_gpus, none.scorer_gpus) == (0.0, 0.0)


def test_a_third_of_three_gpus_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [3.0])
    given = with_gpus(plan(Path(), replicas=1, limits=replace(LIMITS, pools=(
        Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",)), Pool(tasks=("rollout",), replicas=(0,)),
    )), pool_shares=(0.333333, 0.333333, 0.333334)))  # fmt: skip
    assert (given.trainer_gpus, given.scorer_gpus, given.rollout_gpus) == (1.0, 1.0, 1.0)


def test_replicas_and_trainer_of_one_pool_have_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [3.0])
    shared = replace(LIMITS, pools=(Pool(tasks=("rollout", "ref_logprobs", "train"), replicas=(0, 1)),))
    given = with_gpus(plan(Path(), limits=shared, pool_shares=(1.0,)))
    assert (given.trainer_gpus, given.scorer_gpus, given.rollout_gpus) == (1.0, 0.0, 1.0)


def test_ranks_have_a_gpu_each_on_one_node_and_the_rest_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [8.0])
    ranked = plan(Path(), replicas=2, trainer_ranks=4)
    given = with_gpus(ranked)
    assert (given.trainer_gpus, given.rollout_gpus) == (4.0, 1.0)
    halved = with_gpus(replace(ranked, trainer_gpus=2.0, rollout_gpus=3.0))
    assert (halved.trainer_gpus, halved.rollout_gpus) == (2.0, 3.0)
    with pytest.raises(ConfigError, match="its ranks leave 4 GPUs for 2 replicas"):
        with_gpus(replace(ranked, rollout_gpus=3.0))
    with pytest.raises(ConfigError, match=r"need 9 GPUs on one node; the largest node has 8.*use at most 8"):
        with_gpus(replace(ranked, trainer_ranks=9))
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [])
    assert with_gpus(ranked).trainer_gpus == 0.0


def test_replicas_that_can_never_be_placed_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [3.0, 3.0])
    law = "each needs 2 GPUs on one node, 6 in total; the nodes have 3, 3: room for 2 of 3; use 2"
    with pytest.raises(ConfigError, match=rf"rollout\.replicas is 3: {law}"):
        with_gpus(plan(Path(), replicas=3, rollout_gpus=2.0))
    with pytest.raises(ConfigError, match="have 3, 3: room for 0 of 1; fewer GPUs for a replica"):
        with_gpus(plan(Path(), replicas=1, rollout_gpus=8.0))
    spread = plan(Path(), rollout_gpus=2.0, rollout_spread=True)
    assert shortfall(spread, 3) == ""
    assert shortfall(spread, 4) == "each needs 2 GPUs, 8 in total; the nodes have 3, 3: room for 3 of 4"


def test_the_trainer_has_what_large_replicas_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.actors.placement.node_gpus", lambda: [5.0])
    for gpus, replicas, trainer in ((2.0, 2, 1.0), (5.0, 1, 0.0)):
        given = with_gpus(plan(Path(), replicas=replicas, rollout_gpus=gpus))
        assert (given.rollout_gpus, given.trainer_gpus) == (gpus, trainer)
