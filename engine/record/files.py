"""Files of a run: made for its user only, opened only if regular, one writer each.

Records and trajectories hold prompts and answers, so no other user may read them. Used by everything that writes into a
run's directory.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Literal

from engine.errors import RecordError, RecordHeld, RunDamaged

# -- regular files only ------------------------------------------------------------------------------------------------


KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def require_regular(path: Path) -> None:
    """Raises: `RunDamaged` if it is not a regular file, `OSError` if it does not exist."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise RunDamaged(str(path), f"is {KINDS.get(stat.S_IFMT(mode), 'no file')}, but must be a regular file")


def open_regular(path: Path, buffering: int = 1 << 18) -> BinaryIO:
    """Open a file for reading without blocking on another process. Raises: as `require_regular`."""
    require_regular(path)
    return open(path, "rb", buffering=buffering)


def fsync(path: Path) -> None:
    """Sync a file, or the list of files in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- the lock of a record ----------------------------------------------------------------------------------------------


WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
"""Errors of file systems that cannot lock directories, mostly network file systems. On these, a recorder looks for a
segment of a higher epoch before it writes."""


class RecordLock:
    """Locks a record's directory until `release`, until nothing refers to it, or until the process ends. Creates the
    directory if it is missing.

    Raises: `RecordHeld` if another process or another `RecordLock` holds the lock, `RecordError` if the directory
    cannot be created or locked.
    """

    def __init__(self, directory: Path, *, waits: bool = False, looks: bool = False) -> None:
        """`waits`: wait without a limit until the process that holds the lock has ended. `looks`: see `is_locked`."""
        self._handle: int | None = None
        self.exclusive = False
        """False if the file system has no locks, so that other processes may hold it, too."""
        try:
            make_directory(directory)
            self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if waits:
                fcntl.flock(self._handle, fcntl.LOCK_EX)
            elif looks:
                fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            else:
                _lock_at_once(self._handle)
            self.exclusive = True
        except BlockingIOError:
            self.release()
            reason = "another process is writing this record, or another session of this process that is not closed"
            raise RecordHeld(str(directory), 0, reason) from None
        except OSError as error:
            if self._handle is None or error.errno not in WITHOUT_LOCKS:
                self.release()
                raise RecordError(str(directory), 0, f"cannot be written: {error.strerror or error}") from None

    def release(self) -> None:
        """A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    __del__ = release
    """A recorder that was dropped without `close` releases its record before the process ends."""


def _lock_at_once(handle: int) -> None:
    """Raises: `BlockingIOError` if another process holds the lock. Waits for processes that only check it
    (`is_locked`)."""
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # nobody holds it, if this succeeds
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.sched_yield()


def is_locked(directory: Path) -> bool | None:
    """Whether a process holds the `RecordLock` of a directory; None if the file system has no locks. Takes a shared
    lock for a moment; a process that takes the lock meanwhile tries again. Raises: `RecordError`."""
    try:
        lock = RecordLock(directory, looks=True)
    except RecordHeld:
        return True
    lock.release()
    return False if lock.exclusive else None


# -- files for the user only -------------------------------------------------------------------------------------------


DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
UMASK = 0o077
"""For processes in which libraries write into a run's directory."""

CONTENTS = (
    "schedule",
    "trajectories",
    "checkpoints",
    "samples",
    "inputs",
    "logs",
    "tensorboard",
    "wandb",
    "config.yaml",
    "metrics.jsonl",
    "history.log",
    "control.json",
    "endpoint.json",
    "launch.txt",
    "mlflow_run.txt",
    "wandb_run.txt",
)
"""The files and directories that a run writes into its directory. All others are the user's and keep their modes."""


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: only this user can read the file. A device keeps its mode."""
    handle = os.open(path, flags, FILE_MODE)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode) and stat.S_IMODE(mode) != FILE_MODE:
            os.fchmod(handle, FILE_MODE)
    except OSError:
        pass  # another user's file, or a file system without modes: its directory is private if possible
    return handle


def open_private(path: Path, mode: Literal["xb", "ab"]) -> FileIO:
    """Create or append to a file, unbuffered, for this user only. Raises: OSError."""
    return open(path, mode, buffering=0, opener=private_opener)


def write_private(path: Path, text: str) -> None:
    """`Path.write_text`, for this user only. Raises: OSError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


@contextmanager
def replace_whole(path: Path) -> Iterator[BinaryIO]:
    """A new file, for this user only, that replaces the one at `path` once it is complete and on disk. Raises:
    OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb", opener=private_opener) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


def make_directory(path: Path, *, exist_ok: bool = True) -> None:
    """Create a directory for this user only. Missing parents get the mode of the umask; an existing directory keeps its
    mode. Raises: OSError."""
    try:
        try:
            os.mkdir(path, DIRECTORY_MODE)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not exist_ok or not path.is_dir():
            raise
    else:
        os.chmod(path, DIRECTORY_MODE)


def make_run_directory(path: Path) -> OSError | None:
    """Make the directory of a new run: private to this user if it is new or empty. If it has files, it is a project
    of the user and keeps all its modes. Returns an error if it cannot be made."""
    try:
        make_directory(path)
        return None if any(path.iterdir()) else _restrict(path)
    except OSError as error:
        return error


def make_run_private(run_dir: Path) -> OSError | None:
    """Remove other users' access to a run's directory and to all files that the run wrote there. Creates the directory
    if it is missing. Returns an error if a mode could not be set."""
    failure = None
    try:
        make_directory(run_dir)
    except OSError as error:
        return error
    for path in (run_dir, *(found for name in CONTENTS for found in _below(run_dir / name))):
        failure = _restrict(path) or failure
    return failure


def make_tree_private(directory: Path) -> None:
    """Remove other users' access to a directory and everything below it, as far as possible."""
    for path in _below(directory):
        _restrict(path)


def _below(path: Path) -> Iterator[Path]:
    """A path and everything below it, each directory before its contents. Symbolic links are skipped."""
    if path.is_symlink() or not path.exists():
        return
    yield path
    if path.is_dir():
        try:
            inside = sorted(path.iterdir())
        except OSError:
            return
        for inner in inside:
            yield from _below(inner)


def _restrict(path: Path) -> OSError | None:
    """Restrict a path to its user. An executable file stays executable for the user."""
    try:
        mode = stat.S_IMODE(path.lstat().st_mode)
        wanted = DIRECTORY_MODE if path.is_dir() else mode & DIRECTORY_MODE | FILE_MODE
        if mode != wanted:
            path.chmod(wanted)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None
