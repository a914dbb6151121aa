"""Rollouts of several segments on their way to the scheduler: counted once, reported once."""

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import EngineError
from engine.protocols import Generated, GroupWork
from engine.runtime.local import response
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers.group_reports import Versions, check_generated, generated_event

PROMPT = Prompt(row=0, text="2 + 2")


def segment(reward: float | None = 1.0, tokens: int = 2, version: int = 4, **changes: object) -> Trajectory:
    made = response([1] * tokens, reward=reward or 0.0, version=version)
    return replace(made, reward=reward, continues=True, **changes)


def check(*trajectories: Trajectory, aborted: bool = False, kept: Any = None, admitted: int = 0) -> TrajectoryGroup:
    group = TrajectoryGroup(group=7, prompt=PROMPT, trajectories=list(trajectories))
    generated = Generated(group=group, aborted=aborted, oldest_version=kept)
    work = GroupWork(group=7, attempt=1, prompt=PROMPT, samples=2)
    check_generated(work, generated, Versions(admitted=admitted, oldest=4, newest=5))
    return group


def first(reward: float | None = 1.0, version: int = 4) -> Trajectory:
    return replace(segment(reward, version=version), continues=False)


def test_segments_are_of_the_rollout_before_them() -> None:
    group = check(first(), segment(), segment(), first(0.0))
    assert [len(rollout) for rollout in group.rollouts] == [3, 1]
    check(first(None), segment(None), first(None), aborted=True)


@pytest.mark.parametrize(
    ("trajectories", "story"),
    [
        ([first(), first(), first(0.0)], "returned 3 trajectories, not the 2"),
        ([first(), segment(), segment()], "returned 1 trajectories, not the 2"),
        ([segment(), first(), first()], "it is the first trajectory of its group"),
        ([first(1.0), segment(0.5), first()], "its reward is 0.5, but must be 1.0"),
    ],
)
def test_what_is_no_rollout_is_named(trajectories: list[Trajectory], story: str) -> None:
    with pytest.raises(EngineError, match=story):
        check(*trajectories)


def test_tokens_that_outlived_their_attempt_may_be_older() -> None:
    with pytest.raises(EngineError, match="have version 3"):
        check(first(version=3), first())
    check(first(version=3), first(), kept=3)
    with pytest.raises(EngineError, match="have version 2"):
        check(first(version=2), first(), kept=3)


@pytest.mark.parametrize(
    ("changes", "law"),
    [
        ({"prompt": Prompt(row=1, text="?")}, "another prompt than the given one, of row 0"),
        ({"prompt": None}, "another prompt than the given one"),
        ({"group": 8}, "group 8, but was given group 7"),
        ({"aborted": "no"}, "aborted='no', which must be True or False"),
    ],
)
def test_a_group_is_the_one_that_was_ordered(changes: dict[str, Any], law: str) -> None:
    group = TrajectoryGroup(group=7, prompt=PROMPT, trajectories=[first(), first()])
    generated = Generated(group=group)
    for name, value in changes.items():
        setattr(generated if name == "aborted" else group, name, value)
    work = GroupWork(group=7, attempt=1, prompt=PROMPT, samples=2)
    with pytest.raises(EngineError, match=law):
        check_generated(work, generated, Versions(admitted=0, oldest=4, newest=5))


@pytest.mark.parametrize("kept", [-5, 0, 2, 6, 3.0, True, "4", [4]])
def test_the_oldest_version_reported_is_one_that_the_group_may_have(kept: Any) -> None:
    law = r"oldest_version=.*, which must be None or an int from 3 to 5"
    with pytest.raises(EngineError, match=law):
        check(first(), first(), kept=kept, admitted=3)
    check(first(), first(), kept=3, admitted=3)


def test_the_scheduler_gets_the_figures_of_rollouts() -> None:
    """Rewards 1 and 0: the mean is 1/2, though three of four trajectories have 1."""
    group = check(first(), segment(), segment(tokens=1, version=5), first(0.0))
    event = generated_event(group, 1, 0, 1)
    assert (event.trainable, event.reward_mean, event.reward_spread) == (2, 0.5, 1.0)
    assert (event.tokens, event.oldest_version, event.newest_version) == (7, 4, 5)


def test_a_rollout_is_live_if_any_segment_is() -> None:
    masked = first()
    masked.loss_mask = [0, 0]
    event = generated_event(check(masked, segment(), first(0.0)), 1, 0, 1)
    assert (event.trainable, event.reward_mean) == (2, 0.5)
