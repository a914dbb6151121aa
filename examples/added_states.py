"""States of your own, one in each place. Of groups: one before generation, which adds a passage to the prompt, and one
after it, which judges. Of train steps: one that inspects each batch, and one that inspects weights.

    engine check examples/added_states.yaml

A group in `retrieving` holds no place and no slot yet. One in `judging` has left its slot and keeps its place. A step
in `inspecting` has its batch and is not trained yet; one in `vetting` is trained, and no replica has its weights.
"""

import asyncio
import math
from dataclasses import replace
from typing import Any

from engine import policies
from engine.protocols import Batch, PublishedWeights
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


class InspectBatch:
    """Refuses a batch whose rewards say that something is broken. Refusing ends the run, which can be resumed."""

    def enters(self, view: Any, step: Any) -> bool:
        return True

    async def work(self, batch: Batch) -> str | None:
        """None: the batch is trained. A text: it is refused for this reason."""
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        worst = max((abs(reward or 0.0) for reward in rewards), default=0.0)
        return f"a reward of {worst:g} is beyond 100" if worst > 100 else None


class VetWeights:
    """Refuses weights that are not finite, before any replica samples from them."""

    def enters(self, view: Any, step: Any) -> bool:
        return bool(step.version % 2 == 0)  # every other version

    async def work(self, published: PublishedWeights) -> str | None:
        for name, tensor in published.weights.items():
            if not math.isfinite(float(tensor.float().abs().max())):
                return f"{name} is not finite after {published.steps} train steps"
        return None


policies.add_state(
    machine="group", state="retrieving", phase="waiting", between=("queued", "generating"), policy=Retrieve,
    concurrency=16,
)  # fmt: skip
policies.add_state(
    machine="group", state="judging", phase="parked", between=("generated", "batched"), policy=Judge, concurrency=4
)
policies.add_state(machine="step", state="inspecting", between=("scoring", "training"), policy=InspectBatch)
policies.add_state(machine="step", state="vetting", between=("publishing", "finished"), policy=VetWeights)
