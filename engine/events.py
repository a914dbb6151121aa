"""Events: everything that the scheduler is told. Frozen, named in the past tense.

Executors, simulated worlds and replays create them. The driver stamps each one once, with its position in the record
and the time, and passes it to `Scheduler.tick`. An event never says what should follow. Events about a replica carry
its life, and events about a group its attempt, so the scheduler can ignore reports about work that has ended.

A tag identifies its class in the record. Never reuse a tag. Never reorder the fields of a class; add new ones at the
end, with a default.
"""

from msgspec import Struct
from msgspec.structs import force_setattr

from engine.ids import NO_VERSION, EventId, GroupId, LifeNumber, ReplicaId, StepId, TimerId, ValidationId, Version


class Event(Struct, frozen=True, kw_only=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Base of all events. The driver sets `id`, the position in the record, and `at`, seconds since the run began.

    Garbage collection may skip events, because their fields are plain values, never objects that refer to each other.
    """

    id: EventId = -1
    at: float = 0.0


def stamp(event: Event, id: EventId, at: float) -> None:
    """Set the position and the time of a new event. Only the driver calls it, before anyone reads the event."""
    force_setattr(event, "id", id)
    force_setattr(event, "at", at)


class GroupEvent(Event, frozen=True, kw_only=True):
    """Base of events about an attempt of a group, and the life of the replica that it ran on."""

    group: GroupId
    attempt: int
    replica: ReplicaId
    life: LifeNumber


class ProcessEvent(Event, frozen=True, kw_only=True):
    """Base of events about a life of a process. `kind` and `index` name it, as in `states/process.py`."""

    kind: str
    index: int
    life: LifeNumber


class SyncEvent(Event, frozen=True, kw_only=True):
    """Base of answers to an order of a sync. `attempt` is that of the `StageWeights` order."""

    replica: ReplicaId
    life: LifeNumber
    attempt: int


class RunStarted(Event, frozen=True, kw_only=True, tag=1):
    """The run began, and prompts may be drawn. The first event of every record."""

    replicas: int = 0
    """Number of replicas to start, with ids from 0. Replicas reserved for validation have the highest ids."""


class PromptsDrawn(Event, frozen=True, kw_only=True, tag=2):
    """The data source drew `count` prompts, for groups with ids from `first`. `number`: as in `DrawPrompts`.

    `exhausted`: the source has no more prompts.
    """

    first: GroupId
    count: int
    exhausted: bool
    number: int = 0
    described: str = ""
    """What policies see of each prompt, as a JSON list; empty if no added state before generation asks."""


class GroupGenerated(GroupEvent, frozen=True, kw_only=True, tag=3):
    """A replica finished every trajectory of a group and, unless an added state computes them, its rewards."""

    tokens: int
    """Response tokens of all trajectories, including tokens from earlier attempts."""
    oldest_version: Version
    newest_version: Version
    trainable: int
    """Number of trajectories that have tokens to train on."""
    reward_mean: float
    reward_spread: float
    """Largest minus smallest reward of these trainable trajectories."""
    described: str = ""
    """What policies see of the group, as JSON (`workers.group_reports.describe`); empty if none of the run asks."""
    longest: int = 0
    """Response tokens of the longest rollout; 0: unknown."""


class GroupAborted(GroupEvent, frozen=True, kw_only=True, tag=4):
    """A group stopped before its end. Its finished trajectories and prefixes are in the trajectory store."""

    tokens: int
    oldest_version: Version
    newest_version: Version
    unfinished: int = 0
    """Number of trajectories that have not ended."""


class GroupFailed(GroupEvent, frozen=True, kw_only=True, tag=5):
    """An attempt to generate a group failed. `cause`: the retry budget that it uses, `infrastructure` or `data`."""

    cause: str
    reason: str


class ProcessUp(ProcessEvent, frozen=True, kw_only=True, tag=6):
    """A process started and can execute orders."""

    slots: int = 0
    """Replica only: number of whole groups that it can generate at once."""
    samples: int = 1
    """Replica only: trajectories of a group. It can generate `slots * samples` trajectories at once."""
    version: Version = 0
    """Replica only: the weights version that it has."""


class ProcessLost(ProcessEvent, frozen=True, kw_only=True, tag=7):
    """A process ended, or could not be started. Data that it had not stored is lost."""

    reason: str
    final: bool = False
    """The process cannot be started again."""
    published: Version = NO_VERSION
    """Trainer only: the newest version in the weights store. Its `WeightsPublished` may have been lost."""
    saved: tuple[StepId, ...] = ()
    """Trainer only: train steps in each complete checkpoint whose `CheckpointSaved` was lost."""


class WeightsStaged(SyncEvent, frozen=True, kw_only=True, tag=8):
    """A weights version is in the replica's host memory."""

    version: Version


class ReplicaPaused(SyncEvent, frozen=True, kw_only=True, tag=9):
    """The replica stopped sampling until a `ResumeReplica`. It has reported every group that the pause aborted."""


class WeightsInstalled(SyncEvent, frozen=True, kw_only=True, tag=10):
    """The replica has weights version `version` and samples its next token from it."""

    version: Version


class SyncFailed(SyncEvent, frozen=True, kw_only=True, tag=11):
    """Staging, pausing or installing failed. The replica still has its old weights."""

    version: Version
    reason: str


class BatchScored(Event, frozen=True, kw_only=True, tag=12):
    """A scoring task, such as reference log-probs, finished for the batch of a step."""

    step: StepId
    attempt: int
    task: str


class StepTrained(Event, frozen=True, kw_only=True, tag=13):
    """The trainer finished a train step. `updates`: number of optimizer updates in it."""

    step: StepId
    attempt: int
    updates: int = 0


class StepFailed(Event, frozen=True, kw_only=True, tag=14):
    """Scoring or training failed. The trainer's weights are those from before the step."""

    step: StepId
    attempt: int
    reason: str


class WeightsPublished(Event, frozen=True, kw_only=True, tag=15):
    """A weights version is in the weights store. The trainer may change its own copy again."""

    version: Version
    attempt: int


class PublishFailed(Event, frozen=True, kw_only=True, tag=16):
    """A weights version did not reach the weights store."""

    version: Version
    attempt: int
    reason: str


class CheckpointSaved(Event, frozen=True, kw_only=True, tag=17):
    """The checkpoint after `steps` train steps is complete on disk."""

    steps: int


class CheckpointFailed(Event, frozen=True, kw_only=True, tag=18):
    """The checkpoint after `steps` train steps could not be written. The run continues without it, unless it is the
    last."""

    steps: int
    reason: str


class TimerFired(Event, frozen=True, kw_only=True, tag=19):
    """The delay of a `SetTimer` has passed."""

    timer: TimerId


class StopRequested(Event, frozen=True, kw_only=True, tag=20):
    """A user or a signal asked the run to stop at once. It can be resumed."""

    reason: str


class PrefixStored(GroupEvent, frozen=True, kw_only=True, tag=21):
    """The tokens of a running group so far are in the trajectory store. If its replica dies, it resumes from them."""

    tokens: int
    oldest_version: Version
    newest_version: Version
    unfinished: int = 0


class OrderProgressed(Event, frozen=True, kw_only=True, tag=54):
    """A process has made progress on an open order since the last report. This restarts the time limit of the order."""

    order: int
    """The `number` of the order. No number is reused, so a report of an earlier attempt or life changes nothing."""
    finished: int = 0
    """For a group: the number of its trajectories that have ended. Others may be generated in their place."""


NO_ANSWER = 0
"""Stands for the answer of a response from which none could be extracted."""


class RowsMeasured(Event, frozen=True, kw_only=True, tag=30):
    """A replica measured a chunk of validation rows, every row with weights version `version`."""

    validation: ValidationId
    chunk: int
    attempt: int
    replica: ReplicaId
    life: LifeNumber
    version: Version
    measured: int
    """Number of rows that got a reward. The others failed and count as wrong."""
    right: int
    """Number of these rows whose response is right."""
    reward: float
    """Sum of the rewards of these rows."""
    rows: tuple[int, ...] = ()
    """These rows, with the reward and the answer of each; empty if the replica reports only sums."""
    rewards: tuple[float, ...] = ()
    answers: tuple[int, ...] = ()
    """A hash of the answer that was extracted from each response, for majority votes; `NO_ANSWER`: it has none."""
    right_rows: tuple[int, ...] = ()
    """Those of `rows` whose response is right."""
    part_rows: tuple[int, ...] = ()
    """The row of each value of a reward part, with the place of the part in `ValidationSet.parts` and the value."""
    part_places: tuple[int, ...] = ()
    part_values: tuple[float, ...] = ()
    reason: str = ""
    """Why the first of the other rows failed."""


class RowsFailed(Event, frozen=True, kw_only=True, tag=31):
    """A replica could not measure a chunk of validation rows."""

    validation: ValidationId
    chunk: int
    attempt: int
    replica: ReplicaId
    life: LifeNumber
    reason: str


class RunResumed(Event, frozen=True, kw_only=True, tag=22):
    """New processes resumed the run from the weights after `steps` train steps; 0 means the initial weights.

    With `kept`, only running work is lost. Otherwise the run branches: train steps after `steps` are discarded, and the
    groups in `consumed` and `released`, which ended after `steps`, are generated again. `replicas` is the number of
    replicas to start, with ids from 0 and the initial weights.
    """

    steps: int
    replicas: int
    consumed: tuple[GroupId, ...]
    released: tuple[GroupId, ...]
    kept: bool = False
    """No trained step is lost: the trajectory store has its data, and the trainer has retrained the steps since its
    checkpoint from their batches. `steps` is then the number of steps in the record."""
    missing: tuple[GroupId, ...] = ()
    """With `kept`: groups whose trajectories were lost, for example in a power cut. They are generated again."""
    again: bool = False
    """The launching process resumed the run by itself after `FinishRun.again`. False: a user resumed it."""
    checkpoint: StepId = 0
    """With `kept`: train steps in the checkpoint that the trainer loaded. Its `CheckpointSaved` may have been lost."""
    changed: bool = False
    """The data has changed, so the source may have prompts again."""


class StateLeft(Event, frozen=True, kw_only=True, tag=32):
    """An added state finished its work on a group. The result is in the trajectory store."""

    group: GroupId
    attempt: int
    state: str
    trainable: int
    """This field and those after it have the same meaning as in `GroupGenerated`."""
    reward_mean: float
    reward_spread: float
    described: str = ""


class StateFailed(Event, frozen=True, kw_only=True, tag=33):
    """An added state failed on a group. `cause`: the retry budget that it uses, `infrastructure` or `data`."""

    group: GroupId
    attempt: int
    state: str
    cause: str
    reason: str


class StepInspected(Event, frozen=True, kw_only=True, tag=55):
    """An added state of train steps has inspected a batch or, with a `version`, these weights."""

    step: StepId
    attempt: int
    state: str
    version: Version = NO_VERSION
    refused: str = ""
    """Why it refuses them, which ends the run; empty: they pass."""


class InspectionFailed(Event, frozen=True, kw_only=True, tag=56):
    """An added state of train steps could not decide about a batch or about weights."""

    step: StepId
    attempt: int
    state: str
    reason: str
    version: Version = NO_VERSION


class SchedulerRecovered(Event, frozen=True, kw_only=True, tag=34):
    """A restarted scheduler recovered its state from the record. It reissues every open order."""


class DrainRequested(Event, frozen=True, kw_only=True, tag=35):
    """A user or a signal asked for a drain: park running groups, train the formed batch, save a checkpoint, stop."""

    reason: str


class ReplicaLeaves(Event, frozen=True, kw_only=True, tag=36):
    """A replica will be taken away, for example a spot instance. Its groups continue on other replicas."""

    replica: ReplicaId
    life: LifeNumber
    reason: str


class ReplicasWanted(Event, frozen=True, kw_only=True, tag=37):
    """A user asked for `replicas` generating replicas, those with ids from 0 to `replicas` - 1."""

    replicas: int


class SettingChanged(Event, frozen=True, kw_only=True, tag=38):
    """A user changed a live setting. `scheduling/settings.py` lists the settings and their allowed values."""

    setting: str
    value: str


class OrderDone(Event, frozen=True, kw_only=True, tag=39):
    """Acknowledges executed orders that return no data. `orders` holds their numbers."""

    orders: tuple[int, ...]


class DrawFailed(Event, frozen=True, kw_only=True, tag=40):
    """The data source raised, or drew an invalid number of prompts. `number`: as in `DrawPrompts`."""

    number: int
    reason: str


class ProcessWaits(ProcessEvent, frozen=True, kw_only=True, tag=43):
    """A process waits until the cluster has room for it. An empty `reason`: it has room now."""

    reason: str


class RunInterrupted(Event, frozen=True, kw_only=True, tag=44):
    """The previous launch failed: its scheduler ended for good, or an automatic resume could not start."""

    reason: str
    launch: bool = False
    """True: a launch failed. False: the scheduler ended, which changes nothing if the run is already starting again."""


class CheckpointDamaged(Event, frozen=True, kw_only=True, tag=50):
    """The checkpoint after `steps` train steps is damaged and will not be used.

    Reported only while no trainer runs."""

    steps: int
    reason: str


class OrderOverdue(Event, frozen=True, kw_only=True, tag=51):
    """An order has exceeded its time limit, as the watchdog measured (`runtime/watchdog.py`)."""

    order: int
    """Its number."""
    took_s: float
    """Seconds in which its process could work on it since it was given, or last progressed; by `timeouts.max_s`, all
    seconds since it was given."""
    limit_s: float
    setting: str
    """The setting that it exceeded, such as `timeouts.train_s`."""
    chain: tuple[str, ...] = ()
    """Names of processes: the one that executes it, the one that this one waits for, and so on, up to one that waits
    for none, is not up, gives no sign of life, or comes for the second time. Empty: none was asked."""
    answered: bool = True
    """Whether the last one of the chain gave a sign of life: its event loop runs, though its computation may hang."""


class CallsMeasured(ProcessEvent, frozen=True, kw_only=True, tag=53):
    """A process measured its calls of one of the user's functions, such as a reward. Sent while groups wait for it."""

    function: str
    """Its name in messages, such as `reward slow`."""
    groups: int
    """Groups and validation rows that wait for calls now."""
    queued: int
    """Calls that wait until another one ends."""
    at_once: int
    """Maximum number of calls at once in this process."""
    setting: str
    """The setting that limits them; empty: none does."""
    calls: int
    """Calls that have ended since the last report."""
    seconds: float
    """Sum of the durations of these calls."""
    running_s: float
    """Seconds since the start of the oldest running call."""
    held_s: float = 0.0
    """Seconds of the ended calls that awaited nothing, and so held the thread that they share with other calls."""


class CacheMeasured(ProcessEvent, frozen=True, kw_only=True, tag=57):
    """A replica measured its KV cache. Sent while groups run, if the run's concurrency policy uses it."""

    used: float
    """Share of it in use, from 0 to 1."""


EVENTS: tuple[type[Event], ...] = (
    RunStarted, PromptsDrawn, GroupGenerated, GroupAborted, GroupFailed, ProcessUp, ProcessLost, WeightsStaged,
    ReplicaPaused, WeightsInstalled, SyncFailed, BatchScored, StepTrained, StepFailed, WeightsPublished,
    PublishFailed, CheckpointSaved, CheckpointFailed, TimerFired, StopRequested, PrefixStored, RunResumed,
    RowsMeasured, RowsFailed, StateLeft, StateFailed, StepInspected, InspectionFailed, SchedulerRecovered,
    DrainRequested, ReplicaLeaves, ReplicasWanted, SettingChanged, OrderDone, DrawFailed, CheckpointDamaged,
    ProcessWaits, RunInterrupted, OrderOverdue, CallsMeasured, OrderProgressed, CacheMeasured,
)  # fmt: skip
