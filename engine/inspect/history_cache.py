"""Keeps in `RUN/history-cache` what the replays of a record's stretches found, so that the next question about the run
replays only what is new.

Called by `history_reader`. Everything here is derived from the record, so users may delete it at any time. A file that
is damaged, or that other source code wrote, is not used. A directory that cannot be written is left unchanged.
"""

import os
import zlib
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.record import Record
from engine.record.files import make_directory, private_opener
from engine.record.frames import encode_header

DIRECTORY = "history-cache"
SOURCES = ("events.py", "commands.py", "inspect", "metrics", "policies", "record", "scheduling", "states")
"""Parts of the package on which the contents of a file depend."""


class HistoryCache:
    """The cache of a record. Keeps nothing for a record in memory."""

    def __init__(self, record: Record) -> None:
        place = Path(record.name)
        self._directory = place.parent / DIRECTORY if place.name == "schedule" else None
        self._identity = sha256(_sources() + encode_header(record.header)).digest()

    def holds(self, stretch: Any) -> bool:
        """Whether there is a file for a stretch. It may be unusable."""
        return self._directory is not None and self._path(stretch).exists()

    def load(self, stretch: Any) -> bytes | None:
        """The data kept for a stretch; None if there is nothing usable."""
        try:
            data = zlib.decompress(self._path(stretch).read_bytes())
        except (OSError, zlib.error):
            return None
        return data[len(self._identity) :] if data.startswith(self._identity) else None

    def keep(self, stretch: Any, data: bytes) -> None:
        if self._directory is None:
            return
        path = self._path(stretch)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            make_directory(self._directory)
            with open(temporary, "wb", opener=private_opener) as file:
                file.write(zlib.compress(self._identity + data, 1))
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)

    def _path(self, stretch: Any) -> Path:
        """The name depends on the place of the stretch, so a record that was cut and continued has other names."""
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
