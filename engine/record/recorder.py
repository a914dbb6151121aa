"""Recorders: write the driver's frames to disk, keep them in memory, or drop them.

Called by the driver through `runtime.driver.Recorder`: `write` or `reject` once per event, in order, and `flush` before
any of their commands is sent. A recorder never changes what it has written. After a failed write it refuses every
frame, because a record must not have a gap. It keeps the index of its segments (`log.py`), and it notices when its
directory is deleted or moved: a run that cannot be resumed must not continue. It never writes behind a recorder of a
higher epoch.
"""

import io
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from engine.commands import Command, FinishRun, SaveCheckpoint
from engine.errors import FULL, EngineError, RecordError, RecordHeld, RunDamaged, StorageFull
from engine.events import Event
from engine.record.files import Held, RecordLock, fsync, open_private
from engine.record.frames import Header, encode_handled, encode_header, encode_rejected
from engine.record.log import (
    MAX_SEGMENT_BYTES,
    PREAMBLE_BYTES,
    SUFFIX,
    Entry,
    Segment,
    Torn,
    closed_entry,
    first_event_of,
    frame,
    load_index,
    preamble,
    segment_name,
    segments_of,
    store_index,
)
from engine.record.msgpack_values import CodecError

SEGMENT_BYTES = 64 << 20
"""A segment that has reached this size is closed."""
HELD_BYTES = 1 << 20
"""Maximum size of the frames in memory; more are flushed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEnd:
    """The end of an existing record: its number of events, and the torn end that a crash left."""

    events: int
    torn: Torn | None = None


class Recorder:
    """Appends frames to the segments of a new record, or of one that is there.

    Args: `header` begins a new record; a `RecordEnd` continues an existing one in a new segment,
    what is torn cut off. `fsync`: `flush` returns only when the disk has the frames, not merely the operating system;
    costs a disk's latency per flush and is what a power cut, but not a killed process, needs.
    Raises: `RecordError` where the directory holds a record already, is held by another process or cannot be written,
    now or later, `StorageFull` where it finds no room; `CodecError` for an event or a command that the format cannot
    hold.
    """

    keeps = True

    def __init__(
        self,
        directory: str | Path,
        header: Header | RecordEnd,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        fsync: bool = False,
        lock: RecordLock | None = None,
    ) -> None:
        """`lock`: a lock on this directory that the caller holds; `close` releases it."""
        self.directory = Path(directory)
        self.segment_bytes = min(segment_bytes, MAX_SEGMENT_BYTES // 2)
        self.fsync = fsync
        self.next_event = 0
        self._number = -1
        self._file: BinaryIO | None = None
        self._offset = 0
        """Bytes of the open segment that were written to the operating system."""
        self._closed_bytes = 0
        """Bytes of the earlier segments."""
        self._held = Held()
        self._crc32 = 0
        """Checksum of the open segment, including the frames in memory."""
        self._index: list[Entry] = []
        self._syncs = False
        """The next flush waits for the disk, because a checkpoint was ordered: it must not be ahead of the record."""
        self._looks = False
        """The next flush checks that the file still has its name."""
        self._ends = False
        """The frames in memory are the last: the next flush closes the record."""
        self._closed = False
        first = encode_header(header) if isinstance(header, Header) else None
        self._lock = lock or RecordLock(self.directory)
        try:
            if isinstance(header, RecordEnd):
                self._take_up(header)
            else:
                self._require_empty()
            self.epoch = self._number + 1
            self._begin_segment()
            if first is not None:
                self._append(first)
            self.flush()
        except BaseException:
            self._lock.release()
            raise

    def write(self, event: Event, commands: Sequence[Command], state_hash: int) -> None:
        self._append(encode_handled(_expected(event, self.next_event), commands, state_hash))
        self.next_event += 1
        for command in commands:
            self._syncs |= isinstance(command, SaveCheckpoint)
            self._looks |= self._syncs
            self._ends |= isinstance(command, FinishRun)

    def reject(self, event: Event, reason: str) -> None:
        self._append(encode_rejected(_expected(event, self.next_event), reason))

    def snapshot(self, payloads: Sequence[bytes]) -> None:
        """Append a snapshot of the state after the events so far, from `encode_snapshot`. A snapshot above a quarter of
        `MAX_SEGMENT_BYTES` is skipped: a resume can do without it."""
        size = sum(map(len, payloads))
        if size > MAX_SEGMENT_BYTES // 4:
            return
        self._looks = True
        for number, payload in enumerate(payloads):
            self._append(payload, rest=number > 0)

    def flush(self) -> None:
        """Raises: as the class, and `RunDamaged` if the directory was deleted or moved."""
        if self._closed:
            return
        file = self._open_file()
        written = self._held.bytes > 0
        try:
            if not self._lock.exclusive and os.path.exists(self._next_path):
                raise FileExistsError
            self._offset += self._held.write(file, fsync=self.fsync or self._syncs)
            if written or self._looks:
                self._require_place(file)
            if self._ends:
                self._close_segment(file)
                self._file, self._closed = None, True
        except OSError as error:
            raise self._give_up(error) from None
        self._syncs = self._looks = False

    def close(self) -> None:
        """Flush and close the file. Does nothing when called again or after a failed write."""
        try:
            if self._file is not None:
                self._ends = True
                self.flush()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._lock.release()

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes written to the operating system, bytes in memory). May be read from any thread."""
        return self._closed_bytes + self._offset, self._held.bytes

    @property
    def path(self) -> Path:
        """The segment being written."""
        return self.directory / segment_name(self._number)

    def _append(self, payload: bytes, rest: bool = False) -> None:
        """`rest`: it must be in the same segment as the frame before."""
        self._open_file()
        if not rest and self._offset + self._held.bytes >= max(self.segment_bytes, PREAMBLE_BYTES + 1):
            self._looks = True
            self.flush()
            self._begin_segment()
        self._hold(frame(payload))
        if self._held.bytes >= HELD_BYTES:
            self.flush()

    def _hold(self, data: bytes) -> None:
        self._held.add(data)
        self._crc32 = crc32(data, self._crc32)

    def _take_up(self, end: RecordEnd) -> None:
        """Cut the torn end, so that only whole frames precede the next segment, and list the existing segments."""
        self.next_event = end.events
        segments = segments_of(self.directory, missing_end=True)
        self._number = len(segments) - 1
        if end.torn is not None:
            self._cut(end.torn)
        try:
            listed = (load_index(self.directory) or [])[: self._number + 1]
            for number in range(self._number + 1):
                if number >= len(listed) or not listed[number].closed:
                    path = self.directory / segment_name(number)
                    fsync(path)  # else a power cut could tear a segment that another one follows
                    listed[number:] = [closed_entry(path, first_event_of(path)), *listed[number + 1 :]]
        except OSError as error:
            raise self._give_up(error) from None
        self._index = listed

    def _cut(self, torn: Torn) -> None:
        try:
            if torn.offset == 0:
                os.unlink(torn.path)
                self._number -= 1
            else:
                os.truncate(torn.path, torn.offset)
        except OSError as error:
            reason = f"the torn end cannot be cut: {error.strerror or error}"
            raise RecordError(torn.path, torn.offset, reason) from None

    def _require_empty(self) -> None:
        try:
            taken = sorted(name for name in os.listdir(self.directory) if name.endswith(SUFFIX))
        except OSError as error:
            raise RecordError(str(self.directory), 0, f"cannot be written: {error.strerror or error}") from None
        if taken:
            raise RecordError(
                str(self.directory / taken[0]), 0, "the directory has a record already; use an empty directory"
            )

    def _begin_segment(self) -> None:
        """Sync the previous segment to disk, then the first bytes of this one, then list both."""
        try:
            if self._file is not None:
                self._close_segment(self._file)
            self._number += 1
            self._closed_bytes, self._offset, self._crc32 = self._closed_bytes + self._offset, 0, 0
            self._file = open_private(self.path, "xb")
            self._next_path = self.directory / segment_name(self._number + 1)
            self._hold(preamble(self._number, self.epoch, self.next_event))
            self._offset = self._held.write(self._file, fsync=True)
            fsync(self.directory)
            self._index.append(Entry(self.next_event))
            store_index(self.directory, self._index)
        except OSError as error:
            raise self._give_up(error) from None

    def _close_segment(self, file: BinaryIO) -> None:
        """Sync the open segment to disk and list it as closed. Raises: `OSError`."""
        os.fsync(file.fileno())
        file.close()
        self._index[-1] = Entry(self._index[-1].first_event, self._offset, self._crc32)
        if self._ends:  # else the next segment is listed at once
            try:
                store_index(self.directory, self._index)
            except OSError as error:
                if error.errno not in FULL:  # the record is whole without it
                    raise

    def _require_place(self, file: BinaryIO) -> None:
        """Raises: `RunDamaged` if the file being written no longer has its name."""
        there = os.fstat(file.fileno())
        if there.st_nlink and self._looks:
            with suppress(FileNotFoundError):
                if os.path.samestat(there, os.stat(self.path)):
                    return
        elif there.st_nlink:
            return
        file.close()
        self._file = None
        self._lock.release()
        raise RunDamaged(
            str(self.directory),
            "was deleted or moved during the run; the run stops, because it could not be resumed",
        )

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise RecordError(
                str(self.path), self._offset, "the recorder is closed: the run ended or an earlier write failed"
            )
        return self._file

    def _give_up(self, error: OSError) -> EngineError:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()
        if isinstance(error, FileExistsError):
            return RecordHeld(
                str(self.directory), 0, f"a scheduler of a higher epoch than {self.epoch} writes this record"
            )
        if error.errno in FULL:
            return StorageFull(str(self.directory), self._closed_bytes + self._offset, str(error.strerror))
        return RecordError(str(self.path), self._offset, f"cannot be written: {error.strerror or error}")


class MemoryRecorder:
    """Keeps the frames in memory, for tests and embedding. `reader.read` accepts it like a directory.

    Args: `last`: keep only so many newest frames; such a record shows how a run ended but cannot be replayed.
    """

    keeps = True
    epoch = 0

    def __init__(self, header: Header, *, last: int | None = None) -> None:
        self.header = encode_header(header)
        self.frames: deque[bytes] = deque(maxlen=last)
        """Payloads, without the header."""
        self.next_event = 0

    def write(self, event: Event, commands: Sequence[Command], state_hash: int) -> None:
        self.frames.append(encode_handled(_expected(event, self.next_event), commands, state_hash))
        self.next_event += 1

    def reject(self, event: Event, reason: str) -> None:
        self.frames.append(encode_rejected(_expected(event, self.next_event), reason))

    def snapshot(self, payloads: Sequence[bytes]) -> None:
        self.frames.extend(payloads)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def to_bytes(self) -> bytes:
        """The record as one segment."""
        return preamble(0, 0, 0) + b"".join(map(frame, (self.header, *self.frames)))

    def segments(self) -> list[Segment]:
        return [Segment("(memory)", lambda: io.BytesIO(self.to_bytes()))]


class NullRecorder:
    """Keeps nothing."""

    keeps = False
    epoch = 0

    def write(self, event: Event, commands: Sequence[Command], state_hash: int) -> None: ...

    def reject(self, event: Event, reason: str) -> None: ...

    def snapshot(self, payloads: Sequence[bytes]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _expected(event: Event, position: int) -> Event:
    if event.id != position:
        raise CodecError(f"the event has id {event.id}, but the next position in the record is {position}")
    return event
