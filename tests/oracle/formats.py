"""The one module of the oracle that knows the engine's events, commands and settings.

A recorded world holds sentences about the world outside the engine, in plain JSON: the order "start group 4 on replica
1 life 1, attempt 2" was answered with "generated". It never holds the number of an order, the position or the cause of
an event, a timer's number, a probe or a reason. This module makes sentences from today's commands, inputs from today's
events, and events from inputs.

If you change a format or a name, change this module in the same step: it must read and write the same sentences as
before. Never change recorded worlds.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

from msgspec import structs

from engine import events as all_events
from engine.commands import (
    AbortGroup,
    CancelTimer,
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
    InspectStep,
    InstallWeights,
    MeasureRows,
    ParkGroup,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StageWeights,
    StartGroup,
    StartProcess,
    StopMeasuring,
    StopProcess,
    TrainStep,
    TruncateGroup,
)
from engine.events import EVENTS, Event, OrderDone, OrderOverdue, OrderProgressed, RunResumed, SchedulerRecovered, stamp
from engine.policies import PolicySet
from engine.record import Header, read
from engine.record.frames import Tick
from engine.record.recorder import MemoryRecorder
from engine.record.recovery import recover
from engine.record.snapshots import snapshot
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.states.orders import RELATIONS, Order
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER
from engine.states.timeouts import Timeouts

Plain = dict[str, Any]

# -- what the engine says ----------------------------------------------------------------------------------------------

_REPLICA = "replica {replica} life {life}"
_BATCH = "groups {groups}, staleness {staleness}"
SENTENCES: dict[type[Command], str] = {
    DrawPrompts: "draw {count} prompts from {first}",
    StartGroup: f"start group {{group}} on {_REPLICA}, attempt {{attempt}}, version {{admitted_version}} or newer",
    ResumeGroup: f"resume group {{group}} on {_REPLICA}, attempt {{attempt}}, version {{admitted_version}} or newer",
    AbortGroup: f"abort group {{group}} on {_REPLICA}, attempt {{attempt}}",
    TruncateGroup: f"truncate group {{group}} on {_REPLICA}, attempt {{attempt}}",
    ParkGroup: f"park group {{group}} on {_REPLICA}, attempt {{attempt}}",
    StageWeights: f"stage version {{version}} on {_REPLICA}",
    PauseReplica: f"pause {_REPLICA} for version {{version}}, mode {{mode}}",
    InstallWeights: f"install version {{version}} on {_REPLICA}",
    ResumeReplica: f"let {_REPLICA} sample again",
    StartProcess: "start {kind} {index} life {life}",
    StopProcess: "stop {kind} {index} life {life}",
    RetireWeights: "retire version {version}",
    ScoreBatch: f"score step {{step}} with {{task}}, attempt {{attempt}}: {_BATCH.partition(',')[0]}",
    TrainStep: f"train step {{step}}, attempt {{attempt}}: {_BATCH}",
    PublishWeights: "publish version {version} of {steps} steps, attempt {attempt}",
    SaveCheckpoint: "save checkpoint {steps}",
    DeleteCheckpoint: "delete checkpoint {steps}",
    SetTimer: "wait: {name}",
    FinishRun: "end the run: {outcome}",
    MeasureRows: f"measure {{count}} rows from {{first}} at version {{version}} on {_REPLICA}, attempt {{attempt}}",
    StopMeasuring: f"stop measuring on {_REPLICA}",
    EnterState: "work of state {state} on group {group}, attempt {attempt}",
    InspectStep: f"inspect step {{step}}, version {{version}} in state {{state}}, attempt {{attempt}}: {_BATCH}",
}
NOT_SHOWN: tuple[type[Command], ...] = (SetTimer, CancelTimer)
"""What is no part of a comparison: only its consequences count."""


def _sentences(command: Any) -> list[str]:
    """What a command says: one sentence, or one for each group that is discarded."""
    if isinstance(command, DiscardGroups):
        return [f"discard group {group}" for group in command.groups]
    form = SENTENCES.get(type(command))
    if form is None:
        return []
    sentence = form.format_map(structs.asdict(command))
    match command:
        case ResumeGroup(truncate=True):
            sentence += ", only to end it"
        case ParkGroup(reason=reason) if reason:
            sentence += ", charged"
        case StopProcess(hung=True):
            sentence += ", which hangs"
        case StartProcess(kind=kind):
            if kind == TRAINER:
                begin = f", from {command.steps} steps, version {command.version}, {command.updates} updates"
                sentence += f"{begin}, again {command.redo}"
            sentence += f", in {command.delay_s:g} s" if command.delay_s else ""
        case FinishRun():
            sentence += ", to begin again" * command.again + ", drained" * command.drained
    return [sentence]


# -- inputs ------------------------------------------------------------------------------------------------------------

WORDS: dict[str, str] = {
    "draw failed": "DrawFailed", "drawn": "PromptsDrawn", "generated": "GroupGenerated", "aborted": "GroupAborted",
    "failed": "GroupFailed", "stored a prefix": "PrefixStored", "came up": "ProcessUp", "was lost": "ProcessLost",
    "waits for room": "ProcessWaits", "staged": "WeightsStaged", "paused": "ReplicaPaused",
    "installed": "WeightsInstalled", "sync failed": "SyncFailed", "scored": "BatchScored", "trained": "StepTrained",
    "step failed": "StepFailed", "published": "WeightsPublished", "publication failed": "PublishFailed",
    "saved": "CheckpointSaved", "not saved": "CheckpointFailed", "is damaged": "CheckpointDamaged",
    "is over": "TimerFired", "progressed": "OrderProgressed", "done": "OrderDone", "measured": "RowsMeasured",
    "not measured": "RowsFailed", "left the state": "StateLeft", "failed in the state": "StateFailed",
    "passed": "StepInspected", "not inspected": "InspectionFailed", "measured calls": "CallsMeasured",
    "measured cache": "CacheMeasured", "overdue": "OrderOverdue", "the run began": "RunStarted",
    "the run resumed": "RunResumed", "the scheduler was replaced": "SchedulerRecovered",
    "the launch failed": "RunInterrupted", "user stops": "StopRequested", "user drains": "DrainRequested",
    "user takes away": "ReplicaLeaves", "user wants": "ReplicasWanted", "user sets": "SettingChanged",
}  # fmt: skip
"""Word → event class."""
FIELDS: dict[str, str] = {"incarnation": "life"}
"""Field of a recorded input → the events' present name of this field; empty: they have it no more."""
SETTINGS: dict[str, str] = {}
"""Recorded setting → present name; empty: there is no such setting any more."""
STAMPED = ("id", "at")
"""Fields of every event that the oracle sets."""

_CLASSES: dict[str, Any] = {word: getattr(all_events, name) for word, name in WORDS.items()}
_WORD_OF: dict[type, str] = {cls: word for word, cls in _CLASSES.items()}
_RECORDED_NAME = {present: recorded for recorded, present in FIELDS.items()}
_BY_THEMSELVES = ("came up", "was lost", "waits for room")
"""They say which process they are about, also where they answer an order."""


@cache
def _shared(event: type[Event], command: type[Command]) -> tuple[str, ...]:
    """The fields of an event that its order has, too."""
    return tuple(f for f in event.__struct_fields__ if f in command.__struct_fields__ and f != "cause")


@cache
def _keys(command: type[Command]) -> dict[type[Event], tuple[str, ...]]:
    """By event that may answer or report on an order: the fields that must be equal."""
    relation = RELATIONS.get(command)
    if relation is None:
        return {}
    same = {*relation.id, *relation.echo}
    return {
        event: tuple(field for field in _shared(event, command) if field in same)
        for event in EVENTS
        if relation.knows(event) and event not in (OrderDone, OrderProgressed)
    }


def _values(record: Any, fields: Iterable[str]) -> tuple[Any, ...]:
    return tuple([getattr(record, field) for field in fields])


class NeverOrdered(Exception):
    """An input answers an order that this engine did not give."""


class Book:
    """Every order of a run by its sentence. A sentence that was said before gets a number: "save checkpoint 2 (2)"."""

    def __init__(self) -> None:
        self.orders: dict[str, Any] = {}
        self._said: Counter[str] = Counter()
        self._of_number: dict[int, list[str]] = {}
        self._of_command: dict[int, str] = {}
        self._answered_by: dict[type, dict[tuple[Any, ...], tuple[int, str]]] = {cls: {} for cls in EVENTS}
        """By event class and equal values: the newest order that it may be about."""

    def add(self, commands: Sequence[Command]) -> list[str]:
        """Add the commands of a tick. Returns the sentences that count, in an order of their own."""
        shown: list[str] = []
        for command in commands:
            sentences = []
            for sentence in _sentences(command):
                self._said[sentence] += 1
                times = self._said[sentence]
                sentences.append(sentence if times == 1 else f"{sentence} ({times})")
                self.orders[sentences[-1]] = command
            number = getattr(command, "timer", getattr(command, "number", -1))
            self._of_number[number] = sentences
            self._of_command[id(command)] = sentences[0] if sentences else ""
            for event, fields in _keys(type(command)).items():
                key = (fields, *_values(command, fields))
                self._answered_by[event][key] = (len(self.orders), sentences[0])
            if not isinstance(command, NOT_SHOWN):
                shown += sentences
        return sorted(shown)

    def sentence_of(self, command: Command) -> str:
        """What a command that was added said."""
        return self._of_command[id(command)]

    def plain(self, event: Any) -> Plain:
        """An event as an input."""
        cls = type(event)
        said: Plain = {"is": _WORD_OF[cls]}
        if cls is OrderDone:
            return said | {"of": [one for number in event.orders for one in self._of_number.get(number, ())]}
        fields = [field for field in cls.__struct_fields__ if field not in STAMPED]
        if cls is OrderProgressed:
            return said | {"of": self._of_number[event.order][0], "finished": event.finished}
        if cls is RunResumed:
            fields = [field for field in fields if field not in ("consumed", "released")]
        elif said["is"] not in _BY_THEMSELVES:
            found = [
                newest for fields_ in {keys[cls] for keys in map(_keys, RELATIONS) if cls in keys}
                if (newest := self._answered_by[cls].get((fields_, *_values(event, fields_)))) is not None
            ]  # fmt: skip
            if found:
                said["of"] = max(found)[1]
                order = self.orders[said["of"]]
                same = _shared(cls, type(order))
                fields = [f for f in fields if f not in same or getattr(event, f) != getattr(order, f)]
        return said | {_RECORDED_NAME.get(field, field): getattr(event, field) for field in fields}

    def event(self, said: Plain) -> Any:
        """The event of an input. Raises: `NeverOrdered`."""
        word, data = said["is"], {}
        for name, value in said.items():
            field = FIELDS.get(name, name)
            if field and name not in ("is", "of"):
                data[field] = tuple(value) if isinstance(value, list) else value
        if word == "done":
            numbers = [self._order(sentence).number for sentence in said["of"]]
            return OrderDone(orders=tuple(dict.fromkeys(numbers)))
        if word == "progressed":
            return OrderProgressed(order=self._order(said["of"]).number, **data)
        cls = _CLASSES[word]
        if "of" in said:
            order = self._order(said["of"])
            data = {field: getattr(order, field) for field in _shared(cls, type(order))} | data
        return cls(**data)

    def _order(self, sentence: str) -> Any:
        if sentence not in self.orders:
            raise NeverOrdered(sentence)
        return self.orders[sentence]


def plain_settings(limits: Limits) -> Plain:
    """Every setting of a run but its time limits, which are off."""
    return {name: value for name, value in limits.to_plain().items() if name != "timeouts"}


def _limits(settings: Mapping[str, Any]) -> Limits:
    given = {SETTINGS.get(name, name): value for name, value in settings.items()}
    given.pop("", None)
    return Limits.from_plain({**given, "timeouts": asdict(Timeouts.every(None))})


# -- a core that takes inputs ------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a tick made of its inputs."""

    heard: list[bool]
    """For each input whether it meant something. False: an echo of work that is over."""
    ordered: list[str]
    changed: list[str]

    @property
    def said(self) -> list[str]:
        """The orders and what changed, in an order of their own."""
        return sorted([*self.ordered, *self.changed])


class Core:
    """A scheduler with its record, told plain inputs. A failover or a resume recovers it from the record."""

    def __init__(self, settings: Mapping[str, Any], policies: Mapping[str, str], snapshot_every: int) -> None:
        """`snapshot_every`: ticks between two snapshots; 0: none is made, so a recovery replays every event."""
        limits, chosen = _limits(settings), PolicySet.from_names(policies)
        self._scheduler = Scheduler(limits, chosen, observe=self._observe)
        header = Header(run="oracle", limits=limits.to_plain(), policies=dict(chosen.names))
        self._recorder = MemoryRecorder(header)
        self._snapshot_every = snapshot_every
        self._book = Book()
        self._changes: list[str] = []
        self._figures = _figures(self._scheduler)

    def tick(self, at: float, inputs: Sequence[Plain]) -> Answer:
        """Raises: `NeverOrdered`, before anything has changed; and whatever the scheduler raises."""
        self._changes = []
        events = [self._resume(one) if one["is"] == "the run resumed" else self._book.event(one) for one in inputs]
        if any(isinstance(event, SchedulerRecovered) for event in events):
            self._recover()
        for id, event in enumerate(events, start=self._recorder.next_event):
            stamp(event, id, at)
        scheduler = self._scheduler
        commands = scheduler.tick(events)
        applied = list(scheduler.events)
        if applied:
            self._recorder.write(applied, commands)
        number = self._recorder.next_tick
        if self._snapshot_every and not number % self._snapshot_every:
            self._recorder.snapshot(snapshot(scheduler))
        heard = [event in applied and event.id in scheduler.state.orders.matched for event in events]
        figures, before = _figures(scheduler), self._figures
        changed = [f"{name}: {value}" for name, value in figures.items() if before.get(name) != value]
        self._figures = figures
        return Answer(heard, self._book.add(commands), [*self._changes, *changed])

    def _recover(self) -> Any:
        recovered = recover(read(self._recorder))
        self._scheduler = recovered.scheduler
        self._scheduler.state.observe(self._observe)
        return recovered

    def _resume(self, said: Plain) -> RunResumed:
        recovered = self._recover()
        if said["kept"]:
            event: RunResumed = recovered.resume_without_loss(
                replicas=said["replicas"], missing=tuple(said["missing"]), checkpoint=said["checkpoint"]
            )
        else:
            event = recovered.resume_from_checkpoint(steps=said["steps"], replicas=said["replicas"])
        self._changes.append(f"resumed after {event.steps} steps; again {event.consumed} and {event.released}")
        return structs.replace(event, again=said["again"])

    def _observe(self, machine: str, record: Any, source: str, trigger: str) -> None:
        """Note how a group ended without being trained on, and what a validation found."""
        state = record.state
        if machine == "group" and state in ("filtered", "dropped", "failed"):
            self._changes.append(f"group {record.id} was {state}")
        elif machine == "validation" and state in ("reported", "cancelled", "failed"):
            found = f"{record.measured} measured, {record.right} right, reward {record.reward:g}"
            self._changes.append(f"the validation of version {record.version} was {state}: {found}")


def _figures(scheduler: Scheduler) -> dict[str, Any]:
    """Figures whose changes count."""
    view = scheduler.view
    figures = {"steps trained": view.steps_trained, "newest version": view.latest_version, **charges(scheduler)}
    for replica in view.replicas():
        figures[f"version of replica {replica.id}"] = replica.version
    for validation in view.validations():
        figures[f"validation of version {validation.version}"] = (
            f"{validation.measured} of {validation.rows} rows measured"
        )
    return figures


def charges(scheduler: Scheduler) -> dict[str, Any]:
    """The failed attempts that are charged to each open group and step."""
    found: dict[str, Any] = {}
    for group in scheduler.view.groups():
        if group.infrastructure_failures or group.data_failures:
            spent = f"{group.infrastructure_failures} infrastructure, {group.data_failures} data"
            found[f"attempts charged to group {group.id}"] = spent
    for step in scheduler.state.training.steps.values():
        if step.failures:
            found[f"attempts charged to step {step.id}"] = step.failures
    return found


def addressee(command: Any) -> tuple[str, int] | None:
    """The process that executes an order, if it is not a store or the data source."""
    of_owner = {"replica": REPLICA, TRAINER: TRAINER, "task": SCORER, "state": ADDED_STATES}
    kind = getattr(command, "kind", "") or of_owner.get(RELATIONS[type(command)].owner, "")
    return (kind, getattr(command, "index", getattr(command, "replica", 0))) if kind else None


# -- time limits -------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """One consequence of a time limit."""

    at: float
    interval: float
    """Seconds by which the check that found it may have been late."""
    said: str


CONSEQUENCES = ("stop ", "park group", "start trainer", "start replica", "start scorer", "start added", "end the run")
LAUNCHED = re.compile(r"start .* life 1\b")


class LimitWatch:
    """What follows from time limits in a run: overdue orders, stopped and started processes, charged attempts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._book = Book()
        self._open: dict[int, Order] = {}
        self._charges: dict[str, Any] = {}
        self._failed: list[str] = []
        scheduler.state.observe(self._observe)

    def _observe(self, machine: str, record: Any, source: str, trigger: str) -> None:
        if machine == "group" and record.state == "failed":
            self._failed.append(f"group {record.id} was failed")

    def observe(self, tick: Tick) -> list[Seen]:
        """An order is overdue at the moment when its limit was found to be exceeded, before any process was probed."""
        said = [one for one in self._book.add(tick.commands) if one.startswith(CONSEQUENCES)]
        said = [one for one in said if not LAUNCHED.match(one) and not (one.startswith("park ") and ", ch" not in one)]
        matched, cut_s = self._scheduler.state.orders.matched, self._scheduler.limits.timeouts.cut_s
        found = [
            Seen(
                round(tick.at - (0.0 if event.answered else cut_s), 6), 0.0,
                f"overdue: {self._book.sentence_of(self._open[event.order].command)}",
            )
            for event in tick.events if isinstance(event, OrderOverdue) and event.id in matched
        ]  # fmt: skip
        self._open = {order.number: order for order in self._scheduler.state.orders.all()}
        spent = charges(self._scheduler)
        said += [f"{name}: {value}" for name, value in spent.items() if self._charges.get(name) != value]
        said += self._failed
        self._charges, self._failed = spent, []
        return [*found, *(Seen(round(tick.at, 6), 0.0, one) for one in said)]
