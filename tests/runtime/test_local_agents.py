"""A configured rollout in Python, in a whole run in one process."""

from pathlib import Path

import pytest
from ray_plans import check_record, events_of
from test_gateway_ray import PROMPTS, SAMPLES, STEPS, configured

from engine.events import GroupAborted, GroupFailed, GroupGenerated, WeightsInstalled
from engine.plans.configured_plan import plan_of
from engine.runtime.local import run_plan


def test_conversations_of_a_rollout_in_python_live_through_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    status = run_plan(plan_of(configured(tmp_path, {"rollout": "conversations:program"}), run_dir))
    assert (status.outcome, status.steps) == ("finished", STEPS)
    assert check_record(run_dir).state.groups.ledger.consumed == PROMPTS
    assert events_of(run_dir, GroupFailed) == []
    generated = events_of(run_dir, GroupGenerated)
    assert len(generated) == PROMPTS and all(e.trainable == SAMPLES for e in generated)
    resumed = {e.group for e in events_of(run_dir, GroupAborted) if e.tokens}
    assert resumed & {e.group for e in generated if e.oldest_version < e.newest_version}
    assert len(events_of(run_dir, WeightsInstalled)) > 1
