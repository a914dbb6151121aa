"""Checkpoints on disk: what a save replaces, and what counts as damage."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.storage.checkpoints import checkpoint_path, damaged_of, is_sound, list_checkpoints, save_checkpoint


class Writer:
    """A trainer whose weights are a text. `fails`: saving them does."""

    def __init__(self, weights: str, fails: bool = False) -> None:
        self.weights = weights
        self.fails = fails

    def save(self, directory: str, step: int) -> None:
        (Path(directory) / "weights").write_text(self.weights)
        if self.fails:
            raise RuntimeError("CUDA out of memory")

    def score(self, batch: Any, task: str) -> None: ...

    def train(self, batch: Any) -> dict[str, float]:
        return {}


def save(directory: Path, weights: str, fails: bool = False) -> None:
    save_checkpoint(Writer(weights, fails), directory, 4)  # type: ignore[arg-type]


def test_a_save_replaces_what_an_earlier_trainer_wrote_under_its_name(tmp_path: Path) -> None:
    """The report of that was lost: this trainer has trained the steps again, and may have other weights."""
    save(tmp_path, "of the first life")
    save(tmp_path, "of the second")
    (found,) = list_checkpoints(tmp_path)
    assert (found[1] / "weights").read_text() == "of the second" and is_sound(found[1])
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"], "nothing else is left"


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, "of the first life")
    with pytest.raises(RuntimeError):
        save(tmp_path, "of the second", fails=True)
    assert (checkpoint_path(tmp_path, 4) / "weights").read_text() == "of the first life"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("linked", [False, True])
def test_a_checkpoint_with_a_fifo_is_refused_by_name(tmp_path: Path, linked: bool) -> None:
    class Piping(Writer):
        def save(self, directory: str, step: int) -> None:
            os.mkfifo(tmp_path / "elsewhere" if linked else Path(directory, "pipe"))
            if linked:
                Path(directory, "pipe").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(EngineError, match=r"pipe is a FIFO, but must be a regular file"):
        save_checkpoint(Piping("?"), tmp_path / "saved", 4)  # type: ignore[arg-type]
    assert not list((tmp_path / "saved").iterdir())


@pytest.mark.timeout(20)
def test_a_fifo_beside_or_in_place_of_a_file_is_damage(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 4)
    for name in ("pipe", "weights", "SHA256SUMS"):
        save(tmp_path, "sound")
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
        assert name in damaged_of([path])[path] and not is_sound(path)
    os.mkfifo(other := checkpoint_path(tmp_path, 5))
    assert list(damaged_of([other])) == [other]


@pytest.mark.parametrize("what", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_checkpoint_that_cannot_be_read_at_the_moment_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: int
) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise OSError(what, "the disk does not answer")

    save(tmp_path, "sound")
    path = checkpoint_path(tmp_path, 4)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", refuse)
        assert damaged_of([path]) == {} and not is_sound(path)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        assert damaged_of([path]) == {} and not is_sound(path)
    assert is_sound(path)


def test_one_that_is_not_there_or_is_not_what_was_written_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, "sound")
    path, gone = checkpoint_path(tmp_path, 4), checkpoint_path(tmp_path, 5)
    assert list(damaged_of([gone, path])) == [gone]
    (path / "weights").write_text("other")
    assert list(damaged_of([path])) == [path] and not is_sound(path)
