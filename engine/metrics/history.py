"""What happened in a run, as plain values: who worked on what, when, why it began and why it ended.

A run finds them while it goes (`history_builder`) and keeps them in a file (`history_log`). `inspect.history_reader`
makes a `History` of them, which the timeline, the report, the explanation and the pictures share. Every value with a
duration has `start` and `end` in seconds since the run began, `cause`, the event that made it begin, and `ended_by`,
the event that ended it; `History.links` joins the two. Must not read records or files.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from msgspec import Struct, field

from engine.ids import EventId, GroupId, LifeNumber, ReplicaId, StepId, ValidationId, Version
from engine.metrics.collector import FunctionTotals

RUNNING = "running"
"""The outcome of a value that had not ended when the record ended. Its `end` is then the end of the record."""
STOPPED = "stopped"
"""The outcome of a value that the end of the run cut off."""
NO_EVENT: EventId = -1
WAITS = ("waiting_for_groups", "waiting_for_stragglers")
"""What the trainer does while it waits for groups (`IdleSpan.trainer`)."""

FATES = {
    "trained": "a train step has trained on them",
    "filtered": "the filter policy dropped their group",
    "dropped": "the deadline policy or the end of the run dropped their group",
    "failed": "their group failed: its attempts are used up",
    "lost": "their attempt failed or its replica was lost, and no prefix was stored",
    "undone": "the run continued from an earlier checkpoint",
    "open": "their group had not ended when the record ended",
}
"""What became of sampled tokens. Every token has one fate. Tokens that no replica reported are not counted."""


class GenerationAttempt(Struct, frozen=True, array_like=True, gc=False):
    """One attempt to generate a group, in one life of a replica."""

    group: GroupId
    attempt: int
    replica: ReplicaId
    life: LifeNumber
    start: float
    end: float
    resumed: bool
    """It continued from stored tokens."""
    outcome: str
    """`generated`, `aborted`, `failed`, `lost` (with its replica), `stopped` or `running`."""
    reason: str
    """Why it ended. Aborted: `sync`, `pool`, `drain`, `timeout`, `moved` (to a faster replica), `dropped` or `unasked`.
    Generated: empty or `truncated`. Failed and lost: the message."""
    version: Version
    """Weights version of the replica when it began."""
    oldest_version: Version
    newest_version: Version
    """Oldest and newest weights version of the group's tokens when it ended."""
    tokens: int
    """Tokens of the group when it ended, those of earlier attempts included."""
    sampled: int
    """Tokens of this attempt that were reported."""
    cause: EventId
    ended_by: EventId
    ordered_by: EventId
    """The event after which the scheduler ordered its end; `ended_by` where nothing ordered it."""
    longest: int = 0
    """Tokens of its longest rollout, if it was generated; 0: unknown."""


class RowsAttempt(NamedTuple):
    """Validation rows that a replica measured."""

    validation: ValidationId
    chunk: int
    attempt: int
    replica: ReplicaId
    life: LifeNumber
    start: float
    end: float
    outcome: str
    """`measured`, `failed`, `lost`, `stopped` or `running`."""
    version: Version
    rows: int
    cause: EventId
    ended_by: EventId


class GroupWait(Struct, frozen=True, array_like=True, gc=False):
    """The time that a group waited for its batch, or was in an added state."""

    group: GroupId
    state: str
    """`generated`: it waits for its batch. Otherwise the added state."""
    start: float
    end: float
    outcome: str
    """The group's next state: `batched`, `filtered`, `dropped`, ...; or `undone`, `stopped`, `running`."""
    cause: EventId
    ended_by: EventId


class StepPhase(NamedTuple):
    """One phase of a train step."""

    step: StepId
    name: str
    """`collecting`, `scoring`, `training` or `publishing`."""
    start: float
    end: float
    outcome: str
    """The next state of the step; or `undone`, `stopped`, `running`."""
    cause: EventId
    ended_by: EventId


class SyncPhase(NamedTuple):
    """One phase of bringing weights to a replica, or of a pause for another task."""

    replica: ReplicaId
    life: LifeNumber
    sync: int
    version: Version
    name: str
    """`staging`, `pausing` or `installing`."""
    mode: str
    """What a pause does with running groups."""
    start: float
    end: float
    outcome: str
    """`done`, `failed`, `lost`, `replaced`, `stopped` or `running`."""
    cause: EventId
    ended_by: EventId


class ProcessLife(Struct, frozen=True, array_like=True, gc=False):
    """One life of a process."""

    kind: str
    index: int
    number: LifeNumber
    start: float
    up: float | None
    """When it was up; None if it never was."""
    end: float
    outcome: str
    """`lost`, `stopped` or `running`."""
    reason: str
    cause: EventId
    ended_by: EventId


class CheckpointWrite(NamedTuple):
    """One checkpoint, from the order to the answer."""

    steps: StepId
    start: float
    end: float
    outcome: str
    """`saved`, `failed`, `stopped` or `running`."""
    cause: EventId
    ended_by: EventId


class IdleSpan(NamedTuple):
    """A time in which the causes of idleness did not change."""

    start: float
    end: float
    busy_s: float
    """Slot seconds."""
    idle_s: tuple[tuple[str, float], ...]
    """Idle slot seconds by cause (`names.ROLLOUT_IDLE_CAUSES`)."""
    trainer: str
    """The trainer's task, or why it was idle (`names.TRAINER_TASKS`, `names.TRAINER_IDLE_CAUSES`)."""


Interval = GenerationAttempt | RowsAttempt | GroupWait | StepPhase | SyncPhase | ProcessLife | CheckpointWrite


class GroupRow(Struct, frozen=True, array_like=True, gc=False):
    """One prompt group, from its draw to its end."""

    group: GroupId
    state: str
    drawn_at: float
    started_at: float
    """-1 if it never started."""
    ended_at: float
    """-1 while it has not ended."""
    deadline: StepId
    attempts: int
    tokens: int
    oldest_version: Version
    newest_version: Version
    reward_mean: float | None
    reward_spread: float | None
    step: StepId
    """The newest step that took it; -1: none."""
    staleness: int
    """Its staleness in that step; -1: none."""


class StepRow(NamedTuple):
    """One train step and its batch."""

    step: StepId
    groups: tuple[GroupId, ...]
    staleness: tuple[int, ...]
    phases: tuple[StepPhase, ...]
    version: Version
    """The version that it published; -1: none."""
    tokens: int
    finished_at: float
    """-1 if it has not finished."""
    undone: bool
    """The run continued from an earlier checkpoint, so that it was trained again, or will be."""


class Failure(NamedTuple):
    """Something failed."""

    at: float
    event: EventId
    text: str


class Intervals(Struct):
    """What ended in a part of a run, in the order in which it ended."""

    attempts: list[GenerationAttempt] = field(default_factory=list)
    chunks: list[RowsAttempt] = field(default_factory=list)
    waits: list[GroupWait] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)
    """A group may have several rows: the run went back to an earlier checkpoint between them."""
    steps: list[StepRow | StepId] = field(default_factory=list)
    """A number: there, the run went back to the weights after so many steps. Rows that this undid, and that had not
    ended, follow it."""
    syncs: list[SyncPhase] = field(default_factory=list)
    lives: list[ProcessLife] = field(default_factory=list)
    checkpoints: list[CheckpointWrite] = field(default_factory=list)
    idle: list[IdleSpan] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    settings: list[tuple[float, str, str]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """As in `metrics.jsonl`, without the trainer's own figures."""

    def extend(self, more: "Intervals") -> None:
        """Add what ended after it."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(more, name))


@dataclass(frozen=True, kw_only=True)
class History:
    """A run as far as its record goes. Values are in the order in which they ended."""

    run: str
    code: str
    """Version of the engine that wrote the record."""
    limits: Mapping[str, Any]
    policies: Mapping[str, str]
    config: Mapping[str, Any]
    """The configuration as recorded; empty for simulated runs."""
    ticks: int
    events: int
    end: float
    """Time of the last event."""
    outcome: str
    """`finished`, `stopped`, `failed`, or `running`: the record does not say how the run ended. Readers that know that
    no process is running it say `interrupted`."""
    reason: str
    notes: tuple[str, ...]
    """Remarks about the record, such as a torn end."""
    slots: Mapping[ReplicaId, int]
    """Slots of each replica, validators included."""
    attempts: tuple[GenerationAttempt, ...]
    chunks: tuple[RowsAttempt, ...]
    waits: tuple[GroupWait, ...]
    groups: tuple[GroupRow, ...]
    """By number."""
    steps: tuple[StepRow, ...]
    """Those undone first, in the order of their phases."""
    syncs: tuple[SyncPhase, ...]
    validations: tuple[Mapping[str, Any], ...]
    """As in `metrics.jsonl`."""
    lives: tuple[ProcessLife, ...]
    checkpoints: tuple[CheckpointWrite, ...]
    idle: tuple[IdleSpan, ...]
    tokens: Mapping[str, int]
    """Sampled tokens by fate (`FATES`)."""
    rows: tuple[Mapping[str, Any], ...]
    """A row for each finished step, as in `metrics.jsonl` without the trainer's own figures."""
    failures: tuple[Failure, ...]
    functions: Mapping[str, FunctionTotals]
    """Those of the user's functions of which calls were reported."""
    cores: int = 0
    """CPU cores of the machine that ran the scheduler; 0: unknown, or it has GPUs."""
    settings: tuple[tuple[float, str, str], ...] = ()
    """(time, setting, value) of each change of a live setting."""

    @cached_property
    def busy_s(self) -> float:
        """Slot seconds in which groups or rows were generated."""
        return sum(span.busy_s for span in self.idle)

    @cached_property
    def idle_s(self) -> dict[str, float]:
        """Idle slot seconds by cause, largest first."""
        sums: dict[str, float] = defaultdict(float)
        for span in self.idle:
            for cause, seconds in span.idle_s:
                sums[cause] += seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @cached_property
    def trainer_s(self) -> dict[str, float]:
        """Seconds of the trainer by task or cause of idleness, largest first."""
        sums: dict[str, float] = defaultdict(float)
        for span in self.idle:
            sums[span.trainer] += span.end - span.start
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def slowest(self, cause: str) -> tuple[str, FunctionTotals] | None:
        """The function with this cause (`FunctionTotals.cause`) whose calls took the most seconds."""
        found = [one for one in self.functions.items() if one[1].cause == cause]
        return max(found, key=lambda one: one[1].seconds, default=None)

    @property
    def trained(self) -> tuple[StepRow, ...]:
        """The steps of the surviving line of weights."""
        return tuple(step for step in self.steps if not step.undone)

    def intervals(self) -> Iterator[Interval]:
        """Every value with a duration."""
        phases = chain.from_iterable(step.phases for step in self.steps)
        return chain(self.attempts, self.chunks, self.waits, phases, self.syncs, self.lives, self.checkpoints)

    def links(self) -> Iterator[tuple[Interval, Interval]]:
        """(cause, effect): the value whose end is the event that made the other begin. A batch has one link, from the
        group that completed it."""
        ends: dict[EventId, Interval] = {}
        for value in self.intervals():
            if value.ended_by != NO_EVENT and value.ended_by not in ends:
                ends[value.ended_by] = value
        for value in self.intervals():
            source = ends.get(value.cause)
            if source is not None and source is not value:
                yield source, value

    def ends(self) -> Counter[tuple[str, str]]:
        """Number of attempts by (outcome, reason), with messages left out."""
        return Counter((a.outcome, "" if a.outcome in ("failed", "lost") else a.reason) for a in self.attempts)
