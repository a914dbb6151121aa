"""Checkpoints on disk: complete or not there at all, the newest few kept, and known again by their sums.

Written by `trainer.TrainerHost`; read by whoever brings a trainer to where another one was.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError, RunDamaged
from engine.hosts.reasons import reason_of
from engine.private_files import make_directory, make_tree_private
from engine.roles import Trainer
from engine.schedule.appending import fsync
from engine.schedule.regular import open_regular

log = logging.getLogger(__name__)

SUMS = "SHA256SUMS"
"""In each checkpoint: a digest of every other file of it, as `sha256sum --check` reads it."""

UNFINISHED = ".saving"
"""How the names of directories end that are not whole yet, or not any more."""


def checkpoint_path(directory: Path, steps: int) -> Path:
    """Where the checkpoint of everything after `steps` train steps is."""
    return directory / f"step-{steps:06d}"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(train steps, path) of every complete checkpoint, oldest first."""
    found = ((re.fullmatch(r"step-(\d+)", p.name), p) for p in directory.iterdir()) if directory.is_dir() else ()
    return sorted((int(match[1]), path) for match, path in found if match)


def save_checkpoint(trainer: Trainer, directory: Path, steps: int) -> Path:
    """Have a checkpoint written under another name, then make it visible by one rename. It replaces one of the same
    steps: an earlier trainer wrote that, and nobody heard of it. What unfinished saves left is removed, too."""
    final = checkpoint_path(directory, steps)
    remove_unfinished(directory)
    unfinished = directory / f".{final.name}{UNFINISHED}"
    try:
        make_directory(directory)
        make_directory(unfinished, exist_ok=False)
        trainer.save(str(unfinished), steps)
        _write_sums(unfinished)
        make_tree_private(unfinished)
        for path in (*sorted(unfinished.rglob("*")), unfinished):
            fsync(path)
        with suppress(FileNotFoundError):
            os.rename(final, unfinished.with_name(f"{unfinished.name}-replaced"))
        os.rename(unfinished, final)
        fsync(directory)
    finally:
        remove_unfinished(directory)
    return final


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; one that is gone already is no error. A removal that is cut short leaves a directory that
    nobody takes for a checkpoint, and that the next save deletes. Raises: `OSError`."""
    doomed = path.with_name(f".{path.name}{UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(directory: Path) -> None:
    """What saves and removals left that were cut short."""
    for path in directory.glob(f".*{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def put_aside(path: Path) -> Path:
    """Rename to what nobody takes for a checkpoint, or the trajectories, of this line of weights; the new name."""
    aside = name_aside(path)
    os.rename(path, aside)
    return aside


def name_aside(path: Path) -> Path:
    """A name beside a file or directory, which nothing has, for what is not used any more."""
    number = 1
    while (aside := path.with_name(f".{path.name}-left-{number}")).exists():
        number += 1
    return aside


def verify_checkpoint(directory: Path) -> None:
    """Raises: `ConfigError` naming the first file that is missing, is not what was written or is not known to be.
    `OSError` if a file that is there cannot be read, which says nothing about what it holds."""
    try:
        with open_regular(directory / SUMS) as file:
            lines = file.read().decode().splitlines()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, RunDamaged) as error:
        law = f"its {SUMS} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError("checkpoint", str(directory), law, "use another checkpoint") from None
    unknown = {path for path in directory.rglob("*") if path.is_file()} - {directory / SUMS}
    for line in lines:
        digest, _, name = line.partition("  ")
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            law = f"its {SUMS} names {name!r}, which lies elsewhere"
            raise ConfigError("checkpoint", str(directory), law, "use another checkpoint")
        if not path.is_file():
            raise ConfigError("checkpoint", str(path), "is missing", "use another checkpoint")
        if _digest(path) != digest:
            law = f"is not what was written: its SHA-256 is not that in {SUMS}"
            raise ConfigError("checkpoint", str(path), law, "use another checkpoint")
        unknown.discard(path)
    if unknown:
        law = f"is not what was written: {SUMS} does not name it"
        raise ConfigError("checkpoint", str(min(unknown)), law, "use another checkpoint")


def damaged_of(checkpoints: Iterable[Path]) -> dict[Path, str]:
    """What is wrong with each checkpoint before the first that is not damaged, in their order. One that cannot be read
    at the moment is not damaged, as far as anyone knows."""
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
    """Whether a checkpoint is there, and is what was written."""
    try:
        verify_checkpoint(path)
    except (ConfigError, OSError):
        return False
    return True


def _write_sums(directory: Path) -> None:
    """As `sha256sum --check` reads it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    lines = [f"{_digest(path)}  {path.relative_to(directory)}\n" for path in files]
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
