"""What the frames of a record say: the header, an event that was handled with its answer, an event that was rejected,
a part of a snapshot.

    header    [0, {format, run, code, flags, limits, policies, config}]
    handled   [1, position, at, [event], [[command], ...], state hash]
    rejected  [2, position, at, [event], reason]
    snapshot  [3, position, number of the part, parts, what `snapshots.snapshot` gave]

Called by `recorder` and `reader`; `store` knows how frames lie in files. An event's position is its `id`; commands
answer the event of their frame. A rejected event has the position it would have had: the scheduler could not handle
it, so it changed nothing. A snapshot's position is how many events were handled before it; its parts follow one
another in one segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgpack

from engine.commands import Command
from engine.events import Event
from engine.record.codec import command_from, event_from, plain_command, plain_event
from engine.record.msgpack_values import MAX_INT, MAX_TEXT_BYTES, CodecError, pack, unpack

FORMAT_VERSION = 1
"""Raised by every change of this page, of a class's fields or of the tags, once this version is released. Until then
version 1 is open: a change writes its golden records again. Golden records of released versions stay readable."""
LOGIC_FLAGS: frozenset[str] = frozenset()
"""Changes of the scheduler's decisions that a record may name, so that older records still replay. None so far."""
MAX_HASH = 2**64 - 1
HEADER, HANDLED, REJECTED, SNAPSHOT = 0, 1, 2, 3
SNAPSHOT_START = b"\x95\x03"
"""How the payload of such a frame begins: an array of five, the first of them its kind."""
MAX_PARTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first frame: all that a fresh scheduler needs, and where the record comes from."""

    run: str
    """The run's id."""
    limits: Mapping[str, Any]
    """`Limits.to_plain()`."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Decision → name, as `PolicySet.names` has it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The full resolved configuration, as plain values."""
    code: str = ""
    """Version of the engine that wrote it."""
    flags: tuple[str, ...] = ()
    """Logic flags in force."""


@dataclass(frozen=True, slots=True)
class Handled:
    """An event and what the scheduler answered."""

    event: Event
    commands: tuple[Command, ...]
    state_hash: int
    payload: bytes
    """The frame's own bytes, which are the quickest thing to compare."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An event that the scheduler could not handle; the run stopped there."""

    event: Event
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the scheduler's whole state after `position` events: the `number`-th of `parts`, from 0."""

    position: int
    number: int
    parts: int
    plain: Any
    payload: bytes
    """The frame's own bytes."""


def encode_header(header: Header) -> bytes:
    """Raises: `CodecError` where the configuration holds something that is no plain value."""
    said = {
        "format": FORMAT_VERSION, "run": header.run, "code": header.code, "flags": list(header.flags),
        "limits": _plain(header.limits), "policies": _plain(header.policies), "config": _plain(header.config),
    }  # fmt: skip
    data = pack((HEADER, said))
    decode_header(data)
    return data


def decode_header(data: bytes) -> Header:
    """Raises: `CodecError`, also for a newer format and for logic flags that this engine does not know."""
    plain = unpack(data, maps=True)
    if type(plain) is not list or list(map(type, plain)) != [int, dict] or plain[0] != HEADER:
        raise CodecError("not a header")
    said = plain[1]
    check_format(said.get("format"))
    kinds = {"format": int, "run": str, "code": str, "flags": list, "limits": dict, "policies": dict, "config": dict}
    for name, kind in kinds.items():
        if type(said.get(name)) is not kind:
            raise CodecError(f"the header's {name} is a {type(said.get(name)).__name__}, not a {kind.__name__}")
    if len(said) != len(kinds):
        raise CodecError(f"the header has unknown entries: {', '.join(sorted(map(str, set(said) - set(kinds))))}")
    if not all(type(text) is str for text in (*said["flags"], *said["policies"], *said["policies"].values())):
        raise CodecError("the header's flags and policies are names")
    unknown = sorted(set(said["flags"]) - LOGIC_FLAGS)
    if unknown:
        raise CodecError(f"written with the logic flag {unknown[0]!r}, which this engine does not know")
    del said["format"]
    return Header(**{**said, "flags": tuple(said["flags"])})


def check_format(version: object) -> None:
    """Refuse, by name, a format version that this engine cannot read."""
    if type(version) is not int or version < 1:
        raise CodecError(f"{version!r} is no format version")
    if version > FORMAT_VERSION:
        raise CodecError(f"format version {version}; this engine reads up to {FORMAT_VERSION}, a newer one is needed")


def encode_handled(event: Event, commands: Sequence[Command], state_hash: int) -> bytes:
    """Raises: `CodecError`, also for a command that answers another event."""
    answer = []
    for command in commands:
        if command.cause != event.id:
            raise CodecError(
                f"{type(command).__name__} answers event {command.cause}, but stands under event {event.id}"
            )
        answer.append(plain_command(command))
    return pack((HANDLED, event.id, _stamp(event), plain_event(event), answer, state_hash))


def encode_rejected(event: Event, reason: str) -> bytes:
    """Raises: `CodecError`. The reason is cut where it is too long, and cleaned of what is not Unicode."""
    clean = reason.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
    return pack((REJECTED, event.id, _stamp(event), plain_event(event), clean))


def encode_snapshot(position: int, parts: Sequence[Any]) -> list[bytes]:
    """A payload for each part. Raises: `CodecError`, also for more parts than a snapshot may have."""
    _check_stamp(position, 0.0)
    if not 0 < len(parts) <= MAX_PARTS:
        raise CodecError(f"a snapshot of {len(parts)} parts: {MAX_PARTS} at most")
    return [pack((SNAPSHOT, position, number, len(parts), part)) for number, part in enumerate(parts)]


def place_of_part(data: bytes) -> tuple[int, int, int] | None:
    """(position, number, parts) of a snapshot's part, the rest unread; None for any other frame.

    Raises: `CodecError`.
    """
    if not data.startswith(SNAPSHOT_START):
        return None
    walker = msgpack.Unpacker()
    walker.feed(data[:32])
    try:
        walker.read_array_header()
        walker.skip()
        position, number, parts = walker.unpack(), walker.unpack(), walker.unpack()
    except (ValueError, msgpack.UnpackException):
        raise CodecError("not a part of a snapshot: its place is not told") from None
    _check_part(position, number, parts)
    return position, number, parts


def decode_frame(data: bytes, answers: bool = True) -> Handled | Rejected | Part:
    """Any frame but the header. `answers`: whether the commands are decoded; without, they stay empty and unchecked.

    Raises: `CodecError`.
    """
    plain = unpack(data)
    if type(plain) is not list or not plain or type(plain[0]) is not int:
        raise CodecError("not a frame: an array that begins with its kind is needed")
    if plain[0] == HANDLED and len(plain) == 6:
        _, id, at, event, commands, state_hash = plain
        _check_stamp(id, at)
        if type(commands) is not list or type(state_hash) is not int or not 0 <= state_hash <= MAX_HASH:
            raise CodecError("not a frame: commands and a state hash of 64 bits are needed")
        answer = tuple([command_from(command, id) for command in commands]) if answers else ()
        return Handled(event_from(event, id, at), answer, state_hash, data)
    if plain[0] == REJECTED and len(plain) == 5:
        _, id, at, event, reason = plain
        _check_stamp(id, at)
        if type(reason) is not str:
            raise CodecError("not a frame: the reason of a rejection is a text")
        return Rejected(event_from(event, id, at), reason)
    if plain[0] == SNAPSHOT and len(plain) == 5:
        _check_part(*plain[1:4])
        _, position, number, parts, said = plain
        return Part(position, number, parts, said, data)
    raise CodecError(f"no frame has the kind {plain[0]} and {len(plain)} parts")


def _stamp(event: Event) -> float:
    at = float(event.at)
    _check_stamp(event.id, at)
    return at


def _check_part(position: Any, number: Any, parts: Any) -> None:
    _check_stamp(position, 0.0)
    if type(number) is not int or type(parts) is not int or not 0 <= number < parts <= MAX_PARTS:
        raise CodecError(f"part {number!r} of {parts!r} is no part of a snapshot")


def _check_stamp(id: Any, at: Any) -> None:
    if type(id) is not int or not 0 <= id <= MAX_INT:
        raise CodecError(f"{id!r} is no position of an event")
    if type(at) is not float or not isfinite(at):
        raise CodecError(f"{at!r} is no time of an event")


def _plain(value: Any) -> Any:
    """Mappings and sequences of any class as the plain ones, all the way down."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
