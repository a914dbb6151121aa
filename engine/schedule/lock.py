"""The lock on a record: one process writes it at a time. The operating system releases the lock when the process ends.

Held by `recorder` while it writes. Others take it to find out whether a process writes the record.
"""

import errno
import fcntl
import os
from pathlib import Path

from engine.errors import RecordError, RecordHeld
from engine.private_files import make_directory

WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
"""Errors of file systems that cannot lock directories, mostly network file systems. On these, a recorder looks for a
segment of a higher epoch before it writes."""


class RecordLock:
    """Locks a record's directory until `release` or until the process ends. Creates the directory if it is missing.

    Raises: `RecordHeld` if another process holds the lock, `RecordError` if the directory cannot be created or locked.
    """

    def __init__(self, directory: Path, *, waits: bool = False) -> None:
        """`waits`: wait without a limit until the process that holds the lock has ended."""
        self._handle: int | None = None
        self.exclusive = False
        """This process holds the lock. False if the file system has no locks."""
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
