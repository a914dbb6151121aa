"""Schedules worked out by hand: over-sampling and fractional async ratios."""

from collections.abc import Mapping

import pytest

from engine.commands import AbortGroup, DiscardGroups, TrainStep
from engine.errors import ConfigError
from engine.states.limits import Limits
from tests.core.scripted import Scripted


def over_sampling(**others: object) -> Scripted:
    """B = 4, S = 0, x = 0.5: X = 2, six places."""
    figures = {"train_batch_size": 4, "max_staleness_steps": 0, "max_concurrent_groups": 6, "over_sample": 0.5}
    return Scripted(**{**figures, **others})


def test_six_start_the_first_four_ready_make_the_batch_and_two_are_dropped() -> None:
    run = over_sampling()
    assert run.running() == [0, 1, 2, 3, 4, 5]
    run.finish(5, 1, 3)
    assert not run.ordered(TrainStep)
    run.finish(0)
    assert run.ordered(TrainStep)[0].groups == (5, 1, 3, 0)
    assert [order.group for order in run.ordered(AbortGroup)] == [4, 2], "unready, the last started first"
    assert run.ordered(DiscardGroups)[-1].groups == (4, 2)
    assert run.view.phase_counts()["released"] == 2
    assert run.running() == [], "nothing new may start on version 0"
    run.train()
    run.publish()
    run.install()
    assert run.running() == [6, 7, 8, 9, 10, 11]


def test_groups_generated_and_dropped_as_surplus_in_one_tick_are_not_filtered() -> None:
    run = over_sampling(policies={"filter": "zero-variance"})
    run.tell_together(*map(run.generated, (0, 1, 2, 3)), run.generated(4), run.generated(5, spread=0.0))
    assert run.ordered(DiscardGroups)[-1].groups == (5, 4) and run.state.filtered == [5]
    run.train()
    assert run.state.filtered == []


def test_groups_not_due_yet_stay_when_the_batch_is_full() -> None:
    """B = 2, S = 1, x = 0.5: X = 1, so five start, all due by step 1: step 0 must take 5 - 2 - 1 of them."""
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=5, over_sample=0.5)
    assert run.running() == [0, 1, 2, 3, 4]
    assert run.view.requirements() == [(1, 2, 0)]
    run.finish(4, 3)
    assert run.ordered(TrainStep)[0].groups == (4, 3)
    assert run.running() == [0, 1, 2], "they are due by step 1, which can take two; the third is the surplus"
    assert not run.ordered(AbortGroup)
    run.train()
    run.publish()
    run.install()
    assert run.running() == [0, 1, 2, 5, 6], "2 - (3 + 2) + 5 places on version 1"
    run.finish(2, 0)
    assert run.ordered(TrainStep)[1].groups == (2, 0)
    assert [order.group for order in run.ordered(AbortGroup)] == [1]


def test_ready_surplus_is_dropped_too_after_the_unready() -> None:
    """A filter gives places back; the batch of two takes the first two ready, whatever else is ready is not kept."""
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, sync_every=2, over_sample=1.0, max_steps=2
    )
    assert run.running() == [0, 1, 2, 3], "K; of six places"
    run.finish(0, 1)
    assert run.running() == [2, 3, 4, 5]
    run.finish(3, 4)
    run.train()
    assert run.ordered(TrainStep)[1].groups == (3, 4)
    assert [order.group for order in run.ordered(AbortGroup)] == [5, 2]


def test_a_fraction_of_the_staleness_bound_is_held_ahead() -> None:
    """B = 4, S = 1, a = 0.5: floor(1.5 * 4) = 6 places on version 0 in place of 8, and 4 more a step."""
    run = Scripted(train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=6, async_ratio=0.5)
    assert run.running() == [0, 1, 2, 3, 4, 5]
    run.finish(0, 1, 2, 3)
    assert run.running() == [4, 5], "six places of which four are charged to step 0"
    run.train()
    run.publish()
    run.install()
    assert run.running() == [4, 5, 6, 7, 8, 9]
    assert run.state.groups.live[9].deadline == 2, "the hard bound is S all the same"


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (
            {"async_ratio": 1.5},
            "scheduler.async_ratio is 1.5: sync_every - 1 <= async_ratio <= S .*; use a value from 0 to 1",
        ),
        ({"async_ratio": 0.5, "sync_every": 2}, "async_ratio is 0.5: .*; use 1$"),
        ({"async_ratio": float("nan")}, "must be a number of batches"),
        ({"run_restarts": -1}, "limits.run_restarts"),
        ({"async_ratio": True}, "must be a number of batches"),
        (
            {"over_sample": -0.1},
            "scheduler.over_sample is -0.1, but must be a number of batches, not negative; use 0.0",
        ),
        ({"over_sample": None}, "must be a number of batches"),
        ({"async_ratio": 0.5, "max_concurrent_groups": 7}, r"= 6 \+ 0 with B = 4\); use a value from 4 to 6"),
        ({"over_sample": 0.5, "max_concurrent_groups": 11}, r"= 8 \+ 2 with B = 4\); use a value from 4 to 10"),
    ],
)
def test_figures_out_of_law_are_refused_with_the_law(figures: Mapping[str, object], says: str) -> None:
    plain = {"train_batch_size": 4, "max_staleness_steps": 1, "max_concurrent_groups": 4, **figures}
    with pytest.raises(ConfigError, match=says):
        Limits(**plain)  # type: ignore[arg-type]


def test_a_share_just_short_of_a_whole_group_in_floats_is_one() -> None:
    limits = Limits(train_batch_size=100, max_staleness_steps=1, max_concurrent_groups=100, over_sample=0.29)
    assert limits.surplus == 29
