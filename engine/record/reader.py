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

from engine.commands import FinishRun
from engine.errors import RecordDamaged, RecordError, RecordNotBegun
from engine.events import Event, SettingChanged
from engine.ids import EventId
from engine.record.codec import CodecError
from engine.record.frames import (
    REJECTED_START,
    SCHEDULE,
    SNAPSHOT_START,
    Header,
    Rejected,
    Snapshot,
    Tick,
    decode_frame,
    decode_header,
    heading_of,
)
from engine.record.recorder import MemoryRecorder
from engine.record.segment_log import PREAMBLE_BYTES, Payload, SegmentLog, Torn, open_log
from engine.scheduling.settings import FIGURES, changed_limits
from engine.states.limits import Limits


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a snapshot: from byte `offset` of a segment up to, without, byte `behind`."""

    segment: int
    offset: int
    behind: int
    ticks: int
    position: EventId


@dataclass(frozen=True, slots=True)
class Heading:
    """What a frame is, without its contents."""

    place: Place
    """For a tick, with its number and first event."""
    at: float | None
    """Time of a tick; None for a snapshot."""
    rejected: Rejected | None = None


class Record:
    """A record, which can be read any number of times."""

    def __init__(self, name: str, log: SegmentLog, *, is_part: bool = False) -> None:
        """`is_part`: it may begin with a snapshot, and lack the ticks before it."""
        self.name = name
        self._log = log
        first = next(log.payloads(), None)
        if first is None:
            torn_at = self.torn.offset if self.torn else 0
            raise RecordNotBegun(log.segments[0].path, torn_at, "has no header: the run ended before it wrote one")
        self._header_at = first
        try:
            self.header: Header = decode_header(first.data)
        except CodecError as error:
            raise self.header_error(str(error)) from None
        self.begin: Place | None = next(self.snapshots(), None) if is_part else None
        """The snapshot before its first tick, if it lacks the ticks before it."""

    @property
    def torn(self) -> Torn | None:
        """The torn end, known once `frames` has reached it."""
        return self._log.torn

    def frames(self) -> Iterator[Tick | Rejected]:
        """The ticks of the record in order. Raises: `RecordError`."""
        return (frame for frame in self.frames_and_snapshots() if not isinstance(frame, Snapshot))

    def ticks(self) -> Iterator[Tick]:
        """The ticks of the record in order, without rejected ones. Raises: `RecordError`."""
        return (frame for frame in self.frames() if type(frame) is Tick)

    def events(self) -> Iterator[Event]:
        """The events of the record in order. Raises: `RecordError`."""
        return (event for tick in self.ticks() for event in tick.events)

    def frames_and_snapshots(self, after: Place | None = None) -> Iterator[Tick | Rejected | Snapshot]:
        """As `frames`, with the snapshots among them. `after`: only those after a snapshot. Raises: `RecordError`."""
        before = after or self.begin
        ticks, position = (0, 0) if before is None else (before.ticks, before.position)
        number, offset = (0, self._header_at.end) if after is None else (after.segment, after.behind)
        for payload in self._log.payloads(number, offset):
            frame = _decode(payload)
            if isinstance(frame, Snapshot):
                begins, what = (frame.ticks, frame.position), "a snapshot before tick"
            else:
                begins, what = (frame.number, frame.events[0].id), "tick"
            if begins != (ticks, position):
                found = f"found {what} {begins[0]} from event {begins[1]}"
                reason = f"{found}, but expected tick {ticks} from event {position}"
                raise RecordDamaged(payload.path, payload.offset, reason)
            if type(frame) is Tick:
                ticks, position = ticks + 1, position + len(frame.events)
            yield frame

    def headings(self, segment: int = 0, offset: int = 0) -> Iterator[Heading]:
        """What each frame is, in order, from byte `offset` of a segment on; 0: its first frame. Only rejected ticks are
        decoded. Raises: `RecordError`."""
        for number in range(segment, len(self._log.segments)):
            begin = offset if number == segment and offset else self._header_at.end if number == 0 else PREAMBLE_BYTES
            for payload in self._log.payloads_of(number, begin):
                place, at = _heading(number, payload)
                frame = _decode(payload) if payload.data.startswith(REJECTED_START) else None
                rejected = frame if isinstance(frame, Rejected) else None
                yield Heading(place, at, rejected)

    def snapshots(self) -> Iterator[Place]:
        """The snapshots of the record, newest first. Raises: `RecordError` for damage in a segment it read."""
        for number in reversed(range(len(self._log.segments))):
            payloads = self._log.payloads_of(number)
            found = [_heading(number, one)[0] for one in payloads if one.data.startswith(SNAPSHOT_START)]
            yield from reversed(found)

    def snapshot(self, place: Place) -> Snapshot:
        """Read the snapshot at a place. Raises: `RecordError`."""
        payload = self._payload(place)
        frame = _decode(payload)
        if not isinstance(frame, Snapshot):
            raise RecordError(payload.path, payload.offset, "is not the snapshot that was there")
        return frame

    def snapshot_bytes(self, place: Place) -> bytes:
        """The snapshot at a place, without decoding it. Raises: `RecordError`."""
        return self._payload(place).data

    def _payload(self, place: Place) -> Payload:
        return next(self._log.payloads_of(place.segment, place.offset))

    def outcome(self) -> FinishRun | None:
        """The end of the run, if the last tick ended it. Decodes only the ticks after the newest snapshot that has
        any. Raises: `RecordError`."""
        _, ticks = self._newest_ticks()
        return next((order for tick in ticks[-1:] for order in tick.commands if isinstance(order, FinishRun)), None)

    def limits(self) -> Limits:
        """The limits at the end of the record, with all changed settings; decodes as little as `outcome`. Raises:
        `RecordError`."""
        place, ticks = self._newest_ticks()
        limits = Limits.from_plain(dict(self.header.limits if place is None else self.snapshot(place).plain[1]))
        for event in (event for tick in ticks for event in tick.events):
            if isinstance(event, SettingChanged) and event.setting in FIGURES:
                limits = changed_limits(limits, event.setting, event.value)
        return limits

    def _newest_ticks(self) -> tuple[Place | None, list[Tick]]:
        """The newest snapshot that ticks follow, and these ticks; without one, all ticks."""
        for after in chain(self.snapshots(), (None,)):
            ticks = [frame for frame in self.frames_and_snapshots(after) if type(frame) is Tick]
            if ticks:
                return after, ticks
        return None, []

    def verify(self, before: Place) -> int:
        """Check the checksums of all segments before that of a snapshot, without decoding them. Returns their size in
        bytes. Raises: `RecordError`."""
        return sum(map(self._log.verify, range(before.segment)))

    def require_index(self) -> None:
        """Raises: `RunDamaged` if there is no index."""
        self._log.require_index()

    def error_at(self, place: Place, reason: str) -> RecordError:
        """An error with the file and offset of a snapshot."""
        return RecordError(self._log.segments[place.segment].path, place.offset, reason)

    def header_error(self, reason: str) -> RecordError:
        """An error with the header's file and offset."""
        return RecordError(self._header_at.path, self._header_at.offset, reason)

    def tick(self, number: int) -> Tick:
        """The tick with a number, which must exist, with its commands. Raises: `RecordError`."""
        return next(tick for tick in self.ticks() if tick.number == number)


def read(source: str | Path | MemoryRecorder, *, missing_end: bool = False) -> Record:
    """Open a record: the directory of its segments, or a recorder in memory. `missing_end`: the newest segments may be
    missing; the caller continues with the rest. Raises: `RecordError`."""
    if isinstance(source, MemoryRecorder):
        return Record("(memory)", SegmentLog(SCHEDULE, source.segments()))
    log = open_log(Path(source), SCHEDULE, missing_end=missing_end)
    if not log.segments:
        raise RecordNotBegun(str(source), 0, "has no schedule record")
    return Record(str(source), log)


def _heading(segment: int, payload: Payload) -> tuple[Place, float | None]:
    """The place of a frame that is no header, and the time of a tick."""
    ticks, position, at = heading_of(payload.data)
    return Place(segment, payload.offset, payload.end, ticks, position), at


def _decode(payload: Payload) -> Tick | Rejected | Snapshot:
    try:
        return decode_frame(payload.data)
    except CodecError as error:
        raise RecordDamaged(payload.path, payload.offset, str(error)) from None
