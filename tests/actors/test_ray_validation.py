"""Held-out prompts over Ray: measured beside training, once each, whatever dies."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_plans import PROMPTS, Quick, check_record, events_of, plan

from engine.actors.run import start
from engine.errors import ConfigError
from engine.events import GroupGenerated, ProcessLost, RowsMeasured
from engine.hosts.measuring import held_out_group
from engine.metrics.status import Status
from engine.roles import GroupWork
from engine.runtime.plan import Plan, Rollout
from engine.states.limits import ValidationLimits
from engine.trajectory import Prompt, Trajectory

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

HELD_OUT = [Prompt(row=row, text=f"held out {row}") for row in range(10)]


class Judged(Quick):
    """Right on as many held-out prompts as its version says."""

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        sampled = await super().sample(work, weights, version)
        if work.held_out:
            await asyncio.sleep(0)
            sampled[0].reward = float(work.prompt.row < version)
        return sampled


def rollout(replica: int, deadly: int = 1) -> Rollout:
    generator = Judged(deadly=deadly)
    return Rollout(generator=generator, evaluator=generator)


def measured(run_dir: Path, validation: ValidationLimits, deadly: int = 1, **changes: Any) -> Plan:
    base = plan(run_dir, **{"held_out": HELD_OUT, "make_rollout": lambda replica: rollout(replica, deadly)} | changes)
    return replace(base, limits=replace(base.limits, validation=validation))


def run_whole(plan: Plan) -> Status:
    with start(plan) as run:
        return run.wait()


LAST = PROMPTS // 4


def test_a_replica_that_dies_measuring_costs_its_rows_an_attempt(tmp_path: Path) -> None:
    """The process that is given row 2 first dies of it; the version it was measuring is measured elsewhere."""
    validation = ValidationLimits(rows=10, rows_per_slot=3, every=4, replicas=2)
    status = run_whole(measured(tmp_path, validation, deadly=held_out_group(0, 10, 2)))
    assert (status.outcome, status.step) == ("finished", LAST)
    assert (status.accuracy_first, status.accuracy_last) == (0.0, 1.0)
    ends = {row["version"]: row for row in status.validations}
    assert set(ends) == {0, 4, 8, LAST}
    assert all(row["measured"] == 10 for row in ends.values() if row["outcome"] == "reported")
    assert ends[4]["accuracy"] in (0.4, None)
    assert len(events_of(tmp_path, ProcessLost)) == 1
    scheduler = check_record(tmp_path)
    assert scheduler.state.ledger.consumed == PROMPTS


def test_replicas_of_its_own_measure_and_nobody_else_does(tmp_path: Path) -> None:
    status = run_whole(measured(tmp_path, ValidationLimits(rows=10, rows_per_slot=2, own_from=2), deadly=-99))
    assert status.outcome == "finished"
    assert (status.accuracy_first, status.accuracy_last) == (0.0, 1.0)
    assert {event.replica for event in events_of(tmp_path, RowsMeasured)} == {2}
    assert {event.replica for event in events_of(tmp_path, GroupGenerated)} == {0, 1}
    check_record(tmp_path)


def test_held_out_prompts_without_anyone_to_answer_them_are_refused(tmp_path: Path) -> None:
    """Never a deadlock: whoever asks for a validation that cannot be is told before the first prompt is drawn."""
    no_evaluator = {"make_rollout": lambda replica: Rollout(generator=Quick())}
    with pytest.raises(ConfigError, match="needs an evaluator"):
        start(measured(tmp_path, ValidationLimits(rows=10), **no_evaluator))
    with pytest.raises(ConfigError, match=r"limits\.validation\.rows"):
        measured(tmp_path, ValidationLimits(rows=11))
    with pytest.raises(ConfigError, match=r"limits\.validation\.own_from"):
        measured(tmp_path, ValidationLimits(rows=10, own_from=5))
