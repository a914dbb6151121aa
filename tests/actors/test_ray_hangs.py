"""A scheduler whose process hangs: the launcher kills it, and Ray restarts it."""

import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray
from ray_plans import check_record, endless, events_of, paced, plan
from test_ray_lives import processes, trained, until_step
from test_ray_runs import wait_for_no_actors

from engine.actors.lasting import find_living
from engine.actors.run import RunHandle, start
from engine.actors.stacks import dump_stacks, stacks_file
from engine.errors import RunFailed
from engine.events import ProcessLost, RunResumed, SchedulerRecovered, StepFailed
from engine.hosts.prompts import Prompts, listed

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(120)]

PROMPTS = 30 * 4
BEATS = {"heartbeat_s": 1.0, "missed_beats": 3}
SILENT = "gave no sign of life for 3 s and was killed; "


def slow_to_recover(marker: Path) -> Prompts:
    """The second time, this takes twice as long as a silent process is given."""
    if marker.exists():
        threading.Event().wait(6.0)
    marker.write_text("begun")
    return listed([f"question {n}" for n in range(PROMPTS)])


def stop_scheduler() -> None:
    (scheduler,) = processes("SchedulerAct")
    os.kill(scheduler.pid, signal.SIGSTOP)


def write_all_stacks(run: RunHandle, run_dir: Path) -> None:
    living = find_living(run._launched.launch)
    assert {source for source, _ in living} == {"rollout-0", "rollout-1", "trainer", "trajectories", "weights"}
    for (source, _), actor in living.items():
        file = stacks_file(run_dir, source)
        assert dump_stacks(ray.get(actor.beat.remote()).pid, file) == f"its stacks are in {file}"
        assert "most recent call first" in file.read_text()


@pytest.mark.parametrize("how", ["stopped", "looping"])
def test_a_run_whose_scheduler_hangs_continues_and_says_where_its_stacks_are(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    run_dir = tmp_path / "run"
    own = plan(run_dir, paced, make_prompts=partial(slow_to_recover, tmp_path / "begun"), **BEATS)
    if how == "looping":
        extension = {"extensions": ["endless_policy"], "extensions_dir": str(Path(__file__).parent)}
        own = replace(own, policies={"dispatch": "endless-once"}, config={"run": extension})
    with start(own) as run:
        run.note = said.append
        if how == "stopped":
            until_step(run, 1)
            stop_scheduler()
            write_all_stacks(run, run_dir)
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", PROMPTS // 4)
    (line,) = said
    assert len(events_of(run_dir, SchedulerRecovered)) == 1, "a scheduler that recovers is not silent"
    assert events_of(run_dir, ProcessLost, StepFailed, RunResumed) == []
    assert trained(run_dir) == Counter(range(PROMPTS))
    file = stacks_file(run_dir, "scheduler")
    assert SILENT in line and str(file) in line
    assert ("T (stopped)" if how == "stopped" else "endless_policy.py") in file.read_text()
    if how == "stopped":
        check_record(run_dir)
    wait_for_no_actors()


@pytest.mark.parametrize("store", ["TrajectoryStoreAct", "WeightsStoreAct"])
def test_a_run_whose_store_is_stopped_begins_again_from_its_record(store: str, tmp_path: Path) -> None:
    said: list[str] = []
    source = listed([f"question {n}" for n in range(PROMPTS)])
    with start(plan(tmp_path, paced, make_prompts=lambda: source, heartbeat_s=0.5, missed_beats=4)) as run:
        run.note = said.append
        until_step(run, 1)
        (stopped,) = processes(store)
        os.kill(stopped.pid, signal.SIGSTOP)
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", PROMPTS // 4)
    (line,) = said
    name = "trajectory store" if store.startswith("T") else "weights store"
    assert line.startswith(f"the {name} is lost: no sign of life for 8 s; it wrote no stacks: state T (stopped)"), line
    assert "the run begins again from its record (1 of 5)" in line
    (lost,) = events_of(tmp_path, ProcessLost)
    assert lost.kind == name
    assert check_record(tmp_path).state.ledger.consumed == PROMPTS
    wait_for_no_actors()


def test_a_run_without_a_directory_ends_with_the_cause(tmp_path: Path) -> None:
    with start(replace(plan(tmp_path, endless, **BEATS), run_dir=None)) as run:
        stop_scheduler()
        with pytest.raises(RunFailed, match=SILENT + r"state T \(stopped\)"):
            run.wait()
    wait_for_no_actors()
