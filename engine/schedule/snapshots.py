"""The whole state of a scheduler as plain values, and a scheduler from them: what a snapshot in a record says.

    parts = snapshot(scheduler)              # plain values: the books, then the live groups, so many in each part
    scheduler = restore(parts, observe)      # decides from here on as the other would have

Called by the driver, which writes one every so many events, by `replayer`, which compares, and by `recovery`, which
begins there. Pure, like the scheduler.

Nothing is listed that could be forgotten: every slot and attribute of the classes below is taken, unless `WIRING` says
that the constructor makes it. A field that holds what has no plain form is a `CodecError`. A snapshot says which fields
it has; one whose fields are others was written by another engine and is not used, so that no class has to stay as it is
for the sake of snapshots: the events are the record.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from struct import error as StructError
from typing import Any, Protocol

from engine.commands import FinishRun
from engine.errors import EngineError
from engine.policies import PolicySet
from engine.schedule.codec import command_from, plain_command
from engine.schedule.packing import CodecError
from engine.scheduler import Scheduler
from engine.states.clocks import Clocks, OwnerClock
from engine.states.ended import Ended
from engine.states.fleet import Fleet
from engine.states.group import Group
from engine.states.invariants import check_all
from engine.states.kept import KeptBatches
from engine.states.ledger import Deadlines, Ledger
from engine.states.limits import Limits
from engine.states.live import Live
from engine.states.orders import Order, OrderBook
from engine.states.pool import PoolLease, Pools
from engine.states.process import Process
from engine.states.replica import Replica
from engine.states.retention import Checkpoints
from engine.states.stages import Stage, Stages
from engine.states.state import Observer, State
from engine.states.step import Step
from engine.states.validation import Chunk, Validation, Validations
from engine.states.version import WeightsVersion

Plain = Any
"""None, bool, int, float, str, and lists of these that begin with what they stand for."""

GROUPS_IN_A_PART = 4096
LIST, TUPLE, QUEUE, MAPPING, BYTES, RECORD, ORDERS = range(7)
SEQUENCES: dict[type, int] = {list: LIST, tuple: TUPLE, deque: QUEUE}
SCALARS = {type(None), bool, int, float, str}

SAMPLES: dict[str, Any] = {
    type(record).__name__: record
    for record in (
        Step(0), Replica(0), Process(""), WeightsVersion(0, 0), Chunk(0, 0, 1), Validation(0, 0, 0, 1, 1, 0.0),
        OwnerClock(), FinishRun(outcome="", reason="", cause=0),
    )
}  # fmt: skip
"""A record of each class that is made anew from a snapshot, groups aside: its fields and their types."""
DAMAGED = (
    EngineError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, StructError,
)  # fmt: skip
"""What a snapshot that says something else than snapshots do may raise."""
PARTS = (
    State, Pools, PoolLease, Stages, Stage, Fleet, Ledger, Deadlines, Validations, Ended, KeptBatches, Checkpoints,
    Live, Clocks,
)  # fmt: skip
"""What a scheduler holds once, or once for each entry of its limits: made by its constructor, then filled."""
WIRING: dict[str, set[str]] = {
    "State": {
        "limits", "_ahead", "_phases", "_leave", "_enter", "groups", "hashed", "census", "_group_machine",
        "_step_machine",
        "_replica_machine", "_version_machine", "_pool_machine", "_process_machine",
    },
    "Group": {"digest"},
    "Clocks": {"_heap", "_queues", "_stalled", "_state", "least", "sooner", "timer_at"},
    "Pools": {"_of_task", "_of_replica", "listed"},
    "PoolLease": {"pool", "place_of"},
    "Fleet": {*Fleet.__slots__} - {"replicas"},
    "Replica": {"place", "touched"},
    "Process": {"touched"},
    "Stages": {"_orders"},
    "Stage": {"_orders", "owner"},
    "Validations": {"_fleet", "_orders", "machine", "_disturb"},
}  # fmt: skip
"""Fields that the constructor makes, or that follow from others."""


class Books(Protocol):
    """What an observer counts over the whole run, and would have to count again from the first event."""

    def to_plain(self) -> Plain:
        """Scalars, lists and tuples."""

    def take(self, plain: Plain) -> None:
        """Go on from there. Raises: `ValueError` or `TypeError` where that is not what `to_plain` gave; it is then not
        changed."""


def snapshot(scheduler: Scheduler, books: Books | None = None) -> list[Plain]:
    """The parts of a snapshot, between two events. Raises: `CodecError` for what has no plain form."""
    groups = iter(scheduler.state.groups.values())
    rows = [list(map(_row, islice(groups, GROUPS_IN_A_PART))) for _ in range(_parts(len(scheduler.state.groups)))]
    first = [
        _fields_of_all(scheduler),
        _plain(scheduler.limits.to_plain()),
        _plain(dict(scheduler.policies.names)),
        scheduler.state_hash,
        len(scheduler.state.groups),
        _values(scheduler.state),
        None if books is None else _plain(books.to_plain()),
    ]
    return [first, *rows]


def restore(parts: Sequence[Plain], observe: Observer | None = None, books: Books | None = None) -> Scheduler:
    """The scheduler as it was. `books` are taken from the snapshot as well.

    Raises: `CodecError` for whatever no snapshot of this engine says.
    """
    try:
        fields, limits, names, state_hash, live, state, counted = parts[0]
        scheduler = Scheduler(Limits.from_plain(_value(limits)), PolicySet.from_names(_value(names)))
        _restore_into(scheduler, fields, state, parts[1:])
        check_all(scheduler.state)
        if scheduler.state_hash != state_hash or len(scheduler.state.groups) != live:
            raise CodecError("the state is not the one whose hash it names")
        if books is not None:
            if counted is None:
                raise CodecError("nothing is said of what was counted until then")
            books.take(_value(counted))
        watch(scheduler, observe)
    except DAMAGED as error:
        raise CodecError(f"no snapshot that this engine can go on from: {error}") from error
    return scheduler


def same_engine(parts: Sequence[Plain], scheduler: Scheduler) -> bool:
    """Whether a snapshot was written by an engine whose records have the fields that they have here."""
    return type(parts[0]) is list and bool(parts[0]) and parts[0][0] == _fields_of_all(scheduler)


def _restore_into(scheduler: Scheduler, fields: Plain, said: Plain, rows: Sequence[Plain]) -> None:
    if fields != _fields_of_all(scheduler):
        raise CodecError("it was written by an engine whose records have other fields")
    state = scheduler.state
    for row in chain.from_iterable(rows):
        group = _group(row)
        state.groups[group.id] = group
    _fill(state, said)
    scheduler.decisions.recall()
    state.hashed.begin(group for group in state.groups.values() if group.begun)
    state.settle()
    for process in state.processes.values():
        process.watch(None)
    state.fleet.rebuild(state.groups)
    state.census.rebuild()
    state.clocks.rebuild()


def watch(scheduler: Scheduler, observe: Observer | None) -> None:
    """Tell of every change of state from now on: of none that it took to put a scheduler together."""
    state = scheduler.state
    for machine in (
        state._group_machine, state._step_machine, state._replica_machine, state._version_machine, state._pool_machine,
        state._process_machine, state.validations.machine,
    ):  # fmt: skip
        machine.observe = observe


# groups: so many that each is one row

GROUP_FIELDS = ("id", *sorted({*Group.__slots__} - {"id"} - WIRING["Group"]))
_figures = attrgetter(*GROUP_FIELDS)
_FRESH: tuple[Any, ...] = _figures(Group(0))[1:]
_SETTERS: list[Callable[[Any, Any], None]] = [getattr(Group, field).__set__ for field in GROUP_FIELDS]
_WIRE = tuple(list if type(value) is tuple else type(value) for value in _figures(Group(0)))
_KEY = GROUP_FIELDS.index("resume_key")


def _row(group: Group) -> Plain:
    """The fields of a group; its id alone for one of which there is no more to know."""
    row: tuple[Any, ...] = _figures(group)
    return row[0] if not group.attempt and row[1:] == _FRESH else row


def _group(row: Plain) -> Group:
    if type(row) is int:
        return Group(row)
    kinds = tuple(map(type, row))
    if kinds != _WIRE and (len(kinds) != len(_WIRE) or not all(map(_fits, kinds, _WIRE))):
        raise CodecError("a group has other fields than groups have")
    group: Group = object.__new__(Group)
    for put, value in zip(_SETTERS, row, strict=True):
        put(group, value)
    group.resume_key = tuple(row[_KEY])
    group.digest = 0
    if not all(type(number) in (int, float) for number in group.resume_key):
        raise CodecError("a group is parked under something else than numbers")
    return group


def _parts(groups: int) -> int:
    return -(-groups // GROUPS_IN_A_PART)


# everything else: field by field


def _fields(thing: Any) -> tuple[str, ...]:
    """Names of what a snapshot takes of an object."""
    cls = type(thing)
    left_out = WIRING.get(cls.__name__, set())
    names = cls.__slots__ if hasattr(cls, "__slots__") else tuple(vars(thing))
    if cls is FinishRun:
        names = ("outcome", "reason", "again", "cause")
    return tuple(sorted(name for name in names if name not in left_out))


def _fields_of_all(scheduler: Scheduler) -> list[Plain]:
    state = scheduler.state
    things = [
        state, state.pools, *state.pools.leases[:1],
        state.stages, *list(state.stages.by_name.values())[:1], state.fleet, state.ledger, state.deadlines,
        state.validations, state.ended, state.kept, state.checkpoints, state.live, state.clocks, *SAMPLES.values(),
    ]  # fmt: skip
    return [list(GROUP_FIELDS), *([type(thing).__name__, *_fields(thing)] for thing in things)]


def _values(thing: Any) -> list[Plain]:
    name = type(thing).__name__
    return [_plain(getattr(thing, field), f"{name}.{field}") for field in _fields(thing)]


def _plain(value: Any, where: str = "") -> Plain:
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in SEQUENCES:
        scalars = set(map(type, value)) <= SCALARS
        return [SEQUENCES[kind], *(value if scalars else (_plain(entry, where) for entry in value))]
    if kind is dict:
        return [MAPPING, *(_plain(entry, where) for entry in chain.from_iterable(value.items()))]
    if kind is bytes:
        return [BYTES, *value]
    if kind.__name__ in SAMPLES or isinstance(value, PARTS):
        return [RECORD, kind.__name__, *_values(value)]
    if isinstance(value, OrderBook):
        return [ORDERS, value.next_number, *map(_order, value.all())]
    raise CodecError(f"{where}: a snapshot has no form for a {kind.__name__}")


def _order(order: Order) -> Plain:
    return [order.number, order.at, order.mark, order.command.cause, *plain_command(order.command)]


def _fill_orders(book: OrderBook, plain: Plain) -> None:
    kind, following, *orders = plain
    if kind != ORDERS:
        raise CodecError("no order book where one belongs")
    for number, at, mark, cause, *said in orders:
        told = [list(value) if type(value) is tuple else value for value in said]
        book.put_back(number, command_from(told, cause), float(at), float(mark))
    book.next_number = following


def _value(plain: Plain) -> Any:
    """What `_plain` was given, records made anew. Raises: `CodecError`, and what the types themselves raise."""
    if type(plain) in SCALARS:
        return plain
    kind, *entries = plain
    match kind:
        case 0:
            return [_value(entry) for entry in entries]
        case 1:
            return tuple([_value(entry) for entry in entries])
        case 2:
            return deque([_value(entry) for entry in entries])
        case 3:
            pairs = iter(entries)
            return {_value(key): _value(value) for key, value in zip(pairs, pairs, strict=True)}
        case 4:
            return bytes(entries)
        case 5 if entries and entries[0] in SAMPLES:
            sample = SAMPLES[entries[0]]
            record = object.__new__(type(sample))
            for field, entry in zip(_fields(sample), entries[1:], strict=True):
                value = _value(entry)
                _require_fit(type(sample).__name__, field, value, getattr(sample, field))
                getattr(type(sample), field).__set__(record, value)
            return record
    raise CodecError(f"{kind!r} stands for nothing in a snapshot")


def _fill(thing: Any, values: Plain) -> None:
    """Put the values of `_values` into an object whose constructor has made its parts."""
    for field, plain in zip(_fields(thing), values, strict=True):
        present = getattr(thing, field)
        if isinstance(present, OrderBook):
            _fill_orders(present, plain)
        elif isinstance(present, PARTS):
            _fill(present, _entries_of(present, plain))
        elif isinstance(present, list | dict) and any(isinstance(part, PARTS) for part in _in_order(present)):
            entries = plain[1:] if isinstance(present, list) else plain[2::2]
            for part, entry in zip(_in_order(present), entries, strict=True):
                _fill(part, _entries_of(part, entry))
        else:
            value = _value(plain)
            _require_fit(type(thing).__name__, field, value, present)
            setattr(thing, field, value)


def _in_order(parts: Any) -> Iterator[Any]:
    return iter(parts.values() if isinstance(parts, dict) else parts)


def _entries_of(part: Any, plain: Plain) -> Plain:
    if plain[:2] != [RECORD, type(part).__name__]:
        raise CodecError(f"no {type(part).__name__} where one belongs")
    return plain[2:]


def _require_fit(name: str, field: str, value: Any, sample: Any) -> None:
    if not _fits(type(value), type(sample)):
        raise CodecError(f"{name}.{field} is a {type(value).__name__}, not a {type(sample).__name__}")


def _fits(kind: type, expected: type) -> bool:
    """Whether a field may hold such a value, going by what it holds in a fresh record: None may become anything."""
    return kind is expected or expected is type(None) or (kind is int and expected is float)
