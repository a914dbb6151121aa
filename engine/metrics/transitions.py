"""`Transitions`: how often what changed its state, counted as it happens.

Part of `collector`'s figures, and kept in the record's snapshots.
"""

from typing import Any, NamedTuple

from engine.ids import ReplicaId, StepId
from engine.states.validation import VALIDATION


class EndedValidation(NamedTuple):
    """What is kept of a validation that ended."""

    id: int
    version: int
    steps: int
    state: str
    accuracy: float | None
    reward_mean: float | None
    rows: int
    measured: int
    reason: str
    queued_at: float
    started_at: float
    ended_at: float


class Transitions:
    """Counts every change of state. Give it to the scheduler as `observe`, then to `RunMetrics`; and to the driver as
    `books`, so that a run that is resumed from a snapshot goes on counting."""

    __slots__ = ("count", "ended", "replicas", "steps", "validations")

    def __init__(self) -> None:
        self.count: dict[tuple[str, str, str], int] = {}
        """By (machine, state left, state entered)."""
        self.steps: list[tuple[StepId, str]] = []
        """(step, state entered) since the last `RunMetrics.observe`."""
        self.validations: list[EndedValidation] = []
        """Those that ended since the last `RunMetrics.observe`."""
        self.ended: list[EndedValidation] = []
        """All that ended."""
        self.replicas: list[ReplicaId] = []
        """Those that changed their state since the last `RunMetrics.observe`."""

    def __call__(self, machine: str, record: Any, source: str, trigger: str) -> None:
        key = (machine, source, record.state)
        self.count[key] = self.count.get(key, 0) + 1
        if machine == "step":
            self.steps.append((record.id, record.state))
        elif machine == "replica":
            self.replicas.append(record.id)
        elif machine == "validation" and record.state in VALIDATION.terminal:
            ended = EndedValidation(*[getattr(record, field) for field in EndedValidation._fields])
            self.validations.append(ended)
            self.ended.append(ended)

    def to_plain(self) -> Any:
        return [[(*key, n) for key, n in self.count.items()], [tuple(ended) for ended in self.ended]]

    def take(self, plain: Any) -> None:
        counts, ended = plain
        self.count = {(machine, source, target): int(n) for machine, source, target, n in counts}
        self.ended = [EndedValidation(*fields) for fields in ended]
        self.validations = [*self.ended]

    def entered(self, machine: str, state: str) -> int:
        """How often any record entered a state."""
        return sum(n for (name, _, target), n in list(self.count.items()) if name == machine and target == state)

    def group_counts(self) -> dict[str, int]:
        """Of groups that were aborted, resumed and filtered so far, as the rows of steps have them."""
        return {f"groups_{name}": self.entered("group", name) for name in ("aborted", "resumed", "filtered")}

    def net(self, machine: str, state: str) -> int:
        """Records that entered a state minus those that left it."""
        counts = list(self.count.items())
        return sum(
            n * ((target == state) - (source == state)) for (name, source, target), n in counts if name == machine
        )
