"""The work of added states in an actor of its own: it dies and goes on, and rewards can be given there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_plans import SMALLEST, Counter, Quick, check_record, events_of, plan

from engine.actors.models import plan_of
from engine.actors.run import start
from engine.config.loading import parse_config
from engine.events import GroupGenerated, ProcessLost, ProcessUp, StateLeft
from engine.hosts.prompts import listed
from engine.roles import Batch
from engine.runtime.plan import Rollout
from engine.states.limits import AddedState, Limits
from engine.training.trainer import ModelTrainer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS = 5


class Judged(Counter):
    def train(self, batch: Batch) -> dict[str, float]:
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        assert rewards == [7.0, 9.0] * len(batch.groups), "a step took what was not judged"
        return super().train(batch)


def test_the_process_of_the_states_dies_and_goes_on(tmp_path: Path) -> None:
    limits = Limits(
        train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=STEPS,
        added_states=(AddedState(name="refereeing", concurrency=2),),
    )  # fmt: skip
    marker = str(tmp_path / "died")
    judged = plan(
        tmp_path,
        limits=limits,
        make_trainer=Judged,
        make_rollout=lambda replica: Rollout(generator=Quick()),
        make_prompts=lambda: listed([marker] * 40),
        config={"run": {"extensions": ["refereeing_state"], "code_dir": str(Path(__file__).parent)}},
    )
    with start(judged) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    (lost,) = events_of(tmp_path, ProcessLost)
    assert lost.kind == "added states" and "died" in lost.reason
    (up,) = [event for event in events_of(tmp_path, ProcessUp) if event.kind == "added states"]
    assert up.incarnation == 2
    assert events_of(tmp_path, StateLeft)


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
    with start(replace(planned, make_trainer=lambda: Rewarded(model, settings))) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", 2), status.reason
    left = {event.group for event in events_of(tmp_path / "run", StateLeft) if event.state == "rewarding"}
    assert len(left) >= 8 and left <= {event.group for event in events_of(tmp_path / "run", GroupGenerated)}
    assert status.accuracy is not None, "held-out prompts are rewarded where they are answered"
    check_record(tmp_path / "run")
