"""Files and directories of a run that its user alone may read: a record and trajectories hold prompts and answers.

Called by whoever writes into a run's directory. Modes are set, not left to the umask, which may be any.
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
"""For a process in which libraries write into a run's directory."""

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
"""What a run writes into its directory. Anything else there is the user's and keeps its mode."""


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: what is made or written so is for its user alone."""
    handle = os.open(path, flags, FILE_MODE)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) != FILE_MODE:
            os.fchmod(handle, FILE_MODE)
    except OSError:
        pass  # another's file, or a file system without modes: the directory around it is private where that can be
    return handle


def open_private(path: Path, mode: Literal["xb", "ab"]) -> FileIO:
    """Unbuffered, to make or to append to, for this user alone. Raises: OSError."""
    return open(path, mode, buffering=0, opener=private_opener)


def write_private(path: Path, text: str) -> None:
    """`Path.write_text`, for this user alone. Raises: OSError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


def make_directory(path: Path, *, exist_ok: bool = True) -> None:
    """Make a directory for this user alone. Those above it are made as the umask has it, and one that is there keeps
    its mode. Raises: OSError."""
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
    """Take from others what they may do with a run's directory and all that a run has written there; it is made if need
    be. Returns why that could not be done somewhere, if it could not."""
    failure = None
    try:
        make_directory(run_dir)
    except OSError as error:
        return error
    for path in (run_dir, *(found for name in CONTENTS for found in _below(run_dir / name))):
        failure = _restrict(path) or failure
    return failure


def make_tree_private(directory: Path) -> None:
    """The same for a directory and everything below it, where it can be done."""
    for path in _below(directory):
        _restrict(path)


def _below(path: Path) -> Iterator[Path]:
    """A path and what is below it, each directory before what it holds; links are left alone."""
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
    """A file of the user's may be executable and stays so for the user."""
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
