"""A session refuses facts that cannot be true, by name, and nothing changes."""

import dataclasses
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from session_loop import LIMITS, Loop, made, require_sound

import engine
from engine.commands import (
    Command,
    DrawPrompts,
    MeasureRows,
    PauseReplica,
    PublishWeights,
    StageWeights,
    StartGroup,
    StartProcess,
    TrainStep,
)
from engine.events import (
    BatchScored,
    CheckpointDamaged,
    CheckpointSaved,
    Event,
    GroupFailed,
    GroupGenerated,
    OrderDone,
    OrderProgressed,
    ProcessLost,
    ProcessUp,
    PromptsDrawn,
    ReplicaPaused,
    RowsMeasured,
    RunResumed,
    SettingChanged,
    StateFailed,
    StepTrained,
    TimerFired,
    WeightsPublished,
    WeightsStaged,
)
from engine.runtime.local import answer
from engine.states.limits import Pool, ValidationLimits, ValidationSet

ILLEGAL: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "not a fact": (lambda loop: "done", "'done' is not a fact; report an object of a class in engine.events"),
    "the session's own": (lambda loop: RunResumed(steps=0, replicas=1, consumed=(), released=()), "in begin()"),
    "another type": (lambda loop: TimerFired(timer=1.0), "timer"),  # type: ignore[arg-type]
    "never drawn": (lambda loop: replace(group(loop), group=99), "there is no group 99: only groups 0 to 5 were drawn"),
    "another attempt": (lambda loop: replace(group(loop), attempt=7), "attempt 7 of group 0 was not ordered"),
    "no such replica": (lambda loop: replace(group(loop), replica=3), "there is no replica 3"),
    "another life": (lambda loop: replace(group(loop), incarnation=2), "incarnation 2 was not ordered"),
    "weights it cannot have": (lambda loop: replace(group(loop), newest_version=1), "0 <= oldest_version <= newest"),
    "no tokens": (lambda loop: replace(group(loop), tokens=0), "a group without tokens is GroupFailed"),
    "a negative number": (lambda loop: replace(group(loop), trainable=-1), "trainable is -1, but must be at least 0"),
    "no such cause": (
        lambda loop: answer(loop.first(StartGroup), GroupFailed, cause="bug", reason=""),
        "use infrastructure or data",
    ),
    "no batch": (lambda loop: StepTrained(step=2, attempt=1), "there is no step 2: no steps have a batch yet"),
    "too many prompts": (
        lambda loop: answer(loop.first(DrawPrompts), PromptsDrawn, count=7, exhausted=False),
        "prompts 0 to 5 were ordered",
    ),
    "no prompt": (lambda loop: answer(loop.first(DrawPrompts), PromptsDrawn, count=0, exhausted=False), "at least one"),
    "other weights": (lambda loop: answer(loop.first(StageWeights), WeightsStaged, version=0), "version 1 was ordered"),
    "not what was ordered": (
        lambda loop: OrderDone(orders=(loop.first(TrainStep) and number_of(loop, TrainStep),)),
        "is TrainStep; answer it by StepTrained or StepFailed",
    ),
    "never ordered": (lambda loop: OrderDone(orders=(999,)), "there is no order 999"),
    "no slots": (lambda loop: answer(loop.first(StartProcess), ProcessUp), "slots and samples must be at least 1"),
    "half a character": (
        lambda loop: answer(loop.first(StartGroup), GroupFailed, cause="data", reason="\ud83d!"),
        "GroupFailed.reason cannot be recorded: it has '\\ud83d', half of a surrogate pair; use valid Unicode",
    ),
    "half a character in a setting": (
        lambda loop: SettingChanged(setting="\ud83d", value="1"),
        "SettingChanged.setting cannot be recorded: it has '\\ud83d', half of a surrogate pair",
    ),
    "published without an order": (
        lambda loop: at(loop, TrainStep, WeightsPublished(version=1, attempt=1)),
        "no publication of version 1 was ordered; the newest version is 0",
    ),
    "published and never ordered": (
        lambda loop: replace(loop.fact_for(loop.first(PublishWeights)), attempt=3),
        "attempt 3 was not ordered; the newest is 1",
    ),
    "the initial weights published": (
        lambda loop: WeightsPublished(version=0, attempt=1),
        "no publication of version 0",
    ),
    "a lost trainer that published what was never ordered": (
        lambda loop: replace(lost_trainer(loop), published=7),
        "published is 7, but the newest version that was ordered is 0",
    ),
    "a lost trainer that saved what was never ordered": (
        lambda loop: replace(lost_trainer(loop), saved=(3,)),
        "saved has 3, but no checkpoint after 3 train steps was ordered",
    ),
    "a lost replica that published": (
        lambda loop: ProcessLost(kind="replica", index=0, incarnation=1, reason="", published=0),
        "a replica publishes no weights and saves no checkpoints",
    ),
    "a second trainer": (lambda loop: replace(lost_trainer(loop), index=1), "there is no trainer 1"),
    "on another replica": (
        lambda loop: at(loop, StartGroup, replace(group(loop), replica=1 - group(loop).replica)),
        "but this attempt was ordered on",
    ),
    "attempt 0": (lambda loop: replace(group(loop), attempt=0), "attempt is 0, but must be at least 1"),
    "life 0": (lambda loop: replace(group(loop), incarnation=0), "incarnation is 0, but must be at least 1"),
    "more trajectories than samples": (
        lambda loop: answer(loop.first(StartGroup), OrderProgressed, finished=3),
        "finished is 3, but the group has 2 trajectories",
    ),
    "trajectories of a train step": (
        lambda loop: answer(loop.first(TrainStep), OrderProgressed, finished=1),
        "generates no group",
    ),
    "progress of what was never ordered": (lambda loop: OrderProgressed(order=999), "there is no order 999"),
    "progress of a sync": (
        lambda loop: OrderProgressed(order=loop.first(StageWeights) and number_of(loop, StageWeights)),
        "is StageWeights, which does not report progress",
    ),
    "a scoring task": (
        lambda loop: at(loop, TrainStep, BatchScored(step=0, attempt=1, task="ref_logprobs")),
        "there is no scoring task 'ref_logprobs'; the run has no scoring task",
    ),
    "an added state": (
        lambda loop: StateFailed(group=group(loop).group, attempt=1, state="judge", cause="data", reason=""),
        "there is no added state 'judge'",
    ),
    "paused before it was ordered": (
        lambda loop: ReplicaPaused(replica=0, incarnation=1, attempt=loop.first(StageWeights).attempt),
        "StageWeights comes first; answer it by WeightsStaged or SyncFailed",
    ),
    "saved without a step": (lambda loop: CheckpointSaved(steps=0), "no checkpoint after 0 train steps was ordered"),
    "damaged but never saved": (
        lambda loop: at(loop, PublishWeights, CheckpointDamaged(steps=1, reason="")),
        "no checkpoint after 1 train steps was reported as saved",
    ),
    "a setting": (lambda loop: SettingChanged(setting="run.seed", value="1"), "run.seed '1' cannot be changed"),
}


MEASURED: dict[str, tuple[dict[str, Any], str]] = {
    "rows of another chunk": ({"chunk": 1}, "rows has row 0, but rows 2 to 3 were ordered"),
    "rows of a chunk that does not exist": (
        {"chunk": 9},
        "there is no chunk 9: only chunks 0 to 1 are in validation 0",
    ),
    "rows of no validation": ({"validation": 3}, "only validations 0 to 0 were begun"),
    "rows named twice": ({"rows": (0, 0)}, "rows names a row twice; name each once"),
    "right rows named twice": ({"right": 2, "right_rows": (1, 1)}, "right_rows names a row twice; name each once"),
    "parts of a row named twice": (
        {"part_rows": (1, 1), "part_places": (0, 0), "part_values": (0.5, 0.5)},
        "part_rows names a row twice with the same part",
    ),
    "rows out of range": ({"rows": (0, 4)}, "rows has row 4, but rows 0 to 1 were ordered"),
    "right rows out of range": ({"right_rows": (5,)}, "right_rows has row 5, but rows 0 to 1 were ordered"),
    "right rows without their rows": (
        {"rows": (), "rewards": (), "answers": ()},
        "right_rows has rows that are not in rows",
    ),
    "parts out of range": (
        {"part_rows": (1,), "part_places": (2,), "part_values": (0.5,)},
        "part_places has 2, but the set of row 1 has 1 reward parts",
    ),
    "fewer rewards than rows": ({"rewards": (1.0,)}, "rows, rewards, answers must have the same number of entries"),
    "another number of rows": ({"measured": 1}, "has 2 rows, but measured is 1; name these rows"),
}
"""What is changed in the measurement of the first chunk, rows 0 and 1."""


def at(loop: Loop, kind: type[Command], fact: Event) -> Event:
    """A fact, once an order of this kind is open."""
    loop.first(kind)
    return fact


def group(loop: Loop) -> GroupGenerated:
    fact = loop.fact_for(loop.first(StartGroup))
    assert isinstance(fact, GroupGenerated)
    return fact


def number_of(loop: Loop, kind: type[Command]) -> int:
    orders = loop.session._scheduler.state.orders.all()
    return next(order.number for order in orders if type(order.command) is kind)


def lost_trainer(loop: Loop) -> ProcessLost:
    loop.first(TrainStep)
    return ProcessLost(kind="trainer", index=0, incarnation=1, reason="")


def require_refused(loop: Loop, fact: Event, message: str) -> None:
    events = loop.session.events
    with pytest.raises(engine.IllegalFact) as caught:
        loop.tell(fact)
    assert message in str(caught.value)
    assert loop.session.events == events
    loop.finish()
    require_sound(loop.session)


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_fact_that_cannot_be_true_is_refused(case: str) -> None:
    make, message = ILLEGAL[case]
    loop = made(replicas=2)
    require_refused(loop, make(loop), message)


@pytest.mark.parametrize("case", MEASURED)
def test_rows_that_cannot_have_been_measured_are_refused(case: str) -> None:
    changes, message = MEASURED[case]
    held_out = ValidationSet(name="held", prompts=4, parts=("correct",))
    validation = ValidationLimits(rows=4, sets=(held_out,), rows_per_slot=2)
    loop = made(dataclasses.replace(LIMITS, validation=validation))
    measured = answer(
        loop.first(MeasureRows), RowsMeasured, measured=2, right=1, reward=1.0, rows=(0, 1), rewards=(0.0, 1.0),
        answers=(0, 7), right_rows=(1,), part_rows=(0, 1), part_places=(0, 0), part_values=(0.5, 0.5),
    )  # fmt: skip
    require_refused(loop, replace(measured, **changes), message)


def test_a_replica_whose_groups_still_run_is_not_paused() -> None:
    """A pause that aborts them comes after their reports; else they would run on a replica that sleeps."""
    limits = dataclasses.replace(LIMITS, pools=(Pool(tasks=("rollout", "train"), replicas=(0,)),))
    loop = made(limits)
    while not any(isinstance(order, PauseReplica) for order in loop.session.open_orders):
        loop.tell(loop.fact_for(loop.session.open_orders[-1]))
    paused = loop.fact_for(loop.first(PauseReplica))
    require_refused(loop, paused, "groups [0, 1] still run there; first report how each was aborted or ended")


def test_a_late_fact_of_an_earlier_life_has_no_effect() -> None:
    """Its sync had a higher number than that of the life that followed."""
    loop = made()
    while (staged := loop.fact_for(loop.first(StageWeights))).attempt < 2:
        loop.tell(staged)
    loop.tell(ProcessLost(kind="replica", index=0, incarnation=1, reason=""))
    assert loop.first(StageWeights).attempt == 1
    assert loop.tell(staged) == ()
    loop.finish()
    require_sound(loop.session)


class Small(IntEnum):
    TWO = 2


WHOLE = (np.int8, np.uint64, np.int64, np.array, torch.tensor, Small)
REAL = (np.float16, np.float32, np.float64, np.array, torch.tensor, np.int32, int)


@given(whole=st.sampled_from(WHOLE), real=st.sampled_from(REAL))
def test_a_number_of_another_library_becomes_a_plain_one(whole: Any, real: Any) -> None:
    """A snapshot of the state has only plain numbers."""
    loop = made()
    fact = group(loop)
    alike = {"trainable": whole(2), "reward_mean": real(1), "group": np.int64(fact.group), "attempt": np.uint8(1)}
    loop.tell(replace(fact, **alike))
    outcome = loop.session._scheduler.state.groups.live[fact.group].outcome
    assert (outcome.reward_mean, type(outcome.reward_mean)) == (1.0, float)
    recorded = [event for tick in loop.session.record.ticks() for event in tick.events][-1]
    assert recorded == replace(fact, trainable=2, reward_mean=1.0, id=recorded.id, at=recorded.at)


@pytest.mark.parametrize("number", [np.float32(2.0), np.array([2]), np.bool_(True), True, np.longdouble(2), 2.0, "2"])
def test_what_is_no_whole_number_is_refused_and_changes_nothing(number: Any) -> None:
    loop = made()
    fact = group(loop)
    before = loop.session.events
    with pytest.raises(engine.IllegalFact, match=r"GroupGenerated\.trainable cannot be recorded"):
        loop.tell(replace(fact, trainable=number))
    assert loop.session.events == before
    loop.tell(fact)
