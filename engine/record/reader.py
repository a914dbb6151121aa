"""Reads a record: its header, then its frames in order. Reports a torn end, which a crash can leave.

    record = read("runs/latest/schedule")
    for frame in record.frames(): ...
    print(record.torn)

Called by `replayer`, by `engine.inspect` and by tests. No byte is trusted: the reader returns a frame or raises a
`RecordError` that names the file and the byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from engine.commands import FinishRun
from engine.errors import RecordError, RecordNotBegun, RunDamaged
from engine.ids import EventId
from engine.record.frames import Handled, Header, Part, Rejected, decode_frame, decode_header, place_of_part
from engine.record.log import (
    FRAME_BYTES,
    INDEX,
    PREAMBLE_BYTES,
    Payload,
    Segment,
    Torn,
    payloads,
    payloads_of,
    segments_of,
    verify_segment,
)
from engine.record.msgpack_values import CodecError
from engine.record.recorder import MemoryRecorder


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler's state after `position` events, as it was written."""

    position: EventId
    parts: tuple[Part, ...]
    path: str
    offset: int

    @property
    def plain(self) -> list[Any]:
        """The parts that `snapshots.snapshot` returned."""
        return [part.plain for part in self.parts]

    def error(self, reason: str) -> RecordError:
        """An error with the snapshot's file and offset."""
        return RecordError(self.path, self.offset, reason)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a snapshot: from byte `offset` of a segment up to, without, byte `behind`."""

    segment: int
    offset: int
    behind: int
    position: EventId


class Record:
    """A record, which can be read any number of times."""

    def __init__(self, name: str, segments: list[Segment]) -> None:
        self.name = name
        self.torn: Torn | None = None
        """The torn end, known once `frames` has reached it."""
        self._segments = segments
        first = next(payloads(segments, self._report_torn, expected=lambda: 0), None)
        if first is None:
            torn_at = self.torn.offset if self.torn else 0
            raise RecordNotBegun(segments[0].name, torn_at, "has no header: the run ended before it wrote one")
        self._header_at = first.path, first.offset
        try:
            self.header: Header = decode_header(first.data)
        except CodecError as error:
            raise self.header_error(str(error)) from None

    def frames(self, answers: bool = True, *, before: Place | None = None) -> Iterator[Handled | Rejected]:
        """The events of the record in order; with `before`, only those before a snapshot. Without `answers`, commands
        are neither decoded nor checked.

        Raises: `RecordError`.
        """
        for frame in self.frames_and_snapshots(answers):
            if isinstance(frame, Snapshot):
                if before is not None and frame.position >= before.position:
                    return
            else:
                yield frame

    def frames_and_snapshots(
        self, answers: bool = True, *, after: Place | None = None
    ) -> Iterator[Handled | Rejected | Snapshot]:
        """As `frames`, with each complete snapshot in its place among them. Raises: `RecordError`."""
        position = 0 if after is None else after.position
        number, offset = (0, PREAMBLE_BYTES) if after is None else (after.segment, after.behind)
        source = payloads(self._segments, self._report_torn, number, offset, expected=lambda: position)
        if after is None:
            next(source)
        parts = _Parts()
        for payload in source:
            frame = _decode(payload, answers)
            if isinstance(frame, Part):
                whole = parts.add(frame, payload, position)
                if whole is not None:
                    yield whole
                continue
            parts.interrupt(payload)
            if frame.event.id != position:
                raise RecordError(
                    payload.path, payload.offset, f"found event {frame.event.id}, but expected event {position}"
                )
            if type(frame) is Handled:
                position += 1
            yield frame

    def snapshots(self) -> Iterator[Place]:
        """The complete snapshots of the record, newest first. Raises: `RecordError` for damage in a segment it read."""
        for number in reversed(range(len(self._segments))):
            found: list[Place] = []
            begun: tuple[int, int] | None = None
            for payload in payloads_of(self._segments, number, self._report_torn):
                try:
                    place = place_of_part(payload.data)
                except CodecError as error:
                    raise RecordError(payload.path, payload.offset, str(error)) from None
                if place is None:
                    continue
                position, part, parts = place
                if part == 0:
                    begun = payload.offset, position
                if begun is not None and begun[1] == position and part == parts - 1:
                    behind = payload.offset + FRAME_BYTES + len(payload.data)
                    found.append(Place(segment=number, offset=begun[0], behind=behind, position=position))
            yield from reversed(found)

    def snapshot(self, place: Place) -> Snapshot:
        """Read the snapshot at a place. Raises: `RecordError`."""
        parts = _Parts()
        for payload in payloads_of(self._segments, place.segment, self._report_torn, place.offset):
            part = _decode(payload, False)
            if not isinstance(part, Part):
                break
            whole = parts.add(part, payload, place.position)
            if whole is not None:
                return whole
        raise RecordError(self._segments[place.segment].name, place.offset, "the snapshot is incomplete")

    def outcome(self) -> FinishRun | None:
        """The end of the run, if the last event ended it. Decodes only the events after the newest snapshot that has
        any. Raises: `RecordError`."""
        for after in chain(self.snapshots(), (None,)):
            events = [frame for frame in self.frames_and_snapshots(after=after) if type(frame) is Handled]
            if events:
                return next((order for order in events[-1].commands if isinstance(order, FinishRun)), None)
        return None

    def verify(self, before: Place) -> int:
        """Check the checksums of all segments before that of a snapshot, without decoding them. Returns their size in
        bytes. Raises: `RecordError`."""
        return sum(verify_segment(self._segments, number, self._report_torn) for number in range(before.segment))

    def require_index(self) -> None:
        """Raises: `RunDamaged` for several segments without an index, because the newest may then be missing unseen."""
        if len(self._segments) > 1 and all(segment.entry is None for segment in self._segments):
            raise RunDamaged(str(Path(self.name) / INDEX), "is missing; restore it from a copy")

    def header_error(self, reason: str) -> RecordError:
        """An error with the header's file and offset."""
        return RecordError(*self._header_at, reason)

    def handled(self, position: EventId) -> Handled:
        """The event at a position, which must exist, with its commands. Raises: `RecordError`."""
        return next(frame for frame in self.frames() if type(frame) is Handled and frame.event.id == position)

    def _report_torn(self, torn: Torn) -> None:
        self.torn = torn


def read(source: str | Path | MemoryRecorder, *, missing_end: bool = False) -> Record:
    """Open a record: the directory of its segments, or a recorder in memory. `missing_end`: the newest segments may be
    missing, for whoever continues with what is left. Raises: `RecordError`."""
    if isinstance(source, MemoryRecorder):
        return Record("(memory)", source.segments())
    return Record(str(source), segments_of(Path(source), missing_end=missing_end))


class _Parts:
    """Collects the parts of a snapshot. Drops the parts of a snapshot whose end was torn off."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._first: Payload | None = None

    def add(self, part: Part, payload: Payload, position: EventId) -> Snapshot | None:
        """The snapshot, once its last part is added. Raises: `RecordError` for a part out of order."""
        if part.number == 0 and (self._first is None or self._first.path != payload.path):
            self._parts, self._first = [], payload
        expected = (position, len(self._parts), self._parts[0].parts if self._parts else part.parts)
        if self._first is None or (part.position, part.number, part.parts) != expected:
            reason = f"part {part.number} of the snapshot after {part.position} events is out of order"
            raise RecordError(payload.path, payload.offset, reason)
        self._parts.append(part)
        if len(self._parts) < part.parts:
            return None
        first, whole = self._first, tuple(self._parts)
        self._parts, self._first = [], None
        return Snapshot(position, whole, first.path, first.offset)

    def interrupt(self, payload: Payload) -> None:
        """Another frame follows. Forget parts that were torn off at the end of their segment. Raises: `RecordError` if
        the frame is in the same segment."""
        if self._first is not None and self._first.path == payload.path:
            raise RecordError(payload.path, payload.offset, "an event interrupts a snapshot")
        self._parts, self._first = [], None


def _decode(payload: Payload, answers: bool) -> Handled | Rejected | Part:
    try:
        return decode_frame(payload.data, answers)
    except CodecError as error:
        raise RecordError(payload.path, payload.offset, str(error)) from None
