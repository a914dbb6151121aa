"""Several reward functions: their weighted sum, parts that do not apply, and failures that name the part."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from test_generator import Letters

from engine.errors import DataFailure
from engine.rollout.reward_parts import RewardPart, RewardParts
from engine.rollout.scoring import Grader
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup


def letters(prompt: Prompt, trajectory: Trajectory) -> float:
    return len(trajectory.text)


def only_short(prompt: Prompt, trajectory: Trajectory) -> float | None:
    return 1.0 if len(trajectory.text) < 3 else None


def never(prompt: Prompt, trajectory: Trajectory) -> None:
    return None


def wrong(prompt: Prompt, trajectory: Trajectory) -> float:
    raise KeyError("anser")


def part(name: str, weight: float, function: Callable[[Prompt, Trajectory], Any]) -> RewardPart:
    return RewardPart(name=name, weight=weight, function=function)


def scored(*parts: RewardPart) -> TrajectoryGroup:
    """A group of a response "ab", and of a rollout with two segments, the last of them "abc"."""
    group = TrajectoryGroup(group=0, prompt=Prompt(row=4, text="?"), trajectories=[])
    for ids, continues in (([0, 1], False), ([0], False), ([0, 1, 2], True)):
        group.trajectories.append(Trajectory(token_ids=ids, finish_reason="stop", continues=continues))
    asyncio.run(Grader(Letters(), RewardParts(parts)).score(group))
    return group


def test_the_reward_is_the_weighted_sum_of_the_parts_that_apply() -> None:
    group = scored(part("length", 0.5, letters), part("short", -2.0, only_short))
    assert [t.reward for t in group.trajectories] == [0.5 * 2 - 2.0, 1.5, 1.5]
    assert [t.reward_parts for t in group.trajectories] == [{"length": 2.0, "short": 1.0}, *[{"length": 3.0}] * 2]
    assert all(type(t.reward) is float for t in group.trajectories)


@pytest.mark.parametrize(
    ("parts", "story"),
    [
        ([part("a", 1.0, never), part("b", 1.0, never)], "a, b returned None; at least one must return a number"),
        ([part("a", 1.0, letters), part("b", 1.0, wrong)], r"reward b \(.*wrong\) raised KeyError on prompt row 4"),
        ([part("a", 1.0, lambda *_: math.nan)], "reward a .* returned nan on prompt row 4, neither a finite number"),
        ([part("a", 1e9, lambda *_: 1e300)], "the weighted sum of a on prompt row 4 is inf"),
    ],
)
def test_a_failure_names_the_part(parts: list[RewardPart], story: str) -> None:
    with pytest.raises(DataFailure, match=story) as caught:
        scored(*parts)
    assert caught.value.details["row"] == 4
