"""A real Prometheus scrapes a run in one process: every query of every board, and every alert, with nothing wrong."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_server import ALERTS, BOARDS, Prometheus, needs_prometheus

from dashboards.rollout import VLLM
from dashboards.training import AGENTS
from engine.config.loading import parse_config
from engine.control.client import tell
from engine.control.requests import Stop
from engine.metrics.address_files import FOLDER
from engine.metrics.document import PAGE
from engine.plans.configured_plan import plan_of
from engine.runtime.local import run_plan
from engine.tasks.quickstart import Quickstart, prepare

pytestmark = needs_prometheus

RUN = "20260101-000000-scraped"
WINDOW_S = 6


@contextmanager
def running(directory: Path) -> Iterator[Path]:
    """A run on a thread, with a sample of everything there is to measure; where it announces its endpoint."""
    small = Quickstart(train_prompts=40, validation_prompts=4, warmup_steps=2, hidden_size=16, layers=1, heads=2)
    made = prepare(directory / "made", small)
    tree: dict[str, Any] = {
        "run": {"dir": str(directory), "max_steps": 100_000, "epochs": None, "seed": 3},
        "model": {"path": made.model_path},
        "data": {"sources": [{"name": "all", "path": made.training_path}], "validation_path": made.validation_path},
        "reward": {"function": "engine.tasks.arithmetic:reward"},
        "scheduler": {
            "train_batch_size": 4,
            "samples_per_prompt": 2,
            "max_staleness_steps": 2,
            "policies": {"concurrency": "kv-cache"},
        },
        "rollout": {"replicas": 2, "slots": 3, "max_tokens": 60, "sync_mode": "keep"},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
        "validation": {"prompts": 4, "at_end": False},
    }
    run_dir = directory / RUN
    run_dir.mkdir()
    plan = plan_of(parse_config(tree), run_dir)
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(run_plan(plan)))
    thread.start()
    try:
        yield directory / FOLDER
    finally:
        tell(run_dir, RUN, Stop(reason="it was seen"))
        thread.join()
    assert ended[0].outcome == "stopped"


def board_queries() -> list[tuple[str, str, str]]:
    """(board, panel, query) of every target, as Grafana would send it for the run of this test."""
    found = []
    for path in sorted((BOARDS / "generated").glob("*.json")):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                asked = target["expr"].replace("$run", RUN).replace("$replica", ".*")
                found.append((path.stem, panel["title"], asked.replace("$window", f"{WINDOW_S}s")))
    return found


def test_every_query_of_every_panel_has_data_and_no_alert_fires(tmp_path: Path) -> None:
    with running(tmp_path) as endpoints, Prometheus(tmp_path, endpoints, [ALERTS]) as prometheus:
        prometheus.until(f'engine_train_steps_total{{run="{RUN}"}} >= 4 and engine_uptime_seconds > {WINDOW_S}', 120)
        # What a store holds is known one scrape later, and the first reward when a second row is written.
        prometheus.until("engine_trajectory_store_groups > 0 and engine_reward_mean")
        prometheus.until("engine_replica_cache_used_ratio")
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
        example = re.search(r"(?:^    .*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        assert example is not None and 0 <= prometheus.value(example[0]) <= 1, "the example of METRICS.md"

        alerts = {rule["alert"]: rule for rule in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]}
        for rule in alerts.values():
            prometheus.query(rule["expr"])
        seen = prometheus.rules()
        for name in alerts:
            assert (seen[name]["health"], seen[name].get("lastError", "")) == ("ok", ""), name
            assert seen[name]["state"] != "firing", name
        assert prometheus.alerts.names & set(alerts) == set()
