"""A real Prometheus scrapes a real run: every query of every board, every alert, and the alerts in a fault drill."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_server import ALERTS, BOARDS, Prometheus, hurried, needs_prometheus

from dashboards.rollout import VLLM
from dashboards.training import AGENTS
from engine.actors.launch import RunHandle, launch
from engine.config.loading import parse_config
from engine.metrics.address_files import FILE, FOLDER, HOST
from engine.metrics.document import IDLE_SHARE
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
            "reward": {"function": "hanging_reward:score", "timeout_s": 0.5},
            "scheduler": {
                "train_batch_size": 4,
                "samples_per_prompt": 2,
                "max_staleness_steps": 2,
                "max_concurrent_groups": 6,
                "data_attempts": 3,
            },
            "rollout": {"replicas": 2, "slots": 3, "max_tokens": 60, "sync_mode": "keep", "heartbeat_s": 0.0},
            "trainer": {"learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
            "validation": {"prompts": 4, "at_end": False},
        }
    )
    with launch(config, run_dir) as handle:
        yield Watched(handle, run_dir, made / FOLDER, pipe)


def board_queries() -> list[tuple[str, str, str]]:
    """(board, panel, query) of every target, as Grafana would send it for the run of this test."""
    found = []
    for path in sorted((BOARDS / "generated").glob("*.json")):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                asked = target["expr"].replace("$run", RUN).replace("$replica", ".*").replace("$window", "10s")
                found.append((path.stem, panel["title"], asked))
    return found


@pytest.mark.timeout(300)
def test_every_query_of_every_panel_has_data_and_no_alert_fires(watched: Watched, tmp_path: Path) -> None:
    with Prometheus(tmp_path, watched.endpoints, [ALERTS]) as prometheus:
        prometheus.until(f'engine_train_steps_total{{run="{RUN}"}} >= 4 and engine_uptime_seconds > 10', 120)
        # What a store holds is known one scrape later, and the first reward when a second row is written.
        prometheus.until("engine_trajectory_store_groups > 0 and engine_reward_mean")
        queries = board_queries()
        assert len(queries) > 80
        empty = [
            (board, panel, asked)
            for board, panel, asked in queries
            if not any(name in asked for name in (*VLLM, *AGENTS)) and not prometheus.query(asked)
        ]
        assert empty == []
        for _, _, asked in queries:
            prometheus.query(asked)  # vLLM's too are taken, though nobody exports them here
        assert prometheus.value(f'engine_disk_free_bytes{{run="{RUN}"}}') > 0
        assert 0 <= prometheus.value(IDLE_SHARE) <= 1, "the example of docs/METRICS.md"

        alerts = {rule["alert"]: rule for rule in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]}
        for rule in alerts.values():
            prometheus.query(rule["expr"])
        seen = prometheus.rules()
        for name in alerts:
            assert (seen[name]["health"], seen[name].get("lastError", "")) == ("ok", ""), name
            assert seen[name]["state"] != "firing", name
        assert prometheus.alerts.names & set(alerts) == set()


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


def test_a_run_that_ends_is_not_missed(tmp_path: Path) -> None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "actors"))
    from ray_plans import endless, plan

    from engine.actors.launch import start

    run_dir, endpoints = tmp_path / RUN, tmp_path / FOLDER
    run_dir.mkdir()
    with start(plan(run_dir, endless, metrics_port=0, endpoints=endpoints)) as run:
        (said,) = json.loads((endpoints / f"{RUN}.json").read_text())
        assert said["labels"] == {"run": RUN, HOST: socket.gethostname()}, "Prometheus drops the second"
        assert run.metrics_url == f"http://{said['targets'][0]}/metrics"
        assert json.loads((run_dir / FILE).read_text()) == [said]
        run.stop("it is over")
        run.wait()
    assert list(endpoints.iterdir()) == [] and not (run_dir / FILE).exists()


def test_a_run_goes_on_without_its_sinks_and_where_its_endpoint_cannot_be_written_down(tmp_path: Path) -> None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "actors"))
    from ray_plans import PROMPTS, plan

    from engine.actors.launch import start

    (tmp_path / "file").write_text("")
    blocked = str(tmp_path / "file" / "folder")
    sinks = {"mlflow": {"uri": f"file://{blocked}"}, "tensorboard": {"dir": blocked}}
    with start(plan(tmp_path, metrics_port=0, endpoints=Path(blocked), sinks=sinks)) as run:
        assert run.wait().step == PROMPTS // 4
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == PROMPTS // 4
    told = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    for name in sinks:
        assert f"{name} cannot be opened; the run continues without it" in told
    assert "cannot announce the address of the metrics endpoint" in told
