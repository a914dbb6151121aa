"""What a run's directory says of its newest launch, without Ray."""

import shutil
from pathlib import Path

import pytest

from engine.actors.detached_actors import LAUNCH, note_launch, noted_launch


def test_a_copy_of_a_run_does_not_claim_the_actors_of_the_run_it_was_made_of(tmp_path: Path) -> None:
    """That one may be continuing: whoever resumes the copy must not end it."""
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    run.mkdir()
    assert noted_launch(run) is None
    note_launch(run, "run-1")
    note_launch(run, "run-2")
    assert noted_launch(run) == "run-2"
    shutil.copytree(run, copy)
    assert noted_launch(copy) is None
    run.rename(moved)
    assert noted_launch(moved) == "run-2"


@pytest.mark.parametrize("left", [b"", b"\xff\xfe", b"\0" * 40, b"run-1\n", b"run-1 no-number\n"])
def test_a_note_that_cannot_be_read_claims_nothing(tmp_path: Path, left: bytes) -> None:
    (tmp_path / LAUNCH).write_bytes(left)
    assert noted_launch(tmp_path) is None
