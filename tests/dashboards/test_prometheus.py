"""A real Prometheus scrapes a run over Ray through a drill of faults: each shows on the boards and fires its alert."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prometheus_server import Prometheus, hurried, needs_prometheus

from engine.actors.launch import RunHandle, launch
from engine.config.loading import parse_config
from engine.metrics.address_files import FILE, FOLDER
from engine.tasks.quickstart import Quickstart, prepare

sys.path.append(str(Path(__file__).resolve().parent))
from hanging_reward import hanging

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), needs_prometheus]

RUN = "20260101-000000-watched"


@dataclass
class Watched:
    """A run that continues until it is stopped."""

    handle: RunHandle
    directory: Path
    endpoints: Path
    pipe: Path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Iterator[Watched]:
    made = tmp_path_factory.mktemp("watched")
    run_dir, pipe = made / RUN, made / "hang"
    run_dir.mkdir()
    small = Quickstart(train_prompts=200, validation_prompts=4, warmup_steps=12, hidden_size=16, layers=1, heads=2)
    ready = prepare(made / "made", small)
    rows = [json.loads(line) for line in Path(ready.training_path).read_text().splitlines()]
    prompts = made / "prompts.jsonl"
    with prompts.open("w") as file:
        for number, row in enumerate(rows):
            file.write(json.dumps({**row, "pipe": str(pipe) if number % 6 == 0 else ""}) + "\n")
    held_out = made / "held_out.jsonl"
    kept = [json.loads(line) for line in Path(ready.validation_path).read_text().splitlines()]
    held_out.write_text("".join(json.dumps({**row, "pipe": ""}) + "\n" for row in kept))
    config = parse_config(
        {
            "run": {"dir": str(made), "max_steps": 100_000, "epochs": None, "seed": 3},
            "model": {"path": ready.model_path},
            "data": {"sources": [{"name": "all", "path": str(prompts)}], "validation_path": str(held_out)},
            "reward": {"function": "hanging_reward:score", "timeout_s": 1.0},
            "scheduler": {
                "train_batch_size": 4,
                "samples_per_prompt": 2,
                "max_staleness_steps": 2,
                "max_concurrent_groups": 6,
                "data_attempts": 3,
            },
            "rollout": {"replicas": 2, "slots": 3, "max_tokens": 20, "sync_mode": "keep", "heartbeat_s": 0.0},
            "trainer": {"learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
            "validation": {"prompts": 4, "at_end": False},
        }
    )
    with launch(config, run_dir) as handle:
        yield Watched(handle, run_dir, made / FOLDER, pipe)


def process_of(actor: str) -> psutil.Process:
    """The first process of this session's cluster that is such an actor."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if actor in " ".join(child.cmdline()[:1]):
                return child
    raise AssertionError(f"no process of {actor}")


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@pytest.mark.timeout(300)
def test_a_fault_drill_shows_on_the_boards_and_fires_its_alert(watched: Watched, tmp_path: Path) -> None:
    rules = hurried(tmp_path / "alerts.yml", {"engine_step_age_seconds > 900": "engine_step_age_seconds > 4"})
    with Prometheus(tmp_path, watched.endpoints, [rules]) as prometheus:
        alerts = prometheus.alerts
        prometheus.until('engine_train_steps_total >= 4 and on (run) engine_replicas{state="ready"} == 2', 120)
        assert not alerts.names & {"EngineReplicaLost", "EngineAttemptsFailing"}

        # a replica is killed: it is seen lost, and comes back
        os.kill(process_of("RolloutActor").pid, signal.SIGKILL)
        assert (alerts.wait("EngineReplicaLost", 120) or {}).get("run") == RUN
        assert prometheus.value('sum (engine_retries_total{cause="replica_lost"})') == 1
        assert prometheus.value('sum (engine_process_deaths_total{kind="replica"})') == 1
        prometheus.until('sum (engine_transitions_total{machine="replica", from="down"}) == 3')
        prometheus.until('engine_replicas{state="ready"} == 2')

        # the reward of every sixth prompt hangs: its attempts fail, and the share of those that do shows it
        with hanging(watched.pipe):
            fired = alerts.wait("EngineAttemptsFailing", 120)
            assert fired is not None and (fired["run"], fired["cause"]) == (RUN, "group_data")
            assert prometheus.value('sum (engine_replica_groups_total{end="failed"})') > 0
            assert prometheus.value('engine_retries_total{cause="group_data"}') > 0

        # the trainer stands still: no step, and the rollout runs into the staleness bound
        alerts.forget("EngineNoStepFinished")
        with stopped(process_of("TrainerActor")):
            fired = alerts.wait("EngineNoStepFinished", 120)
            assert fired is not None and fired["run"] == RUN
            assert prometheus.value("engine_step_age_seconds") > 4
            prometheus.until('engine_admission_limit{limit="staleness_bound"} == 1')
            prometheus.until('engine_capacity_groups{bound="staleness"} == 0')
        steps = prometheus.value("engine_train_steps_total")
        prometheus.until(f"engine_train_steps_total > {steps}")

        # the scheduler stands still: nothing answers where the run said that it would
        alerts.forget("EngineScrapeGone")
        with stopped(process_of("SchedulerActor")):
            fired = alerts.wait("EngineScrapeGone", 120)
            assert fired is not None and fired["run"] == RUN
            assert (watched.directory / FILE).exists()

        # the scheduler is killed: another takes up the run, and says so
        os.kill(process_of("SchedulerActor").pid, signal.SIGKILL)
        prometheus.until('engine_recoveries_total{kind="scheduler"} == 1')
        steps = prometheus.value("max (engine_train_steps_total)")
        prometheus.until(f"engine_train_steps_total > {steps} and on (run) engine_step_age_seconds < 4")

        # the run is asked to come to rest: it ends, and is not missed
        watched.handle.drain("the drill is over")
        assert watched.handle.wait().outcome == "stopped"
        assert not (watched.directory / FILE).exists()
