"""Added states for the tests of the core: `fetching`, before generation, which some groups enter; after it `weighing`,
which some enter, then `checking`, which all do. Of train steps: `gating` and `sifting`, which inspect some batches, and
`proving`, which inspects some weights."""

from typing import Any

from engine import policies
from engine.states.view import GroupView, StepView, View


class Some:
    """Which groups enter depends on what was asked before."""

    memory: dict[str, Any]

    def enters(self, view: View, group: GroupView) -> bool:
        self.memory["asked"] = self.memory.get("asked", 0) + 1
        return bool((group.id + self.memory["asked"]) % 3)


class Every:
    def enters(self, view: View, group: GroupView) -> bool:
        return True


for name, concurrency, policy in (("weighing", 2, Some), ("checking", 1, Every)):
    policies.add_state(
        machine="group", state=name, phase="parked", between=("generated", "batched"), policy=policy,
        concurrency=concurrency,
    )  # fmt: skip
policies.add_state(
    machine="group", state="fetching", phase="waiting", between=("queued", "generating"), policy=Some, concurrency=2
)


class Inspector:
    """Which batches and weights are inspected depends on what was asked before."""

    memory: dict[str, Any]

    def enters(self, view: View, step: StepView) -> bool:
        assert len(step.groups) == len(step.staleness) == sum(view.group(id) is not None for id in step.groups)
        self.memory["asked"] = self.memory.get("asked", 0) + 1
        return bool((step.step + self.memory["asked"]) % 3)

    async def work(self, given: Any) -> str | None:
        return None


for name in ("gating", "sifting"):
    policies.add_state(machine="step", state=name, between=("scoring", "training"), policy=Inspector)
policies.add_state(machine="step", state="proving", between=("publishing", "finished"), policy=Inspector)
FETCHING, WEIGHING, CHECKING = policies.added_states(("fetching", "weighing", "checking"))
GATING, SIFTING, PROVING = policies.added_states(("gating", "sifting", "proving"))
