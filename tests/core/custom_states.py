"""Added states for the tests of the core: `fetching`, before generation, which some groups enter; after it `weighing`,
which some enter, then `checking`, which all do."""

from typing import Any

from engine import policies
from engine.states.view import GroupView, View


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
FETCHING, WEIGHING, CHECKING = policies.added_states(("fetching", "weighing", "checking"))
