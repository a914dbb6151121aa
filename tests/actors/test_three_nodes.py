"""Three `ray start` nodes of this machine: a run joins them from the command line, and the ranks of a trainer on them
compute the gradients of one rank. Run and trainer survive the loss of nodes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray_nodes import ROOT, Nodes, engine, note_call, pids_of, three_nodes
from ray_plans import SMALLEST, check_record, events_of
from test_ray_runs import wait_for_no_actors

from engine.events import ProcessLost
from engine.tasks.quickstart import Quickstart, prepare

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

REWARD = """
import os
import threading
from pathlib import Path

HERE = Path({here!r})

def half(prompt, trajectory):
    return float(len(trajectory.text) % 2)

def score(prompt, trajectory):
    with open(HERE / "calls", "w") as calls:
        calls.write(f"{{os.getpid()}} {{__file__}}\\n")
    threading.Event().wait(1.0)
    return half(prompt, trajectory)
"""
"""`score` reports each call and takes a second, so that the run leaves the processors to the nodes that start and
end."""


@pytest.fixture(scope="module")
def started() -> Iterator[Nodes]:
    with three_nodes("--num-gpus=2") as made:
        yield made


@pytest.fixture
def nodes(started: Nodes) -> Nodes:
    """Three running nodes: those that an earlier test killed are replaced."""
    started.replace_killed()
    return started


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., Path]:
    """Makes a directory with a reward and a copy of a preset whose paths are relative. `sections` change its fields."""

    def make(reward: dict[str, Any], **sections: dict[str, Any]) -> Path:
        directory = tmp_path / "project"
        made = prepare(directory / "made", Quickstart(**SMALLEST))
        (directory / "my_reward.py").write_text(REWARD.format(here=str(tmp_path)))
        preset = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
        preset["run"]["max_steps"] = 100_000
        preset["model"] = {"path": os.path.relpath(made.model_path, directory)}
        preset["data"] = {"path": os.path.relpath(made.training_path, directory)}
        preset["reward"] = reward
        preset["scheduler"] |= {"train_batch_size": 4, "samples_per_prompt": 2, "max_concurrent_groups": 12}
        preset["rollout"] |= {"slots": 6, "max_tokens": 32} | sections["rollout"]
        preset["trainer"] |= {"device": "cpu"} | sections.get("trainer", {})  # also on the first node, which has no GPU
        del preset["validation"]
        (directory / "preset.yaml").write_text(yaml.safe_dump(preset))
        return directory

    return make


@pytest.mark.long
def test_gradients_of_three_nodes_are_those_of_one_rank(nodes: Nodes) -> None:
    sizes = ["--groups=1", "--samples=3", "--prompt=8", "--tokens=16"]
    command = [sys.executable, "benchmarks/trainer_nodes.py", f"--address={nodes.address}", "--small", "--gradients"]
    environment = nodes.environment | {"RAY_AUTH_MODE": "token"}
    done = subprocess.run([*command, *sizes], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ranks"], found["nodes"], found["restored"]) == (3, 3, True)
    assert found["largest_gradient"] > 1e-3 and found["largest_difference"] < 1e-5


def test_a_run_joins_a_cluster_loses_a_node_and_finishes(
    nodes: Nodes, project: Callable[..., Path], tmp_path: Path
) -> None:
    on_the_last_two = {"replicas": 2, "gpus": 1.0}
    project({"function": "my_reward:score", "timeout_s": 250.0}, rollout=on_the_last_two)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.mkfifo(tmp_path / "calls")
    command = ("run", "../project/preset.yaml", "--plain", "--address", nodes.address)
    wrong = engine(*command, cwd=elsewhere, env={**nodes.environment, "RAY_AUTH_TOKEN": "b" * 64})
    said = wrong.communicate(timeout=250)[0]
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
            assert enough.wait(timeout=250) == 0, enough.communicate()[0]
            said = run.communicate(timeout=250)[0]
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


@pytest.mark.long
def test_a_run_survives_the_nodes_of_its_ranks_and_resumes_on_one(
    nodes: Nodes, project: Callable[..., Path], tmp_path: Path
) -> None:
    ranks = {"ranks": 2, "nodes": 2, "checkpoint_every": 2}
    project({"function": "my_reward:half"}, rollout={"replicas": 1}, trainer=ranks)

    def run(*arguments: str) -> subprocess.Popen[str]:
        return engine(*arguments, cwd=tmp_path, env=nodes.environment)

    started = [run("run", "project/preset.yaml", "--plain", "--address", nodes.address, "--run-dir", "story")]
    record = tmp_path / "story"
    try:
        trained, first = await_ranks(nodes, record, started[0], after=1)
        nodes.kill(next(node for node in nodes.processes[1:] if node.pid in first))
        trained, second = await_ranks(nodes, record, started[0], after=trained + 3)
        assert second.keys() == {node.pid for node in nodes.processes if node.poll() is None}
        assert not {*second.values()} & {*first.values()}, "all ranks are new"

        nodes.kill(next(node for node in nodes.processes[1:] if node.poll() is None))
        await_line(record / "logs" / "scheduler.log", started[0], lambda line: "2 nodes; there is 1" in line)
        assert run("stop", "story").wait(timeout=60) == 0
        said = started[0].communicate(timeout=120)[0]
        assert "engine resume" in said, said
        refused = run("resume", "story", "--plain")
        said = refused.communicate(timeout=120)[0]
        assert refused.returncode == 2 and "trainer.nodes is 2: the cluster has 1 node; use at most 1" in said, said

        started.append(run("resume", "story", "--plain", "--set", "trainer.nodes=1"))
        await_steps(record, started[1], trained + 4)
        assert run("set", "story", "run.max_steps=1").wait(timeout=60) == 0
        said = started[1].communicate(timeout=120)[0]
        assert started[1].returncode == 0, said
    finally:
        for one in started:
            one.kill()
            one.wait()
    reasons = [event.reason for event in events_of(record, ProcessLost) if event.kind == "trainer"]
    assert len(reasons) == 2, "a trainer that Ray places on a dead node is placed again, which is no loss"
    assert check_record(record).state.ending.outcome.outcome == "finished"


def await_ranks(nodes: Nodes, record: Path, run: subprocess.Popen[str], after: int) -> tuple[int, dict[int, int]]:
    """Until two nodes have a rank each, after so many steps are trained. Returns the number of trained steps and the
    ranks. Looks after each step, because a trainer may be replaced between a step and the look."""
    trained, ranks = after, dict[int, int]()
    while len(ranks) < 2:
        trained = await_steps(record, run, trained + 1)
        ranks = ranks_of(nodes)
    return trained, ranks


def ranks_of(nodes: Nodes) -> dict[int, int]:
    """The rank on each node that has one, by the process of the node."""
    return {
        node.pid: child.pid
        for node in nodes.processes
        if node.poll() is None
        for child in psutil.Process(node.pid).children(recursive=True)
        if is_rank(child)
    }


def is_rank(process: psutil.Process) -> bool:
    try:
        return "engine.training.rank_process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def await_steps(record: Path, run: subprocess.Popen[str], steps: int) -> int:
    """Until so many steps are trained. Returns their number."""

    def trained(line: str) -> bool:
        return bool(json.loads(line).get("step", -1) + 1 >= steps)

    return int(json.loads(await_line(record / "metrics.jsonl", run, trained))["step"]) + 1


def await_line(file: Path, run: subprocess.Popen[str], wanted: Callable[[str], bool]) -> str:
    """A line of a growing file. Fails if the run ends first."""
    follow = ["tail", "-n", "+1", "-F", f"--pid={run.pid}", str(file)]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tail:
        assert tail.stdout is not None
        found = next((line for line in tail.stdout if wanted(line)), None)
        tail.kill()
    assert found is not None, run.communicate()[0]
    return found
