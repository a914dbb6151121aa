"""Files of a run are regular files: anything else under their names is refused, not waited for.

Used by whoever opens segments, indexes and checkpoints. Opening a FIFO for reading would block until somebody writes.
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
    """`mode`: of the file, where it is known. Raises: `RunDamaged` for what is no regular file, `OSError` for what is
    not there."""
    mode = os.stat(path).st_mode if mode is None else mode
    if not stat.S_ISREG(mode):
        raise RunDamaged(str(path), f"is {KINDS.get(stat.S_IFMT(mode), 'no file')}, but must be a regular file")


def open_regular(path: Path, buffering: int = 1 << 18) -> BinaryIO:
    """Open a file for reading, never waiting for another process. Raises: as `require_regular`."""
    require_regular(path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        require_regular(path, os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb", buffering=buffering)
    except BaseException:
        os.close(handle)
        raise
