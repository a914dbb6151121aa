"""Facts: everything the scheduler can learn, past tense, frozen.

Made by executors, worlds and replays; stamped once by the driver with a position in the record and a time; handed to
`Scheduler.handle`. An event never says what should follow. Facts about a replica carry its incarnation and facts
about a group its attempt, so that an echo of something already over is known as stale.

Tags are the codec's names for the classes: never reuse one, never change the order of a class's fields; add at the end.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.ids import NO_VERSION, EventId, GroupId, Incarnation, ReplicaId, StepId, TimerId, ValidationId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all facts. `id` and `at` (seconds since the run began) are the driver's stamp."""

    tag: ClassVar[int] = 0
    id: EventId = -1
    at: float = 0.0


def stamp(event: Event, id: EventId, at: float) -> None:
    """Write the driver's stamp into an event that has none: the one write to a frozen event, before anyone reads it."""
    object.__setattr__(event, "id", id)
    object.__setattr__(event, "at", at)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """Prompts may be drawn. The first event of every record."""

    tag: ClassVar[int] = 1
    replicas: int = 0
    """Replicas to be started, numbered from 0. Those that only validate come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsDrawn(Event):
    """The source gave `count` prompts, numbered from `first`. `exhausted`: no more come; `number`: of the order."""

    tag: ClassVar[int] = 2
    first: GroupId
    count: int
    exhausted: bool
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGenerated(Event):
    """A replica finished every trajectory of a group, and its rewards are known."""

    tag: ClassVar[int] = 3
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    tokens: int
    """Response tokens over all trajectories, those of earlier attempts included."""
    oldest_version: Version
    newest_version: Version
    live: int
    """Trajectories that have tokens to train on."""
    reward_mean: float
    reward_spread: float
    """Largest minus smallest reward over the live trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAborted(Event):
    """A group was cut short on its replica; its finished trajectories and prefixes are in the trajectory store."""

    tag: ClassVar[int] = 4
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    tokens: int
    oldest_version: Version
    newest_version: Version
    unfinished: int = 0
    """Trajectories that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed(Event):
    """An attempt failed. `cause` names the budget it costs: `infrastructure` or `data`."""

    tag: ClassVar[int] = 5
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUp(Event):
    """A life of a process can execute orders. `kind` and `index` name the process: `states/process.py`."""

    tag: ClassVar[int] = 6
    kind: str
    index: int
    incarnation: Incarnation
    slots: int = 0
    """Of a replica: groups that it can generate at once."""
    version: Version = 0
    """Of a replica: the weights that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLost(Event):
    """A life of a process has ended, or never began. What it had not stored is gone."""

    tag: ClassVar[int] = 7
    kind: str
    index: int
    incarnation: Incarnation
    reason: str
    final: bool = False
    """Nothing can start another life of it."""
    published: Version = NO_VERSION
    """Of the trainer: the newest version in the weights store. The report of it may be lost with the trainer."""
    saved: tuple[StepId, ...] = ()
    """Of the trainer: train steps in complete checkpoints whose reports are lost with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsStaged(Event):
    """The weights of a version are in the replica's host memory. `attempt` is that of the order it answers."""

    tag: ClassVar[int] = 8
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPaused(Event):
    """The replica samples no token until it is resumed; groups it aborted were reported before."""

    tag: ClassVar[int] = 9
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInstalled(Event):
    """The replica will sample its next token from `version`."""

    tag: ClassVar[int] = 10
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFailed(Event):
    """Staging, pausing or installing a version failed; the replica has its old weights."""

    tag: ClassVar[int] = 11
    replica: ReplicaId
    incarnation: Incarnation
    attempt: int
    version: Version
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScored(Event):
    """A scoring task of a step is done."""

    tag: ClassVar[int] = 12
    step: StepId
    attempt: int
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained(Event):
    """The trainer applied every minibatch of a step, in so many optimizer `updates`."""

    tag: ClassVar[int] = 13
    step: StepId
    attempt: int
    updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(Event):
    """Scoring or training a step failed; the weights are those before the step."""

    tag: ClassVar[int] = 14
    step: StepId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event):
    """A version is in the weights store, the trainer free to change its own copy."""

    tag: ClassVar[int] = 15
    version: Version
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFailed(Event):
    """A version did not reach the weights store."""

    tag: ClassVar[int] = 16
    version: Version
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A complete checkpoint of everything after `steps` train steps is visible."""

    tag: ClassVar[int] = 17
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; the run goes on without it."""

    tag: ClassVar[int] = 18
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """The time set by `SetTimer` has passed."""

    tag: ClassVar[int] = 19
    timer: TimerId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """The user wants the run to stop now, resumably."""

    tag: ClassVar[int] = 20
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStored(Event):
    """What a running group has so far is in the trajectory store; should its replica be lost, it resumes from there."""

    tag: ClassVar[int] = 21
    group: GroupId
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    tokens: int
    oldest_version: Version
    newest_version: Version
    unfinished: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMeasured(Event):
    """A replica has measured a chunk of the held-out rows, all of it under `version`."""

    tag: ClassVar[int] = 30
    validation: ValidationId
    chunk: int
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    version: Version
    measured: int
    """Rows with a reward; the others could not be measured, for their own fault."""
    right: int
    """Of these, with a reward of at least 1."""
    reward: float
    """Sum of their rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFailed(Event):
    """A replica could not measure a chunk of the held-out rows."""

    tag: ClassVar[int] = 31
    validation: ValidationId
    chunk: int
    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(Event):
    """The run goes on, in new processes, from the weights after `steps` train steps; 0: the initial ones.

    What those weights do not hold did not happen: it is done again. `consumed` and `released` are the groups that had
    ended since; `replicas` are being started, numbered from 0, with the
    initial weights."""

    tag: ClassVar[int] = 22
    steps: int
    replicas: int
    consumed: tuple[GroupId, ...]
    released: tuple[GroupId, ...]
    kept: bool = False
    """The trajectory store holds what it held, and the trainer has trained the steps since its checkpoint again, from
    their batches: `steps` are all there were, and only what ran is lost."""
    missing: tuple[GroupId, ...] = ()
    """With `kept`: groups whose trajectories are not there although they should be; they begin again."""
    again: bool = False
    """The launching process resumes the run by itself, as `FinishRun.again` says. Else a user does."""
    checkpoint: StepId = 0
    """With `kept`: train steps in the checkpoint that the trainer began with. The report of it may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLeft(Event):
    """The work of an added state is done on a group, and the store has what came of it."""

    tag: ClassVar[int] = 32
    group: GroupId
    attempt: int
    state: str
    live: int
    """As in `GroupGenerated`, as are the other figures."""
    reward_mean: float
    reward_spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFailed(Event):
    """The work of an added state failed. `cause` names the budget it costs: `infrastructure` or `data`."""

    tag: ClassVar[int] = 33
    group: GroupId
    attempt: int
    state: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRecovered(Event):
    """Another process took the scheduler's place, by the record. What was ordered and not answered is ordered again."""

    tag: ClassVar[int] = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Event):
    """The user wants the run to end resumably: what runs is parked, the formed batch trained, a checkpoint written."""

    tag: ClassVar[int] = 35
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLeaves(Event):
    """A replica will be taken away, as spot instances are: it gets no more groups, and those it has go on elsewhere."""

    tag: ClassVar[int] = 36
    replica: ReplicaId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasWanted(Event):
    """The user wants so many replicas that generate, numbered from 0."""

    tag: ClassVar[int] = 37
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanged(Event):
    """The user has set a figure or a policy of the running scheduler; `scheduling/settings.py` says to what it may."""

    tag: ClassVar[int] = 38
    setting: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDone(Event):
    """Orders that only had to arrive were carried out; `orders` are their numbers."""

    tag: ClassVar[int] = 39
    orders: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawFailed(Event):
    """The source gave no prompt and did not say that there are no more. `number`: of the order."""

    tag: ClassVar[int] = 40
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessWaits(Event):
    """A process cannot start until the cluster has room for it. Empty `reason`: it need not wait any more."""

    tag: ClassVar[int] = 43
    kind: str
    index: int
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterrupted(Event):
    """The run cannot continue where it is: its scheduler ended, or a launch that was to resume it failed."""

    tag: ClassVar[int] = 44
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged(Event):
    """The checkpoint after `steps` train steps is not what was written and is not used any more. Reported only while no
    trainer runs."""

    tag: ClassVar[int] = 50
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessProbed(Event):
    """The answer to a `ProbeProcess`: the process does not hang, but its computation may."""

    tag: ClassVar[int] = 51
    kind: str
    index: int
    incarnation: Incarnation
    order: int
    waits_for: str = ""
    """The name of the process on which it has waited longest, such as `weights store`; empty: on none."""


EVENTS: dict[int, type[Event]] = {
    cls.tag: cls
    for cls in (
        RunStarted, PromptsDrawn, GroupGenerated, GroupAborted, GroupFailed, ProcessUp, ProcessLost, WeightsStaged,
        ReplicaPaused, WeightsInstalled, SyncFailed, BatchScored, StepTrained, StepFailed, WeightsPublished,
        PublishFailed, CheckpointSaved, CheckpointFailed, TimerFired, StopRequested, PrefixStored, RunResumed,
        RowsMeasured, RowsFailed, StateLeft, StateFailed, SchedulerRecovered, DrainRequested, ReplicaLeaves,
        ReplicasWanted, SettingChanged, OrderDone, DrawFailed, CheckpointDamaged, ProcessWaits,
        RunInterrupted, ProcessProbed,
    )
}  # fmt: skip
