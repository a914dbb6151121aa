"""Two states of your own: one before generation, which adds a passage to the prompt, and one after it, which judges.

    engine check examples/added_states.yaml

A group in `retrieving` holds no place and no slot yet. One in `judging` has left its slot and keeps its place.
"""

import asyncio
from dataclasses import replace
from typing import Any

from engine import policies
from engine.trajectory import TrajectoryGroup


class Retrieve:
    """Stands for a search engine: it takes a moment, and several searches run at once."""

    def enters(self, view: Any, group: Any) -> bool:
        """Every group. Another rule may use the view and the group."""
        return True

    async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group has no trajectories yet. The text and the fields of its prompt may change; rewards see the new
        fields, too."""
        await asyncio.sleep(0.01)  # the time of the search
        fields = {**group.prompt.fields, "searched": True}
        group.prompt = replace(group.prompt, fields=fields)
        return group


class Judge:
    """Stands for a slow judge: it sees whole groups, after the reward of the configuration."""

    def enters(self, view: Any, group: Any) -> bool:
        return bool(group.tokens > 10)

    async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
        await asyncio.sleep(0.01)  # the time of the judge
        for trajectory in group.trajectories:
            if len(trajectory.token_ids) > 100:
                trajectory.reward = (trajectory.reward or 0.0) - 0.1
        return group


policies.add_state(
    machine="group", state="retrieving", phase="waiting", between=("queued", "generating"), policy=Retrieve,
    concurrency=16,
)  # fmt: skip
policies.add_state(
    machine="group", state="judging", phase="parked", between=("generated", "batched"), policy=Judge, concurrency=4
)
