"""Frames on their way into a file, which several make together: for whoever appends to segments.

Used by `recorder.Recorder` and by the durable trajectory store. What an error means is theirs.
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
        """Hand everything to the operating system, with `fsync` to the disk; how many bytes. Nothing is held any more,
        also where it raises `OSError`."""
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
    """Bring a file to the disk, or which files a directory has."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
