"""Processes of a run that are killed while it goes on: the scheduler's, the stores', several together."""

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from ray_plans import check_record, events_of, paced, plan
from test_ray_runs import actors_of_ours, wait_for_no_actors

from engine.actors.run import RunHandle, start
from engine.commands import TrainStep
from engine.events import ReplicaLost, RunResumed, SchedulerRecovered, StepFailed
from engine.hosts.prompts import listed
from engine.schedule import Handled, read

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


def trained(run_dir: Path) -> Counter[int]:
    """How often each group was in a batch that was ordered, counting a batch once."""
    batches = {}
    for frame in read(run_dir / "schedule").frames():
        if isinstance(frame, Handled):
            batches.update({c.step: c.groups for c in frame.commands if isinstance(c, TrainStep)})
    return Counter(group for batch in batches.values() for group in batch)


def test_a_scheduler_that_is_killed_again_and_again_goes_on_with_the_same_processes(tmp_path: Path) -> None:
    prompts = 30 * 4
    lasting = plan(tmp_path, paced, make_prompts=lambda: listed([f"question {n}" for n in range(prompts)]))
    with start(lasting) as run:
        before = {p.pid for p in processes(OTHERS)}
        for step in (1, 8, 16):
            until_step(run, step)
            assert {p.pid for p in processes(OTHERS)} == before
            kill("SchedulerAct")
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", 30)
    assert len(events_of(tmp_path, SchedulerRecovered)) == 3
    assert events_of(tmp_path, ReplicaLost, StepFailed, RunResumed) == []
    assert check_record(tmp_path).state.ledger.consumed == prompts
    assert trained(tmp_path) == Counter(range(prompts))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(30))
    wait_for_no_actors()
