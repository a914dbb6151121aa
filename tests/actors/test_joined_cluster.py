"""A run from the command line on three `ray start` nodes of this machine, one of which is killed in the middle."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from ray_nodes import ROOT, Nodes, engine, note_call, pids_of, three_nodes
from ray_plans import SMALLEST, check_record, events_of
from test_ray_runs import wait_for_no_actors

from engine.events import ProcessLost
from engine.tasks.quickstart import Quickstart, prepare

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REWARD = """
import os
import threading
from pathlib import Path

HERE = Path({here!r})

def score(prompt, trajectory):
    with open(HERE / "calls", "w") as calls:
        calls.write(f"{{os.getpid()}} {{__file__}}\\n")
    threading.Event().wait(1.0)
    return float(len(trajectory.text) % 2)
"""
"""Reports each call, and takes a second, so that the run leaves the processors to the nodes that start and end."""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with three_nodes("--num-gpus=2") as made:
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a copy of a preset whose paths are relative, and a reward."""
    directory = tmp_path / "project"
    made = prepare(directory / "made", Quickstart(**SMALLEST))
    (directory / "my_reward.py").write_text(REWARD.format(here=str(tmp_path)))
    preset = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    preset["run"]["max_steps"] = 100_000
    preset["model"] = {"path": os.path.relpath(made.model_path, directory)}
    preset["data"] = {"path": os.path.relpath(made.training_path, directory)}
    preset["reward"] = {"function": "my_reward:score", "timeout_s": 250.0}
    preset["scheduler"] |= {"train_batch_size": 4, "samples_per_prompt": 2, "max_concurrent_groups": 12}
    preset["rollout"] |= {"replicas": 2, "slots": 6, "max_tokens": 32, "gpus": 1.0}  # on the last two nodes
    preset["trainer"] |= {"device": "cpu"}  # on the first node, which has no GPU
    del preset["validation"]
    (directory / "preset.yaml").write_text(yaml.safe_dump(preset))
    return directory


def test_a_run_joins_a_cluster_loses_a_node_and_finishes(nodes: Nodes, project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.mkfifo(tmp_path / "calls")
    command = ("run", "../project/preset.yaml", "--plain", "--address", nodes.address)
    wrong = engine(*command, cwd=elsewhere, env={**nodes.environment, "RAY_AUTH_TOKEN": "b" * 64})
    said = wrong.communicate(timeout=60)[0]
    assert wrong.returncode == 2 and "its token is missing or wrong; set RAY_AUTH_MODE=token" in said, said

    run = engine(*command, cwd=elsewhere, env=nodes.environment)
    try:
        with os.fdopen(os.open(tmp_path / "calls", os.O_RDWR), "rb", buffering=0) as calls:
            lives, places = set[int](), set[str]()
            while len(lives) < 2:
                note_call(run, calls, lives, places)
            assert actors_of(nodes.processes[0]) >= {"Scheduler", "Trainer", "TrajectoryStore", "WeightsStore"}
            nodes.kill(next(node for node in nodes.processes[1:] if lives & pids_of(node)))
            while len(lives) < 3:
                note_call(run, calls, lives, places)
            enough = engine("set", "latest", "run.max_steps=1", cwd=elsewhere, env=nodes.environment)
            assert enough.wait(timeout=60) == 0, enough.communicate()[0]
            said = run.communicate(timeout=120)[0]
        assert run.returncode == 0, said
    finally:
        run.kill()
        run.wait()
    assert "Joining the Ray cluster at " in said and "will be retried" not in said
    assert all("_ray_pkg_" in place for place in places), "the nodes run the code that they were sent"
    run_dir = elsewhere / "runs" / "latest"
    assert {event.kind for event in events_of(run_dir, ProcessLost)} == {"replica"}
    state = check_record(run_dir).state
    assert (state.ending.outcome.outcome, state.limits.max_steps) == ("finished", 1), "more steps had begun"
    wait_for_no_actors()
    assert sorted(node.poll() is None for node in nodes.processes) == [False, True, True], "the cluster stays"


def actors_of(node: subprocess.Popen[str]) -> set[str]:
    """Classes of the actors on a node: scheduler, stores and trainer are where the run's directory is."""
    titles = [" ".join(child.cmdline()[:1]) for child in psutil.Process(node.pid).children(recursive=True)]
    return {found[1] for title in titles if (found := re.match(r"ray::(\w+)Act", title))}
