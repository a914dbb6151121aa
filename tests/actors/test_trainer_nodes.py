"""A trainer whose ranks are on several `ray start` nodes of this machine: its gradients are those of one rank, and it
survives its nodes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from ray_nodes import ROOT, Nodes, engine, three_nodes
from ray_plans import SMALLEST, check_record, events_of

from engine.events import ProcessLost
from engine.tasks.quickstart import Quickstart, prepare

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

REWARD = """
def half(prompt, trajectory):
    return float(len(trajectory.text) % 2)
"""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with three_nodes() as made:
        yield made


def test_gradients_of_three_nodes_are_those_of_one_rank(nodes: Nodes) -> None:
    sizes = ["--groups=1", "--samples=3", "--prompt=8", "--tokens=16"]
    command = [sys.executable, "benchmarks/trainer_nodes.py", f"--address={nodes.address}", "--small", "--gradients"]
    environment = nodes.environment | {"RAY_AUTH_MODE": "token"}
    done = subprocess.run([*command, *sizes], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ranks"], found["nodes"], found["restored"]) == (3, 3, True)
    assert found["largest_gradient"] > 1e-3 and found["largest_difference"] < 1e-5


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    made = prepare(directory / "made", Quickstart(**SMALLEST))
    (directory / "my_reward.py").write_text(REWARD)
    preset = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    preset["run"]["max_steps"] = 100_000
    preset["model"], preset["data"] = {"path": str(made.model_path)}, {"path": str(made.training_path)}
    preset["reward"] = {"function": "my_reward:half"}
    preset["scheduler"] |= {"train_batch_size": 4, "samples_per_prompt": 2, "max_concurrent_groups": 12}
    preset["rollout"] |= {"replicas": 1, "slots": 6, "max_tokens": 32}
    preset["trainer"] |= {"device": "cpu", "ranks": 2, "nodes": 2, "checkpoint_every": 2}
    del preset["validation"]
    (directory / "preset.yaml").write_text(yaml.safe_dump(preset))
    return directory


@pytest.mark.long
def test_a_run_survives_the_nodes_of_its_ranks_and_resumes_on_one(nodes: Nodes, project: Path, tmp_path: Path) -> None:
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
        told = started[0].communicate(timeout=120)[0]
        assert "engine resume" in told, told
        refused = run("resume", "story", "--plain")
        told = refused.communicate(timeout=120)[0]
        assert refused.returncode == 2 and "trainer.nodes is 2: the cluster has 1 node; use at most 1" in told, told

        started.append(run("resume", "story", "--plain", "--set", "trainer.nodes=1"))
        await_steps(record, started[1], trained + 4)
        assert run("set", "story", "run.max_steps=1").wait(timeout=60) == 0
        told = started[1].communicate(timeout=120)[0]
        assert started[1].returncode == 0, told
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
