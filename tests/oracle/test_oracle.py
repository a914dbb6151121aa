"""Worlds that were recorded replay identically; one whose record says otherwise is named."""

import shutil
import subprocess
import sys
from pathlib import Path

from engine.commands import TrainStep
from engine.record import Recorder, read

ROOT = Path(__file__).resolve().parent.parent.parent


def decisions(action: str, directory: Path) -> tuple[int, str]:
    """Run the command in a separate process, because the oracle registers policies that break the rules."""
    command = [sys.executable, "-m", "tests.oracle.decisions", action, str(directory), "--prefix", "calm-00"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_worlds_replay_identically_and_another_decision_is_named(tmp_path: Path) -> None:
    assert decisions("write", tmp_path) == (0, "")
    assert len(list(tmp_path.iterdir())) == 10
    assert decisions("replay", tmp_path) == (0, "")
    forge(tmp_path / "calm-003")
    code, said = decisions("replay", tmp_path)
    assert code == 1 and said.startswith("calm-003: diverged at tick") and said.count("diverged") == 1, said


def forge(directory: Path) -> None:
    """Write a record again, without the order of its first train step."""
    record = read(directory)
    ticks = list(record.ticks())
    shutil.rmtree(directory)
    recorder = Recorder(directory, record.header)
    for tick in ticks:
        recorder.write(tick.events, [c for c in tick.commands if not isinstance(c, TrainStep) or c.step])
    recorder.close()
