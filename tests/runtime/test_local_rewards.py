"""A whole run of a configuration with several rewards: every form, one in a process of its own, one for each token."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray_plans import SMALLEST, check_record, events_of

from engine.config.loading import parse_config
from engine.errors import RunFailed
from engine.events import GroupFailed
from engine.plans.configured_plan import plan_of
from engine.runtime.local import run_plan
from engine.storage.samples import FAILED, TRAIN, SampleFiles
from engine.tasks.quickstart import Quickstart, prepare

CODE = """
def early(prompt, trajectory, *, good):
    return [good if position < 2 else 0.0 for position in range(len(trajectory.token_ids))]

def longest(prompt, trajectories):
    most = max(len(trajectory.token_ids) for trajectory in trajectories)
    return [float(len(trajectory.token_ids) == most) for trajectory in trajectories]

def trl(prompts, completions, answer, **kwargs):
    return [0.5 if answer is not None else None for answer in answer]

def wrong(prompt, trajectory):
    raise KeyError("no such column")
"""


@pytest.fixture
def own_code(tmp_path: Path, own_modules: None) -> Path:
    (tmp_path / "whole_run_rewards.py").write_text(CODE)
    return tmp_path


def tree(folder: Path, *functions: dict[str, Any], **reward: Any) -> dict[str, Any]:
    made = prepare(folder / ".made", Quickstart(**SMALLEST), seed=3)
    return {
        "run": {"dir": str(folder), "max_steps": 2, "seed": 3, "code_dir": str(folder)},
        "model": {"path": made.model_path},
        "data": {"path": made.training_path, "chat": "never"},
        "reward": {"functions": list(functions), **reward},
        "scheduler": {"train_batch_size": 2, "samples_per_prompt": 4},
        "rollout": {"slots": 4, "max_tokens": 12},
        "trainer": {"threads": 1, "checkpoint_every": 0},
        "samples": {"per_step": 4},
    }


def test_several_rewards_make_one(own_code: Path) -> None:
    run_dir = own_code / "run"
    run_dir.mkdir()
    config = tree(
        own_code,
        {"name": "exact", "function": "engine.tasks.rewards:exact_match"},
        {"name": "early", "function": "whole_run_rewards:early", "unit": "token", "arguments": {"good": 0.25}},
        {"name": "longest", "function": "whole_run_rewards:longest", "processes": 1, "memory_mb": 4096},
        {"name": "trl", "function": "whole_run_rewards:trl", "weight": 2.0},
        {
            "name": "digits",
            "function": "engine.tasks.format_rewards:regular_expression",
            "weight": -0.5,
            "arguments": {"pattern": r"\d"},
        },
    )
    config["reward"]["correct"] = "trl"
    assert run_plan(plan_of(parse_config(config), run_dir)).outcome == "finished"
    check_record(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert len(steps) == 2
    for line in steps:
        parts = {name: line[f"reward_{name}"] for name in ("exact", "early", "longest", "trl", "digits")}
        assert parts["trl"] == 0.5 and parts["longest"] >= 0.25 and 0 < parts["early"] <= 0.5
        total = parts["exact"] + parts["early"] + parts["longest"] + 2.0 * parts["trl"] - 0.5 * parts["digits"]
        assert line["reward_mean"] == pytest.approx(total, abs=1e-6)
        assert line["accuracy"] == 0.0, "trl gives 0.5"
    for row in SampleFiles(run_dir / "samples").rows(TRAIN):
        assert row["reward_parts"]["trl"] == 0.5


def test_a_reward_that_always_fails_ends_the_run_by_name(own_code: Path) -> None:
    run_dir = own_code / "run"
    run_dir.mkdir()
    config = tree(own_code, {"name": "wrong", "function": "whole_run_rewards:wrong"}, max_failure_share=0.25)
    said = "the first 1[1-9] attempts all failed on their prompt, agent or reward; last error: reward wrong"
    with pytest.raises(RunFailed, match=said):
        run_plan(plan_of(parse_config(config), run_dir))
    failed = events_of(run_dir, GroupFailed)
    story = "reward wrong (whole_run_rewards.wrong) raised KeyError on prompt row "
    kept = list(SampleFiles(run_dir / "samples").rows(FAILED))
    assert 0 < len(kept) <= 4 * 2, "samples.per_step of each version in each replica"
    for row in kept:
        assert row["error"].startswith(story) and row["tokens"] and row["reward"] is None
        assert (row["kind"], row["attempt"] >= 1, row["version"]) == ("failed", True, 0)
    assert {event.cause for event in failed} == {"data"} and all(event.reason.startswith(story) for event in failed)
