"""Runs over Ray that are cut off and continue: from a checkpoint, from nothing, after a kill of every process."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from group_gate import Gate
from ray_plans import SMALLEST, check_record, events_of

from engine.actors.launch import start
from engine.commands import TrainStep
from engine.config.loading import parse_config
from engine.errors import RecordError, RunDamaged
from engine.events import GroupGenerated, RunResumed, StepTrained
from engine.plans.configured_plan import plan_of
from engine.record import Handled, read
from engine.record.files import RecordLock
from engine.runtime.plan import Plan
from engine.storage.durable_trajectories import DurableStore
from engine.storage.group_codec import unpack_group

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def real(made: Path, run_dir: Path, **trainer: Any) -> Plan:
    config = tree(made)
    config["trainer"] |= trainer
    run_dir.mkdir()
    return plan_of(parse_config(config), run_dir)


def cut_off(plan: Plan, steps: int) -> tuple[Gate, Plan]:
    """A run is cut off after so many train steps and not one more: three groups of the next batch are ready at most.
    The gate that holds the others, and the run's plan."""
    assert plan.run_dir is not None
    gate = Gate(plan.run_dir / "gate")
    plan = replace(plan, make_rollout=gate.before(steps * BATCH + 3, plan.make_rollout))
    with start(plan) as run:
        for status in run.updates():
            if status.step >= steps:
                break
    return gate, plan


def resume(gate: Gate, plan: Any) -> Any:
    gate.open()
    with start(replace(plan, resume=True)) as run:
        return run.history(), run.wait()


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


def check_line(run_dir: Path, steps: int = STEPS) -> list[tuple[int, tuple[int, ...]]]:
    """Each step is trained once in the surviving line, each group once, and each row is there once; the line."""
    scheduler = check_record(run_dir)
    assert scheduler.state.steps_trained == steps
    line = trained_in_the_line(run_dir)
    assert [step for step, _ in line] == list(range(steps))
    groups = [group for _, batch in line for group in batch]
    assert len(set(groups)) == len(groups) == steps * BATCH
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps))
    assert all(row["loss"] is not None and row["optimizer_steps"] for row in rows), "what the trainer said is there"
    return line


def test_a_run_goes_on_where_it_was_and_loses_no_step(made: Path) -> None:
    run_dir = made / "cut"
    gate, plan = cut_off(real(made, run_dir), 5)
    before = trained_in_the_line(run_dir)
    known = {e.group for e in events_of(run_dir, GroupGenerated)}
    whole = {group: attempt for group, attempt in read_back(run_dir).items() if group in known}
    told, status = resume(gate, plan)
    assert (status.outcome, status.step) == ("finished", STEPS)
    assert "resumed from step-000003" in told
    (event,) = events_of(run_dir, RunResumed)
    assert event.kept and event.steps == len(before) == 5, "the steps since the checkpoint are trained again, not anew"
    assert (event.consumed, event.released, event.missing) == ((), (), ())
    assert check_line(run_dir)[: len(before)] == before
    generated = {e.group: e.attempt for e in events_of(run_dir, GroupGenerated)}
    assert all(generated[group] == attempt for group, attempt in whole.items()), "what was ready is not sampled again"


def read_back(run_dir: Path) -> dict[int, int]:
    """Groups that a cut-off run has in its store, finished, with the attempt that finished them."""
    store = DurableStore(run_dir / "trajectories", fresh=False)
    whole = {
        group: attempt for group, attempt in store.attempts.items() if unpack_group(store.get([group])[0]).finished
    }
    store.close()
    return whole


def test_a_run_whose_directory_is_deleted_stops_and_says_so(made: Path) -> None:
    run_dir = made / "deleted"
    run_dir.mkdir()
    config = tree(made)
    config["run"]["max_steps"] = 10_000
    with start(plan_of(parse_config(config), run_dir)) as run:
        with pytest.raises(RunDamaged, match=rf"{run_dir}/schedule was deleted or moved during the run"):
            for status in run.updates():
                if status.step >= 1 and run_dir.exists():
                    shutil.rmtree(run_dir, ignore_errors=True)
        assert status.step < 100


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
