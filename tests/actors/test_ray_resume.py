"""A run of the command line that is killed with every process, and resumed with changes."""

import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from ray_plans import SMALLEST, check_record

from engine.events import RunResumed, StepTrained
from engine.record import read
from engine.record.files import RecordLock

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "run": {"dir": "runs", "max_steps": 10_000, "epochs": None, "seed": 3},
    "model": {"make": "arithmetic", "arithmetic": SMALLEST},
    "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4, "max_staleness_steps": 2},
    "rollout": {"replicas": 1, "slots": 12, "max_tokens": 60},
    "trainer": {"learning_rate": 1e-3, "checkpoint_every": 3, "threads": 1},
    "validation": {"at_start": False, "at_end": False},
}


def steps_of(run_dir: Path) -> list[int]:
    """The train steps in the surviving line of weights."""
    line: list[int] = []
    for event in read(run_dir / "schedule").events():
        if isinstance(event, StepTrained):
            line.append(event.step)
        if isinstance(event, RunResumed):
            line = [step for step in line if step < event.steps]
    return line


def engine(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.cli", *arguments], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_command_line_goes_on_after_a_kill(tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    first = engine("run", "small.yaml", "--plain", cwd=tmp_path)
    assert first.stdout is not None
    said = list(takewhile(lambda line: not line.startswith("step=5"), first.stdout))
    begun = said.index("starting Ray on this machine\n")
    assert said[begun + 1] == "starting 1 replica and the trainer, which load the model\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    RecordLock(tmp_path / "runs" / "latest" / "schedule", waits=True).release()  # its scheduler ends with it
    steps = len(steps_of(tmp_path / "runs" / "latest")) + 10
    changes = ("--set", "rollout.replicas=2", "--set", f"run.max_steps={steps}")
    again = engine("resume", "latest", "--plain", *changes, cwd=tmp_path)
    said, complained = again.communicate(timeout=300)
    assert again.returncode == 0, said + complained
    assert "resumed from step-0000" in said
    check_record(tmp_path / "runs" / "latest")
    assert steps_of(tmp_path / "runs" / "latest") == list(range(steps))
