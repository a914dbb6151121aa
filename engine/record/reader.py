"""A record as it is read: its header, then its frames in order, with what a crash left of its end reported.

    record = read("runs/latest/schedule")
    for frame in record.frames(): ...
    print(record.torn)

Called by `replayer`, by `engine.inspect` and by tests. Nothing is trusted: whatever the bytes say, the answer is a
frame or a `RecordError` that names the file and the byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The whole state after `position` events, as it was written."""

    position: EventId
    parts: tuple[Part, ...]
    path: str
    offset: int

    @property
    def plain(self) -> list[Any]:
        """What `snapshots.snapshot` gave."""
        return [part.plain for part in self.parts]

    def error(self, reason: str) -> RecordError:
        """What is wrong with it, with its place."""
        return RecordError(self.path, self.offset, reason)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a snapshot lies: from byte `offset` of a segment up to `behind`."""

    segment: int
    offset: int
    behind: int
    position: EventId


class Record:
    """A record that can be read, any number of times."""

    def __init__(self, name: str, segments: list[Segment]) -> None:
        self.name = name
        self.torn: Torn | None = None
        """The torn end, known once `frames` has come to it."""
        self._segments = segments
        first = next(payloads(segments, self._report_torn, expected=lambda: 0), None)
        if first is None:
            torn_at = self.torn.offset if self.torn else 0
            raise RecordNotBegun(segments[0].name, torn_at, "no header: the run ended before its record began")
        self._header_at = first.path, first.offset
        try:
            self.header: Header = decode_header(first.data)
        except CodecError as error:
            raise self.header_error(str(error)) from None

    def frames(self, answers: bool = True, *, before: Place | None = None) -> Iterator[Handled | Rejected]:
        """Every event of the record, in order, or those before a snapshot; without `answers`, commands are neither
        decoded nor checked.

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
        """As `frames`, and each snapshot that is whole, in its place among them. Raises: `RecordError`."""
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
                    payload.path, payload.offset, f"event {frame.event.id} stands where {position} belongs"
                )
            if type(frame) is Handled:
                position += 1
            yield frame

    def snapshots(self) -> Iterator[Place]:
        """Where the record has a whole snapshot, the newest first. Raises: `RecordError`, of the segments looked at."""
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
        """The snapshot at a place. Raises: `RecordError`."""
        parts = _Parts()
        for payload in payloads_of(self._segments, place.segment, self._report_torn, place.offset):
            part = _decode(payload, False)
            if not isinstance(part, Part):
                break
            whole = parts.add(part, payload, place.position)
            if whole is not None:
                return whole
        raise RecordError(self._segments[place.segment].name, place.offset, "the snapshot has not all its parts")

    def verify(self, before: Place) -> int:
        """Check the checksums of all segments before that of a snapshot, without decoding them; how many bytes they
        have. Raises: `RecordError`."""
        return sum(verify_segment(self._segments, number, self._report_torn) for number in range(before.segment))

    def require_index(self) -> None:
        """Raises: `RunDamaged` for a record of several segments without an index: nobody knows where it ends."""
        if len(self._segments) > 1 and all(segment.entry is None for segment in self._segments):
            raise RunDamaged(str(Path(self.name) / INDEX), "is missing; restore it from a copy")

    def header_error(self, reason: str) -> RecordError:
        """What is wrong with what the header says, with its place."""
        return RecordError(*self._header_at, reason)

    def handled(self, position: EventId) -> Handled:
        """The event at a position that the record has, its commands included. Raises: `RecordError`."""
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
    """The parts of a snapshot as they come; those of one whose last was torn off come to nothing."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._first: Payload | None = None

    def add(self, part: Part, payload: Payload, position: EventId) -> Snapshot | None:
        """The snapshot, with its last part. Raises: `RecordError` for a part in a place that is not its own."""
        if part.number == 0 and (self._first is None or self._first.path != payload.path):
            self._parts, self._first = [], payload
        expected = (position, len(self._parts), self._parts[0].parts if self._parts else part.parts)
        if self._first is None or (part.position, part.number, part.parts) != expected:
            reason = f"part {part.number} of a snapshot after event {part.position} stands where none belongs"
            raise RecordError(payload.path, payload.offset, reason)
        self._parts.append(part)
        if len(self._parts) < part.parts:
            return None
        first, whole = self._first, tuple(self._parts)
        self._parts, self._first = [], None
        return Snapshot(position, whole, first.path, first.offset)

    def interrupt(self, payload: Payload) -> None:
        """Another frame follows: the parts were torn off at the end of their segment, or the record is damaged."""
        if self._first is not None and self._first.path == payload.path:
            raise RecordError(payload.path, payload.offset, "an event stands within a snapshot")
        self._parts, self._first = [], None


def _decode(payload: Payload, answers: bool) -> Handled | Rejected | Part:
    try:
        return decode_frame(payload.data, answers)
    except CodecError as error:
        raise RecordError(payload.path, payload.offset, str(error)) from None
