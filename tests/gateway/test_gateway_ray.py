"""Whole runs over Ray with agents: weights swapped under conversations, a replica lost in one, every law kept."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "actors"))
import conversations
from conversations import make_inputs
from ray_plans import check_record, events_of

import engine.rollout.torch.torch_backend
from engine.actors.launch import start
from engine.config import Config
from engine.config.loading import parse_config
from engine.events import GroupAborted, GroupFailed, GroupGenerated, ProcessLost, WeightsInstalled
from engine.plans.configured_plan import plan_of
from engine.plans.rollouts import make_rollout
from engine.plans.run_inputs import inputs_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PROMPTS, SAMPLES, STEPS = 16, 2, 4


def configured(
    directory: Path, agent: dict[str, Any], reward: str = "conversations:whole", replicas: int = 2
) -> Config:
    return parse_config(
        {
            "run": {"dir": str(directory), "seed": 3},
            **make_inputs(directory, PROMPTS),
            "reward": {"function": reward},
            "agent": agent,
            "scheduler": {"train_batch_size": 4, "samples_per_prompt": SAMPLES, "max_staleness_steps": 2},
            "rollout": {"replicas": replicas, "slots": 6, "max_tokens": 24, "sync_mode": "abort"},
            "trainer": {"learning_rate": 1e-4, "checkpoint_every": 0, "threads": 1},
            "validation": {"at_start": False, "at_end": False},
        }
    )


def deadly_rollout(config: Config, replica: int) -> Any:
    """The configured replica, on a backend that dies once."""
    engine.rollout.torch.torch_backend.TorchBackend = conversations.Deadly  # type: ignore[misc]
    return make_rollout(config, inputs_of(config), replica)


def test_conversations_live_through_new_weights_and_the_loss_of_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured(tmp_path, {"function": "conversations:converse"})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    plan = replace(plan_of(config, run_dir), make_rollout=lambda replica: deadly_rollout(config, replica))
    with start(plan) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS)
    assert check_record(run_dir).state.groups.ledger.consumed == PROMPTS
    assert [e.index for e in events_of(run_dir, ProcessLost)] != []
    assert events_of(run_dir, GroupFailed) == []
    generated = events_of(run_dir, GroupGenerated)
    assert len(generated) == PROMPTS
    assert all(e.trainable == SAMPLES for e in generated)
    resumed = {e.group for e in events_of(run_dir, GroupAborted) if e.tokens}
    assert resumed & {e.group for e in generated if e.oldest_version < e.newest_version}
    assert len(events_of(run_dir, WeightsInstalled)) > 1
    lines = Counter(line.split()[0] for line in (tmp_path / "agents.txt").read_text().splitlines())
    assert lines["ended"] == PROMPTS * SAMPLES
    assert lines["begun"] - lines["ended"] <= SAMPLES, "hardly an agent was begun twice"
