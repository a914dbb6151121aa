"""Writes, verifies and deletes checkpoints on disk: atomically, with a digest of every file.

Called by `workers.trainer.TrainerWorker`, and by the code that restores a trainer. Must never make an incomplete
checkpoint visible.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError, RunDamaged, reason_of
from engine.protocols import Trainer
from engine.record.files import fsync, make_directory, make_tree_private, open_regular, require_regular

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"
"""The file in each checkpoint with the digests of its other files, in the format of `sha256sum --check`."""

FIRST = "model.checkpoint_path"
"""The field with the checkpoint that a new run begins with."""

UNFINISHED = ".saving"
"""Suffix of directories that are being written or deleted."""


def checkpoint_path(directory: Path, steps: int) -> Path:
    """The path of the checkpoint after `steps` train steps."""
    return directory / f"step-{steps:06d}"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(train steps, path) of every complete checkpoint, oldest first."""
    found = ((re.fullmatch(r"step-(\d+)", p.name), p) for p in directory.iterdir()) if directory.is_dir() else ()
    return sorted((int(match[1]), path) for match, path in found if match)


def save_checkpoint(
    trainer: Trainer, directory: Path, steps: int, progressed: Callable[[], None] = lambda: None
) -> Path:
    """Save a checkpoint under a temporary name, then rename it; returns its path. Replaces a checkpoint of the same
    step, which an earlier trainer wrote but never reported. Also removes the remains of unfinished saves.

    `progressed` is called after each file."""
    final = checkpoint_path(directory, steps)
    remove_unfinished(directory)
    unfinished = directory / f".{final.name}{UNFINISHED}"
    try:
        make_directory(directory)
        make_directory(unfinished, exist_ok=False)
        trainer.save(str(unfinished), steps)
        _write_sums(unfinished, progressed)
        make_tree_private(unfinished)
        for path in (*sorted(unfinished.rglob("*")), unfinished):
            fsync(path)
            progressed()
        with suppress(FileNotFoundError):
            os.rename(final, unfinished.with_name(f"{unfinished.name}-replaced"))
        os.rename(unfinished, final)
        fsync(directory)
    finally:
        remove_unfinished(directory)
    return final


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, if it exists. If interrupted, it leaves a directory that is not listed as a checkpoint; the
    next save deletes it. Raises: `OSError`."""
    doomed = path.with_name(f".{path.name}{UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """Delete the remains of interrupted saves and removals."""
    for path in directory.glob(f".*{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def put_aside(path: Path) -> Path:
    """Rename a checkpoint or a trajectory store so that this run no longer uses it; returns the new path."""
    aside = name_aside(path)
    os.rename(path, aside)
    return aside


def name_aside(path: Path) -> Path:
    """An unused path in the same directory, for a file or directory that is no longer used."""
    number = 1
    while (aside := path.with_name(f".{path.name}-left-{number}")).exists():
        number += 1
    return aside


def remove_aside(directory: Path, keep: Collection[Path]) -> None:
    """Delete the data set aside in a directory, except `keep`, as far as possible."""
    for path in directory.glob(".*-left-*"):
        if path in keep or not path.name.rpartition("-")[2].isdigit():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def listed_files(directory: Path, field: str = "checkpoint") -> dict[Path, str]:
    """The digest of each file of a checkpoint, as the checkpoint lists them. `field`: the name of the checkpoint in
    errors. Raises: `ConfigError` for a list that cannot be read, and for the first file that is missing."""
    try:
        with open_regular(directory / SUMS) as file:
            lines = file.read().decode().splitlines()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, RunDamaged) as error:
        law = f"its {SUMS} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(field, str(directory), law, "use another checkpoint") from None
    digests = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            law = f"its {SUMS} names {name!r}, which is outside the checkpoint"
            raise ConfigError(field, str(directory), law, "use another checkpoint")
        if not path.is_file():
            raise ConfigError(field, str(path), "is missing", "use another checkpoint")
        digests[path] = digest
    return digests


def check_first_checkpoint(directory: Path) -> None:
    """Check a checkpoint with whose weights a new run begins, without its digests. Raises: `ConfigError`."""
    if (directory / "config.json").is_file() and not (directory / SUMS).exists():
        law = f"is a model, not a checkpoint: it has config.json, but no {SUMS}"
        raise ConfigError(FIRST, str(directory), law, "use model.path for it")
    listed_files(directory, FIRST)


def verify_checkpoint(directory: Path, field: str = "checkpoint") -> None:
    """Compare a checkpoint with its digests. `field`: its name in errors. Raises: `ConfigError` naming the first file
    that is missing, changed or not listed. `OSError` if a file cannot be read; it need not be damaged."""
    digests = listed_files(directory, field)
    for path, digest in digests.items():
        if _digest(path) != digest:
            law = f"has changed since it was written: its SHA-256 differs from that in {SUMS}"
            raise ConfigError(field, str(path), law, "use another checkpoint")
    unknown = {*_files(directory)} - {directory / SUMS, *digests}
    if unknown:
        law = f"was not part of the checkpoint when it was written: {SUMS} does not name it"
        raise ConfigError(field, str(min(unknown)), law, "use another checkpoint")


def damaged_of(checkpoints: Iterable[Path]) -> dict[Path, str]:
    """The damage of each checkpoint before the first undamaged one, in the given order. A checkpoint that cannot be
    read counts as undamaged."""
    damaged = {}
    for path in checkpoints:
        try:
            verify_checkpoint(path)
            break
        except ConfigError as error:
            damaged[path] = reason_of(error)
        except OSError as error:
            log.warning("the checkpoint %s cannot be checked: %s", path, reason_of(error))
            break
    return damaged


def is_sound(path: Path) -> bool:
    """Whether a checkpoint exists, is readable and matches its digests."""
    try:
        verify_checkpoint(path)
    except (ConfigError, OSError):
        return False
    return True


def _write_sums(directory: Path, progressed: Callable[[], None]) -> None:
    """Write the digests of all files into `SUMS`. Raises: `RunDamaged` for a FIFO and the like, which would hang."""
    files = _files(directory)
    for path in files:
        require_regular(path)
    lines = []
    for path in files:
        lines.append(f"{_digest(path)}  {path.relative_to(directory)}\n")
        progressed()
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def _files(directory: Path) -> list[Path]:
    """Everything in a checkpoint but directories."""
    return sorted(path for path in directory.rglob("*") if not path.is_dir())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
