"""A training run through Ray whose replicas hold vLLM, one of which loses its engine in the middle of generating."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from frozen_engine import FrozenEngine
from ray_plans import check_record, events_of

from engine.actors.launch import RunHandle, start
from engine.commands import ResumeGroup, StartGroup
from engine.config.loading import parse_config
from engine.events import GroupGenerated, PrefixStored, ProcessLost, SyncFailed, WeightsInstalled
from engine.ids import GroupId
from engine.plans.configured_plan import plan_of
from engine.record import Handled, read

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]
pytest.importorskip("vllm", reason="vLLM is not installed")

STEPS, BATCH, SAMPLES, EVERY = 3, 4, 4, 10


def tree(made: Path) -> dict[str, Any]:
    """A model hardly trained, so that its responses are of any length; heads of 32, as vLLM on a CPU wants them."""
    arithmetic = {"train_prompts": 200, "validation_prompts": 4, "warmup_steps": 12, "layers": 4, "heads": 2}
    return {
        "run": {"dir": str(made), "max_steps": STEPS, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": arithmetic},
        "scheduler": {"train_batch_size": BATCH, "samples_per_prompt": SAMPLES, "max_staleness_steps": 2},
        "rollout": {
            "backend": "vllm", "replicas": 2, "slots": 6, "max_tokens": 150,
            "engine_args": {"dtype": "float32", "enforce_eager": True, "max_model_len": 256},
        },
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1},
        "validation": {"at_start": False, "at_end": False},
        "durability": {"prefix_every_tokens": EVERY},
    }  # fmt: skip


def until_stored(run: RunHandle, run_dir: Path, engine: FrozenEngine) -> GroupId:
    """The group whose prefix is recorded as stored, and whose engine stands still."""
    for _ in run.updates():
        group = engine.group()
        if group is not None and group in {stored.group for stored in events_of(run_dir, PrefixStored)}:
            return group
    pytest.fail("no prefix was stored")


def test_groups_of_a_killed_vllm_process_go_on_elsewhere_from_stored_prefixes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    engine = FrozenEngine(run_dir)
    planned = plan_of(parse_config(tree(tmp_path)), run_dir)
    with start(replace(planned, make_rollout=engine.rollouts(planned.make_rollout))) as run:
        killed = until_stored(run, run_dir, engine)
        engine.kill()
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason

    scheduler = check_record(run_dir)
    assert scheduler.state.steps_trained == STEPS

    lost, *others = events_of(run_dir, ProcessLost)
    until = min((other.id for other in others), default=math.inf)  # a slow machine may lose another one
    assert (lost.index, lost.incarnation) == (0, 1) and "vLLM" in lost.reason
    stored = {e.group: e for e in events_of(run_dir, PrefixStored) if e.replica == 0 and e.id < lost.id}
    assert killed in stored
    orders = [
        command
        for frame in read(run_dir / "schedule").frames()
        if isinstance(frame, Handled) and lost.id <= frame.event.id < until
        for command in frame.commands
        if isinstance(command, StartGroup | ResumeGroup) and command.attempt > 1
    ]
    again = {command.group: command for command in orders}
    resumed = {group: order for group, order in again.items() if isinstance(order, ResumeGroup) and group in stored}
    assert killed in resumed
    assert all(isinstance(order, ResumeGroup) == (group in stored) for group, order in again.items())
    ended = {e.group: e for e in events_of(run_dir, GroupGenerated)}
    assert set(resumed) & set(ended), "what was resumed has ended"
    assert all(ended[group].tokens >= stored[group].tokens for group in resumed if group in ended)


def test_weights_reach_vllm_by_its_own_transfer(tmp_path: Path) -> None:
    config = tree(tmp_path)
    config["run"]["max_steps"] = STEPS
    config["scheduler"]["max_staleness_steps"] = 0  # no step without the version before it
    config["rollout"] |= {"transport": "vllm", "replicas": 1, "slots": 4, "max_tokens": 24}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with start(plan_of(parse_config(config), run_dir)) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    check_record(run_dir)
    assert [failed.reason for failed in events_of(run_dir, SyncFailed)] == []
    assert {event.version for event in events_of(run_dir, WeightsInstalled)} >= set(range(1, STEPS))
