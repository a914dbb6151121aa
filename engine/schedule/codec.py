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
