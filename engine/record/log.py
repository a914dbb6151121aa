"""The segments of a record on disk: append-only files of length-prefixed, checksummed frames.

    schedule/00000000.seg   magic (8) | format version u32 | segment number u32 | epoch u32 | first event u64 |
                            CRC-32 of these u32
                            then frames: payload length u32 | CRC-32 of the payload u32 | payload; little-endian

Called by `recorder` and `reader`. It does not interpret payloads, never reads more than `MAX_PAYLOAD_BYTES` for a
frame, and never mistakes damage in the middle of a record for its end.

Each scheduler process that writes a record begins a new segment. The number of that segment is its *epoch*, which is
written into all its segments. An epoch is unique, because a segment is created only if none has its number.

A crash tears at most the end of the last segment: the file is cut short, its last frame is incomplete, or bytes that
were never written are zeros. So an unreadable frame is a torn tail only in the last segment, only while the index lists
the segment as open, and only if no whole frame follows. A frame that is complete but has another checksum is damaged,
not torn. Everything else raises `RecordError` with file and offset.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from engine.errors import RecordError, RecordNotBegun, RunDamaged
from engine.record.files import fsync, open_regular, private_opener, require_regular
from engine.record.frames import FORMAT_VERSION, SNAPSHOT_START, check_format
from engine.record.msgpack_values import MAX_PAYLOAD_BYTES, CodecError

# -- the index ---------------------------------------------------------------------------------------------------------


INDEX = "index.json"
INDEX_FORMAT = 1
MAX_INDEX_BYTES = 1 << 24
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One segment. `first_event`: the id of its first event. `bytes`, `crc32`: of the whole file, once it is closed."""

    first_event: int
    bytes: int | None = None
    crc32: int | None = None

    @property
    def closed(self) -> bool:
        return self.bytes is not None


def load_index(directory: Path) -> list[Entry] | None:
    """The segments of a record, as its writer listed them; None if there is no index. Raises: `RunDamaged`."""
    path = directory / INDEX
    try:
        with open_regular(path) as file:
            text = file.read(min(os.fstat(file.fileno()).st_size, MAX_INDEX_BYTES) + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDamaged(str(path), f"cannot be read: {error.strerror or error}") from None
    try:
        return _entries(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunDamaged(str(path), f"cannot be used: {error}; restore it from a copy") from None


def store_index(directory: Path, entries: Sequence[Entry]) -> None:
    """Replace the index atomically and sync it to disk. Raises: `OSError`."""
    listed = [_plain(entry) for entry in entries]
    text = json.dumps({"format": INDEX_FORMAT, "segments": listed, "crc32": _checksum(listed)})
    temporary = directory / f"{INDEX}.tmp"
    with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / INDEX)
    fsync(directory)


def closed_entry(path: Path, first_event: int) -> Entry:
    """The entry of a segment that is complete. Raises: `OSError`, `RunDamaged`."""
    size, checksum = measure(path)
    return Entry(first_event, size, checksum)


def measure(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a whole file. Raises: `OSError`, `RunDamaged`."""
    size = checksum = 0
    with open_regular(path, buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = crc32(chunk, checksum)
    return size, checksum


def _entries(text: bytes) -> list[Entry]:
    if len(text) > MAX_INDEX_BYTES:
        raise ValueError(f"it has more than {MAX_INDEX_BYTES} bytes")
    said = json.loads(text)
    if said["format"] != INDEX_FORMAT:
        raise ValueError(f"its format is {said['format']!r}, but this engine reads {INDEX_FORMAT}")
    if said["crc32"] != _checksum(said["segments"]):
        raise ValueError("its checksum does not match")
    entries = [Entry(**entry) for entry in said["segments"]]
    if not all(type(entry.first_event) is int and _fits(entry) for entry in entries):
        raise ValueError("an entry of its list is not a valid segment")
    return entries


def _fits(entry: Entry) -> bool:
    return {type(entry.bytes), type(entry.crc32)} in ({int}, {type(None)})


def _plain(entry: Entry) -> dict[str, Any]:
    if not entry.closed:
        return {"first_event": entry.first_event}
    return {"first_event": entry.first_event, "bytes": entry.bytes, "crc32": entry.crc32}


def _checksum(listed: Any) -> int:
    return crc32(json.dumps(listed).encode())


# -- the segments ------------------------------------------------------------------------------------------------------


MAGIC = b"step-rec"
DEVELOPMENT_MAGIC = b"step-seg"
"""First bytes of segments in the formats of development versions, before format 1."""
_PREAMBLE = struct.Struct("<8sIIIQ")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<II")
PREAMBLE_BYTES = _PREAMBLE.size + _CRC.size
FRAME_BYTES = _FRAME.size
SUFFIX = ".seg"
MAX_SEGMENT_BYTES = 1 << 28
"""Maximum size of a segment. A recorder closes segments much earlier."""
FRAME_STARTS = (b"\x96\x01", b"\x95\x02", SNAPSHOT_START)
"""First bytes of payloads (array of 6, kind 1; arrays of 5, kinds 2 and 3), to find a whole frame after a damaged one.
"""
LOOKED_AT = 4096
"""Maximum number of checksums computed after damage; more than any real tail has."""
FOUND = 1 << 18
"""Maximum number of candidates after damage. One that claims more bytes than are left costs almost nothing."""


SECTOR_BYTES = 512
"""A disk writes at least this much atomically."""
Expected = Callable[[], int]
"""Returns the number of the next event."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a record, or the same bytes in memory."""

    name: str
    open: Callable[[], BinaryIO]
    entry: Entry | None = None
    """Its entry in the index; None if it is not listed."""


@dataclass(frozen=True, slots=True)
class Torn:
    """The incomplete bytes that a crash left after the last whole frame."""

    path: str
    offset: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.path}: torn after byte {self.offset}: the last {self.bytes} bytes are an incomplete frame"


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of one frame and their location."""

    data: bytes
    path: str
    offset: int


def frame(payload: bytes) -> bytes:
    """The bytes of a payload in a segment."""
    return _FRAME.pack(len(payload), crc32(payload)) + payload


def preamble(number: int, epoch: int, first_event: int) -> bytes:
    """The first bytes of a segment."""
    head = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, number, epoch, first_event)
    return head + _CRC.pack(crc32(head))


def first_event_of(path: Path) -> int:
    """The first event of a segment that was read before. Raises: `OSError`, `RunDamaged`."""
    with open_regular(path) as file:
        return int(_PREAMBLE.unpack(file.read(_PREAMBLE.size))[-1])


def segment_name(number: int) -> str:
    return f"{number:08d}{SUFFIX}"


def segments_of(directory: Path, *, missing_end: bool = False) -> list[Segment]:
    """The segments of a record in order. `missing_end`: the newest may be missing.

    Raises: `RecordError` if there are none, one is missing or one is not a regular file.
    """
    entries = load_index(directory)  # before the segments: a run that is running adds one, then lists it
    listed = entries or []
    try:
        found = sorted(entry.name for entry in os.scandir(directory) if entry.name.endswith(SUFFIX))
        for name in found:
            require_regular(directory / name)
    except OSError as error:
        raise RecordError(str(directory), 0, f"cannot be read: {error.strerror or error}") from None
    if not found and not listed:
        raise RecordError(str(directory), 0, "has no schedule record")
    for number, name in enumerate(found):
        if name != segment_name(number):
            raise RecordError(str(directory), 0, f"{segment_name(number)} is missing, but {name} exists")
    if len(found) < len(listed) and not (missing_end and found):
        raise RunDamaged(
            str(directory / segment_name(len(found))), f"is missing, but {INDEX} lists it; restore it from a copy"
        )
    return [
        Segment(str(directory / name), _opener(directory / name), listed[number] if number < len(listed) else None)
        for number, name in enumerate(found)
    ]


def _opener(path: Path) -> Callable[[], BinaryIO]:
    return lambda: open_regular(path)


def payloads(
    segments: list[Segment],
    report_torn: Callable[[Torn], None],
    first: int = 0,
    offset: int = PREAMBLE_BYTES,
    expected: Expected | None = None,
) -> Iterator[Payload]:
    """Every whole frame of a record, in order: from byte `offset` of segment `first` on. `expected` is asked at the
    beginning of each segment which event it must begin with. Raises: `RecordError`."""
    for number in range(first, len(segments)):
        begun = number == first and offset != PREAMBLE_BYTES
        yield from payloads_of(
            segments, number, report_torn, offset if number == first else PREAMBLE_BYTES, None if begun else expected
        )


def payloads_of(
    segments: list[Segment],
    number: int,
    report_torn: Callable[[Torn], None],
    offset: int = PREAMBLE_BYTES,
    expected: Expected | None = None,
) -> Iterator[Payload]:
    """The whole frames of one segment. Raises: `RecordError`."""
    segment, last = segments[number], number == len(segments) - 1
    try:
        with segment.open() as file:
            yield from _SegmentReader(segment, file, number, last, report_torn, expected).frames(offset)
    except OSError as error:
        raise RecordError(segment.name, 0, f"cannot be read: {error.strerror or error}") from None


def verify_segment(segments: list[Segment], number: int, report_torn: Callable[[Torn], None]) -> int:
    """Check the checksums of a segment without decoding a frame. Returns its size in bytes. Raises: `RecordError`."""
    segment, size, checksum = segments[number], 0, 0
    if segment.entry is not None and segment.entry.closed:
        try:
            with segment.open() as file:
                while chunk := file.read(CHUNK_BYTES):
                    size, checksum = size + len(chunk), crc32(chunk, checksum)
        except OSError as error:
            raise RecordError(segment.name, 0, f"cannot be read: {error.strerror or error}") from None
        if (size, checksum) == (segment.entry.bytes, segment.entry.crc32):
            return size
    size = sum(FRAME_BYTES + len(payload.data) for payload in payloads_of(segments, number, report_torn))
    if segment.entry is not None and segment.entry.closed:
        raise RecordError(segment.name, 0, f"was changed after it was written: its checksum differs from {INDEX}")
    return PREAMBLE_BYTES + size


class _SegmentReader:
    """One pass through one segment."""

    def __init__(
        self,
        segment: Segment,
        file: BinaryIO,
        number: int,
        last: bool,
        report_torn: Callable[[Torn], None],
        expected: Expected | None,
    ) -> None:
        self.path = segment.name
        self.entry = segment.entry
        self.closed = segment.entry is not None and segment.entry.closed
        self.file = file
        self.number = number
        self.last = last
        self.report_torn = report_torn
        self.expected = expected
        self.size = file.seek(0, os.SEEK_END)
        file.seek(0)

    def frames(self, offset: int = PREAMBLE_BYTES) -> Iterator[Payload]:
        """The frames from byte `offset` on, where a frame must begin."""
        if self.size > MAX_SEGMENT_BYTES:
            raise self.error(0, f"the segment has {self.size} bytes, but at most {MAX_SEGMENT_BYTES} are allowed")
        if not self._check_preamble():
            return
        read = self.file.read
        self.file.seek(offset)
        while offset < self.size:
            head = read(FRAME_BYTES)
            if len(head) < FRAME_BYTES:
                return self._end(offset, "the file ends within a frame")
            length, checksum = _FRAME.unpack(head)
            if length > MAX_PAYLOAD_BYTES:
                raise self.error(offset, f"a frame claims {length} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed")
            if not length:
                return self._end(offset, "an empty frame", ends=offset)
            if offset + FRAME_BYTES + length > self.size:
                return self._end(offset, f"a frame claims {length} bytes, but the file has fewer left")
            data = read(length)
            if crc32(data) != checksum:
                return self._end(offset, "the frame's checksum does not match", ends=offset + FRAME_BYTES + length)
            yield Payload(data, self.path, offset)
            offset += FRAME_BYTES + length
        self._check_length(offset)

    def error(self, offset: int, reason: str) -> RecordError:
        return RecordError(self.path, offset, reason)

    def _check_preamble(self) -> bool:
        """False if the last segment was torn before its first frame."""
        head = self.file.read(PREAMBLE_BYTES)
        short, torn = len(head) < PREAMBLE_BYTES, self.last and self.entry is None
        if torn and self.number and ((MAGIC.startswith(head[: len(MAGIC)]) and short) or not head.strip(b"\0")):
            self.report_torn(Torn(self.path, 0, self.size))
            return False
        if short:
            if torn and not self.number:
                raise RecordNotBegun(self.path, 0, "the file is too short: the run ended before its record began")
            raise self.error(0, "the file is too short for a segment: it was cut or damaged")
        magic, version, number, epoch, first_event = _PREAMBLE.unpack_from(head)
        if magic == DEVELOPMENT_MAGIC:
            raise self.error(
                0, f"has the unreleased development format {version}, which this engine cannot read; "
                "use the engine version that started this run"
            )  # fmt: skip
        if magic != MAGIC:
            raise self.error(0, "not a segment of a schedule record")
        if _CRC.unpack_from(head, _PREAMBLE.size)[0] != crc32(head[: _PREAMBLE.size]):
            raise self.error(0, "the segment's first bytes are damaged")
        try:
            check_format(version)
        except CodecError as error:
            raise self.error(len(MAGIC), str(error)) from None
        if number != self.number:
            raise self.error(
                len(MAGIC) + 4, f"this is segment {number} of a record, but segment {self.number} was expected"
            )
        if epoch > number:
            raise self.error(len(MAGIC) + 8, f"segment {number} has epoch {epoch}, but must have at most {number}")
        self._check_first_event(first_event)
        return True

    def _check_first_event(self, first: int) -> None:
        belongs = [self.expected()] if self.expected is not None else []
        belongs += [self.entry.first_event] if self.entry is not None else []
        for event in belongs:
            if first != event:
                reason = f"the segment begins with event {first}, but event {event} was expected"
                raise self.error(len(MAGIC) + 12, reason)

    def _check_length(self, offset: int) -> None:
        """Raises: `RecordError` if a closed segment is too short or too long."""
        if self.closed and self.entry is not None and offset != self.entry.bytes:
            there = "ends here" if offset < (self.entry.bytes or 0) else "continues to here"
            raise self.error(offset, f"the segment {there}, but it was closed after {self.entry.bytes} bytes")

    def _end(self, offset: int, problem: str, ends: int | None = None) -> None:
        """Report an unreadable frame as the torn end of the record, or raise `RecordError` if it cannot be that.

        It is torn if only zeros follow byte `ends` (the file's end by default), no whole frame follows its first byte,
        and some of its own bytes are missing.
        """
        if not self.last or self.closed:
            raise self.error(offset, f"{problem}, and {'the segment was closed' if self.last else 'segments follow'}")
        self.file.seek(offset)
        rest = self.file.read()
        if ends is not None and rest[ends - offset :].strip(b"\0"):
            raise self.error(offset, problem)
        if ends is not None and ends > offset and not lacks_bytes(rest[: ends - offset], offset):
            raise self.error(offset, f"{problem}, although it is complete")
        if ends is None and len(rest) > FRAME_BYTES and crc32(rest[FRAME_BYTES:]) == _FRAME.unpack_from(rest)[1]:
            raise self.error(offset, f"{problem}, although it is complete")
        if _holds_whole_frame(rest):
            raise self.error(offset, f"{problem}, and whole frames follow")
        self.report_torn(Torn(self.path, offset, len(rest)))


def lacks_bytes(data: bytes, offset: int) -> bool:
    """Whether some of the bytes from `offset` of a file may not have reached the disk: they end in zeros or contain a
    sector of zeros."""
    aligned = range(-offset % SECTOR_BYTES, len(data) - SECTOR_BYTES + 1, SECTOR_BYTES)
    return data.endswith(b"\0") or any(not data[at : at + SECTOR_BYTES].strip(b"\0") for at in aligned)


def _holds_whole_frame(rest: bytes) -> bool:
    """Whether a whole frame begins after the first byte of `rest`."""
    found = looked = 0
    for start in FRAME_STARTS:
        at = rest.find(start, FRAME_BYTES + 1)
        while at >= 0:
            length, checksum = _FRAME.unpack_from(rest, at - FRAME_BYTES)
            found += 1
            if length <= len(rest) - at:
                looked += 1
                if crc32(rest[at : at + length]) == checksum:
                    return True
            if looked > LOOKED_AT or found > FOUND:
                return True
            at = rest.find(start, at + 1)
    return False
