"""`Transitions`: counts every change of state, as the scheduler's observer, and what the record says besides.

Called for every trigger of every machine, so that it does as little as it can: nearly all calls are about groups, and
cost an addition. What `collector.RunMetrics` must look at after an event is noted beside the counts. Kept in the
record's snapshots.
"""

from typing import Any, NamedTuple

from engine.events import DrainRequested, Event, RunResumed, SchedulerRecovered
from engine.ids import GroupId, ReplicaId, StepId
from engine.metrics.labels import RECOVERY_KINDS
from engine.states.group import GROUP
from engine.states.replica import Replica
from engine.states.validation import VALIDATION

RELEASED = tuple(state for state in GROUP.terminal if state != "consumed")


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
    """Give it to the scheduler as `observe` (its `changed` is quicker), then to `RunMetrics`; and to the driver as
    `books`, so that a run resumed from a snapshot continues its counts."""

    __slots__ = ("_groups", "_others", "draining_since", "ended", "others_changed", "recoveries", "released",
                 "replicas", "steps", "undone", "validations")  # fmt: skip

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, int]] = {}
        """By state left and state entered."""
        self._others: dict[tuple[str, str, str], int] = {}
        """By (machine, state left, state entered)."""
        self.others_changed = True
        """Something that is no group changed since `RunMetrics` last looked."""
        self.steps: list[tuple[StepId, str]] = []
        """(step, state entered) since then; so are the next two."""
        self.validations: list[EndedValidation] = []
        """Those that ended."""
        self.replicas: dict[ReplicaId, Replica] = {}
        """Those that changed, by id."""
        self.ended: list[EndedValidation] = []
        """All that ended."""
        self.released: dict[GroupId, str] | None = {}
        """While a record is replayed: the state in which groups ended that no step took, since the run may go on from
        before that. None as soon as the run goes on."""
        self.undone = dict.fromkeys(RELEASED, 0)
        """Groups that ended there and, as a record was replayed, ended once more."""
        self.recoveries = dict.fromkeys(RECOVERY_KINDS, 0)
        """How often the run went on, in whichever process."""
        self.draining_since: float | None = None
        """When it was asked to come to rest."""

    def changed(self, machine: str, record: Any, source: str, trigger: str) -> None:
        """What `Scheduler` calls."""
        if machine == "group":
            target = record.state
            try:
                self._groups[source][target] += 1
            except KeyError:
                self._groups.setdefault(source, {})[target] = 1
            if self.released is not None and target in RELEASED:
                self._release(record.id, target)
            return
        self.others_changed = True
        key = (machine, source, record.state)
        self._others[key] = self._others.get(key, 0) + 1
        if machine == "step":
            self.steps.append((record.id, record.state))
        elif machine == "replica":
            self.replicas[record.id] = record
        elif machine == "validation" and record.state in VALIDATION.terminal:
            ended = EndedValidation(*[getattr(record, field) for field in EndedValidation._fields])
            self.validations.append(ended)
            self.ended.append(ended)

    __call__ = changed

    def _release(self, group: GroupId, state: str) -> None:
        assert self.released is not None
        before = self.released.get(group)
        if before is not None:
            self.undone[before] += 1
        self.released[group] = state

    def heard(self, event: Event) -> None:
        """Call this once for every event, or for those that this counts: as it is replayed or when it happens."""
        if isinstance(event, RunResumed):
            self.recoveries["resumed" if event.kept else "branched"] += 1
            self.draining_since = None
        elif isinstance(event, SchedulerRecovered):
            self.recoveries["scheduler"] += 1
        elif isinstance(event, DrainRequested) and self.draining_since is None:
            self.draining_since = event.at

    def to_plain(self) -> Any:
        counts = [(*key, n) for key, n in self.count.items()]
        return [counts, [tuple(ended) for ended in self.ended], [*self.recoveries.items()], self.draining_since]

    def take(self, plain: Any) -> None:
        counts, ended, *heard = plain
        recoveries, draining_since = heard or ([], None)  # those before this was counted do not say it
        recoveries = {str(kind): int(n) for kind, n in recoveries}
        draining_since = None if draining_since is None else float(draining_since)
        self._groups, self._others = {}, {}
        for machine, source, target, n in counts:
            if machine == "group":
                self._groups.setdefault(source, {})[target] = int(n)
            else:
                self._others[machine, source, target] = int(n)
        self.ended = [EndedValidation(*fields) for fields in ended]
        self.validations = [*self.ended]
        self.recoveries = dict.fromkeys(RECOVERY_KINDS, 0) | recoveries
        self.draining_since = draining_since

    @property
    def count(self) -> dict[tuple[str, str, str], int]:
        """By (machine, state left, state entered). From any thread."""
        groups = {
            ("group", source, target): n
            for source, targets in list(self._groups.items())
            for target, n in list(targets.items())
        }
        return groups | dict(list(self._others.items()))

    def entered(self, machine: str, state: str) -> int:
        """How often any record entered a state."""
        return sum(n for (name, _, target), n in self.count.items() if name == machine and target == state)

    def group_counts(self) -> dict[str, int]:
        """How often groups were aborted, resumed and filtered, as a step's row has it."""
        return {f"groups_{name}": self.entered("group", name) for name in ("aborted", "resumed", "filtered")}

    def net(self, machine: str, state: str) -> int:
        """Records that entered a state minus those that left it."""
        counts = self.count.items()
        return sum(
            n * ((target == state) - (source == state)) for (name, source, target), n in counts if name == machine
        )
