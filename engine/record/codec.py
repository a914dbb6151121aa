"""Encodes events and commands as bytes and back: an array of the class's tag and its fields, in order.

    GroupGenerated(group=7, attempt=1, ...)  ⇄  [3, 7, 1, ...]

An event's `id` and `at` and a command's `cause` are left out, because their frame has them once. What a
field may hold is read from its annotation: int (signed, 64 bits; no bool), float (finite, because replay cannot compare
NaN; an int in a float field is written as a float), bool, str (UTF-8, `MAX_TEXT_BYTES`), tuple[int, ...] and
tuple[float, ...], whose entries are floats.

Both directions are strict: `decode_*` returns a value equal to what `encode_*` accepted. An unknown tag, a missing or
extra field, a wrong type or a value over a bound raises `CodecError`.

Once the format is released, a tag is never reused, fields are added only at the end, and each such change raises
`frames.FORMAT_VERSION`. Every field is always written.
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
"""A string of so many characters always fits, because a character takes at most four bytes."""


def _int_problem(value: int) -> str | None:
    return None if MIN_INT <= value <= MAX_INT else "does not fit into a signed 64-bit integer"


def _float_problem(value: float) -> str | None:
    return None if isfinite(value) else f"is {value}, but must be finite"


def _text_problem(value: str) -> str | None:
    if len(value) <= SHORT_TEXT or len(value.encode("utf-8", "replace")) <= MAX_TEXT_BYTES:
        return None
    return f"is longer than {MAX_TEXT_BYTES} bytes"


def _ints_problem(values: Sequence[Any]) -> str | None:
    if len(values) > MAX_ITEMS:
        return f"has {len(values)} entries, but may have at most {MAX_ITEMS}"
    if values and set(map(type, values)) != {int}:
        return "has entries that are not ints"
    if values and (max(values) > MAX_INT or min(values) < MIN_INT):
        return "has an entry that does not fit into a signed 64-bit integer"
    return None


def _floats_problem(values: Sequence[Any]) -> str | None:
    if len(values) > MAX_ITEMS:
        return f"has {len(values)} entries, but may have at most {MAX_ITEMS}"
    if values and set(map(type, values)) != {float}:
        return "has entries that are not floats"
    return None if all(map(isfinite, values)) else "has an entry that is not finite"


@dataclass(frozen=True, slots=True)
class Kind:
    """A type that a field may have."""

    name: str
    held: type
    """Type of the field's value in an object."""
    wire: type
    """Type of the value that msgpack decodes."""
    doubt: str
    """Expression of the value `{}` that is true if `problem` must check it. msgpack itself refuses an int below
    `MIN_INT`."""
    problem: Callable[[Any], str | None]
    """What is wrong with a value of the right type; None: nothing."""


KINDS: dict[Any, Kind] = {
    int: Kind("int", int, int, "{} > MAX_INT", _int_problem),
    float: Kind("float", float, float, "{0} - {0} != 0.0", _float_problem),
    bool: Kind("bool", bool, bool, "", lambda value: None),
    str: Kind("str", str, str, "len({}) > SHORT_TEXT", _text_problem),
    tuple[int, ...]: Kind("tuple of ints", tuple, list, "ints_problem({})", _ints_problem),
    tuple[float, ...]: Kind("tuple of floats", tuple, list, "floats_problem({})", _floats_problem),
}


class Shape(Generic[T]):
    """Encodes and decodes the objects of one class.

    `outer` are the fields that the frame carries. `plain(item)` returns (tag, field, ...), checked; `build(plain,
    *outer)` returns the object. Both raise `CodecError`. A field whose type has no `Kind` raises `TypeError` at import.
    """

    def __init__(self, cls: type[T], outer: tuple[str, ...]) -> None:
        hints = get_type_hints(cls)
        self.cls = cls
        self.name = cls.__name__
        self.outer = outer
        self.fields = tuple(f.name for f in fields(cls) if f.name not in outer)  # type: ignore[arg-type]
        for field in self.fields:
            if hints[field] not in KINDS:
                raise TypeError(f"{self.name}.{field}: the record cannot hold the type {hints[field]}")
        self.kinds = tuple(KINDS[hints[field]] for field in self.fields)
        self.tag: int = cls.tag  # type: ignore[attr-defined]
        self.plain: Callable[[T], Values] = self._made(self._plain_source())
        self.build: Callable[..., T] = self._made(self._build_source())

    def _made(self, source: str) -> Any:
        names: dict[str, Any] = {
            "cls": self.cls, "MAX_INT": MAX_INT, "SHORT_TEXT": SHORT_TEXT, "ints_problem": _ints_problem,
            "floats_problem": _floats_problem,
            "new": object.__new__, **self._setters(),
            "plain_with_care": self._plain_with_care, "build_with_care": self._build_with_care,
        }  # fmt: skip
        exec(compile(source, f"<codec of {self.name}>", "exec"), names)
        return names["made"]

    def _setters(self) -> dict[str, Any]:
        """Set the slots directly, because the `__init__` of a frozen class takes twice as long."""
        if hasattr(self.cls, "__post_init__"):
            raise TypeError(f"{self.name}: the record does not run __post_init__")
        return {f"set_{name}": getattr(self.cls, name).__set__ for name in (*self.fields, *self.outer)}

    def _plain_source(self) -> str:
        """For a class with tag 3 and the field `group`:

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
        """For an event with the field `group`:

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
        """Convert an int in a float field to float, and subclasses of int, float and str to these. Refuse the rest."""
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
        """Name the first invalid field, or build the object."""
        if len(plain) != len(self.fields) + 1:
            raise CodecError(f"{self.name} must have {len(self.fields)} fields, not {len(plain) - 1}")
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
    """The event, with the stamp (`id`, `at`) of its frame. Raises: `CodecError`."""
    return event_from(unpack(data), id, at)


def encode_command(command: Command) -> bytes:
    """Raises: `CodecError`."""
    return pack(plain_command(command))


def decode_command(data: bytes, cause: EventId) -> Command:
    """The command, with `cause` as the event that it answers. Raises: `CodecError`."""
    return command_from(unpack(data), cause)


def plain_event(event: Event) -> Values:
    """(tag, field, ...), checked, for the caller to pack into a frame."""
    return _shape_of(event, _EVENTS).plain(event)


def plain_command(command: Command) -> Values:
    return _shape_of(command, _COMMANDS).plain(command)


def event_from(plain: Any, id: EventId, at: float) -> Event:
    """The event from the list that msgpack decoded. Inverse of `plain_event`."""
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
        raise CodecError(f"cannot decode the {what}: expected an array that begins with a tag")
    shape = tags.get(plain[0])
    if shape is None:
        raise CodecError(f"unknown {what} tag {plain[0]}; use the engine version that wrote the record")
    return shape
