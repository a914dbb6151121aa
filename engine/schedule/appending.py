"""Buffers frames in memory and writes them to a file in one call.

Used by `recorder.Recorder` and by the durable trajectory store, which handle the errors.
"""

import os
from pathlib import Path
from typing import BinaryIO


class Held:
    """Frames in memory, in the order in which they are to be written."""

    __slots__ = ("_frames", "bytes")

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self.bytes = 0

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.bytes += len(frame)

    def __bytes__(self) -> bytes:
        return b"".join(self._frames)

    def write(self, file: BinaryIO, *, fsync: bool) -> int:
        """Write and forget all frames; with `fsync`, wait for the disk. Returns the number of bytes. Raises: `OSError`;
        the frames are forgotten then too."""
        if not self._frames:
            return 0
        data = bytes(self)
        self._frames.clear()
        self.bytes = 0
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        if fsync:
            os.fsync(file.fileno())
        return len(data)


def fsync(path: Path) -> None:
    """Sync a file, or the list of files in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
