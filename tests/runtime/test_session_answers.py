"""A session refuses answers and events that cannot be true, by name, and nothing changes."""

import dataclasses
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from session_loop import LIMITS, Loop, kind_of_answer, made, require_sound

import engine
from engine.commands import (
    DrawPrompts,
    MeasureRows,
    PauseReplica,
    StageWeights,
    StartGroup,
    StartProcess,
    TrainStep,
)
from engine.events import (
    CheckpointDamaged,
    Event,
    GroupFailed,
    OrderDone,
    OrderProgressed,
    ProcessLost,
    ProcessUp,
    ReplicaLeaves,
    ReplicaPaused,
    ReplicasWanted,
    RunResumed,
    SettingChanged,
    StepTrained,
    TimerFired,
)
from engine.states.limits import Pool, ValidationLimits, ValidationSet


def to(kind: type[Any], **changes: Any) -> Callable[[Loop], Any]:
    """Answer an order of this kind, but with other values."""
    return lambda loop: loop.give(loop.first(kind), **changes)


def by(kind: type[Any], answer: type[Event], **data: Any) -> Callable[[Loop], Any]:
    """Answer an order of this kind with an event of this class."""
    return lambda loop: loop.first(kind).answer(answer, **data)


def event(event: Any, during: type[Any] = StartProcess) -> Callable[[Loop], Any]:
    """Report an event while an order of this kind is open."""

    def act(loop: Loop) -> None:
        loop.first(during)
        loop.session.report(event)

    return act


def lost(kind: str = "trainer", index: int = 0, life: int = 1, **more: Any) -> Callable[[Loop], Any]:
    return event(ProcessLost(kind=kind, index=index, life=life, reason="", **more), TrainStep)


ILLEGAL: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "no event": (event("done"), "'done' cannot be reported; use the answer() of an order, or report ProcessLost or"),
    "the session's own": (event(RunResumed(steps=0, replicas=1, consumed=(), released=())), "RunResumed cannot be"),
    "a timer": (event(TimerFired(timer=1)), "TimerFired cannot be reported"),
    "an answer without its order": (event(StepTrained(step=2, attempt=1)), "StepTrained cannot be reported"),
    "weights it cannot have": (to(StartGroup, newest_version=1), "0 <= oldest_version <= newest"),
    "half a version": (to(StartGroup, oldest_version=-1), "a group with tokens has an oldest and a newest version"),
    "no tokens": (to(StartGroup, tokens=0), "a group without tokens is GroupFailed"),
    "a negative number": (to(StartGroup, trainable=-1), "trainable is -1, but must be at least 0"),
    "a negative spread": (to(StartGroup, reward_spread=-0.5), "the largest minus the smallest reward"),
    "a reward that is no number": (to(StartGroup, reward_mean=float("nan")), "reward_mean is nan, but must be finite"),
    "no such cause": (by(StartGroup, GroupFailed, cause="bug", reason=""), "use infrastructure or data"),
    "too many prompts": (to(DrawPrompts, count=7), "prompts 0 to 5 were ordered"),
    "no prompt": (to(DrawPrompts, count=0), "at least one"),
    "other weights": (to(StageWeights, version=0), "WeightsStaged.version is 1, as ordered; leave it out"),
    "not what was ordered": (by(TrainStep, OrderDone), "does not answer TrainStep; use StepTrained or StepFailed"),
    "no slots": (to(StartProcess, slots=0), "slots and samples must be at least 1"),
    "weights that do not exist": (to(StartProcess, version=2), "version is 2, but the newest is 0"),
    "half a character": (
        by(StartGroup, GroupFailed, cause="data", reason="\ud83d!"),
        "GroupFailed.reason cannot be recorded: it has '\\ud83d', half of a surrogate pair; use valid Unicode",
    ),
    "half a character in a setting": (
        event(SettingChanged(setting="\ud83d", value="1")),
        "SettingChanged.setting cannot be recorded: it has '\\ud83d', half of a surrogate pair",
    ),
    "published and never ordered": (lost(published=7), "published is 7, but the newest version that was ordered is 0"),
    "saved and never ordered": (lost(saved=(3,)), "saved has 3, but no checkpoint after 3 train steps was ordered"),
    "a replica that published": (lost("replica", published=0), "a replica publishes no weights and saves no"),
    "a second trainer": (lost(index=1), "there is no trainer 1"),
    "no such kind": (lost("trainers"), "kind is 'trainers'; use one of"),
    "life 0": (lost(life=0), "life 0 was not ordered; use one from 1 to 1"),
    "another life": (
        event(ReplicaLeaves(replica=1, life=2, reason="")),
        "life 2 was not ordered; use one from 1 to 1",
    ),
    "more trajectories than samples": (
        lambda loop: loop.first(StartGroup).answer(OrderProgressed, finished=3),
        "finished is 3, but the group has 2 trajectories",
    ),
    "trajectories of a train step": (by(TrainStep, OrderProgressed, finished=1), "TrainStep generates no group"),
    "progress of a sync": (by(StageWeights, OrderProgressed), "OrderProgressed does not answer StageWeights; use"),
    "paused before it was ordered": (
        by(StageWeights, ReplicaPaused),
        "does not answer StageWeights; use WeightsStaged or SyncFailed",
    ),
    "damaged but never saved": (
        event(CheckpointDamaged(steps=1, reason="")),
        "no checkpoint after 1 train steps was reported as saved",
    ),
    "a setting": (event(SettingChanged(setting="run.seed", value="1")), "run.seed '1' cannot be changed"),
    "replicas": (event(ReplicasWanted(replicas=0)), "replicas is 0, but must be from 1 to"),
}


MEASURED: dict[str, tuple[dict[str, Any], str]] = {
    "rows of another chunk": ({"chunk": 1}, "RowsMeasured.chunk is 0, as ordered; leave it out"),
    "more rows than were ordered": ({"measured": 3}, "must have right <= measured <= 2, the number of rows"),
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


def require_refused(loop: Loop, act: Callable[[Loop], Any], message: str) -> None:
    with pytest.raises(engine.IllegalEvent) as caught:
        act(loop)
    assert message in str(caught.value)
    events = loop.session.events
    assert loop.report() == () and loop.session.events == events
    loop.finish()
    require_sound(loop.session)


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_cannot_be_true_is_refused_and_changes_nothing(case: str) -> None:
    act, message = ILLEGAL[case]
    require_refused(made(replicas=2), act, message)


def test_no_answer_can_name_other_work_than_its_order() -> None:
    """Neither another group, attempt, process or life, nor another step or version."""
    loop = made(replicas=2)
    seen = set()
    while loop.session.outcome is None:
        order = loop.session.open_orders[0]
        kind = kind_of_answer(order, fails=False)
        for name in {*kind.__struct_fields__} & {"orders", *order.__struct_fields__} - {"count"}:
            if (kind, name) != (ProcessUp, "version"):
                with pytest.raises(engine.IllegalEvent, match=f"{name} is .*, as ordered; leave it out"):
                    loop.give(order, **{name: 1})
                seen.add(name)
        loop.answer(order)
    assert seen > {"group", "attempt", "replica", "life", "kind", "index", "step", "version", "orders"}
    require_sound(loop.session)


@pytest.mark.parametrize("case", MEASURED)
def test_rows_that_cannot_have_been_measured_are_refused(case: str) -> None:
    changes, message = MEASURED[case]
    held_out = ValidationSet(name="held", prompts=4, parts=("correct",))
    validation = ValidationLimits(rows=4, sets=(held_out,), rows_per_slot=2)
    loop = made(dataclasses.replace(LIMITS, validation=validation))
    measured: dict[str, Any] = dict(
        measured=2, right=1, reward=1.0, rows=(0, 1), rewards=(0.0, 1.0), answers=(0, 7), right_rows=(1,),
        part_rows=(0, 1), part_places=(0, 0), part_values=(0.5, 0.5),
    )  # fmt: skip
    require_refused(loop, to(MeasureRows, **(measured | changes)), message)


def test_a_replica_whose_groups_still_run_is_not_paused() -> None:
    """A pause that aborts them comes after their reports; else they would run on a replica that sleeps."""
    loop = made(dataclasses.replace(LIMITS, pools=(Pool(tasks=("rollout", "train"), replicas=(0,)),)))
    while not any(isinstance(order, PauseReplica) for order in loop.session.open_orders):
        loop.answer(loop.session.open_orders[-1])
    pause = loop.first(PauseReplica)
    running = [order for order in loop.session.open_orders if isinstance(order, StartGroup)]
    with pytest.raises(engine.IllegalEvent, match=r"groups \[0, 1\] still run there; first answer the order of each"):
        loop.give(pause)
    for order in running:
        loop.give(order)
    loop.answer(pause)  # in the same report
    assert pause not in loop.session.open_orders
    loop.finish()
    require_sound(loop.session)


def test_a_late_answer_of_an_earlier_life_has_no_effect() -> None:
    """Its sync had a higher number than that of the life that followed."""
    loop = made()
    while (staged := loop.first(StageWeights)).attempt < 2:
        loop.answer(staged)
    loop.report(ProcessLost(kind="replica", index=0, life=1, reason=""))
    assert loop.first(StageWeights).attempt == 1
    assert loop.answer(staged) == ()
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
    order = loop.first(StartGroup)
    loop.answer(order, trainable=whole(2), reward_mean=real(1))
    group = loop.session._scheduler.state.groups.live[order.group]
    assert (group.reward_mean, type(group.reward_mean)) == (1.0, float)
    recorded: Any = [event for tick in loop.session.record.ticks() for event in tick.events][-1]
    assert (recorded.trainable, recorded.reward_mean) == (2, 1.0)


@pytest.mark.parametrize("number", [np.float32(2.0), np.array([2]), np.bool_(True), True, np.longdouble(2), 2.0, "2"])
def test_what_is_no_whole_number_is_refused(number: Any) -> None:
    loop = made()
    require_refused(loop, to(StartGroup, trainable=number), "GroupGenerated.trainable cannot be recorded")
