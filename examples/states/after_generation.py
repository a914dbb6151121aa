"""A state after generation: a slow judge that sees whole groups, after the configured reward.

    engine run examples/states/after_generation.yaml

A group in `judging` has left its slot and keeps its place. Up to 4 groups are judged at once.
"""

import asyncio
from typing import Any

from engine import policies
from engine.trajectory import TrajectoryGroup


class Judge:
    def enters(self, view: Any, group: Any) -> bool:
        return bool(group.tokens > 10)

    async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """May change only rewards."""
        await asyncio.sleep(0.01)  # the judge takes this time
        for trajectory in group.trajectories:
            if len(trajectory.token_ids) > 100:
                trajectory.reward = (trajectory.reward or 0.0) - 0.1
        return group


policies.add_state(
    machine="group", state="judging", phase="parked", between=("generated", "batched"), policy=Judge, concurrency=4
)
