"""A state before generation: it adds a passage to the prompt, as a search engine would.

    engine run examples/states/before_generation.yaml

A group in `retrieving` holds no place and no slot yet. Up to 16 searches run at once.
"""

import asyncio
from dataclasses import replace
from typing import Any

from engine import policies
from engine.trajectory import TrajectoryGroup


class Retrieve:
    def enters(self, view: Any, group: Any) -> bool:
        """Every group enters. Another rule could use the view and the group."""
        return True

    async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group has no trajectories yet. The text and the fields of its prompt may change; generator, rewards and
        policies see the new ones."""
        await asyncio.sleep(0.01)  # the search takes this time
        group.prompt = replace(group.prompt, fields={**group.prompt.fields, "searched": True})
        return group


policies.add_state(
    machine="group", state="retrieving", phase="waiting", between=("queued", "generating"), policy=Retrieve,
    concurrency=16,
)  # fmt: skip
