"""Orders: everything the scheduler can ask for, imperative, frozen.

Returned by `Scheduler.handle`, recorded with the event that caused them, then carried out by an executor. Each names
its cause,
the event it answers, so that "why?" is a walk through the record. Carrying one out twice must do no harm: (attempt,
incarnation) tell a repeat from a new order.

Tags are the codec's names for the classes: never reuse one, never change the order of a class's fields; add at the end.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.ids import NO_VERSION, EventId, GroupId, Incarnation, ReplicaId, StepId, TimerId, ValidationId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Base of all orders. `cause` is the event it answers; in the record it is implied by the frame."""

    tag: ClassVar[int] = 0
    cause: EventId


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPrompts(Command):
    """Draw up to `count` prompts from the source → `PromptsDrawn` or `DrawFailed`. `number` counts these orders."""

    tag: ClassVar[int] = 1
    count: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup(Command):
    """Generate a group, or retry it from nothing → `GroupGenerated`, `GroupAborted` or `GroupFailed`."""

    tag: ClassVar[int] = 2
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    admitted_version: Version = 0
    """None of its tokens may be of an older version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeGroup(Command):
    """Go on generating a partial group from its stored prefixes. `truncate`: finish it with the prefixes as they
    are."""

    tag: ClassVar[int] = 3
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    truncate: bool
    admitted_version: Version = 0
    """As in `StartGroup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortGroup(Command):
    """Stop generating a group whose tokens nobody wants any more → `OrderDone`."""

    tag: ClassVar[int] = 4
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    number: int
    """Its number in the order book; `OrderDone` repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateGroup(Command):
    """Finish a running group with the tokens it has → `GroupGenerated`."""

    tag: ClassVar[int] = 5
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardGroups(Command):
    """Forget the trajectories of groups that ended → `OrderDone`."""

    tag: ClassVar[int] = 6
    groups: tuple[GroupId, ...]
    number: int
    """Its number in the order book; `OrderDone` repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights(Command):
    """Bring a version into the replica's host memory while it generates → `WeightsStaged` or `SyncFailed`.

    Begins a sync of the replica; `attempt` numbers its syncs, and the pause, install and resume that follow carry
    the same.
    """

    tag: ClassVar[int] = 7
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseReplica(Command):
    """Stop sampling: `keep` requests frozen, `abort` them, or `wait` for their end → `ReplicaPaused` or
    `SyncFailed`. `sleep` aborts them and gives back the memory that the next task of the pool needs."""

    tag: ClassVar[int] = 8
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int
    version: Version
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallWeights(Command):
    """Swap the staged version in → `WeightsInstalled` or `SyncFailed`."""

    tag: ClassVar[int] = 9
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReplica(Command):
    """Sample again → `OrderDone`."""

    tag: ClassVar[int] = 10
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int
    number: int
    """Its number in the order book; `OrderDone` repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProcess(Command):
    """End a life of a process → `ProcessLost`. `kind` and `index` name the process: `states/process.py`."""

    tag: ClassVar[int] = 11
    kind: str
    index: int
    incarnation: Incarnation
    reason: str
    hung: bool = False
    """It did not execute an order in time: its stacks are written before it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireWeights(Command):
    """Drop a superseded version from the weights store → `OrderDone`."""

    tag: ClassVar[int] = 12
    version: Version
    number: int
    """Its number in the order book; `OrderDone` repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBatch(Command):
    """Run a scoring task on the batch of a step → `BatchScored` or `StepFailed`."""

    tag: ClassVar[int] = 13
    step: StepId
    attempt: int
    task: str
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep(Command):
    """Train on a batch → `StepTrained` or `StepFailed`. `staleness[i]` is that of `groups[i]`, in train steps."""

    tag: ClassVar[int] = 14
    step: StepId
    attempt: int
    groups: tuple[GroupId, ...]
    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishWeights(Command):
    """Put the trainer's weights into the store as `version`, holding `steps` train steps → `WeightsPublished` or
    `PublishFailed`."""

    tag: ClassVar[int] = 15
    version: Version
    attempt: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint(Command):
    """Write a checkpoint of everything after `steps` train steps → `CheckpointSaved` or `CheckpointFailed`."""

    tag: ClassVar[int] = 16
    steps: int
    number: int
    """Its number in the order book. It tells a repeat from another attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoint(Command):
    """Delete the checkpoint after `steps` train steps, which is not to be kept any more → `OrderDone`."""

    tag: ClassVar[int] = 50
    steps: int
    number: int
    """Its number in the order book; `OrderDone` repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer(Command):
    """Report after `delay_s` seconds → `TimerFired`."""

    tag: ClassVar[int] = 17
    timer: TimerId
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer(Command):
    """Forget a timer."""

    tag: ClassVar[int] = 18
    timer: TimerId


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun(Command):
    """The run is over: `finished`, `stopped` (resumable, by request) or `failed` (resumable, with the cause)."""

    tag: ClassVar[int] = 19
    outcome: str
    reason: str
    again: bool = False
    """The launching process resumes the run from its record: a process is lost that cannot be replaced while the run is
    running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRows(Command):
    """Measure `count` held-out rows from `first` on, under `version`, which the replica has → `RowsMeasured` or
    `RowsFailed`."""

    tag: ClassVar[int] = 30
    validation: ValidationId
    chunk: int
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    version: Version
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMeasuring(Command):
    """Measure nothing more for a validation → `OrderDone`."""

    tag: ClassVar[int] = 31
    validation: ValidationId
    replica: ReplicaId
    incarnation: Incarnation
    number: int
    """Its number in the order book; `OrderDone` repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterState(Command):
    """Do the work of an added state on a generated group, whose trajectories are in the store → `StateLeft` or
    `StateFailed`."""

    tag: ClassVar[int] = 32
    group: GroupId
    attempt: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkGroup(Command):
    """Cut a running group short and keep what it has → `GroupAborted`, unless it ended before."""

    tag: ClassVar[int] = 33
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    reason: str = ""
    """Why its attempt is lost; empty: it is not, a faster replica takes the group over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProcess(Command):
    """Begin a life of a process → `ProcessUp` or `ProcessLost`. Idempotent by kind, index and incarnation."""

    tag: ClassVar[int] = 34
    kind: str
    index: int
    incarnation: Incarnation
    steps: StepId = 0
    """Of the trainer: it begins with the weights after so many train steps."""
    version: Version = NO_VERSION
    """Of the trainer: the published version that holds these weights. -1: the checkpoint after `steps` train steps; the
    initial weights if `steps` is 0."""
    updates: int = 0
    """Of the trainer: optimizer updates in these steps."""
    redo: tuple[StepId, ...] = ()
    """Of the trainer: the steps that follow. It trains them again from their recorded batches before it is up."""
    delay_s: float = 0.0
    """Wait so long first: the life before could not be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeProcess(Command):
    """Ask a process whether it hangs, and what it waits for → `ProcessProbed`. Given when an order is overdue."""

    tag: ClassVar[int] = 51
    kind: str
    index: int
    incarnation: Incarnation
    order: int
    """The number of the overdue order."""
    reason: str
    """What is said of the overdue order if a process is stopped for it."""
    chain: str
    """The names of the processes from the owner of the overdue order to this one, separated by commas: each waits for
    the next."""


COMMANDS: dict[int, type[Command]] = {
    cls.tag: cls
    for cls in (
        DrawPrompts, StartGroup, ResumeGroup, AbortGroup, TruncateGroup, DiscardGroups, StageWeights, PauseReplica,
        InstallWeights, ResumeReplica, StopProcess, RetireWeights, ScoreBatch, TrainStep, PublishWeights,
        SaveCheckpoint, SetTimer, CancelTimer, FinishRun, MeasureRows, StopMeasuring, EnterState,
        ParkGroup, StartProcess, DeleteCheckpoint, ProbeProcess,
    )
}  # fmt: skip
