"""The shipped environment: its configuration with a small model, in a whole run in one process."""

import json
from pathlib import Path

from ray_plans import check_record, events_of

from engine.config import load_config
from engine.events import GroupFailed
from engine.plans.configured_plan import plan_of
from engine.runtime.local import run_plan

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "environment.yaml"
STEPS = 2


def test_the_shipped_environment_runs_and_its_figures_are_in_the_metrics(tmp_path: Path) -> None:
    few = ["model.lookup.train_prompts=50", "model.lookup.validation_prompts=4", "model.lookup.warmup_steps=60",
           f"run.max_steps={STEPS}", "scheduler.train_batch_size=4", "scheduler.samples_per_prompt=2",
           "scheduler.max_concurrent_groups=8", "scheduler.policies.filter=none", "trainer.checkpoint_every=0",
           "validation.every=0", "validation.at_start=false", f"run.dir={tmp_path}"]  # fmt: skip
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    status = run_plan(plan_of(load_config(CONFIG, few), run_dir))
    assert (status.outcome, status.steps) == ("finished", STEPS), status.reason
    assert events_of(run_dir, GroupFailed) == []
    check_record(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "agent_turns" in line]
    assert len(steps) == STEPS
    for step in steps:
        assert step["agent_turns"] >= 1 and step["agent_tokens_assistant"] > 0
        assert step["agent_tool_errors"] <= step["agent_tool_calls"]
        assert step["segments"] == 1
    assert sum(step["agent_tool_calls"] for step in steps) > 0
