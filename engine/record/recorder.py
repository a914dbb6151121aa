"""Recorders: write the driver's frames to disk, keep them in memory, or drop them.

Called by the driver: `write` or `reject` once per tick, in order, and `flush` before any of its commands is executed.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from engine.commands import Command, FinishRun, SaveCheckpoint
from engine.errors import RecordError, RecordNotBegun
from engine.events import Event
from engine.ids import EventId
from engine.record.codec import CodecError, pack
from engine.record.files import RecordLock
from engine.record.frames import SCHEDULE, Header, Tick, encode_header, encode_rejected, encode_snapshot
from engine.record.segment_log import SegmentFile, SegmentWriter, Torn, frame, has_segments, preamble

SEGMENT_BYTES = 64 << 20
"""A segment that has reached this size is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEnd:
    """The end of an existing record: its numbers of ticks and events, and the torn end that a crash left."""

    ticks: int
    events: int
    torn: Torn | None = None


class SnapshotMark(NamedTuple):
    """Which snapshot of which record: a lost end of a record may be written again, with the same numbers."""

    ticks: int
    events: EventId
    crc32: int


class RecordWriter:
    """Base of recorders: encodes ticks, and passes them to `append`."""

    append: Callable[[bytes], object]
    epoch = 0
    next_tick = 0
    """Number of the next tick."""
    next_event = 0
    newest_snapshot: SnapshotMark | None = None

    def write(self, events: Sequence[Event], commands: Sequence[Command]) -> Tick:
        """Append a tick, and return it."""
        tick = Tick(self.next_tick, tuple(self._expected(events)), tuple(commands))
        self.append(pack(tick))
        self.next_tick += 1
        self.next_event += len(events)
        return tick

    def reject(self, events: Sequence[Event], reason: str) -> None:
        """Append a tick that the scheduler could not handle."""
        self.append(encode_rejected(self.next_tick, self._expected(events), reason))

    def snapshot(self, plain: Sequence[Any]) -> None:
        """Append a snapshot of the state after the ticks so far, as `snapshots.snapshot` returned it."""
        data = encode_snapshot(self.next_tick, self.next_event, plain)
        self.append(data)
        self.newest_snapshot = SnapshotMark(self.next_tick, self.next_event, crc32(data))

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""

    def close(self) -> None: ...

    def _expected(self, events: Sequence[Event]) -> Sequence[Event]:
        if events[0].id != self.next_event:
            law = f"the next position in the record is {self.next_event}"
            raise CodecError(f"the event has id {events[0].id}, but {law}")
        return events


class Recorder(RecordWriter):
    """Appends ticks to a new record, or to an existing one.

    Args: `header` begins a new record; a `RecordEnd` continues an existing one in a new segment,
    what is torn cut off.
    Raises: `RecordError` where the directory holds a record already, and as `SegmentWriter`, now or later; `CodecError`
    for an event or a command that the format cannot hold.
    """

    def __init__(
        self,
        directory: str | Path,
        header: Header | RecordEnd,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        lock: RecordLock | None = None,
    ) -> None:
        """`lock`: a lock on this directory that the caller holds; `close` releases it."""
        self.directory = Path(directory)
        self._syncs = False
        """The next flush waits for the disk, because a checkpoint was ordered: it must not be ahead of the record."""
        self._ends = False
        """The frames in memory are the last: the next flush closes the record."""
        first = encode_header(header) if isinstance(header, Header) else None
        lock = lock or RecordLock(self.directory)
        self.log = SegmentWriter(self.directory, SCHEDULE, lock, segment_bytes=segment_bytes)
        self.append = self.log.append
        try:
            if has_segments(self.directory) != isinstance(header, RecordEnd):
                if isinstance(header, RecordEnd):
                    raise RecordNotBegun(str(self.directory), 0, "has no schedule record")
                raise RecordError(str(self.directory), 0, "the directory has a record already; use an empty directory")
            if isinstance(header, RecordEnd):
                self.next_tick, self.next_event = header.ticks, header.events
                self.log.begin(header.torn)
            else:
                self.log.begin()
            self.epoch = self.log.epoch
            if first is not None:
                self.log.append(first)
            self.flush()
        except BaseException:
            lock.release()
            raise

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes of the record that the operating system has, bytes in memory). May be read from any thread."""
        return self.log.progress

    def write(self, events: Sequence[Event], commands: Sequence[Command]) -> Tick:
        for command in commands:
            self._syncs |= isinstance(command, SaveCheckpoint)
            self._ends |= isinstance(command, FinishRun)
        return super().write(events, commands)

    def flush(self) -> None:
        if self._ends:
            self.log.seal()
        else:
            self.log.flush(sync=self._syncs)
            self._syncs = False

    def close(self) -> None:
        """Flush and close the record. Does nothing when called again or after a failed write."""
        self.log.close()


class MemoryRecorder(RecordWriter):
    """Keeps the frames in memory, for tests and embedding. `reader.read` accepts it like a directory."""

    def __init__(self, header: Header) -> None:
        self.header = encode_header(header)
        self.frames: list[bytes] = []
        """Payloads, without the header."""
        self.append = self.frames.append

    def to_bytes(self) -> bytes:
        """The record as one segment."""
        return preamble(SCHEDULE, 0, 0) + b"".join(map(frame, (self.header, *self.frames)))

    def segments(self) -> list[SegmentFile]:
        return [SegmentFile(0, "(memory)", lambda: io.BytesIO(self.to_bytes()), listed=True)]


class NullRecorder(RecordWriter):
    """Keeps nothing."""

    def write(self, events: Sequence[Event], commands: Sequence[Command]) -> Tick:
        return Tick(self.next_tick, tuple(events), tuple(commands))

    def reject(self, events: Sequence[Event], reason: str) -> None: ...

    def snapshot(self, plain: Sequence[Any]) -> None: ...
