"""`Transitions`: counts every state transition, as the scheduler's observer.

It is called for every trigger of every machine, so it does as little as possible: nearly all calls are about groups and
cost one addition. It also notes what `collector.RunMetrics` must look at after an event. Snapshots of the record
contain its counts.
"""

from typing import Any, NamedTuple

from engine.events import DrainRequested, Event, RunResumed, SchedulerRecovered
from engine.ids import GroupId, ReplicaId, StepId
from engine.metrics.intervals import Estimate, estimates
from engine.metrics.names import RECOVERY_KINDS
from engine.states.group import GROUP
from engine.states.replica import Replica
from engine.states.validation import VALIDATION

RELEASED = tuple(state for state in GROUP.terminal if state != "consumed")


class EndedValidation(NamedTuple):
    """The figures of a validation that ended."""

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
    estimates: tuple[Estimate, ...] = ()


class Transitions:
    """Pass it to the scheduler as `observe` (`changed` is faster), to `RunMetrics`, and to the driver as `books`, so
    that a run resumed from a snapshot continues its counts."""

    __slots__ = ("_groups", "_others", "draining_since", "ended", "filtered", "others_changed", "recoveries",
                 "released", "replicas", "steps", "undone", "validations")  # fmt: skip

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, int]] = {}
        """Group transitions, by old and new state."""
        self._others: dict[tuple[str, str, str], int] = {}
        """Other transitions, by (machine, old state, new state)."""
        self.others_changed = True
        """Whether something other than a group changed since `RunMetrics` last looked."""
        self.steps: list[tuple[StepId, str]] = []
        """(step, new state) of each step that changed since then."""
        self.validations: list[EndedValidation] = []
        """Validations that ended since then."""
        self.replicas: dict[ReplicaId, Replica] = {}
        """Replicas that changed since then, by id."""
        self.ended: list[EndedValidation] = []
        """All validations that ended."""
        self.filtered: list[GroupId] = []
        """Groups that the filter dropped since `runtime.filtered_samples` last looked; empty during a replay."""
        self.released: dict[GroupId, str] | None = {}
        """During a replay: the final states of groups that ended without a train step, because the run may branch to a
        point before that. None once the replay is over."""
        self.undone = dict.fromkeys(RELEASED, 0)
        """Groups that ended twice in the replayed record, because the run branched in between."""
        self.recoveries = dict.fromkeys(RECOVERY_KINDS, 0)
        """Number of recoveries, by kind."""
        self.draining_since: float | None = None
        """When the current drain was requested."""

    def changed(self, machine: str, record: Any, source: str, trigger: str) -> None:
        """Called by `Scheduler` for each transition."""
        if machine == "group":
            target = record.state
            try:
                self._groups[source][target] += 1
            except KeyError:
                self._groups.setdefault(source, {})[target] = 1
            if self.released is None:
                if target == "filtered":
                    self.filtered.append(record.id)
            elif target in RELEASED:
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
            fields = {field: getattr(record, field) for field in EndedValidation._fields if field != "estimates"}
            ended = EndedValidation(**fields, estimates=estimates(record.figures))
            self.validations.append(ended)
            self.ended.append(ended)

    __call__ = changed

    def _release(self, group: GroupId, state: str) -> None:
        assert self.released is not None
        before = self.released.get(group)
        if before is not None:
            self.undone[before] += 1
        self.released[group] = state

    def note_event(self, event: Event) -> None:
        """Call it once for every event, when it is replayed or happens."""
        if isinstance(event, RunResumed):
            self.recoveries["resumed" if event.kept else "branched"] += 1
            self.draining_since = None
        elif isinstance(event, SchedulerRecovered):
            self.recoveries["scheduler"] += 1
        elif isinstance(event, DrainRequested) and self.draining_since is None:
            self.draining_since = event.at

    def to_plain(self) -> Any:
        counts = [(*key, n) for key, n in self.count.items()]
        ended = [(*ended[:-1], tuple(map(tuple, ended.estimates))) for ended in self.ended]
        return [counts, ended, [*self.recoveries.items()], self.draining_since]

    def take(self, plain: Any) -> None:
        counts, ended, recoveries, draining_since = plain
        recoveries = {str(kind): int(n) for kind, n in recoveries}
        draining_since = None if draining_since is None else float(draining_since)
        self._groups, self._others = {}, {}
        for machine, source, target, n in counts:
            if machine == "group":
                self._groups.setdefault(source, {})[target] = int(n)
            else:
                self._others[machine, source, target] = int(n)
        rows = ([*fields, tuple(Estimate(*one) for one in estimates)] for *fields, estimates in ended)
        self.ended = [EndedValidation._make(fields) for fields in rows]
        self.validations = [*self.ended]
        self.recoveries = dict.fromkeys(RECOVERY_KINDS, 0) | recoveries
        self.draining_since = draining_since

    @property
    def count(self) -> dict[tuple[str, str, str], int]:
        """Number of transitions by (machine, old state, new state). Safe on any thread."""
        groups = {
            ("group", source, target): n
            for source, targets in list(self._groups.items())
            for target, n in list(targets.items())
        }
        return groups | dict(list(self._others.items()))

    def entered(self, machine: str, state: str) -> int:
        """Number of times that any record entered a state."""
        return sum(n for (name, _, target), n in self.count.items() if name == machine and target == state)

    def group_counts(self) -> dict[str, int]:
        """Number of groups aborted, resumed, filtered and failed so far, for the row of a step."""
        return {f"groups_{name}": self.entered("group", name) for name in ("aborted", "resumed", "filtered", "failed")}

    def net(self, machine: str, state: str) -> int:
        """Records that entered a state, minus those that left it."""
        counts = self.count.items()
        return sum(
            n * ((target == state) - (source == state)) for (name, source, target), n in counts if name == machine
        )
