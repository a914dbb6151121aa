"""Encodes events and commands as arrays of plain values, those as msgpack bytes within fixed bounds, and both back.

    GroupGenerated(group=7, attempt=1, ...)  ⇄  [3, 7, 1, ...]        the tag of the class and its fields, in order

An event's `id` and `at` and a command's `cause` are left out, because their frame has them once. A field's
annotation gives its values: int (signed, 64 bits; no bool), float (finite, because replay cannot compare
NaN; an int in a float field is written as a float), bool, str (UTF-8, `MAX_TEXT_BYTES`), tuple[int, ...] and
tuple[float, ...], whose entries are floats.

Both directions are strict: what was read is equal to what was written. An unknown tag, a missing or extra field, a
wrong type or a value over a bound raises `CodecError`. Reading raises nothing else, allocates at most a fixed multiple
of the bytes that it was given, and unpickles nothing.

Once the format is released, a tag is never reused, fields are added only at the end, and each such change raises
`frames.FORMAT_VERSION`. Every field is always written.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgpack

from engine.commands import COMMANDS, Command
from engine.errors import EngineError
from engine.events import EVENTS, Event
from engine.ids import EventId

# -- plain values and bytes --------------------------------------------------------------------------------------------


MAX_INT = 2**63 - 1
"""Integers are signed and have 64 bits."""
MIN_INT = -(2**63)
MAX_TEXT_BYTES = 1 << 20
"""Maximum size of one string, as UTF-8."""
MAX_ITEMS = 1 << 22
"""Maximum entries of one array, such as the groups of a batch or the commands of an event."""
MAX_PAYLOAD_BYTES = 1 << 26
"""Maximum size of one frame. A million `StartGroup` take 20 MB."""
CHECKED_FROM_BYTES = 512
"""A payload of at least this size is first walked without building anything, because nested arrays could otherwise
claim more entries than it has bytes. A smaller one can claim at most `CHECKED_FROM_BYTES` squared entries."""

_pack = msgpack.Packer(use_bin_type=True).pack


class CodecError(EngineError):
    """The bytes are not a value of this format, or the format cannot hold the value."""


def pack(plain: Any) -> bytes:
    """Raises: `CodecError` for values that msgpack cannot encode, integers beyond 64 bits and invalid Unicode."""
    try:
        data: bytes = _pack(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"cannot be recorded: {error}") from None
    if len(data) > MAX_PAYLOAD_BYTES:
        raise CodecError(f"the frame has {len(data)} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed")
    return data


def unpack(data: bytes, *, lists: bool = True) -> Any:
    """Decode one value and nothing after it. Mappings have string keys; arrays are `lists` or tuples. Raises:
    `CodecError`."""
    size = len(data)
    if size > MAX_PAYLOAD_BYTES:
        raise CodecError(f"the frame has {size} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed")
    try:
        if size >= CHECKED_FROM_BYTES:
            walker = msgpack.Unpacker(max_buffer_size=MAX_PAYLOAD_BYTES)
            walker.feed(data)
            walker.skip()
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=lists,
            strict_map_key=True,
            max_str_len=MAX_TEXT_BYTES,
            max_array_len=min(MAX_ITEMS, size),
            max_map_len=size,
            max_bin_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        reason = "the data ends early" if isinstance(error, msgpack.OutOfData) else str(error) or type(error).__name__
        raise CodecError(f"cannot decode the frame: {reason}") from None


# -- the values of a field ---------------------------------------------------------------------------------------------


def _int_problem(value: int) -> str:
    return "" if MIN_INT <= value <= MAX_INT else "does not fit into a signed 64-bit integer"


def _float_problem(value: float) -> str:
    return "" if isfinite(value) else f"is {value}, but must be finite"


def _text_problem(value: str) -> str:
    if value.isascii() and len(value) <= MAX_TEXT_BYTES:
        return ""
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        return f"cannot be recorded: it has {value[error.start]!a}, half of a surrogate pair; use valid Unicode"
    return "" if size <= MAX_TEXT_BYTES else f"is longer than {MAX_TEXT_BYTES} bytes"


def _ints_problem(values: Sequence[Any]) -> str:
    return _items_problem(values, int, "ints") or (
        "has an entry that does not fit into a signed 64-bit integer"
        if values and (max(values) > MAX_INT or min(values) < MIN_INT)
        else ""
    )


def _floats_problem(values: Sequence[Any]) -> str:
    return _items_problem(values, float, "floats") or (
        "" if all(map(isfinite, values)) else "has an entry that is not finite"
    )


def _items_problem(values: Sequence[Any], kind: type, name: str) -> str:
    if len(values) > MAX_ITEMS:
        return f"has {len(values)} entries, but may have at most {MAX_ITEMS}"
    return f"has entries that are not {name}" if values and set(map(type, values)) != {kind} else ""


class FieldType(NamedTuple):
    """A type that a field may have."""

    name: str
    cls: type
    problem: Callable[[Any], str]
    """The problem of a value of the right type; empty if there is none."""


KINDS: dict[Any, FieldType] = {
    int: FieldType("int", int, _int_problem),
    float: FieldType("float", float, _float_problem),
    bool: FieldType("bool", bool, lambda value: ""),
    str: FieldType("str", str, _text_problem),
    tuple[int, ...]: FieldType("tuple of ints", tuple, _ints_problem),
    tuple[float, ...]: FieldType("tuple of floats", tuple, _floats_problem),
}


# -- one class of events or commands -----------------------------------------------------------------------------------


T = TypeVar("T")
Values = tuple[Any, ...]


class Shape(Generic[T]):
    """Encodes and decodes the objects of one class.

    `outer` are the fields that the frame carries. `plain(item)` returns (tag, field, ...), checked; `build(plain,
    *outer)` returns the object. Both raise `CodecError`. A field whose type has no `FieldType` raises `TypeError` at
    import.
    """

    def __init__(self, cls: type[T], outer: tuple[str, ...]) -> None:
        hints = get_type_hints(cls)
        self.cls = cls
        self.name = cls.__name__
        self.tag: int = cls.tag  # type: ignore[attr-defined]
        self.fields = tuple(name for name in cls.__struct_fields__ if name not in outer)  # type: ignore[attr-defined]
        for field in self.fields:
            if hints[field] not in KINDS:
                raise TypeError(f"{self.name}.{field}: the record cannot hold the type {hints[field]}")
        if hasattr(cls, "__post_init__"):
            raise TypeError(f"{self.name}: the record does not run __post_init__")
        self.kinds = tuple(KINDS[hints[field]] for field in self.fields)
        self._types = tuple(kind.cls for kind in self.kinds)
        self._values = _values_of(self.fields)
        self._ints = tuple(place for place, kind in enumerate(self.kinds) if kind.cls is int)
        self._others = tuple((place, kind) for place, kind in enumerate(self.kinds) if kind.cls not in (int, bool))
        self._names = (*self.fields, *outer)

    def plain(self, item: T) -> Values:
        """(tag, field, ...). An int in a float field becomes a float; subclasses of int, float and str become these."""
        values = self._values(item)
        if tuple(map(type, values)) != self._types:
            values = tuple(map(self._as_declared, self.fields, self.kinds, values))
        self._check(values)
        return (self.tag, *values)

    def build(self, plain: Values, *outer: Any) -> T:
        """The object of what `plain` returned. Each value must have the declared type itself."""
        values = plain[1:]
        if tuple(map(type, values)) != self._types:
            self._refuse(values)
        self._check(values)
        return self.cls(**dict(zip(self._names, values + outer, strict=True)))

    def _check(self, values: Sequence[Any]) -> None:
        """Values of the right types may still be too large, too long or not finite."""
        for place in self._ints:
            if not MIN_INT <= values[place] <= MAX_INT:
                raise CodecError(f"{self.name}.{self.fields[place]} {_int_problem(values[place])}")
        for place, kind in self._others:
            problem = kind.problem(values[place])
            if problem:
                raise CodecError(f"{self.name}.{self.fields[place]} {problem}")

    def _as_declared(self, field: str, kind: FieldType, value: Any) -> Any:
        if type(value) is kind.cls:
            return value
        accepted = (int, float) if kind.cls is float else kind.cls
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise CodecError(f"{self.name}.{field} is a {type(value).__name__}, not a {kind.name}")
        try:
            return kind.cls(value)
        except OverflowError:
            raise CodecError(f"{self.name}.{field} is too large for a float") from None

    def _refuse(self, values: Values) -> None:
        """Name the first field of a wrong type."""
        if len(values) != len(self.fields):
            raise CodecError(f"{self.name} must have {len(self.fields)} fields, not {len(values)}")
        for field, kind, value in zip(self.fields, self.kinds, values, strict=True):
            if type(value) is not kind.cls:
                raise CodecError(f"{self.name}.{field} is a {type(value).__name__}, not a {kind.name}")


def _values_of(names: tuple[str, ...]) -> Callable[[Any], Values]:
    """A function that takes these fields from an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda item: tuple([getattr(item, name) for name in names])


# -- events and commands -----------------------------------------------------------------------------------------------


def plain_event(event: Event) -> Values:
    """(tag, field, ...), checked. Raises: `CodecError`."""
    return _shape_of(event, _EVENTS).plain(event)


def plain_command(command: Command) -> Values:
    return _shape_of(command, _COMMANDS).plain(command)


def event_from(plain: Any, id: EventId, at: float) -> Event:
    """The inverse of `plain_event`, with the stamp (`id`, `at`) of its frame. Raises: `CodecError`."""
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
    if type(plain) is not tuple or not plain or type(plain[0]) is not int:
        raise CodecError(f"cannot decode the {what}: expected an array that begins with a tag")
    shape = tags.get(plain[0])
    if shape is None:
        raise CodecError(f"unknown {what} tag {plain[0]}; use the engine version that wrote the record")
    return shape
