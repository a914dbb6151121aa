"""A log in a directory: append-only segments of length-prefixed, checksummed frames, and the index that lists them.

    00000000.seg   magic (8) | format version u32 | segment number u32 | epoch u32 | CRC-32 of these u32
                   then frames: payload length u32 | CRC-32 of the payload u32 | CRC-32 of these u32 | payload;
                   all little-endian
    index.json     the number of the first segment; for each segment its bytes and CRC-32, or null while it is open

The schedule's record and the durable trajectory store are such logs. They say what a payload contains and which
segments may be deleted. A log does not interpret payloads, and never mistakes damage in the middle for its end.

Each process that writes a log begins a new segment. The number of that segment is its *epoch*, which is written into
all its segments. An epoch is unique, because a segment is created only if none has its number.

A crash tears at most the end of the last segment: the file is cut short, or ends with zeros that were never replaced.
So an unreadable frame is a torn tail only in the last segment, only while the index lists the segment as open, and only
if its last byte is missing or zero and nothing but zeros follows. The length of a frame has a checksum of its own, so
damage cannot make a frame in the middle claim the rest of the file. Everything else raises `RecordError` with file and
offset.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

from engine.errors import FULL, EngineError, RecordDamaged, RecordError, RecordHeld, RunDamaged, StorageFull
from engine.record.files import RecordLock, fsync, open_private, open_regular, replace_whole, require_regular

# -- the index ---------------------------------------------------------------------------------------------------------


INDEX = "index.json"
INDEX_FORMAT = 1


class Seal(NamedTuple):
    """What a segment is, once it is closed."""

    bytes: int
    crc32: int


class Index(NamedTuple):
    """The segments of a log, as its writer listed them."""

    seals: list[Seal | None]
    """For each segment its seal; None: it is open."""
    first: int = 0
    """Number of the first segment. The earlier ones were deleted."""


def load_index(directory: Path) -> Index | None:
    """The index of a log; None if there is none. Raises: `RunDamaged`."""
    path = directory / INDEX
    try:
        with open_regular(path) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDamaged(str(path), f"cannot be read: {error.strerror or error}") from None
    try:
        return _index_from(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunDamaged(str(path), f"cannot be used: {error}; restore it from a copy") from None


def _index_from(text: bytes) -> Index:
    said = json.loads(text)
    first, listed = said["first"], said["segments"]
    if said["format"] != INDEX_FORMAT:
        raise ValueError(f"its format is {said['format']!r}, but this engine reads {INDEX_FORMAT}")
    if said["crc32"] != _checksum(first, listed):
        raise ValueError("its checksum does not match")
    return Index([None if entry is None else Seal(*entry) for entry in listed], first)


def store_index(directory: Path, index: Index) -> None:
    """Replace the index atomically and sync it to disk. Raises: `OSError`."""
    said = {"format": INDEX_FORMAT, "first": index.first, "segments": index.seals}
    text = json.dumps({**said, "crc32": _checksum(index.first, index.seals)})
    with replace_whole(directory / INDEX) as file:
        file.write(f"{text}\n".encode())


def _checksum(first: object, listed: object) -> int:
    return crc32(json.dumps([first, listed]).encode())


def seal_of(path: Path) -> Seal:
    """The seal of a complete segment. Raises: `OSError`, `RunDamaged`."""
    with open_regular(path, buffering=0) as file:
        return _measured(file)


def _measured(file: BinaryIO) -> Seal:
    size = checksum = 0
    while chunk := file.read(1 << 20):
        size, checksum = size + len(chunk), crc32(chunk, checksum)
    return Seal(size, checksum)


# -- frames and segments -----------------------------------------------------------------------------------------------


_PREAMBLE = struct.Struct("<8sIII")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<II")
PREAMBLE_BYTES = _PREAMBLE.size + _CRC.size
FRAME_BYTES = _FRAME.size + _CRC.size
SUFFIX = ".seg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a log contains."""

    name: str
    """For messages."""
    magic: bytes
    version: int
    """The newest format version that this engine reads, and the one that it writes."""
    development_magics: tuple[bytes, ...] = ()
    """First bytes of segments in the formats of development versions."""


class Torn(NamedTuple):
    """The incomplete bytes that a crash left after the last whole frame."""

    path: str
    offset: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.path}: torn after byte {self.offset}: the last {self.bytes} bytes are an incomplete frame"


class Payload(NamedTuple):
    """The bytes of one frame and their location."""

    data: bytes
    path: str
    offset: int

    @property
    def end(self) -> int:
        """The offset behind its frame."""
        return self.offset + FRAME_BYTES + len(self.data)


def frame(payload: bytes) -> bytes:
    """The bytes of a payload in a segment."""
    return frame_head(payload) + payload


def frame_head(payload: bytes) -> bytes:
    return _checked(_FRAME.pack(len(payload), crc32(payload)))


def preamble(contents: Contents, number: int, epoch: int) -> bytes:
    """The first bytes of a segment."""
    return _checked(_PREAMBLE.pack(contents.magic, contents.version, number, epoch))


def _checked(head: bytes) -> bytes:
    return head + _CRC.pack(crc32(head))


def _is_checked(head: bytes) -> bool:
    """Whether the last bytes are the checksum of the others."""
    return head == _checked(head[: -_CRC.size])


def segment_name(number: int) -> str:
    return f"{number:08d}{SUFFIX}"


def has_segments(directory: Path) -> bool:
    """Whether a directory exists and has a segment. Raises: `RecordError` if it cannot be read."""
    return directory.is_dir() and bool(_names_in(directory))


def _names_in(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(directory) if entry.name.endswith(SUFFIX))
    except OSError as error:
        raise RecordError(str(directory), 0, f"cannot be read: {error.strerror or error}") from None


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One file of a log, or the same bytes in memory."""

    number: int
    path: str
    open: Callable[[], BinaryIO]
    listed: bool
    """The index lists it."""
    seal: Seal | None = None


class SegmentLog:
    """The segments of a log, which can be read any number of times."""

    def __init__(self, contents: Contents, segments: Sequence[SegmentFile]) -> None:
        self.contents = contents
        self.segments = segments
        self.torn: Torn | None = None
        """The torn end, known once it was reached."""

    def payloads(self, at: int = 0, offset: int = PREAMBLE_BYTES) -> Iterator[Payload]:
        """Every whole frame in order, from byte `offset` of the segment at index `at` on. Raises: `RecordError`."""
        for place in range(at, len(self.segments)):
            yield from self.payloads_of(place, offset if place == at else PREAMBLE_BYTES)

    def payloads_of(self, at: int, offset: int = PREAMBLE_BYTES) -> Iterator[Payload]:
        """The whole frames of one segment, from byte `offset` on, where a frame must begin. Raises: `RecordError`."""
        segment = self.segments[at]
        try:
            with segment.open() as file:
                yield from self._frames(segment, file, offset)
        except OSError as error:
            raise RecordError(segment.path, 0, f"cannot be read: {error.strerror or error}") from None

    def verify(self, at: int) -> int:
        """Check the checksums of a segment without its payloads. Returns its size in bytes. Raises: `RecordError`."""
        segment = self.segments[at]
        if segment.seal is not None:
            try:
                with segment.open() as file:
                    if _measured(file) == segment.seal:
                        return segment.seal.bytes
            except OSError as error:
                raise RecordError(segment.path, 0, f"cannot be read: {error.strerror or error}") from None
        size = max((payload.end for payload in self.payloads_of(at)), default=PREAMBLE_BYTES)
        if segment.seal is not None:
            raise RecordDamaged(segment.path, 0, f"was changed after it was written: its checksum differs from {INDEX}")
        return size

    def require_index(self) -> None:
        """Raises: `RunDamaged` if no index lists a segment: a missing segment, or missing last frames of a closed one,
        would not be noticed."""
        if not any(segment.listed for segment in self.segments):
            raise RunDamaged(str(Path(self.segments[0].path).parent / INDEX), "is missing; restore it from a copy")

    def _frames(self, segment: SegmentFile, file: BinaryIO, offset: int) -> Iterator[Payload]:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if not self._has_preamble(segment, file, size):
            return
        read, path = file.read, segment.path
        file.seek(offset)
        while offset < size:
            head = read(FRAME_BYTES)
            behind = offset + FRAME_BYTES
            if len(head) < FRAME_BYTES or not _is_checked(head):
                return self._end(segment, file, offset, behind)
            length, checksum = _FRAME.unpack_from(head)
            behind += length
            if behind > size or crc32(data := read(length)) != checksum:
                return self._end(segment, file, offset, behind)
            yield Payload(data, path, offset)
            offset = behind
        if segment.seal is not None and offset != segment.seal.bytes:
            there = "ends here" if offset < segment.seal.bytes else "continues to here"
            law = f"the segment {there}, but it was closed after {segment.seal.bytes} bytes"
            raise RecordDamaged(path, offset, law)

    def _has_preamble(self, segment: SegmentFile, file: BinaryIO, size: int) -> bool:
        """False if the last segment was torn before its first frame. Raises: `RecordError` if it is damaged."""
        contents, path = self.contents, segment.path
        head = file.read(PREAMBLE_BYTES)
        if segment is self.segments[-1] and not segment.listed:
            begun = size < PREAMBLE_BYTES and contents.magic.startswith(head[: len(contents.magic)])
            if begun or not (head.strip(b"\0") or file.read().strip(b"\0")):
                self.torn = Torn(path, 0, size)
                return False
        if size < PREAMBLE_BYTES:
            raise RecordDamaged(path, 0, "the file is too short for a segment: it was cut or damaged")
        magic, version, number, _ = _PREAMBLE.unpack_from(head)
        if magic in contents.development_magics:
            raise RecordError(
                path, 0, f"has the unreleased development format {version}, which this engine cannot read; use the "
                "engine version that started this run, or keep its weights: engine export"
            )  # fmt: skip
        if magic != contents.magic:
            raise RecordError(path, 0, f"not a segment of a {contents.name}")
        if not _is_checked(head):
            raise RecordDamaged(path, 0, "the segment's first bytes are damaged")
        if not 1 <= version <= contents.version:
            law = f"the format version is {version}, but at most {contents.version} is known; use a newer engine"
            raise RecordError(path, len(magic), law)
        if number != segment.number:
            law = f"this is segment {number} of a {contents.name}, but segment {segment.number} was expected"
            raise RecordError(path, len(magic) + 4, law)
        return True

    def _end(self, segment: SegmentFile, file: BinaryIO, offset: int, behind: int) -> None:
        """Note an unreadable frame as the torn end of the log, or raise `RecordError` if it cannot be that. `behind`:
        where the frame ends, as far as it can be read."""
        file.seek(offset)
        rest = file.read()
        whole = behind <= offset + len(rest)
        problem = "the frame's checksum does not match" if whole else "the file ends within a frame"
        last = segment is self.segments[-1]
        if not last or segment.seal is not None:
            problem = f"{problem}, and {'the segment was closed' if last else 'segments follow'}"
        elif len(rest.rstrip(b"\0")) < behind - offset:
            self.torn = Torn(segment.path, offset, len(rest))
            return
        raise RecordDamaged(segment.path, offset, problem)


def open_log(directory: Path, contents: Contents, *, missing_end: bool = False) -> SegmentLog:
    """The log in a directory. It may have no segments. `missing_end`: the newest segments may be missing.

    Raises: `RecordError` if the directory cannot be read or a segment is missing or not a regular file.
    """
    index = load_index(directory)  # before the segments: a running run adds one, then lists it
    seals, first = index or Index([])
    names = [name for name in _names_in(directory) if name >= segment_name(first)]  # earlier ones are being deleted
    for number, name in enumerate(names, first):
        if name != segment_name(number):
            raise RecordDamaged(str(directory), 0, f"{segment_name(number)} is missing, but {name} exists")
        require_regular(directory / name)
    if len(names) < len(seals) and not (missing_end and names):
        lost = directory / segment_name(first + len(names))
        raise RunDamaged(str(lost), f"is missing, but {INDEX} lists it; restore it from a copy")
    return SegmentLog(
        contents,
        [
            SegmentFile(first + at, str(directory / name), _opener(directory / name), at < len(seals), seal)
            for at, (name, seal) in enumerate(zip(names, [*seals, *[None] * len(names)], strict=False))
        ],
    )


def _opener(path: Path) -> Callable[[], BinaryIO]:
    return lambda: open_regular(path)


def read_payload(handle: int, path: Path, offset: int, bytes: int) -> Payload:
    """Read one frame at a known place. Raises: `OSError`, `RecordError` if it is damaged."""
    data = os.pread(handle, bytes, offset)
    payload = data[FRAME_BYTES:]
    if data[:FRAME_BYTES] != frame_head(payload):
        raise RecordDamaged(str(path), offset, "the frame is damaged: its checksum does not match")
    return Payload(payload, str(path), offset)


# -- writing -----------------------------------------------------------------------------------------------------------


MAX_HELD_BYTES = 1 << 20
"""Maximum size of the frames in memory; more are flushed at once."""


class SegmentWriter:
    """Appends frames to a log, behind the segments that are there. `lock`: on its directory; `close` releases it.

    A writer never changes what was written. After a failed write, every later one raises the same error, because a log
    must not have a gap. It notices when its directory is deleted or moved, and never writes after a writer of a higher
    epoch has begun.

    Raises: `RecordError` if the log cannot be written, `RecordHeld` if a writer of a higher epoch has begun,
    `RunDamaged` if its directory was deleted or moved, `StorageFull` if there is no room.
    """

    def __init__(
        self, directory: Path, contents: Contents, lock: RecordLock, *, segment_bytes: int, fsync: bool = False
    ) -> None:
        """`segment_bytes`: a segment that has reached this size is closed. `fsync`: `flush` returns only when the disk
        has the frames, not merely the operating system."""
        self.directory = directory
        self.contents = contents
        self.segment_bytes = segment_bytes
        self.fsync = fsync
        self.failure: EngineError | None = None
        """What every later write raises."""
        self.number = -1
        self.path = directory
        """The open segment."""
        self.epoch = -1
        """Number of the first segment that this writer began; -1: it has not begun any."""
        self._lock = lock
        self._file: BinaryIO | None = None
        self._index = Index([])
        self._earlier_bytes = 0
        """Bytes of the segments before the open one."""
        self._written = 0
        """Bytes of the open segment that the operating system has."""
        self._synced = 0
        """Bytes of the open segment that the disk has."""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._crc32 = 0
        """Checksum of the open segment, including the frames in memory."""
        self._identity: tuple[int, int] = (0, 0)
        """Device and inode of the open segment."""

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes of all segments that the operating system has, bytes in memory). May be read from any thread."""
        return self._earlier_bytes + self._written, self._held_bytes

    def begin(self, torn: Torn | None = None) -> None:
        """Begin the first segment of this writer. Cuts the `torn` end of the log first."""
        log = open_log(self.directory, self.contents, missing_end=True)
        gone = Path(torn.path).name if torn is not None and not torn.offset else ""
        segments = [segment for segment in log.segments if Path(segment.path).name != gone]
        try:
            if torn is not None and torn.offset:
                os.truncate(torn.path, torn.offset)
            elif torn is not None:
                os.unlink(torn.path)
            first = log.segments[0].number if log.segments else 0
            for name in _names_in(self.directory):
                if name < segment_name(first):
                    os.unlink(self.directory / name)  # a deletion that a crash interrupted
            seals: list[Seal | None] = []
            for segment in segments:
                if segment.seal is None:
                    fsync(Path(segment.path))  # else a power cut could tear a segment that another one follows
                seals.append(segment.seal or seal_of(Path(segment.path)))
        except OSError as error:
            raise self._give_up(error) from None
        self._index = Index(seals, first)
        self._earlier_bytes = sum(seal.bytes for seal in seals if seal is not None)
        self.number = self._index.first + len(seals) - 1
        self.epoch = self.number + 1
        self._begin_segment()

    def append(self, payload: bytes) -> tuple[int, int, int]:
        """Append a frame. Returns the number of its segment, and its offset and size there."""
        self._require_open()
        if self._written + self._held_bytes >= max(self.segment_bytes, PREAMBLE_BYTES + 1):
            self.flush()
            self._begin_segment()
        place = self.number, self._written + self._held_bytes, FRAME_BYTES + len(payload)
        self._hold(frame(payload))
        if self._held_bytes >= MAX_HELD_BYTES:
            self.flush()
        return place

    def flush(self, *, sync: bool = False) -> None:
        """Hand the frames in memory to the operating system; with `sync`, wait for the disk."""
        if self._file is None and self.failure is None:
            return
        file = self._require_open()
        if not self._held and not (sync and self._synced < self._written):
            return
        try:
            self._require_place()
            self._write(file)
            if self.fsync or sync:
                self._sync(file)
        except OSError as error:
            raise self._give_up(error) from None

    def delete(self, number: int) -> None:
        """Delete the first segment of the log, whose number is given. What other frames it needs must be flushed: they
        are synced to disk first."""
        file = self._require_open()
        path = self.directory / segment_name(number)
        try:
            self._require_place()
            self._sync(file)
            size = path.stat().st_size
            self._index = Index(self._index.seals[1:], number + 1)
            store_index(self.directory, self._index)
            path.unlink()
        except OSError as error:
            raise self._give_up(error) from None
        self._earlier_bytes -= size

    def seal(self) -> None:
        """Flush, and close the last segment. Does nothing when called again."""
        self.flush()
        if self._file is None:
            return
        try:
            self._require_place()
            self._seal_segment(self._file)
            self._file = None
        except OSError as error:
            raise self._give_up(error) from None
        try:
            store_index(self.directory, self._index)
        except OSError as error:
            if error.errno not in FULL:  # the log is whole without it
                raise self._give_up(error) from None

    def close(self) -> None:
        """Close the log and release its lock. Also after a failed write, and when called again."""
        try:
            if self.failure is None:
                self.seal()
        finally:
            self._release()

    def _begin_segment(self) -> None:
        """Seal the previous segment, write the first bytes of this one to disk, then list both."""
        try:
            if self._file is not None:
                self._require_place()
                self._seal_segment(self._file)
            self.number += 1
            self.path = self.directory / segment_name(self.number)
            self._earlier_bytes, self._written, self._crc32 = self._earlier_bytes + self._written, 0, 0
            self._file = open_private(self.path, "xb")
            there = os.fstat(self._file.fileno())
            self._identity = there.st_dev, there.st_ino
            self._hold(preamble(self.contents, self.number, self.epoch))
            self._write(self._file)
            self._sync(self._file)
            fsync(self.directory)
            self._index.seals.append(None)
            store_index(self.directory, self._index)
        except OSError as error:
            raise self._give_up(error) from None

    def _seal_segment(self, file: BinaryIO) -> None:
        self._sync(file)
        file.close()
        self._index.seals[-1] = Seal(self._written, self._crc32)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        self._crc32 = crc32(data, self._crc32)

    def _write(self, file: BinaryIO) -> None:
        data = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        self._written += len(data)

    def _sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())
        self._synced = self._written

    def _require_place(self) -> None:
        """Raises: `OSError` if a process of a higher epoch has begun, or the open segment no longer has its name."""
        if not self._lock.exclusive and os.path.exists(self.directory / segment_name(self.number + 1)):
            raise FileExistsError
        there = os.stat(self.path)
        if (there.st_dev, there.st_ino) != self._identity:
            raise FileNotFoundError

    def _require_open(self) -> BinaryIO:
        if self.failure is not None:
            raise self.failure
        if self._file is None:
            raise RecordError(str(self.path), self._written, f"the {self.contents.name} is closed")
        return self._file

    def _give_up(self, error: OSError) -> EngineError:
        """The error for a failed write; nothing may follow a frame that may be incomplete."""
        held, directory = self._earlier_bytes + self._written, str(self.directory)
        if isinstance(error, FileExistsError):
            law = f"a process of a higher epoch than {self.epoch} writes this {self.contents.name}"
            self.failure = RecordHeld(directory, 0, law)
        elif isinstance(error, FileNotFoundError):
            law = "was deleted or moved during the run; the run stops, because it could not be resumed"
            self.failure = RunDamaged(directory, law)
        elif error.errno in FULL:
            self.failure = StorageFull(directory, held, str(error.strerror))
        else:
            self.failure = RecordError(str(self.path), self._written, f"cannot be written: {error.strerror or error}")
        self._release()
        return self.failure

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()
