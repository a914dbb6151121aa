"""Creates the files and directories of a run for its user only: records and trajectories hold prompts and answers.

Called by every module that writes into a run's directory. It sets modes explicitly and must never rely on the umask.
"""

import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Literal

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
UMASK = 0o077
"""For processes in which libraries write into a run's directory."""

CONTENTS = (
    "schedule",
    "trajectories",
    "checkpoints",
    "logs",
    "tensorboard",
    "wandb",
    "config.yaml",
    "metrics.jsonl",
    "control.json",
    "endpoint.json",
    "launch.txt",
    "mlflow_run.txt",
)
"""The files and directories that a run writes into its directory. All others are the user's and keep their modes."""


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: only this user can read the file."""
    handle = os.open(path, flags, FILE_MODE)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) != FILE_MODE:
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
