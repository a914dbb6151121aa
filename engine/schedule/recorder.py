"""Recorders: where the driver's frames go. On disk, into memory, or nowhere.

Called by the driver through `ports.Recorder`: `write` or `reject` once per event in the order of their positions,
`flush` before any of their commands leaves. A recorder never changes what is already written, and once a write failed
it takes nothing more: a record with a hole in it would be worse than one that ends.
"""

import io
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine.commands import Command
from engine.errors import FULL, EngineError, RecordError, StorageFull
from engine.events import Event
from engine.private_files import open_private
from engine.schedule.appending import Held, fsync
from engine.schedule.frames import Header, encode_handled, encode_header, encode_rejected
from engine.schedule.lock import RecordLock
from engine.schedule.packing import CodecError
from engine.schedule.store import (
    MAX_SEGMENT_BYTES,
    PREAMBLE_BYTES,
    SUFFIX,
    Segment,
    Torn,
    frame,
    preamble,
    segment_name,
    segments_of,
)

SEGMENT_BYTES = 64 << 20
"""A segment is closed once it is at least this long."""
HELD_BYTES = 1 << 20
"""Frames wait in memory up to here, even where nobody flushes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """How far a record goes that was read to its end: so many events, and what a crash left behind the last."""

    events: int
    torn: Torn | None = None


class Recorder:
    """Appends frames to the segments of a new record, or of one that is there.

    Args: `header` begins a new record; with an `After` the one that is there goes on instead, in a segment of its own,
    what is torn cut off. `fsync`: `flush` returns only when the disk has the frames, not merely the operating system;
    costs a disk's latency per flush and is what a power cut, but not a killed process, needs.
    Raises: `RecordError` where the directory holds a record already, is held by another process or cannot be written,
    now or later, `StorageFull` where it finds no room; `CodecError` for an event or a command that the format cannot
    hold.
    """

    def __init__(
        self,
        directory: str | Path,
        header: Header | After,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        fsync: bool = False,
        lock: RecordLock | None = None,
    ) -> None:
        """`lock`: on this directory, held already; it is released with the recorder."""
        self.directory = Path(directory)
        self.segment_bytes = min(segment_bytes, MAX_SEGMENT_BYTES // 2)
        self.fsync = fsync
        self.next_event = 0
        self._number = -1
        self._file: BinaryIO | None = None
        self._offset = 0
        """Bytes of the open segment that the operating system has."""
        self._closed_bytes = 0
        """Of the segments before."""
        self._held = Held()
        first = encode_header(header) if isinstance(header, Header) else None
        self._lock = lock or RecordLock(self.directory)
        try:
            if isinstance(header, After):
                self._take_up(header)
            else:
                self._require_empty()
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

    def reject(self, event: Event, reason: str) -> None:
        self._append(encode_rejected(_expected(event, self.next_event), reason))

    def snapshot(self, payloads: Sequence[bytes]) -> None:
        """Append a snapshot of what the events so far have led to, as `encode_snapshot` gave it; one that is too long
        for a segment is left out, since the record does without."""
        size = sum(map(len, payloads))
        if size > MAX_SEGMENT_BYTES // 4:
            return
        for number, payload in enumerate(payloads):
            self._append(payload, rest=number > 0)

    def flush(self) -> None:
        file = self._open_file()
        try:
            self._offset += self._held.write(file, fsync=self.fsync)
        except OSError as error:
            raise self._give_up(error) from None

    def close(self) -> None:
        """Flush and let go of the file. A second call does nothing, nor does one after a failed write."""
        if self._file is None:
            return
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._lock.release()

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes that the operating system has, bytes that wait in memory). May be read from any thread."""
        return self._closed_bytes + self._offset, self._held.bytes

    @property
    def path(self) -> Path:
        """The segment being written."""
        return self.directory / segment_name(self._number)

    def _append(self, payload: bytes, rest: bool = False) -> None:
        """`rest`: it belongs to what was appended before, and into the same segment."""
        self._open_file()
        if not rest and self._offset + self._held.bytes >= max(self.segment_bytes, PREAMBLE_BYTES + 1):
            self.flush()
            self._begin_segment()
        self._held.add(frame(payload))
        if self._held.bytes >= HELD_BYTES:
            self.flush()

    def _take_up(self, after: After) -> None:
        """Cut what is torn, so that whole frames alone lie before the segment that follows."""
        self.next_event = after.events
        self._number = len(segments_of(self.directory)) - 1
        if after.torn is None:
            return
        try:
            if after.torn.offset == 0:
                os.unlink(after.torn.path)
                self._number -= 1
            else:
                os.truncate(after.torn.path, after.torn.offset)
        except OSError as error:
            reason = f"its torn end cannot be cut: {error.strerror or error}"
            raise RecordError(after.torn.path, after.torn.offset, reason) from None

    def _require_empty(self) -> None:
        try:
            taken = sorted(name for name in os.listdir(self.directory) if name.endswith(SUFFIX))
        except OSError as error:
            raise RecordError(str(self.directory), 0, f"cannot be written: {error.strerror or error}") from None
        if taken:
            raise RecordError(
                str(self.directory / taken[0]), 0, "a record is here already; a new one needs an empty directory"
            )

    def _begin_segment(self) -> None:
        try:
            if self._number >= 0:
                fsync(self.path)  # else a power cut could tear a segment that another one follows
            if self._file is not None:
                self._file.close()
            self._number += 1
            self._closed_bytes, self._offset = self._closed_bytes + self._offset, 0
            self._held.add(preamble(self._number, self.next_event))
            self._file = open_private(self.path, "xb")
            if self.fsync:
                fsync(self.directory)
        except OSError as error:
            raise self._give_up(error) from None

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise RecordError(
                str(self.path), self._offset, "the record ended here: it was closed or could not be written"
            )
        return self._file

    def _give_up(self, error: OSError) -> EngineError:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()
        if error.errno in FULL:
            return StorageFull(str(self.directory), self._closed_bytes + self._offset, str(error.strerror))
        return RecordError(str(self.path), self._offset, f"cannot be written: {error.strerror or error}")


class MemoryRecorder:
    """The same frames, kept as bytes: for tests and embedding. `reader.read` takes it like a directory.

    Args: `last`: keep only that many frames, the newest; such a record shows how a run ended but cannot be replayed.
    """

    def __init__(self, header: Header, *, last: int | None = None) -> None:
        self.header = encode_header(header)
        self.frames: deque[bytes] = deque(maxlen=last)
        """Payloads, without the header's."""
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
        return preamble(0, 0) + b"".join(map(frame, (self.header, *self.frames)))

    def segments(self) -> list[Segment]:
        return [Segment("(memory)", lambda: io.BytesIO(self.to_bytes()))]


class NullRecorder:
    """Keeps nothing."""

    def write(self, event: Event, commands: Sequence[Command], state_hash: int) -> None: ...

    def reject(self, event: Event, reason: str) -> None: ...

    def snapshot(self, payloads: Sequence[bytes]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _expected(event: Event, position: int) -> Event:
    if event.id != position:
        raise CodecError(f"event {event.id} cannot be recorded at position {position}")
    return event
