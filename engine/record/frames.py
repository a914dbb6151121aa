"""The contents of a record's frames: the header, a tick with its commands, a rejected tick, a snapshot.

    header    [0, run, limits, policies, config, code, flags]
    tick      [1, number, [event, ...], [command, ...], 127]
    rejected  [2, number, [event, ...], reason, 127]
    snapshot  [3, ticks, events, what `snapshots.snapshot` returned, 127]

Called by `recorder` and `reader`; `segment_log` arranges frames in files, and `codec` says how events and commands are
written. The events of a tick have one time and consecutive ids, and one of them is the cause of each command. A
rejected tick is one that the scheduler could not handle: nothing changed, so the next tick gets the same number and
ids. `ticks` and `events` of a snapshot count those before it. No frame but the header ends with a zero, because 127 is
last: a frame whose end never reached the disk ends with zeros.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Any, Literal

import msgpack
from msgspec import Meta, Struct, field

from engine.commands import AnyCommand
from engine.events import Event
from engine.ids import EventId
from engine.record.codec import (
    AnyEvent,
    CodecError,
    check_finite,
    pack,
    unpacker,
)
from engine.record.segment_log import Contents

FORMAT_VERSION = 1
"""After the release, every change of this file, of a class's fields or of the tags increments it. Until then version 1
may change: regenerate the golden records. Golden records of released versions stay readable."""
LOGIC_FLAGS: frozenset[str] = frozenset()
"""Named changes of the scheduler's decisions. A record names those in force, so that older records still replay. None
so far."""
TICK_START, REJECTED_START, SNAPSHOT_START = b"\x95\x01", b"\x95\x02", b"\x95\x03"
"""First bytes of frame payloads: an array of five elements that begins with the kind."""
HEADING_BYTES = 64
"""More than the parts of a frame up to the time of its first event take."""
MAX_REASON_BYTES = 1 << 20
"""A longer reason of a rejected tick is cut."""
SCHEDULE = Contents(
    name="schedule record",
    magic=b"step-log",
    version=FORMAT_VERSION,
    # with lengths without a checksum, with hashes of the state, and before format 1
    development_magics=(b"step-sch", b"step-seg", b"step-rec"),
)


Number = Annotated[int, Meta(ge=0)]
"""The number of a tick, or a number of ticks or events: from 0."""


class Frame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all frames."""


class Header(Frame, frozen=True, kw_only=True, tag=0):
    """The first frame: what a new scheduler needs, and which run and engine wrote the record."""

    run: str
    """The run's id."""
    limits: dict[str, Any]
    """`Limits.to_plain()`."""
    policies: dict[str, str] = field(default_factory=dict)
    """Decision → name, as `PolicySet.names` has it."""
    config: dict[str, Any] = field(default_factory=dict)
    """The full resolved configuration, as plain values."""
    code: str = ""
    """Version of the engine that wrote it."""
    flags: tuple[str, ...] = ()
    """Logic flags in force."""
    cores: int = 0
    """CPU cores of the machine that runs the scheduler; 0: unknown, or it has GPUs."""


class Tick(Frame, frozen=True, tag=1):
    """Events that were decided together, and the commands of the scheduler."""

    number: Number
    events: tuple[AnyEvent, ...]
    """At least one."""
    commands: tuple[AnyCommand, ...]
    end: Literal[127] = 127

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


class Rejected(Frame, frozen=True, tag=2):
    """A tick that the scheduler could not handle; the run stopped there. The last of the events was being handled, or
    a reaction to all of them failed."""

    number: Number
    events: tuple[AnyEvent, ...]
    reason: str
    end: Literal[127] = 127


class Snapshot(Frame, frozen=True, tag=3):
    """The scheduler's state after `ticks` ticks of `position` events, as `snapshots.snapshot` returned it."""

    ticks: Number
    position: Number
    plain: list[Any]
    end: Literal[127] = 127


def encode_header(header: Header) -> bytes:
    """Raises: `CodecError` if the configuration has a value that the record cannot hold."""
    return pack(header)


def decode_header(data: bytes) -> Header:
    """Raises: `CodecError`, also for logic flags that this engine does not know."""
    header: Header = _header(data)
    unknown = sorted(set(header.flags) - LOGIC_FLAGS)
    if unknown:
        raise CodecError(f"unknown logic flag {unknown[0]!r}; use the engine version that wrote the record")
    return header


def encode_rejected(number: int, events: Sequence[Event], reason: str) -> bytes:
    """The reason is cut to `MAX_REASON_BYTES`, and invalid Unicode in it is replaced. Raises: as `pack`."""
    clean = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
    return pack(Rejected(number, tuple(events), clean))


def encode_snapshot(ticks: int, position: EventId, plain: Sequence[Any]) -> bytes:
    """Raises: as `pack`."""
    return pack(Snapshot(ticks, position, list(plain)))


def heading_of(data: bytes) -> tuple[int, EventId, float | None]:
    """(number, first event, time) of a tick, or (ticks, events) before a snapshot and no time, without decoding the
    rest."""
    walker = msgpack.Unpacker()
    walker.feed(data[len(TICK_START) : HEADING_BYTES])
    timed = not data.startswith(SNAPSHOT_START)
    number = walker.unpack()
    if timed:
        walker.read_array_header()  # the events
        walker.read_array_header()  # the first event
        walker.skip()  # its tag
    first, at = walker.unpack(), walker.unpack() if timed else None
    return number, first, at


def decode_frame(data: bytes) -> Tick | Rejected | Snapshot:
    """Any frame but the header. Raises: `CodecError`."""
    frame: Tick | Rejected | Snapshot = _frame(data)
    if isinstance(frame, Snapshot):
        return frame
    if not frame.events or frame.events[0].id < 0 or not isfinite(frame.events[0].at):
        raise CodecError("invalid frame: a tick has at least one event, with an id from 0 and a finite time")
    first, at = frame.events[0].id, frame.events[0].at
    for place, event in enumerate(frame.events):
        if event.id != first + place or event.at != at:
            raise CodecError(f"the events of a tick must have one time and consecutive ids, but one has id {event.id}")
    check_finite(frame.events)
    if isinstance(frame, Tick):
        causes = range(first, first + len(frame.events))
        for command in frame.commands:
            if command.cause not in causes:
                law = f"must have an event of its tick as its cause, from {first} to {causes[-1]}"
                raise CodecError(f"{type(command).__name__} has cause {command.cause}, but {law}")
        check_finite(frame.commands)
    return frame


_header, _frame = unpacker(Header), unpacker(Tick | Rejected | Snapshot)
