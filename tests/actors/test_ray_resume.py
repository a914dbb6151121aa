"""A run of the command line that is killed with every process, resumed, and ended on request."""

import contextlib
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import psutil
import pytest
import yaml
from ray_plans import SMALLEST, check_record

from engine.actors.private_cluster import NICENESS
from engine.events import RunResumed, StepTrained
from engine.record import read

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "run": {"dir": "runs", "max_steps": 10_000, "epochs": None, "seed": 3},
    "model": {"make": "arithmetic", "arithmetic": SMALLEST},
    "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4, "max_staleness_steps": 2},
    "rollout": {"replicas": 1, "slots": 12, "max_tokens": 60},
    "trainer": {"learning_rate": 1e-3, "checkpoint_every": 3, "threads": 1},
    "validation": {"at_start": False, "at_end": False},
}


def steps_of(run_dir: Path) -> list[int]:
    """The train steps in the surviving line of weights."""
    line: list[int] = []
    for event in read(run_dir / "schedule").events():
        if isinstance(event, StepTrained):
            line.append(event.step)
        if isinstance(event, RunResumed):
            line = [step for step in line if step < event.steps]
    return line


RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own, without any work of ours: after a launcher killed outright they take a minute to notice."""


PROGRAM = """
import sys
from forked_workers import MODEL, forked_workers
from engine.cli import main
with forked_workers(*(MODEL if "resume" in sys.argv else ())):
    sys.exit(main(sys.argv[1:]))
"""


def engine(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    others = {name: value for name, value in os.environ.items() if name != NICENESS}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, env={**others, "PYTHONPATH": path},
    )  # fmt: skip


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def test_a_killed_run_is_resumed_and_neither_end_leaves_a_process(tmp_path: Path) -> None:
    """The launcher's whole process group gets SIGTERM, as from `timeout`, but Ray's processes do not. Before that, the
    scheduler dies, and Ray's messages about repeated calls are not shown. Actors in the run's own cluster have the
    usual priority."""
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    first = engine("run", "small.yaml", "--plain", cwd=tmp_path)
    assert first.stdout is not None
    said = list(takewhile(lambda line: not line.startswith("step=3"), first.stdout))
    begun = said.index("starting Ray on this machine\n")
    assert said[begun + 1] == "starting 1 replica and the trainer, which load the model\n"
    before = psutil.Process(first.pid).children(recursive=True)
    actors = [process for process in before if "Actor" in title(process)]
    assert len(actors) == 5 and {process.nice() for process in actors} == {psutil.Process().nice()}
    scheduler = next(process for process in actors if "SchedulerActor" in title(process))
    assert not has_torch(scheduler), "its memory is for the state of the run"
    assert any(map(has_torch, actors))
    scheduler.kill()
    said += takewhile(lambda line: not line.startswith("step=6"), first.stdout)
    started = list({*before, *psutil.Process(first.pid).children(recursive=True)})
    agents = [process for process in started if title(process) in RAYS_AGENTS]
    first.kill()
    first.wait()
    _, left = psutil.wait_procs([process for process in started if process not in agents], timeout=60)
    assert left == [], "a process of the run is left behind"
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()
    assert first.stderr is not None
    assert "will be retried" not in "".join(said) + first.stderr.read()

    run_dir = tmp_path / "runs" / "latest"
    further = f"step={len(steps_of(run_dir)) + 3} "
    again = engine("resume", "latest", "--plain", cwd=tmp_path)
    assert again.stdout is not None
    said = list(takewhile(lambda line: not line.startswith(further), again.stdout))
    assert any("resumed from step-0000" in line for line in said), said
    started = psutil.Process(again.pid).children(recursive=True)
    os.killpg(again.pid, signal.SIGTERM)
    shown, complained = again.communicate(timeout=200)
    assert again.returncode == 130, shown + complained
    assert complained.startswith("engine: interrupted; ") and complained.count("\n") == 1
    assert "draining: pending rewards are computed" in shown and "run drained" in shown
    assert not (run_dir / "control.json").exists()
    check_record(run_dir)
    steps = steps_of(run_dir)
    assert steps == list(range(len(steps)))
    newest = max(run_dir.glob("checkpoints/step-*")).name
    assert newest == f"step-{len(steps):06d}", "of the batch that was in progress"
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []
