"""Worlds that were recorded replay identically; one whose record says otherwise is named."""

import shutil
from pathlib import Path

import pytest

from engine.commands import TrainStep
from engine.record import Recorder, read
from tests.oracle.decisions import main


def decisions(action: str, directory: Path) -> int:
    return main([action, str(directory), "--prefix", "calm-00"])


def test_worlds_replay_identically_and_another_decision_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decisions("write", tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 10
    assert decisions("replay", tmp_path) == 0
    forge(tmp_path / "calm-003")
    assert capsys.readouterr().out == ""
    assert decisions("replay", tmp_path) == 1
    said = capsys.readouterr().out
    assert said.startswith("calm-003: diverged at tick") and said.count("diverged") == 1, said


def forge(directory: Path) -> None:
    """Write a record again, without the order of its first train step."""
    record = read(directory)
    ticks = list(record.ticks())
    shutil.rmtree(directory)
    recorder = Recorder(directory, record.header)
    for tick in ticks:
        recorder.write(tick.events, [c for c in tick.commands if not isinstance(c, TrainStep) or c.step])
    recorder.close()
