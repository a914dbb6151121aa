"""Converts the state of a scheduler to plain values and back: the contents of a record's snapshots.

    plain = snapshot(scheduler)              # declarations, limits, policies, the state, its groups
    scheduler = restore(plain, observe)      # decides exactly as the first would have

Called by the driver, which writes a snapshot every so many events, by `replayer`, which compares them, and by
`recovery`, which begins at one. Pure, like the scheduler.

A snapshot has the fields that the classes of the tree declare (`states/tree.py`), in order. Both directions check their
types: a value of another type raises `CodecError`. Everything else is derived from these fields. A snapshot begins with
the declarations. If they differ from this engine's, another engine version wrote it and it is not used; the events are
replayed instead. So the classes may change freely.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from struct import error as StructError
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from engine.commands import Command, FinishRun
from engine.errors import EngineError
from engine.policies import PolicySet
from engine.record.codec import AnyCommand, CodecError, pack, unpack, unpacker
from engine.scheduling.scheduler import Scheduler
from engine.states.group import (
    NO_OUTCOME,
    NO_RARE_FACTS,
    NOTHING_STORED,
    Admission,
    Group,
    Outcome,
    RareFacts,
    Stored,
    admit,
)
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.machine import Observer
from engine.states.state import State
from engine.states.tree import declared

Plain = Any
"""None, bool, int, float, str, bytes, commands, and lists and dicts of these."""

SCALARS = (NoneType, bool, int, float, str, bytes)
SHOWN = 100
"""Maximum length of a value in a message, in characters."""
STRETCH_EVENTS = 20_000
"""Minimum number of events between two snapshots that readers of a record replay apart from the rest."""
DAMAGED = (
    EngineError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, StructError,
)  # fmt: skip
"""Errors that restoring an invalid snapshot may raise."""


def snapshot(scheduler: Scheduler) -> list[Plain]:
    """A snapshot. Call it between two events. Raises: `CodecError` for a value that it cannot hold."""
    tree = _form(State).plain(scheduler.state)
    return [declarations(), scheduler.limits.to_plain(), dict(scheduler.policies.names), tree]


def restore(plain: Sequence[Plain], observe: Observer | None = None) -> Scheduler:
    """The scheduler of a snapshot. Raises: `CodecError` for anything but a snapshot of this engine."""
    try:
        fields, limits, names, tree = plain
        if fields != declarations():
            raise CodecError("an engine version with other fields wrote it")
        scheduler = Scheduler(Limits.from_plain(limits), PolicySet.from_names(names))
        state = scheduler.state
        _form(State).value(tree, state)
        state.rebuild()
        scheduler.decisions.recall()
        check_all(state)
        state.observe(observe)
    except DAMAGED as error:
        raise CodecError(f"this engine cannot continue from this snapshot: {error}") from error
    return scheduler


def first_difference(scheduler: Scheduler, plain: Sequence[Plain]) -> str:
    """The first field in which a scheduler differs from a decoded snapshot, with both values; empty if they are equal,
    or if an engine with other fields wrote the snapshot."""
    if len(plain) != 4 or plain[0] != declarations():
        return ""
    here = unpack(pack(snapshot(scheduler)))
    for name, at, hint in (("limits", 1, None), ("policies", 2, None), ("State", 3, State)):
        if found := _difference(hint, name, here[at], plain[at]):
            return found
    return ""


def _difference(hint: Any, name: str, here: Plain, there: Plain) -> str:
    """The path of the first difference between two values of a declared type; empty if there is none."""
    if here == there:
        return ""
    inner = _inner(hint, here, there)
    for (part, part_hint), mine, theirs in zip(inner, here, there, strict=True) if inner else ():
        if found := _difference(part_hint, f"{name}{part}", mine, theirs):
            return found
    return f"{name}: {_shown(there)} was recorded, {_shown(here)} was replayed"


def _inner(hint: Any, here: Plain, there: Plain) -> list[tuple[str, Any]]:
    """The names and types of the parts of two values, if they have the same parts."""
    if type(here) is not list or type(there) is not list or len(here) != len(there):
        return []
    if hint is Group:
        return [(f".{name}", None) for name in _FIELDS[: len(here)]]
    if isinstance(hint, type) and declared(hint) and get_origin(hint) is None and hint not in SCALARS:
        return [(f".{name}", field) for name, field in declared(hint).items()]
    args = get_args(hint)
    if get_origin(hint) is dict and args[1] is Group:
        return [(f"[{row if type(row) is int else row[0]}]", Group) for row in here]
    if get_origin(hint) is dict and args[1] is not None:
        return [
            ("'s keys", args[0]) if place % 2 == 0 else (f"[{_shown(here[place - 1])}]", args[1])
            for place in range(len(here))
        ]
    if get_origin(hint) in (Union, UnionType):
        return _inner(next((arg for arg in args if arg not in SCALARS), None), here, there)
    return [(f"[{place}]", args[min(place, len(args) - 1)] if args else None) for place in range(len(here))]


def _shown(value: Plain) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"


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
    if hint in (Command, FinishRun):
        return Form(lambda order: order, lambda plain, _: _command(pack(plain)))
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
    if origin is dict and args[1] is Group:
        return _groups()
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
    forms = {name: _form(hint) for name, hint in declared(cls).items()}

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


_command = unpacker(AnyCommand)


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
    if isinstance(hint, type) and hint not in (*SCALARS, Command, FinishRun) and get_origin(hint) is None:
        return [hint]
    return [cls for arg in get_args(hint) if arg is not ... for cls in _classes_in(arg)]


# groups: there are so many that each is one row

_PARTS: dict[str, Any] = {"admission": Admission, "stored": Stored, "outcome": Outcome, "rare": RareFacts}
_PLAIN = [name for name in declared(Group) if name not in _PARTS]
_FIELDS = [*_PLAIN, *(f"{part}.{name}" for part, record in _PARTS.items() for name in record._fields)]
_figures = attrgetter(*_PLAIN)
_FRESH = (*_figures(Group(0)), *(value for record in _PARTS.values() for value in record()))
_WIRE = tuple(list if type(value) is tuple else type(value) for value in _FRESH)
_USUAL = len(_FIELDS) - len(RareFacts._fields)
_KEY = _FIELDS.index("rare.resume_key")


def _groups() -> Form:
    """A list of rows, each with the id of its group."""
    return Form(
        lambda groups: list(map(_row, groups.values())),
        lambda plain, _: {group.id: group for group in map(_group, _list(plain))},
    )


def _row(group: Group) -> Plain:
    """The fields of a group, the rare ones only if it has some; only its id if all other fields have their defaults."""
    row: tuple[Any, ...] = (*_figures(group), *group.admission, *group.stored, *group.outcome)
    if group.rare is not NO_RARE_FACTS:
        return (*row, *group.rare)
    return row[0] if not group.attempt and row[1:] == _FRESH[1:_USUAL] else row


def _group(row: Plain) -> Group:
    if type(row) is int:
        return Group(row)
    if len(row) not in (_USUAL, len(_FIELDS)):
        raise CodecError("a group has a wrong number of fields")
    kinds, wire = tuple(map(type, row)), _WIRE[: len(row)]
    if kinds != wire and any(kind is not want and (kind, want) != (int, float) for kind, want in
                             zip(kinds, wire, strict=True)):  # fmt: skip
        raise CodecError("a group's fields have wrong types")
    values = iter(row)
    group = Group(*islice(values, len(_PLAIN)))
    group.admission = admit(*islice(values, len(Admission._fields)))
    stored, outcome = Stored(*islice(values, len(Stored._fields))), Outcome(*islice(values, len(Outcome._fields)))
    group.stored = NOTHING_STORED if stored == NOTHING_STORED else stored
    group.outcome = NO_OUTCOME if outcome == NO_OUTCOME else outcome
    if len(row) == len(_FIELDS):
        row[_KEY] = tuple(row[_KEY])
        if not all(type(number) in (int, float) for number in row[_KEY]):
            raise CodecError("the resume key of a group must consist of numbers")
        group.note(**dict(zip(RareFacts._fields, row[_USUAL:], strict=True)))
    return group
