"""A run of the command line that is killed with every process, and resumed with changes."""

import contextlib
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_plans import SMALLEST, check_record

from engine.commands import TrainStep
from engine.errors import RecordError
from engine.events import RunResumed, StepTrained
from engine.record import Handled, read
from engine.record.files import RecordLock

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(400)]

STEPS, BATCH, EVERY = 8, 4, 3
ROOT = Path(__file__).resolve().parents[2]


def tree(made: Path, **changes: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(made), "max_steps": STEPS, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": SMALLEST},
        "scheduler": {"train_batch_size": BATCH, "samples_per_prompt": 4, "max_staleness_steps": 2},
        "rollout": {"replicas": 1, "slots": 12, "max_tokens": 60},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": EVERY, "threads": 1},
        "validation": {"at_start": False, "at_end": False},
        **changes,
    }


def trained_in_the_line(run_dir: Path) -> list[tuple[int, tuple[int, ...]]]:
    """(step, groups) as the surviving line of weights has them."""
    line: list[tuple[int, tuple[int, ...]]] = []
    batches: dict[int, tuple[int, ...]] = {}
    for frame in read(run_dir / "schedule").frames():
        if isinstance(frame, Handled):
            batches.update({c.step: c.groups for c in frame.commands if isinstance(c, TrainStep)})
            if isinstance(frame.event, StepTrained):
                line.append((frame.event.step, batches[frame.event.step]))
            if isinstance(frame.event, RunResumed):
                line = [entry for entry in line if entry[0] < frame.event.steps]
    return line


def engine(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.cli", *arguments], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_command_line_goes_on_after_a_kill(tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(tree(Path("runs"), run={"dir": "runs", "max_steps": 10_000, "seed": 3})))
    first = engine("run", "small.yaml", "--plain", cwd=tmp_path)
    assert first.stdout is not None
    said = list(takewhile(lambda line: not line.startswith("step=5"), first.stdout))
    begun = said.index("starting Ray on this machine\n")
    assert said[begun + 1] == "starting 1 replica and the trainer, which load the model\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    lock = held(tmp_path / "runs" / "latest" / "schedule")
    second = engine("resume", "latest", "--plain", cwd=tmp_path)
    said = second.communicate(timeout=200)[1]
    assert second.returncode == 2 and "another process is writing this record" in said
    lock.release()
    refused = engine("resume", "latest", "--set", "trainer.learning_rate=0.1", cwd=tmp_path)
    said = refused.communicate(timeout=200)[1]
    assert refused.returncode == 2 and "trainer.learning_rate is 0.1: the run began with 0.001" in said
    steps = len(trained_in_the_line(tmp_path / "runs" / "latest")) + 10
    changes = ("--set", "rollout.replicas=2", "--set", f"run.max_steps={steps}")
    again = engine("resume", "latest", "--plain", *changes, cwd=tmp_path)
    said, complained = again.communicate(timeout=300)
    assert again.returncode == 0, said + complained
    assert "resumed from step-0000" in said
    check_record(tmp_path / "runs" / "latest")
    assert [step for step, _ in trained_in_the_line(tmp_path / "runs" / "latest")] == list(range(steps))


def held(schedule: Path) -> RecordLock:
    """The lock on a record, once whoever writes it has ended."""
    while True:
        with contextlib.suppress(RecordError):
            return RecordLock(schedule)
        os.sched_yield()
