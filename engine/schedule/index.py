"""The index of a record: its segments, with the length and checksum of each closed one.

    schedule/index.json   {"format": 1, "segments": [{"first_event": 0, "bytes": 67108871, "crc32": 904}, ...,
                                                     {"first_event": 91207}], "crc32": of `segments` as JSON}

Written by `recorder` and read by `store`. The index makes missing segments and missing frames at the end detectable:
without it, such a record looks like one that a crash has cut.

The writer replaces the whole file on disk each time a segment begins, and once more when the record ends. It lists a
segment only after its first bytes are on disk, and marks it closed only after all its bytes are. The index therefore
never claims data that a crash or a power cut can lose:

* a listed segment that is missing was removed;
* a closed segment with a different length or checksum was damaged, whatever its last bytes look like;
* the last segment may have a torn end only while it is open;
* a crash may leave one segment that is not listed yet.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from engine.errors import RunDamaged
from engine.private_files import private_opener
from engine.schedule.appending import fsync
from engine.schedule.regular import open_regular

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
