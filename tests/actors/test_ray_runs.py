"""Runs through real Ray with work that takes no time: weights, deaths, ends."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ray_plans import (
    PROMPTS,
    Mortal,
    Quick,
    check_record,
    endless,
    events_of,
    exhausted,
    limited,
    plan,
    refused,
    restore_mortal,
)

from engine.actors.launch import start
from engine.errors import ConfigError, RunFailed
from engine.events import GroupGenerated, ProcessLost, ProcessUp
from engine.metrics.status import Status
from engine.runtime.plan import DistributedSettings, Plan

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def run_whole(plan: Plan) -> Status:
    with start(plan) as run:
        return run.wait()


def actors_of_ours() -> list[psutil.Process]:
    """Processes of this session's cluster that are an actor of the engine."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "Actor" in (_title(child))]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def wait_for_no_actors() -> None:
    _, left = psutil.wait_procs(actors_of_ours(), timeout=60)
    assert left == [], "a process of the run is left behind"


def test_every_prompt_is_trained_once_although_a_rollout_process_dies(tmp_path: Path) -> None:
    with start(plan(tmp_path, lambda replica: Quick(deadly=15), metrics_port=0)) as run:
        with urllib.request.urlopen(run.metrics_url) as answer:
            assert b"engine_train_steps_total" in answer.read()
        seen = list(run.updates())
        assert list(run.updates()) == []
    assert (seen[-1].outcome, seen[-1].step, seen[-1].version) == ("finished", PROMPTS // 4, PROMPTS // 4)
    assert [s.step for s in seen] == sorted(s.step for s in seen)
    assert sorted(e.group for e in events_of(tmp_path, GroupGenerated)) == list(range(PROMPTS))
    (lost,) = events_of(tmp_path, ProcessLost)
    assert lost.kind == "replica" and "died" in lost.reason
    assert check_record(tmp_path).state.ledger.consumed == PROMPTS
    joined = [(e.index, e.incarnation) for e in events_of(tmp_path, ProcessUp)]
    assert (lost.index, 2) in joined or seen[-1].step == PROMPTS // 4, "it may end before the new life is up"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(PROMPTS // 4))
    assert rows[1]["loss"] == 0.5
    wait_for_no_actors()


def test_a_trainer_that_dies_trains_the_steps_since_its_checkpoint_again(tmp_path: Path) -> None:
    deaths, redone = (1, 2, 3, 5, 9), [0, 0, 1, 0, 1, 2, 4, 8]
    limits = replace(plan(tmp_path).limits, sync_every=3, checkpoint_every=4, keeps_batches=True)
    status = run_whole(
        plan(
            tmp_path,
            lambda replica: Quick(steps=3),
            make_trainer=lambda: Mortal(tmp_path, deaths),
            restore_trainer=restore_mortal,
            limits=limits,
            trajectories="memory",
        )
    )
    assert (status.outcome, status.step) == ("finished", PROMPTS // 4), status.reason
    assert [event.kind for event in events_of(tmp_path, ProcessLost)] == ["trainer"] * len(deaths)
    trained = [int(step) for step in (tmp_path / "trained").read_text().split()]
    assert sorted(trained) == sorted([*range(PROMPTS // 4), *redone])
    check_record(tmp_path)


def test_what_is_wrong_with_a_plan_is_raised_before_any_prompt_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda:9"):
        start(plan(tmp_path, make_rollout=refused))
    with pytest.raises(ConfigError, match="did you mean truncate"):
        start(plan(tmp_path / "other", policies={"deadline": "trunkate"}))
    with pytest.raises(RunFailed, match="exhausted raised StopIteration"):
        start(plan(tmp_path / "iterator", make_rollout=exhausted))
    nccl = DistributedSettings(backend="nccl", bucket_bytes=1 << 20, timeout_s=1.0)
    with pytest.raises(ConfigError, match="need a GPU of their own: 4; there are 0; "):
        start(plan(tmp_path / "third", transport=nccl))
    wait_for_no_actors()


def test_a_run_stops_on_request_and_leaves_no_process(tmp_path: Path) -> None:
    with start(plan(tmp_path, endless)) as run:
        run.stop("enough")
        status = run.wait()
    assert (status.outcome, status.reason) == ("stopped", "enough")
    check_record(tmp_path)
    wait_for_no_actors()


def test_a_scheduler_that_is_killed_takes_its_actors_along_and_is_reported(tmp_path: Path) -> None:
    with start(limited(plan(tmp_path, endless, scheduler_restarts=0), run_restarts=0)) as run:
        (scheduler,) = [p for p in actors_of_ours() if "SchedulerActor" in _title(p)]
        os.kill(scheduler.pid, signal.SIGKILL)
        status = run.wait()
    assert status.outcome == "failed" and re.search(r"SchedulerActor .* died", status.reason)
    wait_for_no_actors()


RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own, without any work of ours: after a launcher killed outright they take a minute to notice."""

LAUNCHER = """
import sys, time
sys.path.append({here!r})
from pathlib import Path
from ray_plans import endless, plan
from engine.actors.launch import start
run = start(plan(Path({run_dir!r}), endless))
print("up", flush=True)
run.wait()
"""


def test_a_launching_process_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    program = LAUNCHER.format(here=str(Path(__file__).parent), run_dir=str(tmp_path))
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "up\n"
    started = psutil.Process(launcher.pid).children(recursive=True)
    assert len(started) >= 6
    agents = [process for process in started if process.name() in RAYS_AGENTS]
    launcher.kill()
    launcher.wait(60)
    _, left = psutil.wait_procs([process for process in started if process not in agents], timeout=60)
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()
    assert left == []
