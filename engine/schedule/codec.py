"""Encodes events and commands as bytes and back: an array of the class's tag and its fields, in order.

    GroupGenerated(group=7, attempt=1, ...)  ⇄  [3, 7, 1, ...]

An event's `id` and `at` and a command's `cause` are left out, because their frame has them once. The type of a
field may hold is read from its annotation: int (signed, 64 bits; no bool), float (finite, because replay cannot compare
NaN; an int in a float field is written as a float), bool, str (UTF-8, `MAX_TEXT_BYTES`), tuple[int, ...].

Both directions are strict: `decode_*` returns a value equal to what `encode_*` accepted. An unknown tag, a missing or
extra field, a wrong type or a value over a bound raises `CodecError`.

Once the format is released, a tag is never reused, fields are added only at the end, and each such change raises
`frames.FORMAT_VERSION`. Every field is always written.
"""

from typing import Any, TypeVar

from engine.commands import COMMANDS, Command
from engine.events import EVENTS, Event
from engine.ids import EventId
from engine.schedule.packing import CodecError, pack, unpack
from engine.schedule.shapes import Shape, Values

__all__ = ["CodecError", "decode_command", "decode_event", "encode_command", "encode_event"]

T = TypeVar("T")


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
