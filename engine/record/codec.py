"""Events and commands as msgpack bytes, and back.

    GroupGenerated(group=7, attempt=1, ...)  ⇄  [3, id, at, 7, 1, ...]     the tag of the class and its fields, in order

`msgspec` reads the classes' annotations. What it does not check is checked here: a float must be finite, because replay
cannot compare NaN. Reading is strict: an unknown tag, a surplus field or a wrong type raises `CodecError`. It raises
nothing else, allocates at most a fixed multiple of the bytes that it was given, and unpickles nothing. Writing checks
nothing of this: whoever takes a value from a user's code checks it there, with `event_of` for a whole event.

Once the format is released, a tag is never reused, fields are added only at the end with a default, and each such
change raises `frames.FORMAT_VERSION`. Every field is always written.
"""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_type_hints

import msgpack
import msgspec

from engine.commands import COMMANDS, Command
from engine.errors import EngineError
from engine.events import EVENTS, Event

MAX_PAYLOAD_BYTES = 1 << 26
"""Maximum size of one frame. A million `StartGroup` take 26 MB."""
CHECKED_FROM_BYTES = 512
"""A payload of at least this size is first walked without building anything, because nested arrays could otherwise
claim more entries than it has bytes. A smaller one can claim at most `CHECKED_FROM_BYTES` squared entries."""

if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = Union[EVENTS]  # noqa: UP007 - of a tuple


AnyKind = TypeVar("AnyKind", bound=Event)


class CodecError(EngineError):
    """The bytes are not a value of this format, or the format cannot hold the value."""


def pack(value: Any) -> bytes:
    """Plain values, events and commands as bytes. It also takes values that cannot be read back, such as sets and
    dates. Raises: `CodecError` for what msgspec cannot encode, such as integers beyond 64 bits and invalid Unicode."""
    try:
        data = _encode(value)
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!a}, half of a surrogate pair"
        raise CodecError(f"cannot be recorded: it has {half}; use valid Unicode") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot be recorded: {error}") from None
    _check_size(data)
    return data


def unpacker(kind: Any) -> Callable[[bytes], Any]:
    """A function that decodes one value of a type and nothing after it. It raises `CodecError`."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def unpack(data: bytes) -> Any:
        _check_size(data)
        try:
            if len(data) >= CHECKED_FROM_BYTES:
                walker = msgpack.Unpacker(max_buffer_size=MAX_PAYLOAD_BYTES)
                walker.feed(data)
                walker.skip()
            return decode(data)
        except msgspec.ValidationError as error:
            raise CodecError(f"cannot be decoded: {error}; use the engine version that wrote it") from None
        except (msgspec.DecodeError, msgpack.UnpackException, ValueError, RecursionError) as error:
            raise CodecError(f"cannot be decoded: {str(error) or 'the data ends early'}") from None

    return unpack


unpack = unpacker(Any)
"""Decodes plain values."""


def plain(value: Any) -> Any:
    """A number or text of a subclass, or a single number of numpy or torch, as one of the plain class. Raises:
    `TypeError` for anything else."""
    if type(value) in (bool, int, float, str):
        return value
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    if getattr(value, "ndim", None) == 0 and type(number := value.item()) in (bool, int, float):
        return number
    raise TypeError(f"{value!r:.100} is of type {type(value).__name__}; use numbers, texts, lists and dicts")


_encode = msgspec.msgpack.Encoder(enc_hook=plain).encode


def _check_size(data: bytes) -> None:
    if len(data) > MAX_PAYLOAD_BYTES:
        raise CodecError(f"the frame has {len(data)} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed")


# -- events and commands -----------------------------------------------------------------------------------------------


def unpack_events(data: bytes) -> list[Event]:
    """The inverse of `pack`. Raises: `CodecError`."""
    events: list[Event] = _events(data)
    check_finite(events)
    return events


_events = unpacker(list[AnyEvent])


def event_of(kind: type[AnyKind], values: Mapping[str, Any]) -> AnyKind:
    """The event with these values, as a record has it: numbers of other libraries become plain ones. Raises:
    `CodecError`, which names a field whose value the record cannot hold."""
    plain_values = {}
    for name, value in values.items():
        try:
            plain_values[name] = msgspec.msgpack.decode(pack(value), type=_FIELDS[kind][name])
        except CodecError as error:
            raise CodecError(f"{kind.__name__}.{name} {error}") from None
        except msgspec.ValidationError as error:
            raise CodecError(f"{kind.__name__}.{name} cannot be recorded: {error}") from None
    event = kind(**plain_values)
    check_finite([event])
    return event


def check_finite(items: Iterable[Event | Command]) -> None:
    """Raises: `CodecError` for a float that is not finite."""
    for item in items:
        for field in _FLOATS.get(type(item), ()):
            value = getattr(item, field)
            if not (all(map(isfinite, value)) if type(value) is tuple else isfinite(value)):
                raise CodecError(f"{type(item).__name__}.{field} is {value}, but must be finite")


_FIELDS: dict[type, dict[str, Any]] = {
    cls: {name: hint for name, hint in get_type_hints(cls).items() if name in cls.__struct_fields__}
    for cls in (*EVENTS, *COMMANDS)
}
_FLOATS = {
    cls: tuple(name for name, hint in fields.items() if hint in (float, tuple[float, ...]) and name != "at")
    for cls, fields in _FIELDS.items()
}
"""The fields of each class that hold floats, without the time of an event, which `decode_frame` checks."""
