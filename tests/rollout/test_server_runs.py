"""Whole runs in one process whose rollouts come from servers: vLLM in processes of its own, with all its routes and
with some of them."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_servers import KEY, Hiding, VllmServer, vllm_servers

from engine.actors.configured_plan import plan_of
from engine.config.loading import parse_config
from engine.events import GroupGenerated, WeightsInstalled
from engine.runtime.local import run_plan
from engine.runtime.plan import Plan, Rollout

sys.path.append(str(Path(__file__).resolve().parent.parent / "actors"))
from ray_plans import check_record, events_of

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.xdist_group("engines")
STEPS = 4
RIGHT = "A_RIGHT"
"""The variable of the key."""
MOST = 60
PAUSING = ("/pause", "/resume", "/is_paused", "/abort_requests", "/inference/v1/generate")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[VllmServer], Path]]:
    """Two servers, and where their model is."""
    directory = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch, vllm_servers(directory, count=2) as servers:
        patch.setenv(RIGHT, KEY)
        yield servers, directory


def tree(tmp_path: Path, model: Path, urls: list[str], **rollout: Any) -> dict[str, Any]:
    """Two groups of two trajectories at a time on each server."""
    rows = [json.dumps({"prompt": f"{number}-7="}) for number in range(100, 140)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    return {
        "run": {"dir": str(tmp_path / "runs"), "max_steps": STEPS},
        "model": {"path": str(model)},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "reward": {"function": "engine.tasks.arithmetic:reward"},
        "scheduler": {
            "train_batch_size": 2, "samples_per_prompt": 2, "max_staleness_steps": 2,
            "max_concurrent_groups": 2 * len(urls), "policies": {"filter": "none"},
        },
        "rollout": {
            "backend": "openai", "urls": urls, "api_key_env": RIGHT, "slots": 2, "max_tokens": MOST,
            "weights_dir": str(tmp_path / "weights"), **rollout,
        },
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
        "metrics": {"port": 0},
    }  # fmt: skip


def when_both_have_installed(plan: Plan, act: Callable[[], None]) -> Plan:
    """The plan of a run that does this once both replicas have new weights."""
    installed: set[int] = set()

    def made(replica: int) -> Rollout:
        rollout: Any = plan.make_rollout(replica)
        install = rollout.generator.install

        async def noting(version: int) -> None:
            await install(version)
            installed.add(replica)
            if len(installed) == 2:
                act()

        rollout.generator.install = noting
        return rollout

    return replace(plan, make_rollout=made)


def test_a_run_over_two_servers_updates_both_under_running_groups(
    tmp_path: Path, served: tuple[list[VllmServer], Path]
) -> None:
    (free, held), model = served
    for server in (free, held):
        server.gate.hold(5)
    before = held.tokens_sampled()
    config = tree(tmp_path, model, [free.url, held.url], sync_mode="keep")
    plan = when_both_have_installed(plan_of(parse_config(config), tmp_path), held.gate.open)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_plan, plan)
        while held.tokens_sampled() < before + 10:
            assert held.process.poll() is None and not running.done()
        free.gate.open()
        result = running.result()
    assert (result.outcome, result.steps, result.version) == ("finished", STEPS, STEPS)
    generated = events_of(tmp_path, GroupGenerated)
    assert {event.replica for event in generated} == {0, 1}
    assert any(event.replica == 1 and event.oldest_version == 0 < event.newest_version for event in generated)
    assert {event.replica for event in events_of(tmp_path, WeightsInstalled)} == {0, 1}
    check_record(tmp_path)


def test_a_server_that_cannot_pause_is_updated_all_the_same(
    tmp_path: Path, served: tuple[list[VllmServer], Path]
) -> None:
    (server, _), model = served
    with Hiding(server.url, *PAUSING) as plainer:
        config = tree(tmp_path, model, [plainer.url], sync_mode="abort", slots=4)
        config["scheduler"]["max_concurrent_groups"] = 4
        result = run_plan(plan_of(parse_config(config), tmp_path))
    assert (result.outcome, result.steps, result.version) == ("finished", STEPS, STEPS)
    assert not set(plainer.asked) & set(PAUSING) and "/collective_rpc" in plainer.asked
    assert events_of(tmp_path, WeightsInstalled)
    assert any(event.newest_version > 0 for event in events_of(tmp_path, GroupGenerated))
    check_record(tmp_path)
