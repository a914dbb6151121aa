"""Converts the state of a scheduler to plain values and back: the contents of a record's snapshots.

    parts = snapshot(scheduler)              # the tree without groups, then the groups, `GROUPS_IN_A_PART` in a part
    scheduler = restore(parts, observe)      # decides exactly as the first would have

Called by the driver, which writes a snapshot every so many events, by `replayer`, which compares them, and by
`recovery`, which begins at one. Pure, like the scheduler.

A snapshot has the fields that the classes of the tree declare (`states/tree.py`), in order. Both directions check their
types: a value of another type raises `CodecError`. Everything else is derived from these fields. A snapshot begins with
the declarations. If they differ from this engine's, another engine version wrote it and it is not used; the events are
replayed instead. So the classes may change freely.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from struct import error as StructError
from types import NoneType, UnionType
from typing import Any, NamedTuple, Protocol, Union, get_args, get_origin

from engine.commands import Command, FinishRun
from engine.errors import EngineError
from engine.policies import PolicySet
from engine.record.codec import command_from, plain_command
from engine.record.msgpack_values import CodecError
from engine.scheduling.scheduler import Scheduler
from engine.states.group import Group
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.state import Observer, State
from engine.states.tree import declared

Plain = Any
"""None, bool, int, float, str, and lists of these."""

GROUPS_IN_A_PART = 4096
SCALARS = (NoneType, bool, int, float, str)
ROOT_LEFT_OUT = ("groups",)
"""Fields of the state that are in separate parts."""
DAMAGED = (
    EngineError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, StructError,
)  # fmt: skip
"""Errors that restoring an invalid snapshot may raise."""


class Books(Protocol):
    """What an observer counts over the whole run. Without a snapshot it must count again from the first event."""

    def to_plain(self) -> Plain:
        """Scalars, lists and tuples."""

    def take(self, plain: Plain) -> None:
        """Restore the counts. Raises: `ValueError` or `TypeError`, without a change, for anything that `to_plain` does
        not return."""


def snapshot(scheduler: Scheduler, books: Books | None = None) -> list[Plain]:
    """The parts of a snapshot. Call it between two events. Raises: `CodecError` for a value that it cannot hold."""
    state = scheduler.state
    groups = iter(state.groups.values())
    parts = -(-len(state.groups) // GROUPS_IN_A_PART)
    rows = [list(map(_row, islice(groups, GROUPS_IN_A_PART))) for _ in range(parts)]
    counted = None if books is None else books.to_plain()
    names = dict(scheduler.policies.names)
    first = [
        declarations(), _tagged(scheduler.limits.to_plain()), _tagged(names), scheduler.state_hash, len(state.groups),
        _form(State).plain(state), _tagged(counted),
    ]  # fmt: skip
    return [first, *rows]


def restore(parts: Sequence[Plain], observe: Observer | None = None, books: Books | None = None) -> Scheduler:
    """The scheduler of a snapshot. Restores `books` too.

    Raises: `CodecError` for anything but a snapshot of this engine.
    """
    try:
        fields, limits, names, state_hash, live, plain, counted = parts[0]
        if fields != declarations():
            raise CodecError("an engine version with other fields wrote it")
        scheduler = Scheduler(Limits.from_plain(_untagged(limits)), PolicySet.from_names(_untagged(names)))
        state = scheduler.state
        for group in map(_group, chain.from_iterable(parts[1:])):
            state.groups[group.id] = group
        _form(State).value(plain, state)
        state.rebuild()
        scheduler.decisions.recall()
        check_all(state)
        if scheduler.state_hash != state_hash or len(state.groups) != live:
            raise CodecError("its state does not match its hash")
        if books is not None:
            if counted is None:
                raise CodecError("it has no counts of the observer")
            books.take(_untagged(counted))
        state.observe(observe)
    except DAMAGED as error:
        raise CodecError(f"this engine cannot continue from this snapshot: {error}") from error
    return scheduler


def same_engine(parts: Sequence[Plain], scheduler: Scheduler) -> bool:
    """Whether an engine with the same fields as this one wrote the snapshot."""
    return type(parts[0]) is list and bool(parts[0]) and parts[0][0] == declarations()


# the forms of values, by their declared types


class Form(NamedTuple):
    """How values of a type are written and read. `value(plain, present)` may fill `present` instead of a new object."""

    plain: Callable[[Any], Plain]
    value: Callable[[Plain, Any], Any]


@lru_cache
def _form(hint: Any) -> Form:
    hint = NoneType if hint is None else hint
    origin, args = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return _scalar(hint)
    if hint is bytes:
        return Form(list, lambda plain, _: bytes(plain))
    if hint in (Command, FinishRun):
        return Form(lambda order: [order.cause, *plain_command(order)], lambda plain, _: _command(plain))
    if origin in (Union, UnionType):
        return _union(args)
    if origin is tuple and args[1:] != (...,):
        forms = tuple(map(_form, args))
        return Form(
            lambda values: [form.plain(value) for form, value in zip(forms, values, strict=True)],
            lambda plain, _: tuple([form.value(entry, None) for form, entry in zip(forms, _list(plain), strict=True)]),
        )
    if origin in (tuple, list):
        of = _form(args[0])
        return Form(
            lambda values: [of.plain(value) for value in values],
            lambda plain, there: origin(
                [
                    of.value(entry, there[at] if there and at < len(there) else None)
                    for at, entry in enumerate(_list(plain))
                ]
            ),
        )
    if origin is dict:
        return _mapping(_form(args[0]), _form(args[1]), keys_only=args[1] is None)
    if isinstance(hint, type) and declared(hint):
        return _record(hint)
    raise TypeError(f"a snapshot cannot hold the type {hint}")


def _scalar(kind: type) -> Form:
    def plain(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise CodecError(f"{value!r} is a {type(value).__name__}, not a {kind.__name__}")

    return Form(plain, lambda value, _: plain(value))


def _union(args: tuple[Any, ...]) -> Form:
    """Scalars, and at most one other type, whose values are written as lists."""
    kinds = {arg for arg in args if arg in SCALARS}
    lists = [arg for arg in args if arg not in SCALARS]
    if len(lists) > 1:
        raise TypeError(f"a snapshot cannot tell these types apart: {', '.join(map(str, lists))}")
    of = _form(lists[0] if lists else args[-1])
    return Form(
        lambda value: value if type(value) in kinds else of.plain(value),
        lambda plain, _: plain if type(plain) in kinds else of.value(plain, None),
    )


def _mapping(key: Form, of: Form, keys_only: bool) -> Form:
    """Alternating keys and values; for a dict used as an ordered set, only the keys."""
    if keys_only:
        return Form(
            lambda values: [key.plain(name) for name in values],
            lambda plain, _: {key.value(name, None): None for name in _list(plain)},
        )

    def value(plain: Plain, there: Any) -> Any:
        pairs = iter(_list(plain))
        named = ((key.value(name, None), entry) for name, entry in zip(pairs, pairs, strict=True))
        return {name: of.value(entry, (there or {}).get(name)) for name, entry in named}

    return Form(
        lambda values: [part for name, entry in values.items() for part in (key.plain(name), of.plain(entry))], value
    )


def _record(cls: type) -> Form:
    """The values of the declared fields. Fills an existing object, whose constructor has made its parts."""
    left_out = ROOT_LEFT_OUT if cls is State else ()
    forms = {name: _form(hint) for name, hint in declared(cls).items() if name not in left_out}

    def plain(record: Any) -> Plain:
        values = []
        for name, form in forms.items():
            try:
                values.append(form.plain(getattr(record, name)))
            except (CodecError, TypeError, AttributeError) as error:
                raise CodecError(f"{cls.__name__}.{name}: {error}") from None
        return values

    def value(plain: Plain, there: Any) -> Any:
        record = object.__new__(cls) if there is None else there
        for (name, form), entry in zip(forms.items(), _list(plain), strict=True):
            setattr(record, name, form.value(entry, getattr(there, name, None)))
        if hasattr(cls, "__post_init__") and there is None:
            record.__post_init__()
        return record

    return Form(plain, value)


def _list(plain: Plain) -> Any:
    if type(plain) is not list:
        raise CodecError(f"expected a list, but found {plain!r}")
    return plain


def _command(plain: Plain) -> Command:
    cause, *said = plain
    return command_from([list(value) if type(value) is tuple else value for value in said], cause)


@lru_cache
def declarations() -> Plain:
    """Every class of the tree with its fields and their types."""
    classes: list[type] = [State]
    found = dict.fromkeys(classes)
    for cls in classes:
        for hint in declared(cls).values():
            for inner in _classes_in(hint):
                if inner not in found:
                    found[inner] = None
                    classes.append(inner)
    return [[cls.__name__, *(f"{name}: {hint}" for name, hint in declared(cls).items())] for cls in found]


def _classes_in(hint: Any) -> list[type]:
    if isinstance(hint, type) and hint not in (*SCALARS, bytes, Command, FinishRun) and get_origin(hint) is None:
        return [hint]
    return [cls for arg in get_args(hint) if arg is not ... for cls in _classes_in(arg)]


def _tagged(value: Any) -> Plain:
    """A value without a declared type: dicts, lists and tuples are tagged with their type."""
    if type(value) is dict:
        return ["dict", *(_tagged(part) for pair in value.items() for part in pair)]
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_tagged, value)]
    return value


def _untagged(plain: Plain) -> Any:
    if type(plain) is not list:
        return plain
    kind, *values = plain
    parts = [_untagged(value) for value in values]
    if kind == "dict":
        return dict(zip(parts[::2], parts[1::2], strict=True))
    return {"list": list, "tuple": tuple}[kind](parts)


# groups: there are so many that each is one row

_GROUP_FIELDS = list(declared(Group))
_figures = attrgetter(*_GROUP_FIELDS)
_FRESH = _figures(Group(0))[1:]
_WIRE = tuple(list if type(value) is tuple else type(value) for value in _figures(Group(0)))
_KEY = _GROUP_FIELDS.index("resume_key")


def _row(group: Group) -> Plain:
    """The fields of a group; only its id if all other fields have their defaults."""
    row: tuple[Any, ...] = _figures(group)
    return row[0] if not group.attempt and row[1:] == _FRESH else row


def _group(row: Plain) -> Group:
    if type(row) is int:
        return Group(row)
    kinds = tuple(map(type, row))
    if kinds != _WIRE and any(kind is not want and (kind, want) != (int, float) for kind, want in
                              zip(kinds, _WIRE, strict=True)):  # fmt: skip
        raise CodecError("a group's fields have wrong types")
    row[_KEY] = tuple(row[_KEY])
    if not all(type(number) in (int, float) for number in row[_KEY]):
        raise CodecError("the resume key of a group must consist of numbers")
    return Group(*row)
