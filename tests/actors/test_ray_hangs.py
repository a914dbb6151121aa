"""Processes that hang: their run recovers within its limits, and the stacks of endless loops are in `logs/`."""

import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import ray
from group_gate import Gate
from ray_plans import events_of, paced, plan
from test_ray_lives import trained
from test_ray_runs import wait_for_no_actors

from engine.actors.detached_actors import find_actors
from engine.actors.launch import RunHandle, start
from engine.events import ProcessLost, RunResumed, SchedulerRecovered, StepFailed
from engine.runtime.prompt_sources import Prompts, listed
from engine.runtime.stacks import dump_stacks, stacks_file

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PROMPTS = 30 * 4
BEATS = {"heartbeat_s": 1.0, "missed_beats": 3}
SILENT = "gave no sign of life for 3 s and was killed; "


def slow_to_recover(marker: Path) -> Prompts:
    """The second time, this takes twice as long as a silent process is given."""
    if marker.exists():
        threading.Event().wait(6.0)
    marker.write_text("begun")
    return listed([f"question {n}" for n in range(PROMPTS)])


def write_all_stacks(run: RunHandle, run_dir: Path) -> None:
    living = find_actors(run._launched.launch)
    assert {source for source, _ in living} == {"rollout-0", "rollout-1", "trainer", "trajectories", "weights"}
    for (source, _), actor in living.items():
        file = stacks_file(run_dir, source)
        assert dump_stacks(ray.get(actor.beat.remote()).pid, file) == f"its stacks are in {file}"
        assert "most recent call first" in file.read_text()


def test_a_run_whose_scheduler_hangs_continues_and_says_where_its_stacks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    run_dir = tmp_path / "run"
    own = plan(run_dir, paced, make_prompts=partial(slow_to_recover, tmp_path / "begun"), **BEATS)
    gate = Gate(tmp_path / "gate")
    extension = {"extensions": ["endless_policy"], "code_dir": str(Path(__file__).parent)}
    own = replace(
        own, make_rollout=gate.before(8 * 4, own.make_rollout), policies={"dispatch": "endless-once"},
        config={"run": extension},
    )  # fmt: skip
    with start(own) as run:
        run.note = said.append
        write_all_stacks(run, run_dir)
        gate.open()
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", PROMPTS // 4)
    (line,) = said
    assert len(events_of(run_dir, SchedulerRecovered)) == 1, "a scheduler that recovers is not silent"
    assert events_of(run_dir, ProcessLost, StepFailed, RunResumed) == []
    assert trained(run_dir) == Counter(range(PROMPTS))
    file = stacks_file(run_dir, "scheduler")
    assert SILENT in line and str(file) in line
    assert "endless_policy.py" in file.read_text()
    wait_for_no_actors()
