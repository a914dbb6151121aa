"""The contents of a record's frames: the header, a handled event with its commands, a rejected event, a part of a
snapshot.

    header    [0, {format, run, code, flags, limits, policies, config}]
    handled   [1, position, at, [event], [[command], ...], state hash]
    rejected  [2, position, at, [event], reason]
    snapshot  [3, position, number of the part, parts, the part of `snapshots.snapshot`]

Called by `recorder` and `reader`; `store` arranges frames in files. An event's position is its `id`. Commands answer
the event of their frame. The scheduler could not handle a rejected event, so nothing changed and the next event gets
the same position. A snapshot's position is the number of events handled before it. Its parts are consecutive frames of
one segment.
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
"""After the release, every change of this file, of a class's fields or of the tags increments it. Until then version 1
may change: regenerate the golden records. Golden records of released versions stay readable."""
LOGIC_FLAGS: frozenset[str] = frozenset()
"""Named changes of the scheduler's decisions. A record names those in force, so that older records still replay. None
so far."""
MAX_HASH = 2**64 - 1
HEADER, HANDLED, REJECTED, SNAPSHOT = 0, 1, 2, 3
SNAPSHOT_START = b"\x95\x03"
"""First bytes of a snapshot's payload: an array of five that begins with its kind."""
MAX_PARTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first frame: what a new scheduler needs, and which run and engine wrote the record."""

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
    """The bytes of the frame, which replay compares first because that is fastest."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An event that the scheduler could not handle; the run stopped there."""

    event: Event
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the scheduler's state after `position` events: number `number` of `parts`, from 0."""

    position: int
    number: int
    parts: int
    plain: Any
    payload: bytes
    """The bytes of the frame."""


def encode_header(header: Header) -> bytes:
    """Raises: `CodecError` if the configuration has a value that msgpack cannot encode."""
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
            raise CodecError(f"header field {name} is a {type(said.get(name)).__name__}, not a {kind.__name__}")
    if len(said) != len(kinds):
        raise CodecError(f"the header has unknown fields: {', '.join(sorted(map(str, set(said) - set(kinds))))}")
    if not all(type(text) is str for text in (*said["flags"], *said["policies"], *said["policies"].values())):
        raise CodecError("flags and policies in the header must be strings")
    unknown = sorted(set(said["flags"]) - LOGIC_FLAGS)
    if unknown:
        raise CodecError(f"unknown logic flag {unknown[0]!r}; use the engine version that wrote the record")
    del said["format"]
    return Header(**{**said, "flags": tuple(said["flags"])})


def check_format(version: object) -> None:
    """Raises: `CodecError` for a format version that this engine cannot read."""
    if type(version) is not int or version < 1:
        raise CodecError(f"the format version is {version!r}, but must be an integer of at least 1")
    if version > FORMAT_VERSION:
        raise CodecError(f"the format version is {version}, but at most {FORMAT_VERSION} is known; use a newer engine")


def encode_handled(event: Event, commands: Sequence[Command], state_hash: int) -> bytes:
    """Raises: `CodecError`, also for a command that answers another event."""
    answer = []
    for command in commands:
        if command.cause != event.id:
            raise CodecError(
                f"{type(command).__name__} has cause {command.cause}, but must have its event's id {event.id}"
            )
        answer.append(plain_command(command))
    return pack((HANDLED, event.id, _stamp(event), plain_event(event), answer, state_hash))


def encode_rejected(event: Event, reason: str) -> bytes:
    """The reason is cut to `MAX_TEXT_BYTES`, and invalid Unicode in it is replaced. Raises: `CodecError`."""
    clean = reason.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
    return pack((REJECTED, event.id, _stamp(event), plain_event(event), clean))


def encode_snapshot(position: int, parts: Sequence[Any]) -> list[bytes]:
    """A payload for each part. Raises: `CodecError`, for example for more than `MAX_PARTS` parts."""
    _check_stamp(position, 0.0)
    if not 0 < len(parts) <= MAX_PARTS:
        raise CodecError(f"a snapshot has {len(parts)} parts, but must have from 1 to {MAX_PARTS}")
    return [pack((SNAPSHOT, position, number, len(parts), part)) for number, part in enumerate(parts)]


def place_of_part(data: bytes) -> tuple[int, int, int] | None:
    """(position, number, parts) of a snapshot's part, without decoding the rest; None for any other frame.

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
        raise CodecError("invalid part of a snapshot: expected its position, number and parts") from None
    _check_part(position, number, parts)
    return position, number, parts


def decode_frame(data: bytes, answers: bool = True) -> Handled | Rejected | Part:
    """Any frame but the header. `answers=False`: commands are neither decoded nor checked, and stay empty.

    Raises: `CodecError`.
    """
    plain = unpack(data)
    if type(plain) is not list or not plain or type(plain[0]) is not int:
        raise CodecError("invalid frame: expected an array that begins with its kind")
    if plain[0] == HANDLED and len(plain) == 6:
        _, id, at, event, commands, state_hash = plain
        _check_stamp(id, at)
        if type(commands) is not list or type(state_hash) is not int or not 0 <= state_hash <= MAX_HASH:
            raise CodecError("invalid frame: expected a list of commands and a 64-bit state hash")
        answer = tuple([command_from(command, id) for command in commands]) if answers else ()
        return Handled(event_from(event, id, at), answer, state_hash, data)
    if plain[0] == REJECTED and len(plain) == 5:
        _, id, at, event, reason = plain
        _check_stamp(id, at)
        if type(reason) is not str:
            raise CodecError("invalid frame: the reason of a rejection must be a string")
        return Rejected(event_from(event, id, at), reason)
    if plain[0] == SNAPSHOT and len(plain) == 5:
        _check_part(*plain[1:4])
        _, position, number, parts, said = plain
        return Part(position, number, parts, said, data)
    raise CodecError(f"invalid frame: unknown kind {plain[0]} with {len(plain)} elements")


def _stamp(event: Event) -> float:
    at = float(event.at)
    _check_stamp(event.id, at)
    return at


def _check_part(position: Any, number: Any, parts: Any) -> None:
    _check_stamp(position, 0.0)
    if type(number) is not int or type(parts) is not int or not 0 <= number < parts <= MAX_PARTS:
        raise CodecError(f"invalid part {number!r} of {parts!r} of a snapshot")


def _check_stamp(id: Any, at: Any) -> None:
    if type(id) is not int or not 0 <= id <= MAX_INT:
        raise CodecError(f"the position of an event is {id!r}, but must be an integer from 0 to {MAX_INT}")
    if type(at) is not float or not isfinite(at):
        raise CodecError(f"the time of an event is {at!r}, but must be a finite float")


def _plain(value: Any) -> Any:
    """Convert mappings to dict and sequences to list, recursively."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
