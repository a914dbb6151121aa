"""Checkpoints on disk: what a save replaces, and what counts as damage."""

import errno
import hashlib
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("what", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_checkpoint_that_cannot_be_read_at_the_moment_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: int
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(what, "the disk does not answer")

    save(tmp_path, "sound")
    path = checkpoint_path(tmp_path, 4)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", refuse)
        assert damaged_of([path]) == {} and not is_sound(path)
    with monkeypatch.context() as patch:
        patch.setattr("os.open", refuse)
        assert damaged_of([path]) == {} and not is_sound(path)
    assert is_sound(path)


def test_one_that_is_not_there_or_is_not_what_was_written_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, "sound")
    path, gone = checkpoint_path(tmp_path, 4), checkpoint_path(tmp_path, 5)
    assert list(damaged_of([gone, path])) == [gone]
    (path / "weights").write_text("other")
    assert list(damaged_of([path])) == [path] and not is_sound(path)
