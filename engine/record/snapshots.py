"""Converts the state of a scheduler to plain values and back: the contents of a record's snapshots.

    plain = snapshot(scheduler)              # declarations, limits, policies, the state, its groups
    scheduler = restore(plain, observe)      # decides exactly as the first would have

Called by the driver, which writes a snapshot every so many events, by `replayer`, which compares them, and by
`recovery`, which begins at one. Pure, like the scheduler.

A snapshot has the fields that the classes of the tree declare (`states/tree.py`), in order. `msgspec` checks their
types in both directions: a value of another type raises `CodecError`. Everything else is derived from these fields. A
snapshot begins with the declarations. If they differ from this engine's, another engine version wrote it and it is not
used; the events are replayed instead. So the classes may change freely.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from struct import error as StructError
from typing import Any, get_args, get_origin

import msgspec

from engine.commands import Command
from engine.errors import EngineError
from engine.policies import PolicySet
from engine.record.codec import AnyCommand, CodecError, pack, unpack
from engine.scheduling.scheduler import Scheduler
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.machine import Observer
from engine.states.state import State
from engine.states.tree import declared

Plain = Any
"""What `codec.pack` takes."""

SHOWN = 100
"""Maximum length of a value in a message, in characters."""
DAMAGED = (
    EngineError, msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError,
    StructError,
)  # fmt: skip
"""Errors that restoring an invalid snapshot may raise."""


def snapshot(scheduler: Scheduler) -> list[Plain]:
    """A snapshot. Call it between two events. Raises: `CodecError` for a value that it cannot hold."""
    try:
        tree = msgspec.convert(scheduler.state, _plain_type(State), from_attributes=True)
    except msgspec.ValidationError as error:
        raise CodecError(f"the state cannot be recorded: {error}") from None
    return [declarations(), scheduler.limits.to_plain(), dict(scheduler.policies.names), tree]


def restore(plain: Sequence[Plain], observe: Observer | None = None) -> Scheduler:
    """The scheduler of a snapshot. Raises: `CodecError` for anything but a snapshot of this engine."""
    try:
        fields, limits, names, tree = plain
        if fields != declarations():
            raise CodecError("an engine version with other fields wrote it")
        scheduler = Scheduler(Limits.from_plain(limits), PolicySet.from_names(names))
        state = scheduler.state
        _record(State)(msgspec.convert(tree, _plain_type(State)), state)
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
    """The path of the first difference between two values of a declared type; empty if there is none. The order of a
    mapping's keys counts, because decisions follow it."""
    if pack(here) == pack(there):
        return ""
    for part, inner, mine, theirs in _parts(hint, here, there):
        if found := _difference(inner, f"{name}{part}", mine, theirs):
            return found
    return f"{name}: {_shown(there)} was recorded, {_shown(here)} was replayed"


def _parts(hint: Any, here: Plain, there: Plain) -> Iterator[tuple[str, Any, Plain, Plain]]:
    """Name, type and both values of each part, if two values have the same parts."""
    of = get_args(hint)[-1:] or (None,)
    if type(here) is type(there) is dict and list(here) == list(there):
        for key in here:
            yield f"[{_shown(key)}]", of[0], here[key], there[key]
    elif type(here) is type(there) is list and len(here) == len(there):
        fields = declared(hint) if isinstance(hint, type) and get_origin(hint) is None else {}
        if len(fields) == len(here):
            names = [(f".{name}", inner) for name, inner in fields.items()]
        else:
            names = [(f"[{place}]", None) for place in range(len(here))]
        for (part, inner), mine, theirs in zip(names, here, there, strict=True):
            yield part, inner, mine, theirs


def _shown(value: Plain) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"


# plain types: each record of the tree as an array of its declared fields


def _is_record(hint: Any) -> bool:
    """Whether a type is a class of the tree whose objects change. Tuples and commands are written as they are."""
    is_class = isinstance(hint, type) and get_origin(hint) is None
    return is_class and bool(declared(hint)) and not issubclass(hint, (tuple, msgspec.Struct))


@lru_cache
def _plain_type(hint: Any) -> Any:
    """The type of the plain values of a type: each record in it becomes an array of its declared fields."""
    if hint is Command:
        return AnyCommand
    if _is_record(hint):
        fields = [(name, _plain_type(inner)) for name, inner in declared(hint).items()]
        return msgspec.defstruct(hint.__name__, fields, array_like=True, forbid_unknown_fields=True, frozen=True)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (dict, list):
        return origin[tuple(map(_plain_type, args))]
    return hint


Fill = Callable[[Any, Any], Any]
"""(plain value, the value that is there or None) → the value."""


@lru_cache
def _fill(hint: Any) -> Fill | None:
    """The function that makes values of a type from those of its plain type; None: they are the same."""
    if _is_record(hint):
        return _record(hint)
    args = get_args(hint)
    fill = _fill(args[-1]) if get_origin(hint) in (dict, list) else None
    if fill is None:
        return None
    if get_origin(hint) is dict:
        return lambda plain, there: {key: fill(value, (there or {}).get(key)) for key, value in plain.items()}
    return lambda plain, there: [
        fill(value, there[at] if there and at < len(there) else None) for at, value in enumerate(plain)
    ]


@lru_cache
def _record(cls: Any) -> Fill:
    """Fills an existing object, whose constructor has made its parts, or a new one."""
    fills = {name: _fill(hint) for name, hint in declared(cls).items()}

    def fill(plain: Any, there: Any) -> Any:
        record = object.__new__(cls) if there is None else there
        for name, inner in fills.items():
            value = getattr(plain, name)
            setattr(record, name, value if inner is None else inner(value, getattr(there, name, None)))
        if hasattr(cls, "__post_init__") and there is None:
            record.__post_init__()
        return record

    return fill


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
    if isinstance(hint, type) and get_origin(hint) is None:
        return [hint] if declared(hint) and not issubclass(hint, msgspec.Struct) else []
    return [cls for arg in get_args(hint) if arg is not ... for cls in _classes_in(arg)]
