"""Commands: everything that the scheduler can ask for. Frozen, named in the imperative.

`Scheduler.tick` returns them, the driver records them with the events that caused them, and an executor carries them
out. `→` names the events that answer an order; `states/orders.py` has the whole table. Executors must tolerate a
repeated command: its attempt, life or number shows that it is not a new one.

A tag identifies its class in the record. Never reuse a tag. Never reorder the fields of a class; add new ones at the
end, with a default.
"""

from typing import TYPE_CHECKING, Union

from msgspec import Struct

from engine.ids import NO_VERSION, EventId, GroupId, LifeNumber, ReplicaId, StepId, TimerId, ValidationId, Version


class Command(Struct, frozen=True, kw_only=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Base of all commands. `cause`: id of the event that caused it; in the record, an event of the same frame. The
    scheduler sets it and the `number` of an order as it gives the command."""

    cause: EventId = -1


class GroupCommand(Command, frozen=True, kw_only=True):
    """Base of orders about an attempt of a group on a life of a replica."""

    group: GroupId
    attempt: int
    replica: ReplicaId
    life: LifeNumber


class DrawPrompts(Command, frozen=True, kw_only=True, tag=1):
    """Draw up to `count` prompts from the data source, beginning with prompt `first` → `PromptsDrawn` or `DrawFailed`.
    `number` counts the draws."""

    first: GroupId
    count: int
    number: int = -1


class StartGroup(GroupCommand, frozen=True, kw_only=True, tag=2):
    """Generate a group from its prompt, without prefixes → `GroupGenerated`, `GroupAborted` or `GroupFailed`."""

    admitted_version: Version = 0
    """Oldest weights version that its tokens may come from."""
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it."""


class ResumeGroup(GroupCommand, frozen=True, kw_only=True, tag=3):
    """Continue a group from its stored prefixes → `GroupGenerated`, `GroupAborted` or `GroupFailed`.

    `truncate`: generate nothing more and finish it with its prefixes."""

    truncate: bool
    admitted_version: Version = 0
    """As in `StartGroup`."""
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it."""


class AbortGroup(GroupCommand, frozen=True, kw_only=True, tag=4):
    """Stop generating a group and discard its tokens → `OrderDone`."""

    number: int = -1
    """Its number in the order book; `OrderDone` repeats it."""


class TruncateGroup(GroupCommand, frozen=True, kw_only=True, tag=5):
    """Finish a running group with the tokens that it has → `GroupGenerated`, `GroupAborted` or `GroupFailed`."""


class DiscardGroups(Command, frozen=True, kw_only=True, tag=6):
    """Delete the trajectories of groups that are no longer needed → `OrderDone`."""

    groups: tuple[GroupId, ...]
    number: int = -1
    """Its number in the order book; `OrderDone` repeats it."""


class StageWeights(Command, frozen=True, kw_only=True, tag=7):
    """Copy a weights version into the replica's host memory while it generates → `WeightsStaged` or `SyncFailed`.

    This begins a sync. `attempt` numbers the syncs of a replica; the pause, install and resume of the same sync repeat
    it.
    """

    replica: ReplicaId
    life: LifeNumber
    attempt: int
    version: Version


class PauseReplica(Command, frozen=True, kw_only=True, tag=8):
    """Stop sampling → `ReplicaPaused` or `SyncFailed`.

    `mode` says what happens to running requests: `keep` freezes them, `abort` aborts them, `wait` lets them finish, and
    `sleep` aborts them and frees memory for the next task of the pool."""

    replica: ReplicaId
    life: LifeNumber
    attempt: int
    version: Version
    mode: str


class InstallWeights(Command, frozen=True, kw_only=True, tag=9):
    """Replace the weights of a paused replica with the staged version → `WeightsInstalled` or `SyncFailed`."""

    replica: ReplicaId
    life: LifeNumber
    attempt: int
    version: Version


class ResumeReplica(Command, frozen=True, kw_only=True, tag=10):
    """Sample again after a pause → `OrderDone`."""

    replica: ReplicaId
    life: LifeNumber
    attempt: int
    number: int = -1
    """Its number in the order book; `OrderDone` repeats it."""


class StopProcess(Command, frozen=True, kw_only=True, tag=11):
    """Stop a process → `ProcessLost`. `kind` and `index` name it, as in `states/process.py`."""

    kind: str
    index: int
    life: LifeNumber
    reason: str
    hung: bool = False
    """The process exceeded a time limit: write the stacks of its threads first."""


class RetireWeights(Command, frozen=True, kw_only=True, tag=12):
    """Delete a version that is no longer needed from the weights store → `OrderDone`."""

    version: Version
    number: int = -1
    """Its number in the order book; `OrderDone` repeats it."""


class ScoreBatch(Command, frozen=True, kw_only=True, tag=13):
    """Run a scoring task on the batch of a step → `BatchScored` or `StepFailed`."""

    step: StepId
    attempt: int
    task: str
    groups: tuple[GroupId, ...]
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it."""


class TrainStep(Command, frozen=True, kw_only=True, tag=14):
    """Train on a batch → `StepTrained` or `StepFailed`. `staleness[i]`: staleness of `groups[i]`, in train steps."""

    step: StepId
    attempt: int
    groups: tuple[GroupId, ...]
    staleness: tuple[int, ...]
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it."""


class PublishWeights(Command, frozen=True, kw_only=True, tag=15):
    """Put the trainer's weights into the weights store as `version` → `WeightsPublished` or `PublishFailed`.

    `steps`: train steps in these weights."""

    version: Version
    attempt: int
    steps: int
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it."""


class SaveCheckpoint(Command, frozen=True, kw_only=True, tag=16):
    """Save the trainer's state after `steps` train steps → `CheckpointSaved` or `CheckpointFailed`."""

    steps: int
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it. A new attempt has a new number."""


class DeleteCheckpoint(Command, frozen=True, kw_only=True, tag=50):
    """Delete the checkpoint after `steps` train steps → `OrderDone`."""

    steps: int
    number: int = -1
    """Its number in the order book; `OrderDone` repeats it."""


class SetTimer(Command, frozen=True, kw_only=True, tag=17):
    """Fire after `delay_s` seconds → `TimerFired`. `name` says what the timer is for; a newer one with the same name
    replaces it."""

    timer: TimerId
    """Its number in the order book."""
    delay_s: float
    name: str


class CancelTimer(Command, frozen=True, kw_only=True, tag=18):
    """Cancel a timer. Needs no answer."""

    timer: TimerId
    name: str


class FinishRun(Command, frozen=True, kw_only=True, tag=19):
    """End the run. `outcome`: `finished`, `stopped` or `failed`; the last two can be resumed. Needs no answer."""

    outcome: str
    reason: str
    again: bool = False
    """The launching process must resume the run from its record: a running run cannot replace the lost process."""
    drained: bool = False
    """It stopped because it was asked to drain and nothing was running any more."""

    @property
    def word(self) -> str:
        """How the run ended, for people: `drained` or the outcome."""
        return "drained" if self.drained else self.outcome


class MeasureRows(Command, frozen=True, kw_only=True, tag=30):
    """Measure `count` validation rows, beginning with row `first` → `RowsMeasured` or `RowsFailed`.

    `version`: weights version that the replica has and must measure with."""

    validation: ValidationId
    chunk: int
    attempt: int
    replica: ReplicaId
    life: LifeNumber
    version: Version
    first: int
    count: int
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it."""


class StopMeasuring(Command, frozen=True, kw_only=True, tag=31):
    """Stop measuring the rows of a validation on a replica → `OrderDone`."""

    validation: ValidationId
    replica: ReplicaId
    life: LifeNumber
    number: int = -1
    """Its number in the order book; `OrderDone` repeats it."""


class EnterState(Command, frozen=True, kw_only=True, tag=32):
    """Run the work of an added state on a group in the trajectory store → `StateLeft` or `StateFailed`."""

    group: GroupId
    attempt: int
    state: str


class InspectStep(Command, frozen=True, kw_only=True, tag=35):
    """Run the work of an added state of train steps → `StepInspected` or `InspectionFailed`.

    It inspects the batch of `step` before it is trained, or, with a `version`, these weights in their store before
    replicas get them; `step` is then the last step in them, -1 for none."""

    step: StepId
    attempt: int
    state: str
    version: Version = NO_VERSION
    groups: tuple[GroupId, ...] = ()
    """The batch; empty for weights."""
    staleness: tuple[int, ...] = ()


class ParkGroup(GroupCommand, frozen=True, kw_only=True, tag=33):
    """Stop a running group and store its tokens → `GroupAborted`, or `GroupGenerated` or `GroupFailed` if it ended."""

    reason: str = ""
    """Why the group is charged one attempt. Empty: it is not charged, and a faster replica continues it."""


class StartProcess(Command, frozen=True, kw_only=True, tag=34):
    """Start a process → `ProcessUp` or `ProcessLost`. Idempotent by kind, index and life."""

    kind: str
    index: int
    life: LifeNumber
    steps: StepId = 0
    """Trainer only: train steps in the weights that it begins with."""
    version: Version = NO_VERSION
    """Trainer only: published version that has these weights. -1: load the checkpoint after `steps` train steps, or the
    initial weights if `steps` is 0."""
    updates: int = 0
    """Trainer only: optimizer updates in these steps."""
    redo: tuple[StepId, ...] = ()
    """Trainer only: later steps, which it retrains from their recorded batches before it is up."""
    delay_s: float = 0.0
    """Seconds to wait first, because the previous start failed."""
    number: int = -1
    """Its number in the order book; `OrderProgressed` repeats it."""


COMMANDS: tuple[type[Command], ...] = (
    DrawPrompts, StartGroup, ResumeGroup, AbortGroup, TruncateGroup, DiscardGroups, StageWeights, PauseReplica,
    InstallWeights, ResumeReplica, StopProcess, RetireWeights, ScoreBatch, TrainStep, PublishWeights,
    SaveCheckpoint, SetTimer, CancelTimer, FinishRun, MeasureRows, StopMeasuring, EnterState,
    InspectStep, ParkGroup, StartProcess, DeleteCheckpoint,
)  # fmt: skip

if TYPE_CHECKING:
    AnyCommand = Command
else:
    AnyCommand = Union[COMMANDS]  # noqa: UP007 - of a tuple
"""Any of them, for `msgspec`, which tells them apart by their tags."""
