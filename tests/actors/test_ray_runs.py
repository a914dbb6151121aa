"""Runs through real Ray with work that takes no time: deaths, refusals, ends."""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ray_plans import (
    PROMPTS,
    Mortal,
    Quick,
    check_record,
    endless,
    events_of,
    exhausted,
    limited,
    plan,
    refused,
    restore_mortal,
)

from engine.actors.launch import start
from engine.errors import ConfigError, RunFailed
from engine.events import ProcessLost, StateLeft
from engine.metrics.status import Status
from engine.policies import state_registry
from engine.protocols import Batch
from engine.runtime.prompt_sources import listed
from engine.states.limits import AddedState
from engine.workers.plan import Liveness, Plan

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def run_whole(plan: Plan) -> Status:
    with start(plan) as run:
        return run.wait()


def actors_of_ours() -> list[psutil.Process]:
    """Processes of this session's cluster that are an actor of the engine."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "Actor" in (_title(child))]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def wait_for_no_actors() -> None:
    _, left = psutil.wait_procs(actors_of_ours(), timeout=60)
    assert left == [], "a process of the run is left behind"


class Judged(Mortal):
    def train(self, batch: Batch) -> dict[str, float]:
        rewards = [trajectory.reward for group in batch.groups for trajectory in group.trajectories]
        assert rewards == [7.0, 9.0] * len(batch.groups), "a step took what was not judged"
        return super().train(batch)


@pytest.fixture
def refereeing() -> Iterator[None]:
    """This process knows the state, too, to replay the record."""
    import refereeing_state

    yield
    state_registry.forget([refereeing_state.Judge])


@pytest.mark.usefixtures("refereeing")
def test_a_dead_trainer_redoes_steps_since_its_checkpoint_and_added_states_continue(
    tmp_path: Path,
) -> None:
    deaths, redone = (1, 2, 3, 5, 9), [0, 0, 1, 0, 1, 2, 4, 8]
    limits = replace(
        plan(tmp_path).limits, sync_every=3, checkpoint_every=4, keeps_batches=True,
        added_states=(AddedState(name="refereeing", concurrency=2),),
    )  # fmt: skip
    marker = str(tmp_path / "judge-died")
    status = run_whole(
        plan(
            tmp_path,
            lambda replica: Quick(steps=3),
            make_trainer=lambda: Judged(tmp_path, deaths),
            make_prompts=lambda: listed([marker] * PROMPTS),
            restore_trainer=restore_mortal,
            limits=limits,
            trajectories="memory",
            config={"run": {"extensions": ["refereeing_state"], "code_dir": str(Path(__file__).parent)}},
        )
    )
    assert (status.outcome, status.step) == ("finished", PROMPTS // 4), status.reason
    lost = Counter(event.kind for event in events_of(tmp_path, ProcessLost))
    assert lost == {"trainer": len(deaths), "added states": 1}
    assert len(events_of(tmp_path, StateLeft)) >= PROMPTS
    trained = [int(step) for step in (tmp_path / "trained").read_text().split()]
    assert sorted(trained) == sorted([*range(PROMPTS // 4), *redone])
    check_record(tmp_path)


def test_what_is_wrong_with_a_plan_is_raised_before_any_prompt_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda:9"):
        start(plan(tmp_path, make_rollout=refused))
    with pytest.raises(RunFailed, match="exhausted raised StopIteration"):
        start(plan(tmp_path / "iterator", make_rollout=exhausted))
    wait_for_no_actors()


def test_a_scheduler_that_is_killed_takes_its_actors_along_and_is_reported(tmp_path: Path) -> None:
    with start(limited(plan(tmp_path, endless, liveness=Liveness(scheduler_restarts=0)), run_restarts=0)) as run:
        (scheduler,) = [p for p in actors_of_ours() if "SchedulerActor" in _title(p)]
        os.kill(scheduler.pid, signal.SIGKILL)
        status = run.wait()
    assert status.outcome == "failed" and re.search(r"SchedulerActor .* died", status.reason)
    wait_for_no_actors()
