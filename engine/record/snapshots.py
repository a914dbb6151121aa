"""Converts the state of a scheduler to plain values and back: the contents of a record's snapshots.

    plain = snapshot(scheduler)              # declarations, limits, policies, the state, its groups
    scheduler = restore(plain, observe)      # decides exactly as the first would have

Called by the driver, which writes a snapshot every so many events, by `replayer`, which compares them, and by
`recovery`, which begins at one. Pure, like the scheduler.

A snapshot is the tree of facts (`states/state.RunFacts`), encoded as it is; `msgspec` checks every type when it is
decoded. It begins with the declarations of the classes. If they differ from this engine's, another engine version wrote
it and it is not used; the events are replayed instead. So the classes may change freely.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import error as StructError
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from engine.errors import EngineError
from engine.policies import PolicySet
from engine.record.codec import CodecError, pack, unpack
from engine.scheduling.scheduler import Scheduler
from engine.states.facts import Facts
from engine.states.laws import check_all
from engine.states.limits import Limits
from engine.states.machine import Observer
from engine.states.state import RunFacts

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
    """A snapshot, to be encoded before the next event."""
    return [declarations(), scheduler.limits.to_plain(), dict(scheduler.policies.names), scheduler.state.facts]


def restore(plain: Sequence[Plain], observe: Observer | None = None) -> Scheduler:
    """The scheduler of a snapshot. Raises: `CodecError` for anything but a snapshot of this engine."""
    try:
        fields, limits, names, tree = plain
        if fields != declarations():
            raise CodecError("an engine version with other fields wrote it")
        facts = msgspec.convert(tree, RunFacts)
        scheduler = Scheduler(Limits.from_plain(limits), PolicySet.from_names(names), facts=facts)
        check_all(scheduler.state)
        scheduler.state.observe(observe)
    except DAMAGED as error:
        raise CodecError(f"this engine cannot continue from this snapshot: {error}") from error
    return scheduler


def first_difference(scheduler: Scheduler, plain: Sequence[Plain]) -> str:
    """The first field in which a scheduler differs from a decoded snapshot, with both values; empty if they are equal,
    or if an engine with other fields wrote the snapshot."""
    if len(plain) != 4 or plain[0] != declarations():
        return ""
    here = unpack(pack(snapshot(scheduler)))
    for name, at, kind in (("limits", 1, None), ("policies", 2, None), ("RunFacts", 3, RunFacts)):
        if found := _difference(kind, name, here[at], plain[at]):
            return found
    return ""


def _difference(kind: Any, name: str, here: Plain, there: Plain) -> str:
    """The path of the first difference between two values of a type; empty if there is none. The order of a mapping's
    keys counts, because decisions follow it."""
    if pack(here) == pack(there):
        return ""
    for part, inner, mine, theirs in _parts(kind, here, there):
        if found := _difference(inner, f"{name}{part}", mine, theirs):
            return found
    return f"{name}: {_shown(there)} was recorded, {_shown(here)} was replayed"


def _parts(kind: Any, here: Plain, there: Plain) -> Iterator[tuple[str, Any, Plain, Plain]]:
    """Name, type and both values of each part, if two values have the same parts."""
    of = get_args(kind)[-1:] or (None,)
    if type(here) is type(there) is dict and list(here) == list(there):
        for key in here:
            yield f"[{_shown(key)}]", of[0], here[key], there[key]
    elif type(here) is type(there) is list and len(here) == len(there):
        fields = get_type_hints(kind) if _is_facts(kind) else {}
        names = [(f".{name}", inner) for name, inner in fields.items()]
        for (part, inner), mine, theirs in zip(names or _numbered(here, of[0]), here, there, strict=False):
            yield part, inner, mine, theirs


def _numbered(values: Sequence[Plain], kind: Any) -> list[tuple[str, Any]]:
    return [(f"[{place}]", kind) for place in range(len(values))]


def _shown(value: Plain) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"


def _is_facts(kind: Any) -> bool:
    return isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Facts)


@lru_cache
def declarations() -> Plain:
    """Every class of the tree with its fields and their types."""
    classes: list[type] = [RunFacts]
    for cls in classes:
        inner = (found for hint in get_type_hints(cls).values() for found in _classes_in(hint))
        classes += dict.fromkeys(found for found in inner if found not in classes)
    return [[cls.__name__, *(f"{name}: {hint}" for name, hint in get_type_hints(cls).items())] for cls in classes]


def _classes_in(hint: Any) -> list[type]:
    """The classes of facts and the named tuples in a type."""
    if isinstance(hint, type) and get_origin(hint) is None:
        return [hint] if _is_facts(hint) or hasattr(hint, "_fields") else []
    return [cls for arg in get_args(hint) if arg is not ... for cls in _classes_in(arg)]
