"""The order book: every open order, and the one table that says which event ends which order.

An order is a command that expects an answer. It opens with the event that caused it. It ends when an event answers it,
another command replaces or withdraws it, or its process is lost. `State.orders` is the only book of open orders. It
shows what a run waits for, what to reissue after the scheduler's process died, and which orders fail with a process.

`Scheduler.tick` matches each event against it before anything else; then `scheduling/` gives every command of the tick
through `OrderBook.add`. No other field may encode "this is in flight".
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from msgspec import structs
from msgspec.structs import force_setattr

from engine.commands import (
    AbortGroup,
    AnyCommand,
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
from engine.events import (
    BatchScored,
    CheckpointFailed,
    CheckpointSaved,
    DrawFailed,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    InspectionFailed,
    OrderDone,
    OrderOverdue,
    OrderProgressed,
    PrefixStored,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    PromptsDrawn,
    PublishFailed,
    ReplicaPaused,
    RowsFailed,
    RowsMeasured,
    StateFailed,
    StateLeft,
    StepFailed,
    StepInspected,
    StepTrained,
    SyncFailed,
    TimerFired,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.ids import EventId, ReplicaId
from engine.states.facts import Facts
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER, TRAJECTORY_STORE, WEIGHTS_STORE, name_of

Owner = ReplicaId | str
"""Who executes an order: a replica by its number, any other process by its name."""

DATA_SOURCE, TIMERS = "data source", "timers"

# the names of timers
DEADLINE = "deadline policy"
"""Fires when stragglers have kept a batch from forming for long enough."""
GIVE_UP = "give up"
"""Set while no replica is left and none is coming."""
DRAIN = "drain"
"""Fires when a drain has taken too long: the run then stops as it is."""
TOTAL = "timeouts.max_s"
"""The setting that limits an order from when it was given, whatever its kind."""
SLACK_S = 0.001
"""Sums of times are no more exact than that."""
SCORER_OF = "scorer of "
"""The owner of a scoring task that a process of its own executes is this and the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """How one class of orders is keyed, executed and answered."""

    subject: str
    """Forms the key together with the fields of `id`. A newer order with the same key replaces the older one."""
    id: tuple[str, ...]
    """Fields that identify the subject of the order. Events identify it by the same fields."""
    owner: str
    """Who executes it: the name of an `Owner`, or of the command's field that holds the owner."""
    answers: tuple[type[Event], ...]
    """Events that close it."""
    echo: tuple[str, ...] = ()
    """Fields that an event must repeat to match."""
    reports: tuple[type[Event], ...] = ()
    """Events that need the open order and leave it open."""
    limit: str
    """The kind of its time limit, `timeouts.<kind>_s`; empty: it has none."""
    blames_process: bool = True
    """Whether its process may be stopped if it exceeds its limit: the watchdog then asks whom the process waits for."""
    stands_still: bool = True
    """Its time stands still while its process cannot work. False for orders that mostly change the process itself."""
    withdraws: tuple[str, ...] = ()
    """Subjects whose order with the same id ends without an answer when this order is given."""

    def knows(self, event: type[Event]) -> bool:
        """Whether such an event may answer or report on the order."""
        return event in self.answers or event in self.reports


_ON_REPLICA = ("replica", "life")
_PROCESS = ("kind", "index")
_PROGRESS = (OrderProgressed,)
_GROUP = Relation(
    subject="group", id=("group",), owner="replica", echo=("attempt", *_ON_REPLICA), limit="group",
    blames_process=False,
    answers=(GroupGenerated, GroupAborted, GroupFailed), reports=(PrefixStored, OrderProgressed),
)  # fmt: skip


def _cut(subject: str, limit: str, *, blames_process: bool) -> Relation:
    """A running group is cut short: whatever ends its attempt answers."""
    return Relation(
        subject=subject, id=("group",), owner="replica", echo=("attempt", *_ON_REPLICA), limit=limit,
        blames_process=blames_process,
        answers=(GroupGenerated, GroupAborted, GroupFailed),
    )  # fmt: skip


def _sync(*answers: type[Event]) -> Relation:
    """A replica has one sync order at a time: a pause for another reason replaces the open staging order."""
    return Relation(
        subject="sync", id=("replica",), owner="replica", echo=("life", "attempt"), limit="sync",
        answers=(*answers, SyncFailed), stands_still=False,
    )  # fmt: skip


def _acknowledged(subject: str, id: tuple[str, ...], owner: str, limit: str, **more: Any) -> Relation:
    """An order that needs only an acknowledgment; the answer repeats its number."""
    return Relation(subject=subject, id=id, owner=owner, answers=(OrderDone,), limit=limit, **more)


RELATIONS: dict[type[Command], Relation] = {
    DrawPrompts: Relation(
        subject="draw", id=(), owner=DATA_SOURCE, echo=("number",), answers=(PromptsDrawn, DrawFailed), limit="draw",
        blames_process=False,
    ),
    StartGroup: _GROUP,
    ResumeGroup: _GROUP,
    TruncateGroup: _cut("truncate", "group", blames_process=False),
    ParkGroup: _cut("park", "cut", blames_process=True),
    AbortGroup: _acknowledged("abort", ("group",), "replica", "cut", withdraws=("group", "truncate", "park")),
    DiscardGroups: _acknowledged("discard", ("number",), TRAJECTORY_STORE, "store"),
    StageWeights: _sync(WeightsStaged),
    PauseReplica: _sync(ReplicaPaused),
    InstallWeights: _sync(WeightsInstalled),
    ResumeReplica: _acknowledged("resume", ("replica",), "replica", "resume", stands_still=False),
    StartProcess: Relation(subject="start", id=_PROCESS, owner="kind", echo=("life",), limit="start",
                           stands_still=False,
                           answers=(ProcessUp, ProcessLost), reports=(ProcessWaits, OrderProgressed)),
    StopProcess: Relation(subject="stop", id=_PROCESS, owner="kind", echo=("life",), limit="start",
                          blames_process=False, stands_still=False, answers=(ProcessLost,)),
    RetireWeights: _acknowledged("retire", ("version",), WEIGHTS_STORE, "store"),
    ScoreBatch: Relation(subject="score", id=("step", "task"), owner="task", echo=("attempt",),
                         answers=(BatchScored, StepFailed), reports=_PROGRESS, limit="score"),
    TrainStep: Relation(subject="train", id=("step",), owner=TRAINER, echo=("attempt",),
                        answers=(StepTrained, StepFailed), reports=_PROGRESS, limit="train"),
    PublishWeights: Relation(subject="publish", id=("version",), owner=TRAINER, echo=("attempt",),
                             answers=(WeightsPublished, PublishFailed), reports=_PROGRESS, limit="publish"),
    SaveCheckpoint: Relation(subject="checkpoint", id=("steps",), owner=TRAINER,
                             answers=(CheckpointSaved, CheckpointFailed), reports=_PROGRESS, limit="checkpoint"),
    DeleteCheckpoint: _acknowledged("delete", ("steps",), TRAINER, "store"),
    SetTimer: Relation(subject="timer", id=("name",), owner=TIMERS, echo=("timer",), answers=(TimerFired,), limit=""),
    MeasureRows: Relation(subject="rows", id=("validation", "chunk"), owner="replica", echo=("attempt", *_ON_REPLICA),
                          answers=(RowsMeasured, RowsFailed), reports=_PROGRESS, limit="rows", blames_process=False),
    StopMeasuring: _acknowledged("stop rows", ("replica",), "replica", "cut"),
    EnterState: Relation(subject="state", id=("group",), owner="state", echo=("attempt", "state"),
                         answers=(StateLeft, StateFailed), limit="state"),
    InspectStep: Relation(subject="inspect", id=("version", "step"), owner="state", echo=("attempt", "state"),
                          answers=(StepInspected, InspectionFailed), limit="state"),
}  # fmt: skip
"""Every order. `CancelTimer` (withdraws its timer) and `FinishRun` (withdraws everything) are not orders."""

KINDS_OF_SUBJECTS: dict[str, str] = {
    relation.subject: relation.limit for relation in RELATIONS.values() if relation.limit
}
"""The kind of the time limit of each subject that has one."""

FAILURES: frozenset[type[Event]] = frozenset((
    DrawFailed, GroupAborted, GroupFailed, SyncFailed, ProcessLost, StepFailed, PublishFailed, CheckpointFailed,
    RowsFailed, StateFailed, InspectionFailed,
))  # fmt: skip
"""Answers that do not say that the order was carried out."""

NUMBERED = (OrderDone, OrderProgressed, OrderOverdue)
"""Events that name their orders by number."""

UNSOLICITED: tuple[type[Event], ...] = (ProcessUp, ProcessLost)
"""Events that answer an order if one is open, but need none."""


def state_owner(state: str) -> Owner:
    """The owner of the work of an added state."""
    return f"state {state}"


def owner_of(kind: str, index: int) -> Owner:
    """The owner of the orders that start and stop a process."""
    return index if kind == REPLICA else name_of(kind, index)


def owner_text(owner: Owner) -> str:
    """The owner of an order as the subject of a sentence."""
    if isinstance(owner, int):
        return f"replica {owner}"
    if owner.startswith(f"{SCORER} "):
        return owner
    return f"the process of the {owner}" if owner == ADDED_STATES else f"the {owner}"


def works_in_order(owner: Owner) -> bool:
    """Whether a process executes its orders one after another, oldest first."""
    return owner == TRAINER or (isinstance(owner, str) and owner.startswith(SCORER_OF))


class Order(Facts):
    """One open order. What else is known of it follows from its command."""

    number: int
    owner: Owner
    command: AnyCommand
    at: float
    """Time it was given, in seconds since the run began."""
    since: float
    """Time it was given, or last got its full time."""
    overdue: bool = False
    """It exceeded its limit, and that was acted on."""

    @property
    def subject(self) -> str:
        return RELATIONS[type(self.command)].subject

    @property
    def stands_still(self) -> bool:
        return RELATIONS[type(self.command)].stands_still

    @property
    def id(self) -> Any:
        return _OPENINGS[type(self.command)][1](self.command)


_number = attrgetter("number")
_NONE: dict[Any, Order] = {}


class OrdersFacts(Facts):
    """The open orders of a run, oldest first."""

    next_number: int = 0
    """The number of the next order. Numbers are never reused."""
    by_number: dict[int, Order] = {}
    stale_echoes: int = 0
    """Events that needed an open order and found none."""


class OrderBook:
    """The open orders of a run, indexed by subject, and by owner and subject, oldest first; and the commands of the
    newest tick."""

    def __init__(self, facts: OrdersFacts, scored_apart: tuple[str, ...] = ()) -> None:
        """`scored_apart`: scoring tasks that a separate process executes instead of the trainer."""
        self.facts, self._apart = facts, scored_apart
        self.open: dict[str, dict[Any, Order]] = {relation.subject: {} for relation in RELATIONS.values()}
        """The open orders by subject and id, oldest first. Only this class changes it."""
        self.by_number = facts.by_number
        self._owned: dict[Owner, dict[str, dict[Any, Order]]] = defaultdict(lambda: defaultdict(dict))
        self.matched: dict[EventId, tuple[Order, ...]] = {}
        """By event of the newest tick: the orders that it answered or reported on, which caused it. A stale echo has no
        entry."""
        self.event = Event()
        """The newest event in `matched`; while a fired timer is acted on, its event. It is the cause of a command that
        names no other."""
        self.commands: list[Command] = []
        """The commands of the newest tick."""
        for order in self.all():
            subject, identify, _, _ = _OPENINGS[type(order.command)]
            self._enter(subject, identify(order.command), order)

    def __len__(self) -> int:
        return len(self.by_number)

    # reading

    def find(self, subject: str, id: Any) -> Order | None:
        """The open order with that key."""
        return self.open[subject].get(id)

    def is_open(self, command: Command) -> bool:
        """Whether a command is an order without an answer."""
        subject, identify, _, _ = _OPENINGS[type(command)]
        order = self.find(subject, identify(command))
        return order is not None and order.command == command

    def owned(self, owner: Owner) -> list[Order]:
        """The open orders of a process, oldest first."""
        owned = self._owned.get(owner, {})
        return sorted([order for orders in owned.values() for order in orders.values()], key=_number)

    def of(self, owner: Owner, subject: str) -> dict[Any, Order]:
        """The open orders of a process and a subject, by id, oldest first. Callers must not change the dict."""
        owned = self._owned.get(owner)
        return _NONE if owned is None else owned.get(subject, _NONE)

    def first(self, owner: Owner) -> Order | None:
        """The oldest open order of a process."""
        return next(iter(self.owned(owner)), None)

    def all(self) -> list[Order]:
        """Every open order, oldest first."""
        return list(self.by_number.values())

    def reissued(self, now: float) -> list[Command]:
        """The orders to reissue after a process died: all open orders, oldest first. Timers get their remaining time.
        Executing an order twice does no harm."""
        commands: list[Command] = []
        for order in self.all():
            command = order.command
            if isinstance(command, SetTimer):
                command = structs.replace(command, delay_s=max(0.0, order.at + command.delay_s - now))
            commands.append(command)
        return commands

    def scorer(self, task: str) -> Owner:
        """The owner of a scoring task."""
        return f"{SCORER_OF}{task}" if task in self._apart else TRAINER

    def ends_by_owner(self) -> dict[Owner, EventId]:
        """By process: the last event of the newest tick that ended one of its orders."""
        matched = self.matched.items()
        return {one.owner: event for event, orders in matched for one in orders if one.number not in self.by_number}

    # orders

    def add(self, command: Command) -> None:
        """Give a command. An order gets its number; the order with the same key, and the orders that it withdraws, end
        without an answer."""
        if command.cause < 0:
            force_setattr(command, "cause", self.event.id)
        self.commands.append(command)
        opening = _OPENINGS.get(type(command))
        if opening is None:
            self._withdraw_for(command)
            return
        subject, identify, own, withdraws = opening
        number = self.facts.next_number
        self.facts.next_number = number + 1
        if type(command) in _NUMBERED_COMMANDS:
            force_setattr(command, "number", number)
        id = identify(command)
        orders = self.open[subject]
        for other in withdraws:
            self.withdraw(other, id)
        if id in orders:
            self._close(orders[id])
        order = self.by_number[number] = Order(number, own(self, command), command, self.event.at, self.event.at)
        self._enter(subject, id, order)

    def _enter(self, subject: str, id: Any, order: Order) -> None:
        """Add an order to the indexes."""
        self.open[subject][id] = self._owned[order.owner][subject][id] = order

    def withdraw(self, subject: str, id: Any) -> Order | None:
        """End an order without an answer. A later answer is a stale echo."""
        order = self.open[subject].get(id)
        if order is not None:
            self._close(order)
        return order

    def fail(self, owner: Owner) -> list[Order]:
        """End every order of a lost process. Returns them, oldest first."""
        lost = self.owned(owner)
        for order in lost:
            self._close(order)
        return lost

    def clear(self) -> None:
        """End every order: the run is over, or a resume starts new processes."""
        for order in self.all():
            self._close(order)

    # events

    def match(self, event: Event) -> bool:
        """Close every open order that an event answers. False: the event needs an open order and finds none, so it is
        a stale echo."""
        matched: tuple[Order, ...] = self._match_numbers(event) if isinstance(event, NUMBERED) else ()
        for rule in _RULES.get(type(event), ()):
            orders = self.open[rule.subject]
            found = rule.find(orders, event) if orders else ()
            if found:
                matched += found
                if rule.closes:
                    for order in found:
                        self._close(order)
        if not matched and type(event) in _NEED_ORDERS:
            return False
        self.event = event
        self.matched[event.id] = matched
        return True

    def _match_numbers(self, event: OrderDone | OrderProgressed | OrderOverdue) -> tuple[Order, ...]:
        """For an event that names orders by their numbers."""
        if isinstance(event, OrderOverdue):
            return self._match_overdue(event)
        numbers = event.orders if isinstance(event, OrderDone) else (event.order,)
        named = [self.by_number[number] for number in dict.fromkeys(numbers) if number in self.by_number]
        matched = tuple(order for order in named if RELATIONS[type(order.command)].knows(type(event)))
        if isinstance(event, OrderDone):
            for order in matched:
                self._close(order)
        return matched

    def _match_overdue(self, event: OrderOverdue) -> tuple[Order, ...]:
        """The order, if it was open and without progress for as long as an event says."""
        order = self.by_number.get(event.order)
        if order is None or order.overdue or order.subject not in KINDS_OF_SUBJECTS:
            return ()
        began = order.at if event.setting == TOTAL else order.since
        return (order,) if event.at - began >= event.took_s - SLACK_S else ()

    def _withdraw_for(self, command: Command) -> None:
        if isinstance(command, CancelTimer):
            self.withdraw("timer", command.name)
        elif isinstance(command, FinishRun):
            self.clear()

    def _close(self, order: Order) -> None:
        subject, identify, _, _ = _OPENINGS[type(order.command)]
        id = identify(order.command)
        del self.by_number[order.number], self._owned[order.owner][subject][id], self.open[subject][id]


class _Rule:
    """How an event finds the orders of one subject that it answers or reports on."""

    __slots__ = ("closes", "echo", "fields", "find", "identify", "kinds", "subject")

    def __init__(self, event: type[Event], relation: Relation, kinds: tuple[type[Command], ...]) -> None:
        self.subject = relation.subject
        self.closes = event in relation.answers
        self.kinds = kinds
        self.fields = tuple(name for name in relation.id if name in event.__struct_fields__)
        self.identify = _getter(self.fields)
        self.echo = _getter(relation.echo)
        self.find: Callable[[Mapping[Any, Order], Any], tuple[Order, ...]] = self._find
        if self.fields != relation.id:
            self.find = self._find_some

    def _find(self, orders: Mapping[Any, Order], event: Event) -> tuple[Order, ...]:
        order = orders.get(self.identify(event))
        if order is None or type(order.command) not in self.kinds or self.echo(order.command) != self.echo(event):
            return ()
        return (order,)

    def _find_some(self, orders: Mapping[Any, Order], event: Event) -> tuple[Order, ...]:
        """For an event that names part of the id: a failed step ends all its scoring tasks."""
        named = self.identify(event), self.echo(event)
        return tuple(
            order for order in orders.values() if (self.identify(order.command), self.echo(order.command)) == named
        )


def _getter(names: tuple[str, ...]) -> Callable[[Any], Any]:
    return attrgetter(*names) if names else lambda record: None


def _owner_of(relation: Relation, command: type[Command]) -> Callable[[OrderBook, Any], Owner]:
    if relation.owner == "task":
        return lambda book, order: book.scorer(order.task)
    if relation.owner == "state":
        return lambda book, order: state_owner(order.state)
    if relation.owner == "kind":
        return lambda book, order: owner_of(order.kind, order.index)
    if relation.owner not in command.__struct_fields__:
        return lambda book, order: relation.owner
    owner = attrgetter(relation.owner)
    return lambda book, order: owner(order)


_OPENINGS: Mapping[type[Command], tuple[str, Callable[[Any], Any], Callable[[Any, Any], Owner], tuple[str, ...]]] = {
    command: (relation.subject, _getter(relation.id), _owner_of(relation, command), relation.withdraws)
    for command, relation in RELATIONS.items()
}


def _rules() -> dict[type[Event], tuple[_Rule, ...]]:
    """The table inverted: event → the orders that it may end or report on. `NUMBERED` events are left out."""
    found: dict[type[Event], dict[tuple[str, ...], tuple[Relation, list[type[Command]]]]] = {}
    for command, relation in RELATIONS.items():
        for event in (*relation.answers, *relation.reports):
            if event not in NUMBERED:
                subjects = found.setdefault(event, {})
                subjects.setdefault((relation.subject, *relation.echo), (relation, []))[1].append(command)
    return {
        event: tuple(_Rule(event, relation, tuple(kinds)) for relation, kinds in subjects.values())
        for event, subjects in found.items()
    }


_RULES = _rules()
_NEED_ORDERS = frozenset((*_RULES, *NUMBERED)) - {*UNSOLICITED}
_NUMBERED_COMMANDS = frozenset(command for command in RELATIONS if "number" in command.__struct_fields__)
