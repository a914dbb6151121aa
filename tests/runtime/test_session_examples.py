"""The examples with a loop of their own learn, keep the bound, survive a kill, and leave a record that replays."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from engine.commands import TrainStep
from engine.record import read, replay

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

KILLED = """
import os, sys, plain_loop
loss_of, steps = plain_loop.loss_of, []

def mortal(model, batch):
    steps.append(1)
    if len(steps) == 25:
        os._exit(8 if "ray" in sys.modules else 9)
    return loss_of(model, batch)

plain_loop.loss_of = mortal
plain_loop.main({directory!r})
"""
IN_TRL = """
import trl_grpo
rewards = trl_grpo.main({directory!r})
assert len(rewards) == 40
assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.15, rewards  # it rises by about 0.35
"""


def run_example(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-W", "ignore", "-c", program.format(directory=str(directory))]
    return subprocess.run(arguments, capture_output=True, text=True, cwd=EXAMPLES)


def stalest(directory: Path) -> int:
    """The largest staleness in a record that replays."""
    record = read(directory / "schedule")
    assert replay(record).identical
    orders = [order for tick in record.ticks() for order in tick.commands]
    return max(max(order.staleness) for order in orders if isinstance(order, TrainStep))


def test_a_plain_loop_learns_and_continues_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = run_example(KILLED, tmp_path / "run")
    assert killed.returncode == 9, killed.stderr
    monkeypatch.syspath_prepend(EXAMPLES)
    rewards = importlib.import_module("plain_loop").main(str(tmp_path / "run"))
    assert len(rewards) == 30, "after the checkpoint of step 20"
    assert sum(rewards[-10:]) / 10 > 0.4, rewards  # about 0.7; 0.1 without training
    assert "finished: 50 train steps" in capsys.readouterr().out
    assert 1 <= stalest(tmp_path / "run") <= 2


def test_trl_trains_on_the_batches_of_a_session(tmp_path: Path) -> None:
    done = run_example(IN_TRL, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "finished: 40 train steps" in done.stdout
    assert 1 <= stalest(tmp_path / "run") <= 2
