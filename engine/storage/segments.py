"""The disk format of the durable trajectory store: append-only segments of length-prefixed, checksummed entries.

    trajectories/00000000.seg   magic (8) | format version u32 | segment number u32 | CRC-32 of these u32
                                then entries: payload length u32 | CRC-32 of the payload u32 | payload; little-endian
    put      [1, group, attempt, packed group]
    scores   [2, group, [step, task], packed scores]
    discard  [3, [group, ...], null, null]              payloads are msgpack

Used by `durable_trajectories.py`, which interprets the entries. As in the schedule's record, a crash tears at most the
end of the last segment. An unreadable entry counts as a torn tail only there, and only if no whole entry follows it.
Any other damage is a `RecordError` with file and offset. Segments without kept entries are deleted, so numbers may have
gaps.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgpack

from engine.errors import RecordError
from engine.record.files import RecordLock, open_regular, require_regular
from engine.record.log import Torn, frame, lacks_bytes
from engine.storage.checkpoints import put_aside
from engine.storage.group_codec import MAX_GROUP_BYTES

MAGIC = b"step-trj"
FORMAT = 1
_PREAMBLE = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<II")
PREAMBLE_BYTES = _PREAMBLE.size + _CRC.size
FRAME_BYTES = _FRAME.size
MAX_ENTRY_BYTES = MAX_GROUP_BYTES + 4096
SUFFIX = ".seg"
PUT, SCORES, DISCARD = 1, 2, 3
ENTRY_STARTS = (b"\x94\x01", b"\x94\x02", b"\x94\x03")
"""The first bytes of payloads, to search for a whole entry after a damaged one."""
LOOKED_AT = 1 << 33
"""Maximum number of bytes to checksum after damage. The tail that a crash leaves needs fewer."""


class Entry(NamedTuple):
    """One entry, with its offset and its size in the segment."""

    kind: int
    key: Any
    mark: Any
    data: Any
    offset: int
    bytes: int


def packed_entry(kind: int, key: Any, mark: Any = None, data: bytes | None = None) -> bytes:
    """The bytes of an entry in a segment."""
    return frame(msgpack.packb((kind, key, mark, data), use_bin_type=True))


def preamble(number: int) -> bytes:
    """The first bytes of a segment."""
    head = _PREAMBLE.pack(MAGIC, FORMAT, number)
    return head + _CRC.pack(crc32(head))


def segment_path(directory: Path, number: int) -> Path:
    """The path of a segment."""
    return directory / f"{number:08d}{SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the existing segments, in order. Raises: `RecordError` if the directory cannot be read."""
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(str(directory), 0, f"cannot be read: {error.strerror or error}") from None
    for name in names:
        require_regular(directory / name)
    stems = [name.removesuffix(SUFFIX) for name in names]
    for name, stem in zip(names, stems, strict=True):
        if len(stem) != 8 or not (stem.isascii() and stem.isdecimal()):
            raise RecordError(str(directory), 0, f"{name} is not a segment of a trajectory store")
    return [int(stem) for stem in stems]


def read_segment(path: Path, number: int, *, last: bool) -> Iterator[Entry | Torn]:
    """Every entry of a segment, in order; at the end of the `last` segment also a `Torn`, if a crash left one.

    Raises: `RecordError`.
    """
    try:
        size = path.stat().st_size
        with open_regular(path, buffering=1 << 20) as file:
            head = file.read(PREAMBLE_BYTES)
            if last and len(head) < PREAMBLE_BYTES and preamble(number).startswith(head.rstrip(b"\0")):
                yield Torn(str(path), 0, size)
                return
            _check_preamble(path, number, head)
            offset = PREAMBLE_BYTES
            while offset < size:
                payload, problem, ends = _frame_at(file.read, size - offset)
                if problem:
                    yield _torn(path, offset, size, problem, last, ends)
                    return
                yield entry_of(path, offset, payload)
                offset += FRAME_BYTES + len(payload)
    except OSError as error:
        raise RecordError(str(path), 0, f"cannot be read: {error.strerror or error}") from None


def entry_of(path: Path, offset: int, payload: bytes) -> Entry:
    """Decode a payload. Raises: `RecordError`."""
    size = len(payload)
    try:
        plain = msgpack.unpackb(
            payload, raw=False, max_str_len=4096, max_bin_len=size, max_array_len=size, max_map_len=0, max_ext_len=0
        )
        kind, key, mark, data = plain
        if not _IS_ENTRY[kind](key, mark, data):
            raise ValueError("its parts have other types")
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RecordError(str(path), offset, f"not an entry of a trajectory store: {error!r}") from None
    return Entry(kind, key, mark, data, offset, FRAME_BYTES + size)


def read_entry(handle: int, path: Path, offset: int, bytes: int) -> Entry:
    """Read the entry at an offset. Raises: `RecordError` if it is damaged."""
    data = os.pread(handle, bytes, offset)
    length, checksum = _FRAME.unpack_from(data) if len(data) == bytes else (0, 0)
    if FRAME_BYTES + length != bytes or crc32(memoryview(data)[FRAME_BYTES:]) != checksum:
        raise RecordError(str(path), offset, "the entry is damaged: its checksum does not match")
    return entry_of(path, offset, data[FRAME_BYTES:])


_IS_ENTRY = {
    PUT: lambda key, mark, data: type(key) is int and type(mark) is int and type(data) is bytes,
    SCORES: lambda key, mark, data: (
        type(key) is int and type(data) is bytes and type(mark) is list and list(map(type, mark)) == [int, str]
    ),
    DISCARD: lambda key, mark, data: type(key) is list and all(type(group) is int for group in key),
}


def _check_preamble(path: Path, number: int, head: bytes) -> None:
    if len(head) < PREAMBLE_BYTES:
        raise RecordError(str(path), 0, "the file ends within its first bytes")
    magic, version, stored = _PREAMBLE.unpack_from(head)
    if magic != MAGIC:
        raise RecordError(str(path), 0, "not a segment of a trajectory store")
    if _CRC.unpack_from(head, _PREAMBLE.size)[0] != crc32(head[: _PREAMBLE.size]):
        raise RecordError(str(path), 0, "the segment's first bytes are damaged")
    if version > FORMAT:
        law = f"format version {version}; this engine reads up to {FORMAT}: use a newer engine"
        raise RecordError(str(path), len(MAGIC), law)
    if stored != number:
        raise RecordError(str(path), len(MAGIC) + 4, f"the file of segment {number} holds segment {stored}")


def _frame_at(read: Any, left: int) -> tuple[bytes, str, int]:
    """(payload, its problem, size of the frame in bytes; 0 if it ends with the file)"""
    head = read(FRAME_BYTES)
    if len(head) < FRAME_BYTES:
        return b"", "the file ends within an entry", 0
    length, checksum = _FRAME.unpack(head)
    if not length:
        return b"", "an empty entry", FRAME_BYTES
    if FRAME_BYTES + length > left:
        return b"", f"an entry claims {length} bytes, more than the file has left", 0
    if length > MAX_ENTRY_BYTES:
        return b"", f"an entry claims {length} bytes; at most {MAX_ENTRY_BYTES} are allowed", FRAME_BYTES
    payload = read(length)
    if crc32(payload) != checksum:
        return b"", "the entry's checksum does not match", FRAME_BYTES + length
    return payload, "", 0


def _torn(path: Path, offset: int, size: int, problem: str, last: bool, ends: int) -> Torn:
    """Accept an unreadable entry as the torn end of the store. Raises: `RecordError` if it cannot be that.

    It can be if only zeros follow its end, it contains no whole entry, and the entry itself lacks bytes.
    """
    if not last:
        raise RecordError(str(path), offset, f"{problem}, and segments follow")
    with path.open("rb") as file:
        file.seek(offset)
        rest = file.read()
    if ends and rest[ends:].strip(b"\0"):
        raise RecordError(str(path), offset, problem)
    whole = ends > FRAME_BYTES and not lacks_bytes(rest[:ends], offset)
    whole |= not ends and len(rest) > FRAME_BYTES and crc32(rest[FRAME_BYTES:]) == _FRAME.unpack_from(rest)[1]
    if whole:
        raise RecordError(str(path), offset, f"{problem}, although the entry has all its bytes")
    if _holds_whole_entry(rest):
        raise RecordError(str(path), offset, f"{problem}, and whole entries follow")
    return Torn(str(path), offset, size - offset)


def _holds_whole_entry(rest: bytes) -> bool:
    looked, view = 0, memoryview(rest)
    for start in ENTRY_STARTS:
        at = rest.find(start, FRAME_BYTES + 1)
        while at >= 0:
            length, checksum = _FRAME.unpack_from(rest, at - FRAME_BYTES)
            if 0 < length <= len(rest) - at:
                looked += length
                if looked > LOOKED_AT or crc32(view[at : at + length]) == checksum:
                    return True
            at = rest.find(start, at + 1)
    return False


def put_store_aside(directory: Path) -> Path | None:
    """Rename the directory of a store, once its writer has ended, so that a new store can use the path. Returns the new
    path, or None if it is empty. Raises: `RecordError` if it cannot be renamed."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    lock = RecordLock(directory, waits=True)
    try:
        return put_aside(directory)
    except OSError as error:
        raise RecordError(str(directory), 0, f"cannot be set aside: {error.strerror or error}") from None
    finally:
        lock.release()
