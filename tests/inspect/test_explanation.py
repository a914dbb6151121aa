"""Explanations: worlds with known causes, and shares that add up whatever happened in a run."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from steady_world import SteadyDice

from engine.errors import ConfigError
from engine.inspect.explanation import (
    BOUNDS,
    READY,
    Explanation,
    explain_group,
    explain_idle,
    explain_moment,
    explain_run,
    explain_step,
)
from engine.inspect.history_reader import made_history, read_history
from engine.metrics.history import (
    GenerationAttempt,
    GroupRow,
    GroupWait,
    History,
    IdleSpan,
    Intervals,
    StepPhase,
    StepRow,
)
from engine.metrics.history_builder import OpenValues
from engine.record import Header, read
from engine.record.recorder import MemoryRecorder
from engine.simulation.world import Setting, World
from engine.states.limits import REWARDING, AddedState, Limits
from tests.inspect.recorded_worlds import LIMITS, faulty_record, record_of
from tests.oracle import worlds

QUICK: dict[str, Any] = {"replicas": 1, "slots": 8, "prompts": 40, "latency_s": 0.0, "sync_s": 0.25, "train_s": 4.0}


def known(limits: Limits, lengths: Callable[[int], int], **setting: Any) -> History:
    """The history of a run without chance."""
    recorder = MemoryRecorder(Header(run="known", limits=limits.to_plain()))
    made = Setting(limits=limits, **{**QUICK, **setting})
    World(made, recorder=recorder, dice=SteadyDice(made, lengths)).run()
    return read_history(read(recorder))


def sentences(explanation: Explanation) -> str:
    return "\n".join(sentence for part in explanation.parts for sentence in part.sentences)


def seconds_of(explanation: Explanation) -> dict[str, float]:
    return {name: round(s, 2) for name, s in explanation.figures["seconds"].items()}


# -- known causes ------------------------------------------------------------------------------------------------------


def test_a_step_waits_for_a_straggler_whose_deadline_is_bound() -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, max_steps=3, sync_mode="abort")
    history = known(limits, lambda group: 40 if group == 1 else 4)
    explanation = explain_step(history, 1)
    said = sentences(explanation)
    assert explanation.figures["last_group"] == 1
    assert "The trainer waited 33 s for group 1 on replica 0, started at version 0 at 0.0 s, 60 tokens long" in said
    assert "aborted once by the sync to version 1" in said
    assert "No other group could replace it: step 1 was its deadline." in said
    assert seconds_of(explanation)["stragglers"] == 28.0  # before that, other groups were missing too


def test_a_step_waits_for_the_last_group_of_its_batch() -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, max_steps=2)
    explanation = explain_step(known(limits, lambda group: 20 if group == 6 else 4), 1)
    assert "It was the last of the 4 groups of the batch to become ready." in sentences(explanation)
    assert explanation.figures["last_group"] == 6
    assert seconds_of(explanation) == {"generation": 20.0, "training": 4.0, "publishing": 0.25, "not_started": 0.75}


def test_a_step_waits_for_rewards() -> None:
    states = (AddedState(name=REWARDING, concurrency=1),)
    limits = Limits(
        train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, max_steps=2, added_states=states
    )
    explanation = explain_step(known(limits, lambda group: 2, state_s=10.0), 1)
    assert seconds_of(explanation)["rewards"] == 40.0
    assert "40 s in the state rewarding" in sentences(explanation)


def test_a_busy_trainer_waits_for_no_group() -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=8, max_steps=4)
    explanation = explain_step(known(limits, lambda group: 4, train_s=50.0), 2)
    assert "The trainer did not wait for groups" in sentences(explanation)
    assert seconds_of(explanation) == {"training": 50.0, "publishing": 0.25}


def test_idle_slots_and_trainer_have_the_cause_that_the_world_was_built_with() -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, max_steps=4)
    history = known(limits, lambda group: 10, slots=4, train_s=30.0)
    _, trainer, tokens = explain_idle(history).parts
    shares = {one.name: one.amount for one in trainer.shares}
    assert shares["training"] == pytest.approx(120) and shares["publishing"] == pytest.approx(1)
    assert shares["waiting_for_groups"] == pytest.approx(40 + 3 * 0.75)
    assert [(one.name, one.share) for one in tokens.shares] == [("trained", 1.0)]


def test_the_history_of_a_group_names_times_replicas_and_its_end() -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, max_steps=3, sync_mode="abort")
    history = known(limits, lambda group: 40 if group == 1 else 4)
    lines = explain_group(history, 1).parts[0].lines()
    assert lines[0] == "group 1: consumed"
    assert (
        "began on replica 0 at version 0, to be trained by step 1 at the latest; it was aborted by the sync" in lines[2]
    )
    assert "its attempt 2 continued on replica 0 at version 1" in lines[3]
    assert lines[-1].startswith("  Its 60 tokens are from versions 0 to 1; step 1 trained on them at staleness 1")


def test_a_moment_has_the_trainer_every_replica_and_the_ready_groups() -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, max_steps=3)
    said = sentences(explain_moment(known(limits, lambda group: 40 if group == 1 else 4), 6.0))
    assert "Step 0 was training; the trainer: it trained." in said
    assert "Replica 0: up, 1 group running (1)." in said and "3 groups ready: 5, 6, 7." in said


def step_row(finished: float, formed: float, begin: float = 0.0, groups: tuple[int, ...] = (0,)) -> StepRow:
    times = [("collecting", begin, formed, "training"), ("training", formed, finished, "finished")]
    phases = tuple(StepPhase(0, name, start, end, outcome, 0, 0) for name, start, end, outcome in times)
    return StepRow(0, groups, (0,) * len(groups), phases, -1, 0, finished, False)


def group_row(group: int) -> GroupRow:
    return GroupRow(group, "batched", 0.0, 0.0, -1.0, 0, 1, 4, 0, 0, None, None, 0, 0)


def test_each_second_of_the_last_group_has_one_bound_in_every_order_of_states() -> None:
    found = Intervals(groups=[group_row(0)], steps=[step_row(25.0, 21.0)])
    attempt = GenerationAttempt(0, 1, 0, 1, 7.0, 11.0, False, "aborted", "timeout", 0, 0, 0, 4, 4, 2, 3, 3)
    again = structs.replace(attempt, attempt=2, start=13.0, end=16.0, resumed=True, outcome="generated", reason="")
    found.attempts += [attempt, again]
    for state, start, end, outcome in [
        ("fetching", 0.0, 6.0, "queued"), ("checking", 16.0, 20.0, READY), (READY, 20.0, 21.0, "batched"),
    ]:  # fmt: skip
        found.waits.append(GroupWait(0, state, start, end, outcome, 0, 0))
    found.idle += [
        IdleSpan(0.0, 21.0, 0.0, (), "waiting_for_groups"), IdleSpan(21.0, 25.0, 0.0, (), "training"),
    ]  # fmt: skip
    history = made_history(Header(run="made", limits={}), found, OpenValues(at=26.0), "finished")
    assert seconds_of(explain_step(history, 0)) == {
        "rewards": 10.0, "generation": 7.0, "training": 4.0, "parked": 2.0, "not_started": 1.0, "other": 2.0,
    }  # fmt: skip


def test_a_step_without_a_batch_waits_for_the_group_at_work_that_is_due_first() -> None:
    limits = Limits(train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, max_steps=3)
    recorder = MemoryRecorder(Header(run="known", limits=limits.to_plain()))
    made = Setting(limits=limits, **QUICK)
    world = World(made, recorder=recorder, dice=SteadyDice(made, lambda group: 50 if group == 6 else 4))
    world.run_until(lambda state: state.training.steps_trained == 1)
    world.run_for(20.0)
    world.close()
    history = read_history(read(recorder))
    assert seconds_of(explain_step(history, 1)) == {"not_started": 0.75, "generation": 4.0}
    assert "It has no batch yet." in sentences(explain_step(history, 1))
    assert explain_run(history).figures["bounds"]["other"] == 0.0


def test_an_undone_step_waited_for_the_last_group_of_its_own_batch() -> None:
    found = Intervals(groups=[group_row(0), group_row(1)])
    for group, start, end in [(0, 0.0, 5.0), (1, 0.0, 9.0), (1, 10.0, 15.0), (0, 10.0, 18.0)]:
        made = GenerationAttempt(group, 1, 0, 1, start, end, False, "generated", "", 0, 0, 0, 4, 4, 0, 0, 0)
        found.attempts.append(made)
        found.waits.append(GroupWait(group, READY, end, 9.0 if start < 10.0 else 18.0, "batched", 0, 0))
    for begin, formed, finished in [(0.0, 9.0, 10.0), (10.0, 18.0, 20.0)]:
        found.steps.append(step_row(finished, formed, begin, (0, 1)))
        found.idle.append(IdleSpan(begin, formed, 0.0, (), "waiting_for_groups"))
        found.idle.append(IdleSpan(formed, finished, 0.0, (), "training"))
        if begin == 0.0:
            found.steps.append(0)
    history = made_history(Header(run="made", limits=LIMITS.to_plain()), found, OpenValues(at=20.0), "finished")
    slowest = next(part for part in explain_run(history).parts if part.heading == "slowest steps")
    waits = [sentence.split(" on replica")[0] for sentence in slowest.sentences]
    assert waits == [
        f"step 0: 10 s, of which 9 s: {BOUNDS['generation']}; group 1",
        f"step 0: 10 s, of which 8 s: {BOUNDS['generation']}; group 0",
    ]


# -- sums --------------------------------------------------------------------------------------------------------------


def check_sums(history: History) -> None:
    """Every table of the run adds up to 100 %, and every second of a step has one bound."""
    run = explain_run(history)
    for part in run.parts:
        if part.shares:
            assert math.isclose(sum(one.share for one in part.shares), 1.0)
            shown = [line.split(" %")[0].strip() for line in part.lines()[1 + len(part.sentences) :]]
            assert round(sum(map(float, shown)), 6) == 100.0
    assert sum(run.figures["bounds"].values()) == pytest.approx(history.end)
    assert set(run.figures["bounds"]) == set(BOUNDS)
    for step in {step.step for step in history.steps if step.phases}:
        figures = explain_step(history, step).figures
        assert sum(figures["seconds"].values()) == pytest.approx(figures["end"] - figures["start"], abs=1e-6)
    for group in range(0, len(history.groups), 7):
        assert str(explain_group(history, group))
    for share in (0.0, 0.3, 0.9, 1.0):
        assert str(explain_moment(history, share * history.end))


@pytest.mark.parametrize(
    ("family", "number"),
    [(worlds.preset, 5), (worlds.rough, 8), (worlds.rough, 51), (worlds.asked, 9), (worlds.cut, 6),
     (worlds.wild, 3)],
)  # fmt: skip
def test_shares_add_up_whatever_happens_in_a_run(family: Any, number: int) -> None:
    check_sums(read_history(record_of(family, number)))


def test_shares_add_up_in_a_run_with_failures_and_in_one_that_is_running() -> None:
    check_sums(read_history(faulty_record()))
    check_sums(read_history(faulty_record(steps=2)))


def test_remarks_about_the_record_come_first() -> None:
    cut = replace(read_history(faulty_record(steps=2)), notes=("cut: a frame claims more",))
    assert str(explain_idle(cut)).startswith("cut: a frame claims more\n\nslots: ")


# -- what does not exist -----------------------------------------------------------------------------------------------


def test_an_unknown_step_group_or_time_names_the_allowed_range() -> None:
    history = known(replace(LIMITS, max_steps=2), lambda group: 4)
    with pytest.raises(ConfigError, match="use a number from 0 to 1"):
        explain_step(history, 2)
    with pytest.raises(ConfigError, match="use a number from 0 to "):
        explain_group(history, -1)
    with pytest.raises(ConfigError, match="use seconds from 0 to "):
        explain_moment(history, history.end + 1)
