"""Real training runs of configurations in one process: the embedded sampler, the torch trainer, rewards and scorers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_plans import SMALLEST, check_record, events_of
from ray_plans import TRAIN_STEPS as STEPS
from ray_plans import training as tree

from engine.cli.run import resumption_of
from engine.config.loading import load_config, parse_config
from engine.errors import ConfigError
from engine.events import BatchScored, GroupGenerated, StateLeft
from engine.plans.configured_plan import plan_of
from engine.protocols import Batch
from engine.runtime.local import run_plan
from engine.storage import run_directory
from engine.training.model_trainer import ModelTrainer
from engine.workers.plan import Resumption


def test_batches_are_scored_by_reference_and_old_policy_before_they_are_trained(tmp_path: Path) -> None:
    """Composed objectives, each of whose parts says something in `metrics.jsonl`."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = tree(tmp_path, sync_mode="abort")
    config["scheduler"]["policy_mini_batch_size"] = 2
    config["trainer"] |= {
        "advantage": "rloo",
        "clip_dual": 3.0,
        "old_policy": "proximal",
        "correction": "sequence_tis",
        "masks": [{"measure": "token_ratio", "low": 0.5, "high": 2.0}, {"measure": "mean_k3", "high": 0.5}],
        "kl_loss_coef": 0.01,
        "kl_reward_coef": 0.01,
        "overlong_cache_tokens": 149,  # of 150: length alone makes advantages, even where every answer is wrong
    }
    assert run_plan(plan_of(parse_config(config), run_dir)).outcome == "finished"
    check_record(run_dir)
    scored = [(e.step, e.task) for e in events_of(run_dir, BatchScored)]
    assert scored == [(step, task) for step in range(STEPS) for task in ("ref_logprobs", "old_logprobs")]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [row for row in rows if "step" in row]
    assert len(lines) == STEPS
    names = {
        "ess", "clip_share_dual", "behavior_kl_k1", "reference_kl_k3", "kl_reward_mean", "overlong_penalty_mean",
        "masked_share", "masked_share_token_ratio", "rejected_share_mean_k3", "advantage_std",
    }  # fmt: skip
    assert all(isinstance(line[name], float) for line in lines for name in names)
    assert 0 <= lines[0]["reference_kl_k3"] < min(1e-3, lines[-1]["reference_kl_k3"])
    assert any("ratio_mean_stale_1" in line for line in lines)


def test_inputs_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = tree(tmp_path) | {"model": {"path": "somewhere"}, "validation": {}}
    config["data"], config["reward"] = {"path": str(rows)}, {"function": "no_such_module:score"}
    with pytest.raises(ConfigError, match="no module named 'no_such_module'"):
        plan_of(parse_config(config), tmp_path)
    config["reward"], config["data"] = {"function": "engine.tasks.rewards:exact_match"}, {"path": "rows.jsonl"}
    with pytest.raises(ConfigError, match="does not exist"):
        plan_of(parse_config(config), tmp_path)


class Rewarded(ModelTrainer):
    def train(self, batch: Batch) -> dict[str, float]:
        assert all(trajectory.reward is not None for group in batch.groups for trajectory in group.trajectories)
        return super().train(batch)


def test_the_configured_reward_is_given_in_a_pool_of_its_own(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "run": {"dir": str(tmp_path), "max_steps": 2, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": SMALLEST},
        "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4, "state_timeout_s": 7.0},
        "rollout": {"slots": 6, "max_tokens": 30},
        "pools": [{"tasks": ["rollout"]}, {"tasks": ["train"]}, {"tasks": ["reward"], "slots": 3}],
        "reward": {"timeout_s": 9.0},
        "trainer": {"checkpoint_every": 0, "threads": 1},
        "validation": {"at_start": False, "prompts": 4},
    }
    (tmp_path / "run").mkdir()
    planned = plan_of(parse_config(config), tmp_path / "run")
    assert (planned.state_timeout_s, planned.reward_timeout_s) == (7.0, 9.0)
    model, settings = planned.make_trainer.args[:2]  # type: ignore[attr-defined]
    result = run_plan(replace(planned, make_trainer=lambda: Rewarded(model, settings)))
    assert (result.outcome, result.steps) == ("finished", 2), result.reason
    left = {event.group for event in events_of(tmp_path / "run", StateLeft) if event.state == "rewarding"}
    assert len(left) >= 8 and left <= {event.group for event in events_of(tmp_path / "run", GroupGenerated)}
    assert result.validations[-1]["accuracy"] is not None, "validation prompts are rewarded where they are answered"
    check_record(tmp_path / "run")


def test_a_run_that_resumes_in_another_directory_makes_no_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    config = tree(tmp_path)
    del config["run"]["dir"]  # runs/ in the working directory
    config["run"]["max_steps"], config["trainer"]["checkpoint_every"], config["validation"]["every"] = 1, 1, 0
    Path("config.yaml").write_text(yaml.safe_dump(config))
    began = load_config("config.yaml")
    run = run_directory.create(began.run.dir, "mine", config_yaml=began.dump_yaml())
    assert run_plan(plan_of(began, run.path)).steps == 1

    def made() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (here / "runs" / ".made").rglob("*") if path.is_file()}

    models = made()
    assert models
    monkeypatch.chdir(elsewhere)
    again = run_directory.open_run(here / "runs" / run.path.name)
    resumed, settings = resumption_of(again, again.config, ["run.max_steps=2"])
    plan = replace(plan_of(resumed, again.path), resume=True, resumption=Resumption(settings=tuple(settings)))
    assert run_plan(plan).steps == 2
    assert made() == models and not list(elsewhere.iterdir())
