"""A state of train steps before training: it refuses a batch whose rewards say that something is broken.

    engine run examples/states/before_training.yaml

A step in `inspecting` has its batch and is not trained yet. A refusal ends the run, which can be resumed.
"""

from typing import Any

from engine import policies
from engine.protocols import Batch


class InspectBatch:
    def enters(self, view: Any, step: Any) -> bool:
        return True

    async def work(self, batch: Batch) -> str | None:
        """None: the batch is trained. A text: it is refused for this reason."""
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        worst = max((abs(reward or 0.0) for reward in rewards), default=0.0)
        return f"a reward of {worst:g} is beyond 100" if worst > 100 else None


policies.add_state(machine="step", state="inspecting", between=("scoring", "training"), policy=InspectBatch)
