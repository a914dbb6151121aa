"""The orders of a session, which a user's loop answers, and the checks of all that the loop says.

Called by `session.py`. An order is a handle: its ids, attempt and number are in it, so an answer cannot be about other
work. The values that the loop adds are checked once, when it answers, and the events that no order asks for when it
reports them. An answer that comes too late, about work that has ended, is taken: the scheduler ignores it. This module
must never change the state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from engine.commands import Command, MeasureRows, PauseReplica
from engine.control.requests import MOST_REPLICAS, changes, check_replicas
from engine.errors import ConfigError, EngineError, choice
from engine.events import (
    CheckpointDamaged,
    DrainRequested,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderDone,
    OrderProgressed,
    PrefixStored,
    ProcessLost,
    ProcessUp,
    PromptsDrawn,
    ReplicaLeaves,
    ReplicaPaused,
    ReplicasWanted,
    RowsMeasured,
    SettingChanged,
    StateFailed,
    StateLeft,
    StopRequested,
)
from engine.ids import NO_VERSION
from engine.record.codec import CodecError, event_of
from engine.scheduling.scheduler import Scheduler
from engine.states.orders import RELATIONS
from engine.states.process import KINDS, REPLICA, TRAINER
from engine.states.state import State

REPORTED = (
    ProcessLost, ReplicaLeaves, ReplicasWanted, SettingChanged, DrainRequested, StopRequested, CheckpointDamaged,
)  # fmt: skip
"""Events that no order asks for."""
CHOSEN = ("count", "reason")
"""Fields that an order has, too, but that its answer may change."""
MAY_BE_NONE = ("oldest_version", "newest_version", "published")
"""Versions that are `NO_VERSION` if there is none."""
ABORTING = ("abort", "sleep")
"""Modes of a pause that first stops the groups of its replica."""
ENDED = (GroupGenerated, GroupAborted, GroupFailed)
CAUSES = ("infrastructure", "data")


class IllegalEvent(EngineError):
    """An answer or an event that cannot be true, or a call that the session does not allow. It changes nothing."""


# -- orders and their answers ------------------------------------------------------------------------------------------


class SessionOrder:
    """A command with the method that answers it. It has the fields and the class of the command, for `isinstance` and
    `match`. A copy of it, such as one in another process, is the command alone."""

    __slots__ = ("_command", "_take")

    def __init__(self, command: Command, take: Callable[[Command, Event], None]) -> None:
        self._command = command
        self._take = take

    def answer(self, kind: type[Event], /, **data: Any) -> None:
        """Answer the order with an event of class `kind`, or report on it. The event has the ids of the order; the
        other fields are `data`. May be called from any thread. `Session.report` returns the orders that follow.

        Raises: `IllegalEvent` if such an event does not answer this order, a field is missing or unknown, or a value
        cannot be true.
        """
        self._take(self._command, _answer_event(self._command, kind, data))

    __class__ = property(lambda self: type(self._command))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._command, name)

    def __eq__(self, other: object) -> bool:
        return self._command == (other._command if type(other) is SessionOrder else other)

    def __hash__(self) -> int:
        return hash(self._command)

    def __repr__(self) -> str:
        return repr(self._command)

    def __reduce__(self) -> Any:
        return self._command.__reduce__()


def _answer_event(command: Command, kind: type[Event], data: Mapping[str, Any]) -> Event:
    """The event that answers a command, with plain values that its class may have. Raises: `IllegalEvent`."""
    relation = RELATIONS.get(type(command))
    known = () if relation is None else (*relation.answers, *relation.reports)
    if relation is None or kind not in known:
        allowed = _named(known) if known else "nothing, because it needs no answer"
        raise IllegalEvent(f"{_name(kind)} does not answer {type(command).__name__}; use {allowed}")
    fields = {field.name: field.required for field in structs.fields(kind) if field.name not in ("id", "at")}
    ordered = {*command.__struct_fields__} - {"cause"}  # which is an event here, and a budget in failures
    repeated = ordered & {*relation.id, *relation.echo, *(name for name, required in fields.items() if required)}
    values = {name: getattr(command, name) for name in fields if name in repeated}
    if kind is OrderDone:
        values["orders"] = (command.number,)  # type: ignore[attr-defined]
    elif kind is OrderProgressed:
        values["order"] = command.number  # type: ignore[attr-defined]
    given = [name for name in fields if name not in values or name in CHOSEN]
    for name in data:
        if name not in fields:
            fix = choice(name, given, f"it has {', '.join(given)}")
            raise IllegalEvent(f"{kind.__name__} has no field {name}; {fix}")
        if name not in given:
            raise IllegalEvent(f"{kind.__name__}.{name} is {values[name]!r}, as ordered; leave it out")
    values |= data
    missing = [name for name, required in fields.items() if required and name not in values]
    if missing:
        raise IllegalEvent(f"{kind.__name__} lacks {', '.join(missing)}; give each as a keyword")
    event = _plain(kind, values)
    _require(event, _value_problems(event, data))
    return event


def check_answer(event: Event, command: Command, state: State, before: Sequence[Event]) -> None:
    """Raise `IllegalEvent` unless the event can be true after the state and the answers `before`, if its order is
    open."""
    if state.orders.is_open(command):
        _require(event, _answer_problems(event, command, state, before))


# -- events that no order asks for -------------------------------------------------------------------------------------


def checked_event(event: Any, scheduler: Scheduler) -> Event:
    """The event with plain values. Raises: `IllegalEvent`."""
    if type(event) not in REPORTED:
        what = type(event).__name__ if isinstance(event, Event) else f"{event!r:.200}"
        raise IllegalEvent(f"{what} cannot be reported; use the answer() of an order, or report {_named(REPORTED)}")
    plain = _plain(type(event), {name: getattr(event, name) for name in event.__struct_fields__})
    try:
        _require(plain, _report_problems(plain, scheduler))
    except ConfigError as error:
        raise IllegalEvent(f"{plain}: {error}") from None
    return plain


def _report_problems(event: Any, scheduler: Scheduler) -> Iterator[str]:
    state = scheduler.state
    match event:
        case SettingChanged():
            changes([(event.setting, event.value)], state.limits, scheduler.policies)
        case ReplicasWanted():
            check_replicas(event.replicas, state.limits, MOST_REPLICAS)
        case ReplicaLeaves():
            yield from _life_problems(REPLICA, event.replica, event.life, state)
        case ProcessLost():
            yield from _life_problems(event.kind, event.index, event.life, state)
            yield from _loss_problems(event, state)
        case CheckpointDamaged() if event.steps not in state.checkpoints.steps:
            yield f"no checkpoint after {event.steps} train steps was reported as saved"


def _life_problems(kind: str, index: int, life: int, state: State) -> Iterator[str]:
    process = state.find_process(kind, index) if kind in KINDS else None
    if process is None or process.index != index:
        yield f"there is no {kind} {index}" if kind in KINDS else f"kind is {kind!r}; use one of {', '.join(KINDS)}"
    elif not 1 <= life <= process.life:
        yield f"life {life} was not ordered; use one from 1 to {process.life}"


# -- what is impossible ------------------------------------------------------------------------------------------------


def _plain(kind: type[Event], values: Mapping[str, Any]) -> Event:
    try:
        return event_of(kind, values)
    except CodecError as error:
        raise IllegalEvent(str(error)) from None


def _require(event: Event, problems: Iterator[str]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise IllegalEvent(f"{event}: {problem}")


def _value_problems(event: Any, names: Iterable[str]) -> Iterator[str]:
    """What is impossible in these fields, whatever was ordered."""
    for name in names:
        least, value = NO_VERSION if name in MAY_BE_NONE else 0, getattr(event, name)
        for number in value if isinstance(value, tuple) else [value]:
            if type(number) is int and number < least:
                yield f"{name} is {number}, but must be at least {least}"
    match event:
        case GroupFailed() | StateFailed() if event.cause not in CAUSES:
            yield f"cause is {event.cause!r}; use {_any(CAUSES)}"
        case GroupGenerated() | StateLeft() if event.reward_spread < 0:
            yield "reward_spread is negative, but is the largest minus the smallest reward"


def _answer_problems(event: Any, command: Any, state: State, before: Sequence[Event]) -> Iterator[str]:
    """What is impossible in an answer to an open order."""
    match event:
        case PromptsDrawn():
            if event.count > command.count:
                yield f"prompts {command.first} to {command.first + command.count - 1} were ordered"
            if not event.count and not event.exhausted:
                yield "count is 0, but the source is not exhausted; draw at least one prompt"
        case GroupGenerated() | GroupAborted() | PrefixStored():
            yield from _version_problems(event, state)
        case ReplicaPaused() if command.mode in ABORTING:
            yield from _pause_problems(command, state, before)
        case RowsMeasured():
            yield from _row_problems(event, command, state)
        case ProcessUp() if event.kind == REPLICA:
            if not event.slots or not event.samples:
                yield "slots and samples must be at least 1"
            if event.version > state.training.latest_version:
                yield f"version is {event.version}, but the newest is {state.training.latest_version}"
        case ProcessLost():
            yield from _loss_problems(event, state)
        case OrderProgressed() if event.finished:
            if RELATIONS[type(command)].subject != "group":
                yield f"finished is {event.finished}, but {type(command).__name__} generates no group"
            elif event.finished > (samples := state.replicas.by_id[command.replica].samples):
                yield f"finished is {event.finished}, but the group has {samples} trajectories"


def _version_problems(event: Any, state: State) -> Iterator[str]:
    oldest, newest = event.oldest_version, event.newest_version
    first, replica = state.groups.live[event.group].admitted_version, state.replicas.by_id[event.replica]
    if oldest == NO_VERSION or newest == NO_VERSION:
        if event.tokens or oldest != newest:
            yield "a group with tokens has an oldest and a newest version; use -1 for both if it has no token"
    elif not first <= oldest <= newest <= replica.version:
        law = f"must have {first} <= oldest_version <= newest_version <= {replica.version}"
        yield f"{law}: it was admitted on version {first}, and replica {replica.id} has version {replica.version}"
    if isinstance(event, GroupGenerated) and not event.tokens:
        yield "tokens is 0; a group without tokens is GroupFailed"


def _pause_problems(pause: PauseReplica, state: State, before: Sequence[Event]) -> Iterator[str]:
    ended = {(event.group, event.attempt) for event in before if isinstance(event, ENDED)}
    running: dict[int, Any] = state.orders.of(pause.replica, "group")
    left = [group for group, order in running.items() if (group, order.command.attempt) not in ended]
    if left:
        yield f"groups {left} still run there; first answer the order of each"


def _loss_problems(event: ProcessLost, state: State) -> Iterator[str]:
    """The problem of a loss with versions or checkpoints that the process cannot have left."""
    if event.kind != TRAINER:
        if event.published != NO_VERSION or event.saved:
            yield f"a {event.kind} publishes no weights and saves no checkpoints; leave published and saved out"
        return
    newest = state.training.latest_version + state.publishing
    if not NO_VERSION <= event.published <= newest:
        yield f"published is {event.published}, but the newest version that was ordered is {newest}"
    for steps in event.saved:
        if not 0 < steps <= state.training.steps_trained or not state.limits.checkpoint_every:
            yield f"saved has {steps}, but no checkpoint after {steps} train steps was ordered"


def _row_problems(event: RowsMeasured, order: MeasureRows, state: State) -> Iterator[str]:
    """What is impossible in the measurement of an ordered chunk."""
    if not event.right <= event.measured <= order.count:
        yield f"must have right <= measured <= {order.count}, the number of rows"
    ordered = range(order.first, order.first + order.count)
    for name in ("rows", "right_rows", "part_rows"):
        rows = getattr(event, name)
        if (strange := next((row for row in rows if row not in ordered), None)) is not None:
            yield f"{name} has row {strange}, but rows {ordered.start} to {ordered.stop - 1} were ordered"
        if not {*event.rows}.issuperset(rows):
            yield f"{name} has rows that are not in rows"
        values = rows if name != "part_rows" else tuple(zip(rows, event.part_places, strict=False))
        if len({*values}) < len(values):
            yield f"{name} names a row twice{' with the same part' if name == 'part_rows' else ''}; name each once"
    for names in (("rows", "rewards", "answers"), ("part_rows", "part_places", "part_values")):
        if len({len(getattr(event, name)) for name in names}) > 1:
            yield f"{', '.join(names)} must have the same number of entries"
    for name, number in (("rows", event.measured), ("right_rows", event.right)):
        if event.rows and len(getattr(event, name)) != number:
            field = "measured" if name == "rows" else "right"
            yield f"has {len(getattr(event, name))} {name}, but {field} is {number}; name these rows"
    assert state.limits.validation is not None  # otherwise no rows are ordered
    for row, place in zip(event.part_rows, event.part_places, strict=True):
        parts = state.limits.validation.place(row).set.parts
        if place >= len(parts):
            yield f"part_places has {place}, but the set of row {row} has {len(parts)} reward parts"


def _named(kinds: Iterable[Any]) -> str:
    return _any(kind.__name__ for kind in kinds)


def _any(names: Iterable[str]) -> str:
    return " or ".join(names)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))
