"""Keeps in `RUN/history-cache` what the replays of a record's stretches found, so that the next question about the run
replays only what is new.

Called by `history_reader`. Everything here is derived from the record, so users may delete it at any time. A file that
is damaged, or that other source code wrote, is not used. A directory that cannot be written is left unchanged.
"""

import os
import zlib
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.errors import RunDamaged
from engine.record import Record
from engine.record.files import make_directory, open_regular, private_opener
from engine.record.frames import encode_header

DIRECTORY = "history-cache"
SOURCES = (
    "commands.py", "errors", "events.py", "ids.py", "inspect", "metrics", "policies", "protocols", "record",
    "reward_histogram.py", "scheduling", "states", "trajectory.py",
)  # fmt: skip
"""Parts of the package on which the contents of a file depend."""
IDENTITY_BYTES = 32


class HistoryCache:
    """The cache of a record. Keeps nothing for a record in memory, and nothing for the stretch at its end."""

    def __init__(self, record: Record) -> None:
        place = Path(record.name)
        self._directory = place.parent / DIRECTORY if place.name == "schedule" else None
        self._record = record

    def holds(self, stretch: Any) -> bool:
        """Whether there is a file for a stretch, of this source code. It may be damaged."""
        return bool(self._read(stretch, IDENTITY_BYTES))

    def load(self, stretch: Any) -> bytes | None:
        """The data kept for a stretch; None if there is nothing usable."""
        try:
            return zlib.decompress(self._read(stretch)[IDENTITY_BYTES:])
        except zlib.error:
            return None

    def keep(self, stretch: Any, data: bytes) -> None:
        if self._directory is None:
            return
        path = self._path(stretch)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            make_directory(self._directory)
            self._remove_unfinished()
            with open(temporary, "wb", opener=private_opener) as file:
                file.write(self._identity(stretch) + zlib.compress(data, 1))
            temporary.replace(path)
        except OSError:
            with suppress(OSError):  # such as a file system that cannot be written
                temporary.unlink()

    def _remove_unfinished(self) -> None:
        """Delete the files of writers that were killed. If a writer on another node is taken for one, it keeps nothing
        for its stretch."""
        assert self._directory is not None
        for path in self._directory.iterdir():
            writer = path.suffix[1:]
            if writer.isdecimal() and not Path("/proc", writer).exists():
                path.unlink(missing_ok=True)

    def _read(self, stretch: Any, most: int = -1) -> bytes:
        """The first bytes of a stretch's file; empty if it cannot be read or has another identity."""
        if self._directory is None or stretch.end is None:
            return b""
        try:
            with open_regular(self._path(stretch)) as file:
                data = file.read(most)
        except (OSError, RunDamaged):
            return b""
        return data if data.startswith(self._identity(stretch)) else b""

    def _identity(self, stretch: Any) -> bytes:
        """With the snapshot at its end: a lost end of the record may be written again, with the same places."""
        snapshot = self._record.snapshot_bytes(stretch.end)
        return sha256(_sources() + encode_header(self._record.header) + snapshot).digest()

    def _path(self, stretch: Any) -> Path:
        assert self._directory is not None
        return self._directory / f"{sha256(repr(stretch).encode()).hexdigest()[:32]}.z"


@lru_cache
def _sources() -> bytes:
    """A digest of the source code that replays."""
    digest = sha256()
    for name in SOURCES:
        place = Path(__file__).parents[1] / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.digest()
