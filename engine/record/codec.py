"""Events and commands to bytes and back: an array of the class's tag and its fields in their order.

    GroupGenerated(group=7, attempt=1, ...)  ⇄  [3, 7, 1, ...]

An event's `id` and `at` and a command's `cause` are left out: the frame that holds them carries these once. What a
field may hold is read from its annotation: int (signed, 64 bits; a bool is none), float (finite: NaN equals nothing,
so that it could not be compared on replay; an int where a float belongs is written as a float), bool, str (UTF-8,
`MAX_TEXT_BYTES`), tuple[int, ...].

Strict both ways: what `encode_*` accepts, `decode_*` gives back equal; an unknown tag, a missing or surplus field,
another type or an excess is a `CodecError`.

How the format may change once it is released: a tag is never used twice, fields are added only at the end, and either
raises `frames.FORMAT_VERSION`. Every field is always there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Generic, TypeVar, get_type_hints

from engine.commands import COMMANDS, Command
from engine.events import EVENTS, Event
from engine.ids import EventId
from engine.record.msgpack_values import MAX_INT, MAX_ITEMS, MAX_TEXT_BYTES, MIN_INT, CodecError, pack, unpack

# -- one class of events or commands -----------------------------------------------------------------------------------


T = TypeVar("T")
Values = tuple[Any, ...]
SHORT_TEXT = MAX_TEXT_BYTES // 4
"""No character takes more than four bytes."""


def _int_problem(value: int) -> str | None:
    return None if MIN_INT <= value <= MAX_INT else "is beyond 64 bits with a sign"


def _float_problem(value: float) -> str | None:
    return None if isfinite(value) else f"is {value}: only finite numbers are recorded"


def _text_problem(value: str) -> str | None:
    if len(value) <= SHORT_TEXT or len(value.encode("utf-8", "replace")) <= MAX_TEXT_BYTES:
        return None
    return f"is longer than {MAX_TEXT_BYTES} bytes"


def _ints_problem(values: Sequence[Any]) -> str | None:
    if len(values) > MAX_ITEMS:
        return f"has {len(values)} entries: {MAX_ITEMS} at most"
    if values and set(map(type, values)) != {int}:
        return "holds something else than ints"
    if values and (max(values) > MAX_INT or min(values) < MIN_INT):
        return "holds an int beyond 64 bits with a sign"
    return None


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may hold."""

    name: str
    held: type
    """Its type in an object."""
    wire: type
    """Its type as msgpack gives it back."""
    doubt: str
    """Beyond another type: an expression of the value `{}` that is true where it needs a closer look. msgpack itself
    neither writes nor reads an int below `MIN_INT`."""
    problem: Callable[[Any], str | None]
    """The closer look: what is wrong with a value of the right type."""


KINDS: dict[Any, Kind] = {
    int: Kind("int", int, int, "{} > MAX_INT", _int_problem),
    float: Kind("float", float, float, "{0} - {0} != 0.0", _float_problem),
    bool: Kind("bool", bool, bool, "", lambda value: None),
    str: Kind("str", str, str, "len({}) > SHORT_TEXT", _text_problem),
    tuple[int, ...]: Kind("tuple of ints", tuple, list, "ints_problem({})", _ints_problem),
}


class Shape(Generic[T]):
    """A class and how it is written and read.

    `outer` are the fields that the frame carries. `plain(item)` gives (tag, field, ...), checked; `build(plain,
    *outer)` the object. Both raise `CodecError`. A field of a type that has no `Kind` is a `TypeError` at import.
    """

    def __init__(self, cls: type[T], outer: tuple[str, ...]) -> None:
        hints = get_type_hints(cls)
        self.cls = cls
        self.name = cls.__name__
        self.outer = outer
        self.fields = tuple(f.name for f in fields(cls) if f.name not in outer)  # type: ignore[arg-type]
        for field in self.fields:
            if hints[field] not in KINDS:
                raise TypeError(f"{self.name}.{field}: the record has no form for {hints[field]}")
        self.kinds = tuple(KINDS[hints[field]] for field in self.fields)
        self.tag: int = cls.tag  # type: ignore[attr-defined]
        self.plain: Callable[[T], Values] = self._made(self._plain_source())
        self.build: Callable[..., T] = self._made(self._build_source())

    def _made(self, source: str) -> Any:
        names: dict[str, Any] = {
            "cls": self.cls, "MAX_INT": MAX_INT, "SHORT_TEXT": SHORT_TEXT, "ints_problem": _ints_problem,
            "new": object.__new__, **self._setters(),
            "plain_with_care": self._plain_with_care, "build_with_care": self._build_with_care,
        }  # fmt: skip
        exec(compile(source, f"<codec of {self.name}>", "exec"), names)
        return names["made"]

    def _setters(self) -> dict[str, Any]:
        """The slots themselves: a frozen class's own `__init__` takes twice the time and has nothing to add."""
        if hasattr(self.cls, "__post_init__"):
            raise TypeError(f"{self.name}: the record does not run __post_init__")
        return {f"set_{name}": getattr(self.cls, name).__set__ for name in (*self.fields, *self.outer)}

    def _plain_source(self) -> str:
        """As for a class of tag 3 with the one field `group`:

        def made(item):
            v0 = item.group
            if type(v0) is not int or v0 > MAX_INT: return plain_with_care(item)
            return (3, v0,)
        """
        values = [f"v{index}" for index in range(len(self.fields))]
        lines = [f"    {value} = item.{field}" for value, field in zip(values, self.fields, strict=True)]
        doubts = self._doubts(values, [kind.held for kind in self.kinds])
        lines += [f"    if {doubts}: return plain_with_care(item)"] if doubts else []
        return "\n".join(["def made(item):", *lines, f"    return ({', '.join([str(self.tag), *values])},)"])

    def _build_source(self) -> str:
        """As for an event with the one field `group`:

        def made(plain, id, at):
            if len(plain) != 2: return build_with_care(plain, id, at)
            _, v0, = plain
            if type(v0) is not int or v0 > MAX_INT: return build_with_care(plain, id, at)
            item = new(cls)
            set_group(item, v0)
            set_id(item, id)
            set_at(item, at)
            return item
        """
        values = [f"v{index}" for index in range(len(self.fields))]
        outer = ", ".join(self.outer)
        doubts = self._doubts(values, [kind.wire for kind in self.kinds])
        held = [
            f"tuple({value})" if kind.wire is list else value for value, kind in zip(values, self.kinds, strict=True)
        ]
        given = zip((*self.fields, *self.outer), (*held, *self.outer), strict=True)
        return "\n".join([
            f"def made(plain, {outer}):",
            f"    if len(plain) != {len(values) + 1}: return build_with_care(plain, {outer})",
            f"    {', '.join(['_', *values])}, = plain",
            *([f"    if {doubts}: return build_with_care(plain, {outer})"] if doubts else []),
            "    item = new(cls)",
            *[f"    set_{name}(item, {value})" for name, value in given],
            "    return item",
        ])  # fmt: skip

    def _doubts(self, values: list[str], types: list[type]) -> str:
        doubts = []
        for value, kind, expected in zip(values, self.kinds, types, strict=True):
            doubts.append(f"type({value}) is not {expected.__name__}")
            doubts += [kind.doubt.format(value)] if kind.doubt else []
        return " or ".join(doubts)

    def _plain_with_care(self, item: T) -> Values:
        """An int where a float belongs becomes one, a subclass of int, float or str the plain thing; the rest is
        refused."""
        values = [
            self._as_held(field, kind, getattr(item, field))
            for field, kind in zip(self.fields, self.kinds, strict=True)
        ]
        return (self.tag, *values)

    def _as_held(self, field: str, kind: Kind, value: Any) -> Any:
        if type(value) is not kind.held:
            accepted = (int, float) if kind.held is float else kind.held
            if isinstance(value, bool) or not isinstance(value, accepted):
                raise CodecError(f"{self.name}.{field} is a {type(value).__name__}, not a {kind.name}")
            try:
                value = kind.held(value)
            except OverflowError:
                raise CodecError(f"{self.name}.{field} is too large for a float") from None
        self._require(field, kind, value)
        return value

    def _build_with_care(self, plain: list[Any], *outer: Any) -> T:
        """Say what is wrong with what was read, or build it where nothing is."""
        if len(plain) != len(self.fields) + 1:
            raise CodecError(f"{self.name} has {len(self.fields)} fields, not {len(plain) - 1}")
        given = dict(zip(self.outer, outer, strict=True))
        for field, kind, value in zip(self.fields, self.kinds, plain[1:], strict=True):
            if type(value) is not kind.wire:
                raise CodecError(f"{self.name}.{field} is a {type(value).__name__}, not a {kind.name}")
            self._require(field, kind, value)
            given[field] = kind.held(value)
        return self.cls(**given)

    def _require(self, field: str, kind: Kind, value: Any) -> None:
        problem = kind.problem(value)
        if problem is not None:
            raise CodecError(f"{self.name}.{field} {problem}")


# -- events and commands to bytes and back -----------------------------------------------------------------------------


__all__ = ["CodecError", "decode_command", "decode_event", "encode_command", "encode_event"]


def encode_event(event: Event) -> bytes:
    """Raises: `CodecError`."""
    return pack(plain_event(event))


def decode_event(data: bytes, id: EventId = -1, at: float = 0.0) -> Event:
    """The event under the stamp (`id`, `at`) that its frame carries. Raises: `CodecError`."""
    return event_from(unpack(data), id, at)


def encode_command(command: Command) -> bytes:
    """Raises: `CodecError`."""
    return pack(plain_command(command))


def decode_command(data: bytes, cause: EventId) -> Command:
    """The command as an answer to the event `cause`. Raises: `CodecError`."""
    return command_from(unpack(data), cause)


def plain_event(event: Event) -> Values:
    """(tag, field, ...), checked, for a frame that packs more than this."""
    return _shape_of(event, _EVENTS).plain(event)


def plain_command(command: Command) -> Values:
    return _shape_of(command, _COMMANDS).plain(command)


def event_from(plain: Any, id: EventId, at: float) -> Event:
    """What `plain_event` gave, as msgpack gives it back."""
    return _shape_for(plain, _EVENT_TAGS, "event").build(plain, id, at)


def command_from(plain: Any, cause: EventId) -> Command:
    return _shape_for(plain, _COMMAND_TAGS, "command").build(plain, cause)


_EVENT_TAGS: dict[int, Shape[Event]] = {tag: Shape(cls, ("id", "at")) for tag, cls in EVENTS.items()}
_COMMAND_TAGS: dict[int, Shape[Command]] = {tag: Shape(cls, ("cause",)) for tag, cls in COMMANDS.items()}
_EVENTS: dict[type[Event], Shape[Event]] = {shape.cls: shape for shape in _EVENT_TAGS.values()}
_COMMANDS: dict[type[Command], Shape[Command]] = {shape.cls: shape for shape in _COMMAND_TAGS.values()}


def _shape_of(item: T, shapes: dict[type[T], Shape[T]]) -> Shape[T]:
    try:
        return shapes[type(item)]
    except KeyError:
        raise CodecError(f"{type(item).__name__} is not in the record's table of events and commands") from None


def _shape_for(plain: Any, tags: dict[int, Shape[T]], what: str) -> Shape[T]:
    if type(plain) is not list or not plain or type(plain[0]) is not int:
        raise CodecError(f"no {what}: an array that begins with a tag is needed")
    shape = tags.get(plain[0])
    if shape is None:
        raise CodecError(f"no {what} has the tag {plain[0]}; a newer engine may have written it")
    return shape
