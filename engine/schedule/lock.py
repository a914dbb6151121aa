"""Who writes a record: one process at a time, known by a lock that the operating system takes back when it ends.

Taken by `recorder` for as long as it writes, and by whoever wants to know beforehand.
"""

import errno
import fcntl
import os
from pathlib import Path

from engine.errors import RecordError, RecordHeld
from engine.private_files import make_directory

WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
"""What file systems say that lock no directories, network ones for the most part. There, a recorder looks for a segment
of a higher epoch before it writes."""


class RecordLock:
    """Holds a record's directory, which is made if need be, until `release` or until the process ends.

    Raises: `RecordHeld` where another process holds it, `RecordError` where it cannot be made.
    """

    def __init__(self, directory: Path, *, waits: bool = False) -> None:
        """`waits`: until whoever holds it has ended, for as long as that takes."""
        self._handle: int | None = None
        self.exclusive = False
        """No other process holds the directory. False where the file system has no locks."""
        try:
            make_directory(directory)
            self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.exclusive = True
        except BlockingIOError:
            self.release()
            raise RecordHeld(str(directory), 0, "another process is writing this record") from None
        except OSError as error:
            if self._handle is None or error.errno not in WITHOUT_LOCKS:
                self.release()
                raise RecordError(str(directory), 0, f"cannot be written: {error.strerror or error}") from None

    def release(self) -> None:
        """A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
