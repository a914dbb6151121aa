"""Opens regular files only: refuses a FIFO, a directory or a device in their place.

Used by readers of segments, indexes and checkpoints. It must never block: opening a FIFO for reading would wait for a
writer.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from engine.errors import RunDamaged

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def require_regular(path: Path, mode: int | None = None) -> None:
    """`mode`: the mode of the file, if known. Raises: `RunDamaged` if it is not a regular file, `OSError` if it
    does not exist."""
    mode = os.stat(path).st_mode if mode is None else mode
    if not stat.S_ISREG(mode):
        raise RunDamaged(str(path), f"is {KINDS.get(stat.S_IFMT(mode), 'no file')}, but must be a regular file")


def open_regular(path: Path, buffering: int = 1 << 18) -> BinaryIO:
    """Open a file for reading without blocking on another process. Raises: as `require_regular`."""
    require_regular(path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        require_regular(path, os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb", buffering=buffering)
    except BaseException:
        os.close(handle)
        raise
