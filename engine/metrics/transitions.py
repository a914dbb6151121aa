"""`Transitions`: counts every change of state, as the scheduler's observer.

Called for every trigger of every machine, so that it does as little as it can: nearly all calls are about groups, and
cost an addition. What `collector.RunMetrics` must look at after an event is noted beside the counts.
"""

from typing import Any

from engine.ids import GroupId, StepId
from engine.states.group import GROUP
from engine.states.replica import Replica
from engine.states.validation import VALIDATION, Validation

RELEASED = tuple(state for state in GROUP.terminal if state != "consumed")


class Transitions:
    """Give `changed` to the scheduler as `observe`, then this to `RunMetrics`."""

    __slots__ = ("_groups", "_others", "others_changed", "released", "replicas", "steps", "validations")

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, int]] = {}
        """By state left and state entered."""
        self._others: dict[tuple[str, str, str], int] = {}
        """By (machine, state left, state entered)."""
        self.others_changed = True
        """Something that is no group changed since `RunMetrics` last looked."""
        self.steps: list[tuple[StepId, str]] = []
        """(step, state entered) since then; so are the next two."""
        self.validations: list[Validation] = []
        """Those that ended."""
        self.replicas: dict[int, Replica] = {}
        """Those that changed, by id."""
        self.released: dict[GroupId, str] | None = {}
        """While a record is replayed: the state in which groups ended that no step took, since the run may go on from
        before that. None as soon as the run goes on."""

    def changed(self, machine: str, record: Any, source: str, trigger: str) -> None:
        """What `Scheduler` calls."""
        if machine == "group":
            target = record.state
            try:
                self._groups[source][target] += 1
            except KeyError:
                self._groups.setdefault(source, {})[target] = 1
            if self.released is not None and target in RELEASED:
                self.released[record.id] = target
            return
        self.others_changed = True
        key = (machine, source, record.state)
        self._others[key] = self._others.get(key, 0) + 1
        if machine == "step":
            self.steps.append((record.id, record.state))
        elif machine == "replica":
            self.replicas[record.id] = record
        elif machine == "validation" and record.state in VALIDATION.terminal:
            self.validations.append(record)

    @property
    def count(self) -> dict[tuple[str, str, str], int]:
        """By (machine, state left, state entered)."""
        groups = {
            ("group", source, target): n
            for source, targets in list(self._groups.items())
            for target, n in list(targets.items())
        }
        return groups | dict(list(self._others.items()))

    def entered(self, machine: str, state: str) -> int:
        """How often any record entered a state."""
        return sum(n for (name, _, target), n in self.count.items() if name == machine and target == state)

    def net(self, machine: str, state: str) -> int:
        """Records that entered a state minus those that left it."""
        counts = self.count.items()
        return sum(
            n * ((target == state) - (source == state)) for (name, source, target), n in counts if name == machine
        )
