"""The reward that a configuration names: one function, the weighted sum of several, or none."""

import asyncio
from typing import Any

import pytest

from engine.config import parse_config
from engine.errors import ConfigError
from engine.plans.run_inputs import inputs_of, reward_of
from engine.rollout.reward_parts import RewardParts
from engine.rollout.scoring import Grader
from engine.tasks.rewards import exact_match
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

EXACT, NUMBER = "engine.tasks.rewards:exact_match", "engine.tasks.rewards:final_number"


class Texts:
    """Decodes ids to one of two answers."""

    def decode(self, ids: Any, **options: Any) -> str:
        return ("4", "It is 4")[ids[0]]


def reward(**section: Any) -> RewardParts:
    tree = {"model": {"path": "some/model"}, "data": {"path": "p.jsonl"}, "reward": section}
    config = parse_config(tree)
    found = reward_of(config, inputs_of(config))
    assert found is not None
    return found


def scored(parts: RewardParts) -> list[Trajectory]:
    """The responses "4" and "It is 4" to a prompt whose answer is 4."""
    group = TrajectoryGroup(group=0, prompt=Prompt(row=0, text="2+2?", fields={"answer": "4"}), trajectories=[])
    group.trajectories = [Trajectory(token_ids=[index], loss_mask=[1], finish_reason="stop") for index in range(2)]
    asyncio.run(Grader(Texts(), parts).score(group))
    return group.trajectories


def test_a_single_function_is_used_as_it_is() -> None:
    (part,) = reward(function=EXACT).parts
    assert part.function is exact_match
    assert [(one.reward, one.reward_parts) for one in scored(reward(function=EXACT))] == [(1.0, {}), (0.0, {})]


def test_a_list_is_the_weighted_sum() -> None:
    parts = [{"name": "exact", "function": EXACT, "weight": 2.0}, {"name": "number", "function": NUMBER}]
    exact, near = scored(reward(functions=parts))
    assert exact.reward == 3.0
    assert near.reward == 1.0 and near.reward_parts == {"exact": 0.0, "number": 1.0}


def test_a_function_that_is_missing_is_refused_by_its_place_in_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        reward(
            functions=[{"name": "exact", "function": EXACT}, {"name": "lost", "function": "engine.tasks.rewards:no"}]
        )
    assert caught.value.details["field"] == "reward.functions.1.function"
