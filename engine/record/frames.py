"""The contents of a record's frames: the header, a tick with its commands, a rejected tick, a snapshot.

    header    [0, {run, code, flags, limits, policies, config}]
    tick      [1, number, first event, at, [[event], ...], [[cause, command], ...], true]
    rejected  [2, number, first event, at, [[event], ...], reason, true]
    snapshot  [3, ticks, events, what `snapshots.snapshot` returned, true]

Called by `recorder` and `reader`; `segment_log` arranges frames in files. The events of a tick have one time and
consecutive ids. A command's cause is written as its distance from the first event. A rejected tick is one that the
scheduler could not handle: nothing changed, so the next tick gets the same number and ids. `ticks` and `events` of a
snapshot count those before it. No frame ends with a zero, because `true` is last: a frame whose end never reached the
disk ends with zeros.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgpack

from engine.commands import Command
from engine.errors import RecordError
from engine.events import Event
from engine.ids import EventId
from engine.record.codec import (
    MAX_INT,
    MAX_PAYLOAD_BYTES,
    MAX_TEXT_BYTES,
    CodecError,
    command_from,
    event_from,
    pack,
    plain_command,
    plain_event,
    unpack,
)
from engine.record.segment_log import Contents

FORMAT_VERSION = 1
"""After the release, every change of this file, of a class's fields or of the tags increments it. Until then version 1
may change: regenerate the golden records. Golden records of released versions stay readable."""
LOGIC_FLAGS: frozenset[str] = frozenset()
"""Named changes of the scheduler's decisions. A record names those in force, so that older records still replay. None
so far."""
HEADER, TICK, REJECTED, SNAPSHOT = 0, 1, 2, 3
TICK_START, REJECTED_START, SNAPSHOT_START = b"\x97\x01", b"\x97\x02", b"\x95\x03"
"""First bytes of frame payloads: an array of seven or five elements that begins with the kind."""
HEADING_BYTES = 32
"""More than a kind, two numbers and a time take."""
SCHEDULE = Contents(
    name="schedule record",
    magic=b"step-sch",
    version=FORMAT_VERSION,
    starts=(TICK_START, REJECTED_START, SNAPSHOT_START),
    max_payload_bytes=MAX_PAYLOAD_BYTES,
    max_segment_bytes=1 << 28,
    development_magics=(b"step-seg", b"step-rec"),  # with hashes of the state, and before format 1
)


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
class Tick:
    """Facts that were decided together, and the commands of the scheduler."""

    number: int
    events: tuple[Event, ...]
    """At least one."""
    commands: tuple[Command, ...]
    payload: bytes = b""
    """The bytes of the frame, which replay compares first because that is fastest."""

    @property
    def first(self) -> EventId:
        """The id of its first event."""
        return self.events[0].id

    @property
    def last(self) -> EventId:
        """The id of its last event."""
        return self.events[-1].id

    @property
    def at(self) -> float:
        """Seconds since the run began."""
        return self.events[0].at


@dataclass(frozen=True, slots=True)
class Rejected:
    """A tick that the scheduler could not handle; the run stopped there. The last of the events was being handled, or
    a reaction to all of them failed."""

    number: int
    events: tuple[Event, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler's state after `ticks` ticks of `position` events, as `snapshots.snapshot` returned it."""

    ticks: int
    position: EventId
    plain: list[Any]
    path: str = ""
    """The segment that it was read from."""
    offset: int = 0

    def error(self, reason: str) -> RecordError:
        """An error with the snapshot's file and offset."""
        return RecordError(self.path, self.offset, reason)


def encode_header(header: Header) -> bytes:
    """Raises: `CodecError` if the configuration has a value that msgpack cannot encode."""
    said = {
        "run": header.run, "code": header.code, "flags": list(header.flags), "limits": _plain(header.limits),
        "policies": _plain(header.policies), "config": _plain(header.config),
    }  # fmt: skip
    data = pack((HEADER, said))
    decode_header(data)
    return data


def decode_header(data: bytes) -> Header:
    """Raises: `CodecError`, also for logic flags that this engine does not know."""
    plain = unpack(data)
    if type(plain) is not list or list(map(type, plain)) != [int, dict] or plain[0] != HEADER:
        raise CodecError("not a header")
    said = plain[1]
    kinds = {"run": str, "code": str, "flags": list, "limits": dict, "policies": dict, "config": dict}
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
    return Header(**{**said, "flags": tuple(said["flags"])})


def encode_tick(number: int, events: Sequence[Event], commands: Sequence[Command]) -> bytes:
    """Raises: `CodecError`, also for a command that no event of the tick caused."""
    first, at = _stamp(number, events)
    causes = range(first, first + len(events))
    orders = []
    for command in commands:
        if command.cause not in causes:
            law = f"must have an event of its tick as its cause, from {first} to {causes[-1]}"
            raise CodecError(f"{type(command).__name__} has cause {command.cause}, but {law}")
        orders.append((command.cause - first, *plain_command(command)))
    return pack((TICK, number, first, at, list(map(plain_event, events)), orders, True))


def encode_rejected(number: int, events: Sequence[Event], reason: str) -> bytes:
    """The reason is cut to `MAX_TEXT_BYTES`, and invalid Unicode in it is replaced. Raises: `CodecError`."""
    first, at = _stamp(number, events)
    clean = reason.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
    return pack((REJECTED, number, first, at, list(map(plain_event, events)), clean, True))


def encode_snapshot(ticks: int, position: EventId, plain: Sequence[Any]) -> bytes:
    """Raises: `CodecError`."""
    _check_place(ticks, position)
    return pack((SNAPSHOT, ticks, position, plain, True))


def heading_of(data: bytes) -> tuple[int, EventId, float | None]:
    """(number, first event, time) of a tick, or (ticks, events) before a snapshot and no time, without decoding the
    rest. Raises: `CodecError`."""
    walker = msgpack.Unpacker()
    walker.feed(data[len(TICK_START) : HEADING_BYTES])
    timed = not data.startswith(SNAPSHOT_START)
    try:
        number, position, at = walker.unpack(), walker.unpack(), walker.unpack() if timed else None
    except (ValueError, msgpack.UnpackException):
        raise CodecError("invalid frame: expected the numbers of a tick and an event, and a time") from None
    _check_place(number, position)
    if timed:
        _check_time(at)
    return number, position, at


def decode_frame(data: bytes, answers: bool = True) -> Tick | Rejected | Snapshot:
    """Any frame but the header. `answers=False`: commands are neither decoded nor checked, and stay empty.

    Raises: `CodecError`.
    """
    plain = unpack(data, lists=data.startswith(SNAPSHOT_START))
    if type(plain) not in (list, tuple) or len(plain) not in (5, 7) or plain[-1] is not True:
        raise CodecError("invalid frame: expected an array that begins with its kind and ends with true")
    kind, number, first = plain[:3]
    _check_place(number, first)
    if kind == SNAPSHOT and len(plain) == 5 and type(plain[3]) is list:
        return Snapshot(number, first, plain[3])
    if type(kind) is not int or kind not in (TICK, REJECTED) or len(plain) != 7:
        raise CodecError(f"invalid frame: unknown kind {kind}, or it has {len(plain)} parts")
    at, facts, said = plain[3:6]
    _check_time(at)
    if type(facts) is not tuple or not facts:
        raise CodecError("invalid frame: a tick has a list of at least one event")
    events = tuple([event_from(fact, first + place, at) for place, fact in enumerate(facts)])
    if kind == REJECTED:
        if type(said) is not str:
            raise CodecError("invalid frame: the reason of a rejection must be a string")
        return Rejected(number, events, said)
    if type(said) is not tuple:
        raise CodecError("invalid frame: expected a list of commands")
    return Tick(number, events, tuple([_command(one, first, len(events)) for one in said]) if answers else (), data)


def _command(plain: Any, first: EventId, events: int) -> Command:
    if type(plain) is not tuple or not plain or type(plain[0]) is not int or not 0 <= plain[0] < events:
        raise CodecError(
            "cannot decode the command: expected an array that begins with its cause, an event of the tick"
        )
    return command_from(plain[1:], first + plain[0])


def _stamp(number: int, events: Sequence[Event]) -> tuple[EventId, float]:
    """(id of the first event, time) of a tick. Raises: `CodecError`."""
    first, at = events[0].id, float(events[0].at)
    _check_place(number, first)
    _check_time(at)
    for place, event in enumerate(events):
        if event.id != first + place or event.at != events[0].at:
            raise CodecError(f"the events of a tick must have one time and consecutive ids, but one has id {event.id}")
    return first, at


def _check_place(*numbers: Any) -> None:
    """Numbers of ticks and events."""
    for number in numbers:
        if type(number) is not int or not 0 <= number <= MAX_INT:
            raise CodecError(f"the number of a tick or event is {number!r}, but must be an integer from 0 to {MAX_INT}")


def _check_time(at: Any) -> None:
    if type(at) is not float or not isfinite(at):
        raise CodecError(f"the time of a tick is {at!r}, but must be a finite float")


def _plain(value: Any) -> Any:
    """Convert mappings to dict and sequences to list, recursively."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
