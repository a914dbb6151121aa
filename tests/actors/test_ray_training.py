"""Short real training runs through Ray: the embedded sampler, the torch trainer, their weights and metrics."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_plans import SMALLEST, check_record, events_of
from watched_weights import watched_rollout, watched_trainer

from engine.actors.models import plan_of
from engine.actors.run import launch, start
from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.events import (
    BatchScored,
    CheckpointSaved,
    GroupGenerated,
    PublishFailed,
    SyncFailed,
    WeightsInstalled,
)
from engine.metrics.status import Status
from engine.schedule import read

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS, BATCH, STALENESS = 8, 4, 2


def tree(made: Path, **rollout: Any) -> dict[str, Any]:
    """A configuration of the smallest model there can be, hardly trained, so that its responses are of any length."""
    return {
        "run": {"dir": str(made), "max_steps": STEPS, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": SMALLEST},
        "scheduler": {"train_batch_size": BATCH, "samples_per_prompt": 4, "max_staleness_steps": STALENESS},
        "rollout": {"replicas": 2, "slots": 6, "max_tokens": 150, **rollout},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 3, "keep_checkpoints": 2, "threads": 1},
        "validation": {"prompts": 8, "every": 4},
        "metrics": {"port": 0},
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def train(tmp_path: Path, config: dict[str, Any]) -> list[Status]:
    with launch(parse_config(config), tmp_path) as run:
        first = next(run.updates())
        has_torch = run._launched.actor.__ray_call__.remote(lambda actor: "torch" in sys.modules)
        assert not ray.get(has_torch), "the scheduler's memory is for the state of the run"
        return [first, *run.updates()]


@pytest.fixture(scope="module")
def trained(made: Path) -> tuple[Path, list[Status]]:
    run_dir = made / "run"
    run_dir.mkdir()
    return run_dir, train(run_dir, tree(made))


def test_a_training_run_keeps_every_law_and_replays_to_the_bit(trained: tuple[Path, list[Status]]) -> None:
    run_dir, updates = trained
    last = updates[-1]
    assert (last.outcome, last.step, last.version) == ("finished", STEPS, STEPS)
    assert last.staleness_max is not None
    assert last.staleness_max <= STALENESS
    assert last.accuracy_first is not None
    assert last.accuracy is not None
    scheduler = check_record(run_dir)
    assert scheduler.state.steps_trained == STEPS
    assert read(run_dir / "schedule").header.config["rollout"]["sync_mode"] == "keep"
    assert events_of(run_dir, WeightsInstalled)


def test_weights_sent_over_torch_distributed_are_the_trainers_own(made: Path) -> None:
    run_dir = made / "run-distributed"
    run_dir.mkdir()
    rollout = {"transport": "distributed", "send_bucket_mb": 1, "transport_timeout_s": 30.0}
    config = tree(made, **rollout)
    config["trainer"]["weight_decay"] = 0.5  # weights change in a step whose rewards are all equal, too
    planned = plan_of(parse_config(config), run_dir)
    watched = replace(
        planned,
        make_trainer=partial(watched_trainer, planned.make_trainer, run_dir),
        make_rollout=partial(watched_rollout, planned.make_rollout, run_dir),
    )
    with start(watched) as run:
        status = run.wait()
    assert (status.outcome, status.step, status.version) == ("finished", STEPS, STEPS)
    check_record(run_dir)
    assert not events_of(run_dir, SyncFailed, PublishFailed)
    published = {path.name.split("-")[1]: path.read_text() for path in run_dir.glob("published-*")}
    installed = {path.name: path.read_text() for path in run_dir.glob("installed-*")}
    assert len(set(published.values())) == STEPS, "every step changes the weights"
    used = {(e.newest_version, e.replica) for e in events_of(run_dir, GroupGenerated) if e.newest_version > 0}
    assert used and used <= {tuple(map(int, name.split("-")[1:])) for name in installed}
    assert all(read_back == published[name.split("-")[1]] for name, read_back in installed.items())


def test_it_leaves_metrics_and_checkpoints_that_transformers_loads(trained: tuple[Path, list[Status]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, _ = trained
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measured = [(row["version"], row["steps"], row["outcome"]) for row in rows if "validation" in row]
    assert measured[0] == (0, 0, "reported")
    assert measured[-1] == (STEPS, STEPS, "reported")
    assert {version for version, _, _ in measured} == {0, 4, STEPS}, "each due, reported or superseded"
    rows = [row for row in rows if "step" in row]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["loss"] is not None and row["groups"] == BATCH for row in rows)
    assert [e.steps for e in events_of(run_dir, CheckpointSaved)] == [3, 6, 8]
    kept = sorted((run_dir / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-000006", "step-000008"]
    AutoModelForCausalLM.from_pretrained(kept[-1])
    AutoTokenizer.from_pretrained(kept[-1])


def test_batches_are_scored_by_reference_and_old_policy_before_they_are_trained(made: Path) -> None:
    """Composed objectives, each of whose parts says something in `metrics.jsonl`."""
    run_dir = made / "run-objectives"
    run_dir.mkdir()
    config = tree(made, sync_mode="abort")
    config["trainer"] |= {
        "advantage": "rloo",
        "loss": "dual_clip",
        "old_policy": "proximal",
        "correction": "sequence_tis",
        "masks": [{"measure": "token_ratio", "low": 0.5, "high": 2.0}, {"measure": "mean_k3", "high": 0.5}],
        "kl_loss_coef": 0.01,
        "kl_reward_coef": 0.01,
        "overlong_cache_tokens": 149,  # of 150: length alone makes advantages, even where every answer is wrong
    }
    assert train(run_dir, config)[-1].outcome == "finished"
    check_record(run_dir)
    scored = [(e.step, e.task) for e in events_of(run_dir, BatchScored)]
    assert scored == [(step, task) for step in range(STEPS) for task in ("ref_logprobs", "old_logprobs")]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [row for row in rows if "step" in row]
    assert len(lines) == STEPS
    told = {
        "ess", "clip_share_dual", "behaviour_kl_k1", "reference_kl_k3", "kl_reward_mean", "overlong_penalty_mean",
        "masked_share", "masked_share_token_ratio", "rejected_share_mean_k3", "advantage_std",
    }  # fmt: skip
    assert all(isinstance(line[name], float) for line in lines for name in told)
    assert lines[0]["reference_kl_k3"] == pytest.approx(0.0, abs=1e-9) and lines[-1]["reference_kl_k3"] > 0
    assert any("ratio_mean_stale_1" in line for line in lines)


def test_inputs_that_cannot_be_used_are_refused_before_any_actor_starts(made: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = tree(made) | {"model": {"path": "somewhere"}, "validation": {}}
    config["data"], config["reward"] = {"path": str(rows)}, {"function": "no_such_module:score"}
    with pytest.raises(ConfigError, match="no module named 'no_such_module'"):
        launch(parse_config(config), tmp_path)
    config["reward"], config["data"] = {"function": "engine.tasks.rewards:exact_match"}, {"path": "rows.jsonl"}
    with pytest.raises(ConfigError, match="does not exist"):
        launch(parse_config(config), tmp_path)
