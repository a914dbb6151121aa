"""Processes of a run that are killed while it continues: the scheduler's, the stores', several together."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from group_gate import Gate
from ray_plans import PROMPTS, check_record, endless, events_of, paced, plan
from ray_plans import Counter as CountingTrainer
from test_ray_runs import actors_of_ours, wait_for_no_actors

from engine.actors.launch import RunHandle, start
from engine.actors.launcher_watch import GCS, ray_processes
from engine.commands import TrainStep
from engine.events import ProcessLost, RunInterrupted, RunResumed, SchedulerRecovered, StepFailed
from engine.protocols import Batch
from engine.record import read
from engine.record.files import RecordLock
from engine.runtime.prompt_sources import listed
from engine.workers.plan import Liveness, Plan, Rollout

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]

OTHERS = "RolloutAct|TrainerAct|StoreAct"
"""All but the scheduler."""


def processes(name: str) -> list[psutil.Process]:
    """Of the actors whose class begins so; Ray cuts the title of a process."""
    return [p for p in actors_of_ours() if re.search(name, " ".join(p.cmdline()[:1]))]


def kill(name: str) -> None:
    for process in processes(name):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def until_step(run: RunHandle, step: int) -> None:
    for status in run.updates():
        if status.step >= step:
            return


def gated(run_dir: Path, first: int, **changes: Any) -> tuple[Gate, Plan]:
    """A paced run that cannot end: its groups from `first` on are generated once the gate is open."""
    gate = Gate(run_dir / "gate")
    made = plan(run_dir, paced, **changes)
    return gate, replace(made, make_rollout=gate.before(first, made.make_rollout))


def trained(run_dir: Path) -> Counter[int]:
    """How often each group was in a batch that was ordered, counting a batch once."""
    batches = {}
    for tick in read(run_dir / "schedule").ticks():
        batches.update({c.step: c.groups for c in tick.commands if isinstance(c, TrainStep)})
    return Counter(group for batch in batches.values() for group in batch)


def test_a_run_survives_the_death_of_its_scheduler_alone_and_with_its_replicas(tmp_path: Path) -> None:
    prompts = 30 * 4
    source = listed([f"question {n}" for n in range(prompts)])
    gate, paused = gated(tmp_path, 22 * 4, make_prompts=lambda: source, snapshot_every=40)
    with start(paused) as run:
        before = {p.pid for p in processes(OTHERS)}
        for step in (1, 8):
            until_step(run, step)
            assert {p.pid for p in processes(OTHERS)} == before
            kill("SchedulerAct")
        until_step(run, 16)
        assert {p.pid for p in processes(OTHERS)} == before
        assert events_of(tmp_path, ProcessLost, StepFailed, RunResumed) == []
        kill("SchedulerAct|RolloutAct")
        until_step(run, 21)
        kill("SchedulerAct")
        gate.open()
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", 30)
    assert len(events_of(tmp_path, SchedulerRecovered)) == 4
    assert {(event.kind, event.index) for event in events_of(tmp_path, ProcessLost)} == {("replica", 0), ("replica", 1)}
    assert events_of(tmp_path, StepFailed, RunResumed) == []
    assert check_record(tmp_path).state.groups.ledger.consumed == prompts
    assert trained(tmp_path) == Counter(range(prompts))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["groups"]) for row in rows] == [(step, 4) for step in range(30)]
    wait_for_no_actors()


class Working(CountingTrainer):
    """Takes longer over one step than a silent process is given."""

    def train(self, batch: Batch) -> dict[str, float]:
        if batch.step == 6:
            threading.Event().wait(4.0)
        return super().train(batch)


def scarce(run_dir: Path, replica: int) -> Rollout:
    """There is no memory for the first replica of the first start after one in which all went well."""
    marker = run_dir / f"started-{replica}"
    with marker.open("a") as file:
        file.write("x")
    if replica == 0 and marker.stat().st_size == 2:
        raise RuntimeError("CUDA out of memory")
    return Rollout(generator=paced(replica))


def test_a_run_begins_again_from_its_record_when_what_hangs_cannot_be_replaced(tmp_path: Path) -> None:
    """A store, or a scheduler that may not be restarted. A start that fails is followed by another. A trainer that only
    works is not taken for one that hangs."""
    said: list[str] = []
    gate = Gate(tmp_path / "gate")
    own = plan(
        tmp_path, make_rollout=gate.before(2 * 4 + 3, partial(scarce, tmp_path)), make_trainer=Working,
        liveness=Liveness(scheduler_restarts=0, heartbeat_s=1.0, missed_beats=3),
    )  # fmt: skip
    with start(own) as run:
        run.note = said.append
        until_step(run, 2)
        for name in ("TrajectoryStoreAct", "SchedulerAct"):
            (process,) = processes(name)
            begun = len(said)
            os.kill(process.pid, signal.SIGSTOP)
            next(status for status in run.updates() if len(said) > begun)
        gate.open()
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", PROMPTS // 4)
    silent = "store is lost: no sign of life for 12 s; it wrote no stacks: state T (stopped)"
    reasons = (
        f"the trajectory {silent}",
        "the run could not restart: replica 0 could not be started: RuntimeError: CUDA out of memory",
        "gave no sign of life for 3 s and was killed; it wrote no stacks: state T (stopped)",
    )  # fmt: skip
    lines = [line for line in said if "restarts from its record" in line]
    for line, reason in zip(lines, reasons, strict=True):
        assert reason in line and "the run restarts from its record" in line
    assert len(events_of(tmp_path, RunInterrupted)) == 2  # a launch failed; the scheduler was killed
    assert len(events_of(tmp_path, RunResumed)) == 2
    assert [event.kind for event in events_of(tmp_path, ProcessLost)] == ["trajectory store"]
    assert check_record(tmp_path).state.groups.ledger.consumed == PROMPTS
    wait_for_no_actors()


LAUNCHER = """
import sys
sys.path.append({here!r})
from pathlib import Path
import ray
from ray_plans import endless, plan
from engine.actors.launch import start
from engine.workers.plan import Liveness
ray.init(address={address!r}, log_to_driver=False)
runs = []
for name, orphan_s in (("gone", 1.0), ("left", 3600.0)):
    liveness = Liveness(orphan_s=orphan_s)
    runs.append(start(plan(Path({directory!r}, name), endless, liveness=liveness, trajectories="memory")))
    print("up", flush=True)
sys.stdin.read()
"""
"""Two runs, in the cluster of the tests."""


def test_processes_of_a_killed_launcher_end_on_their_own_or_when_the_run_is_resumed(tmp_path: Path) -> None:
    """In a cluster of others. They are given a second to find another launcher in one run, and an hour in the other."""
    address, here = ray.get_runtime_context().gcs_address, str(Path(__file__).parent)
    program = LAUNCHER.format(here=here, directory=str(tmp_path), address=address)
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    token = psutil.Process(ray_processes()[GCS]).environ()["RAY_AUTH_TOKEN"]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # do not replace the loopback's address by another one
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as launcher:
        assert launcher.stdout is not None and "up" in launcher.stdout.readline()
        soon = processes(OTHERS)
        assert "up" in launcher.stdout.readline()
        late = [process for process in processes(OTHERS) if process not in soon]
        assert len(soon) == len(late) == 5
        launcher.kill()
    _, alive = psutil.wait_procs(soon, timeout=60)
    assert alive == [] and set(processes(OTHERS)) == set(late)
    RecordLock(tmp_path / "left" / "schedule", waits=True).release()  # its scheduler goes with its launcher
    with start(plan(tmp_path / "left", endless, trajectories="memory", resume=True)):
        _, alive = psutil.wait_procs(late, timeout=60)
        assert alive == [] and len(processes(OTHERS)) == 5
    wait_for_no_actors()
