"""A bug file: the end of a record without the texts of its run, in one compressed file.

    magic (8) | version u32 | CRC-32 of what follows u32 | zlib of a msgpack map: engine, environment, segment

The segment is that of a record (`segment_log`). It begins with a snapshot, unless it has the events from the first one
on; ticks and events keep their numbers. Written by `inspect.bug_report`, read like a record by `engine replay`,
`engine debug` and `engine.testing`. No byte is trusted.
"""

import io
import struct
import zlib
from pathlib import Path

from msgspec import Struct

from engine.errors import RecordDamaged, RecordError
from engine.record.codec import MAX_PAYLOAD_BYTES, CodecError, pack, unpacker
from engine.record.files import open_regular, replace_whole
from engine.record.frames import SCHEDULE
from engine.record.reader import Record
from engine.record.segment_log import SegmentFile, SegmentLog

BUG_VERSION = 1
"""Every change of this file's format increments it."""
MAGIC = b"step-bug"
HEAD = struct.Struct("<8sII")


class BugFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a bug file holds."""

    engine: str
    """Version of the engine that wrote it."""
    environment: dict[str, str]
    """Versions of packages, and what else is known of the machine."""
    segment: bytes

    def record(self, path: str) -> Record:
        """Raises: `RecordError`."""
        segment = SegmentFile(0, path, lambda: io.BytesIO(self.segment), listed=True)
        return Record(path, SegmentLog(SCHEDULE, [segment]), is_part=True)


def write_bug_file(path: Path, file: BugFile) -> int:
    """Returns its size in bytes. Raises: `OSError`, `CodecError` if it is too large."""
    data = zlib.compress(pack(file), 9)
    with replace_whole(path) as out:
        out.write(HEAD.pack(MAGIC, BUG_VERSION, zlib.crc32(data)) + data)
    return HEAD.size + len(data)


def read_bug_file(path: Path) -> BugFile:
    """Raises: `RecordError` for anything but a whole bug file of this version."""
    name = str(path)
    try:
        with open_regular(path) as file:
            head, data = file.read(HEAD.size), file.read(MAX_PAYLOAD_BYTES)
    except OSError as error:
        raise RecordError(name, 0, f"cannot be read: {error.strerror or error}") from None
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise RecordError(name, 0, "is no bug file: give the directory of a run, or a file that `engine bug` wrote")
    _, version, checksum = HEAD.unpack(head)
    if version != BUG_VERSION:
        law = f"is a bug file of version {version}, but this engine reads {BUG_VERSION}; use the engine that wrote it"
        raise RecordError(name, len(MAGIC), law)
    if zlib.crc32(data) != checksum:
        raise RecordDamaged(name, HEAD.size, "the bug file is damaged: its checksum does not match")
    try:
        found: BugFile = _unpack(zlib.decompressobj().decompress(data, MAX_PAYLOAD_BYTES))
    except (zlib.error, CodecError) as error:
        raise RecordError(name, HEAD.size, f"the bug file cannot be decoded: {error}") from None
    return found


_unpack = unpacker(BugFile)
