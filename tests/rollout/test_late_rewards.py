"""Rewards that are given in a state of their own: generators leave them out, and texts in."""

import asyncio

from test_generator import Letters

from engine.rollout.scoring import Grader
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup


def test_texts_are_given_and_rewards_left_to_who_gives_them_later() -> None:
    calls: list[str] = []

    def reward(prompt: Prompt, trajectory: Trajectory) -> float:
        calls.append(trajectory.text)
        return 1.0

    group = TrajectoryGroup(group=0, prompt=Prompt(row=0, text="?"), trajectories=[])
    group.trajectories = [Trajectory(token_ids=[0, 1], finish_reason="stop") for _ in range(2)]
    group.trajectories[1].reward = 0.5  # brought by an agent

    async def scene() -> None:
        await Grader(Letters(), reward, later=True).score(group)
        assert [t.reward for t in group.trajectories] == [None, 0.5]
        assert [t.text for t in group.trajectories] == ["ab", "ab"] and calls == []
        await Grader(Letters(), reward).score(group)
        assert [t.reward for t in group.trajectories] == [1.0, 0.5] and calls == ["ab"]

    asyncio.run(scene())
