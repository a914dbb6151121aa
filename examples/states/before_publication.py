"""A state of train steps before replicas get their weights: it refuses weights that are not finite.

    engine run examples/states/before_publication.yaml

A step in `vetting` is trained; its weights are in the weights store, and no replica has them. A refusal ends the run,
which can be resumed.
"""

from typing import Any

from engine import policies
from engine.protocols import PublishedWeights


class VetWeights:
    def enters(self, view: Any, step: Any) -> bool:
        return bool(step.version % 2 == 0)  # every other version

    async def work(self, published: PublishedWeights) -> str | None:
        """None: replicas get the weights. A text: they are refused for this reason."""
        for name, tensor in published.weights.items():
            if not tensor.isfinite().all():
                return f"{name} is not finite after {published.steps} train steps"
        return None


policies.add_state(machine="step", state="vetting", between=("publishing", "finished"), policy=VetWeights)
