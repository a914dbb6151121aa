"""Time limits of orders: what exceeds its limit is cut short or stopped, and healthy work never is."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.commands import (
    Command,
    EnterState,
    FinishRun,
    ParkGroup,
    PauseReplica,
    ResumeGroup,
    ScoreBatch,
    SetTimer,
    StartProcess,
    StopMeasuring,
    StopProcess,
    TrainStep,
)
from engine.errors import ConfigError
from engine.events import (
    BatchScored,
    CheckpointSaved,
    DrainRequested,
    GroupProgressed,
    OrderDone,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    ReplicaPaused,
    ReplicasWanted,
    RunResumed,
    SchedulerRecovered,
    SettingChanged,
    StateLeft,
    TimerFired,
    WeightsInstalled,
    WeightsStaged,
)
from engine.record.msgpack_values import pack, unpack
from engine.record.snapshots import restore, snapshot
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.states.timeouts import AUTO, KINDS, Timeouts
from tests.core.custom_states import CHECKING
from tests.core.scripted import Scripted
from tests.core.test_validation import Measured

HOUR = 3600.0
TWO_AT_ONCE = replace(CHECKING, concurrency=2)


every = Timeouts.every


def small(timeouts: Timeouts, **others: Any) -> Scripted:
    """B = 2, S = 1, K = 4; one replica."""
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4}
    return Scripted(timeouts=timeouts, **{**figures, **others})


def wait(run: Scripted, until: float) -> list[Command]:
    """Let time pass: the timer of the time limits fires when it is due. Returns what was ordered."""
    ordered: list[Command] = []
    while run.state.outcome is None and run.state.limit_timer is not None and run.state.clocks.timer_at <= until:
        ordered += run.tell(TimerFired(timer=run.state.limit_timer), at=run.state.clocks.timer_at)
    run.clock = until
    return ordered


def cut_or_stopped(commands: list[Command]) -> list[str]:
    kinds = (ParkGroup, StopMeasuring, StopProcess, FinishRun)
    return [type(command).__name__ for command in commands if isinstance(command, kinds)]


def done(run: Scripted, kind: type[Any]) -> None:
    """The last order of a kind is acknowledged."""
    run.tell(OrderDone(orders=(run.ordered(kind)[-1].number,)))


# escalation


def test_a_group_that_exceeds_its_limit_is_parked_and_its_next_attempt_has_twice_the_time() -> None:
    run = small(every(None, group_s=100.0))
    given = run.state.orders.find("group", 0).at  # type: ignore[union-attr]
    assert not cut_or_stopped(wait(run, given + 99.0))
    assert cut_or_stopped(wait(run, given + 100.0)) == ["ParkGroup"] * 4
    run.abort(0)
    group = run.state.groups[0]
    assert (group.infrastructure_failures, run.ordered(ResumeGroup)[-1].group) == (1, 0)
    assert run.state.last_failure == "an attempt exceeded its time limit of 100 s (timeouts.group_s)"
    run.abort(1, 2, 3)
    again = run.state.orders.find("group", 0).at  # type: ignore[union-attr]
    assert not cut_or_stopped(wait(run, again + 199.0))
    assert cut_or_stopped(wait(run, again + 200.0)) == ["ParkGroup"]


def test_a_replica_that_does_not_cut_a_group_short_is_stopped() -> None:
    run = small(every(None, group_s=100.0, cut_s=7.0))
    wait(run, 103.0)
    parked = run.state.orders.find("park", 0).at  # type: ignore[union-attr]
    assert cut_or_stopped(wait(run, parked + 6.0)) == []
    (stop,) = [one for one in wait(run, parked + 7.0) if isinstance(one, StopProcess)]
    assert stop.reason == "replica 0 exceeded its time limit of 7 s (timeouts.cut_s) after 7 s: it parks group 0"
    assert {group.infrastructure_failures for group in run.state.groups.values() if group.attempt} == {1}


def test_a_group_that_already_moves_is_not_told_to_park_twice() -> None:
    run = small(every(None, group_s=100.0))
    wait(run, 103.0)
    run.tell(SettingChanged(setting="timeouts.group_s", value="50"))
    assert not cut_or_stopped(wait(run, run.clock + 51.0)), "the cut has its own limit"


def trains(run: Scripted) -> None:
    run.finish(0, 1)


def publishes(run: Scripted) -> None:
    trains(run)
    run.train()


def checkpoints(run: Scripted) -> None:
    publishes(run)
    run.publish()


def syncs(run: Scripted) -> None:
    publishes(run)
    run.publish()


def resumes(run: Scripted) -> None:
    syncs(run)
    run.install()


TRAINS = r"the trainer exceeded its time limit of 50 s \(timeouts.train_s\) after 50 s: it trains step 0 on 2 groups"


@pytest.mark.parametrize(
    ("kind", "prepare", "others", "ends", "says"),
    [
        ("draw", lambda run: None, {"answers_draws": False}, "FinishRun", "the data source .* draws 6 prompts"),
        ("score", trains, {"scoring_tasks": ("old_logprobs",)}, "StopProcess", "the trainer .* does old_logprobs"),
        ("train", trains, {}, "StopProcess", TRAINS),
        ("publish", publishes, {}, "StopProcess", "the trainer .* publishes version 1"),
        ("checkpoint", checkpoints, {"checkpoint_every": 1}, "StopProcess", "the trainer .* writes the checkpoint"),
        ("sync", syncs, {}, "StopProcess", "replica 0 .* fetches version 1"),
        ("resume", resumes, {}, "StopProcess", "replica 0 .* resumes sampling"),
        ("store", publishes, {}, "StopProcess", "the trajectory store .* forgets 2 groups"),
    ],
)  # fmt: skip
def test_a_process_that_does_not_execute_its_order_is_stopped(
    kind: str, prepare: Callable[[Scripted], None], others: dict[str, Any], ends: str, says: str
) -> None:
    run = small(Timeouts(**{f"{kind}_s": 50.0}), **others)
    prepare(run)
    (order,) = [one for one in run.state.orders.all() if one.subject in (kind, "discard" if kind == "store" else kind)]
    began = run.state.now - run.state.clocks.elapsed(order)
    assert not cut_or_stopped(wait(run, began + 49.0))
    (last,) = [one for one in wait(run, began + 50.0) if type(one).__name__ == ends]
    assert re.match(says, last.reason), last.reason  # type: ignore[attr-defined]
    if isinstance(last, FinishRun):
        assert last.outcome == "stopped" and not last.again, "it can be resumed"


def test_the_pause_and_the_install_of_a_replica_have_a_limit_too() -> None:
    run = small(every(None, sync_s=50.0))
    syncs(run)
    run.install(pause=False)
    assert isinstance(run.orders[-1], PauseReplica | SetTimer)
    assert cut_or_stopped(wait(run, run.clock + 49.0)) == []
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


def test_a_replica_that_does_not_start_is_stopped_and_one_that_does_not_stop_ends_the_run() -> None:
    run = small(every(None, start_s=50.0))
    run.tell(ReplicasWanted(replicas=2))
    assert run.ordered(StartProcess)
    assert cut_or_stopped(wait(run, run.clock + 51.0)) == ["StopProcess"]
    stop = run.ordered(StopProcess)[-1]
    assert (stop.kind, stop.index, stop.incarnation) == ("replica", 1, 1)
    assert cut_or_stopped(wait(run, run.clock + 51.0)) == ["FinishRun"]
    end = run.ordered(FinishRun)[-1]
    assert (end.outcome, end.again) == ("stopped", True)
    assert end.reason.startswith("replica 1 exceeded its time limit of 50 s (timeouts.start_s)")


def test_a_replica_that_was_stopped_as_it_did_not_start_starts_again() -> None:
    run = small(every(None, start_s=50.0))
    run.tell(ReplicasWanted(replicas=2))
    wait(run, run.clock + 51.0)
    lost(run)
    start = run.ordered(StartProcess)[-1]
    assert (start.kind, start.index, start.incarnation) == ("replica", 1, 2)
    assert run.state.outcome is None


def lost(run: Scripted) -> list[Command]:
    """The process that was to stop last has ended."""
    stop = run.ordered(StopProcess)[-1]
    return run.tell(
        ProcessLost(kind=stop.kind, index=stop.index, incarnation=stop.incarnation, published=0, reason=stop.reason)
    )


def up(run: Scripted) -> list[Command]:
    """The process that was to start last is up."""
    start = run.ordered(StartProcess)[-1]
    return run.tell(ProcessUp(kind=start.kind, index=start.index, incarnation=start.incarnation))


def test_a_trainer_that_is_stopped_starts_again_and_its_orders_stand_still_until_it_is_up() -> None:
    run = small(every(None, train_s=50.0))
    trains(run)
    (stop,) = [one for one in wait(run, run.clock + 60.0) if isinstance(one, StopProcess)]
    assert (stop.kind, run.state.processes["trainer"].state) == ("trainer", "stopping")
    assert run.state.orders.find("train", 0) is not None, "it is charged once the process has ended"
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0)), "one stop is enough"
    lost(run)
    assert run.state.steps[0].failures == 1
    again = run.state.orders.find("train", 0)
    assert again is not None and run.ordered(StartProcess)[-1].incarnation == 2
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0)), "it loads a model"
    up(run)
    began = run.clock
    assert not cut_or_stopped(wait(run, began + 99.0)), "an order that was overdue has twice the time"
    assert cut_or_stopped(wait(run, began + 100.0)) == ["StopProcess"]


def test_a_trainer_that_hangs_again_and_again_ends_the_run() -> None:
    run = small(every(None, train_s=50.0), trainer_restarts=1, infrastructure_attempts=9)
    trains(run)
    wait(run, run.clock + 60.0)
    lost(run)
    up(run)
    wait(run, run.clock + 110.0)
    lost(run)
    (end,) = run.ordered(FinishRun)
    assert end.outcome == "failed" and "the trainer exceeded its time limit of 100 s" in end.reason


def test_a_scorer_that_is_stopped_starts_again_and_scores() -> None:
    pools = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))
    run = small(every(None, score_s=50.0), scoring_tasks=("old_logprobs",), pools=pools)
    trains(run)
    (stop,) = [one for one in wait(run, run.clock + 60.0) if isinstance(one, StopProcess)]
    assert (stop.kind, stop.index) == ("scorer", 0)
    assert stop.reason.startswith("scorer of old_logprobs exceeded its time limit of 50 s (timeouts.score_s)")
    lost(run)
    again = run.ordered(ScoreBatch)[-1]
    assert (again.attempt, run.ordered(StartProcess)[-1].kind) == (2, "scorer")
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0))
    up(run)
    run.tell(BatchScored(step=0, task="old_logprobs", attempt=2))
    assert run.ordered(TrainStep)


def test_a_start_that_waits_for_room_stands_still() -> None:
    run = small(every(None, start_s=50.0))
    run.tell(ReplicasWanted(replicas=2))
    waits = {"kind": "replica", "index": 1, "incarnation": 1}
    run.tell(ProcessWaits(**waits, reason="no GPU is free"))
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0))
    run.tell(ProcessWaits(**waits, reason="two GPUs are not free"))
    run.tell(ProcessWaits(**waits, reason=""))
    assert not cut_or_stopped(wait(run, run.clock + 49.0))
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


def test_the_delay_of_a_start_does_not_count() -> None:
    run = small(every(None, start_s=50.0), replica_restarts=9)
    run.tell(ReplicasWanted(replicas=2))
    for life in range(1, 8):
        run.tell(ProcessLost(kind="replica", index=1, incarnation=life, reason="it does not start"))
    start = run.ordered(StartProcess)[-1]
    assert (start.incarnation, start.delay_s) == (8, 60.0)
    assert not cut_or_stopped(wait(run, run.clock + 60.0 + 49.0))
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


def test_a_start_that_waited_for_room_teaches_nothing_about_starts() -> None:
    run = small(every(None, start_s=AUTO))
    run.tell(ReplicasWanted(replicas=2))
    run.tell(ProcessWaits(kind="replica", index=1, incarnation=1, reason="no GPU is free"))
    known = run.state.clocks.longest["start"]
    run.clock += 50_000.0
    run.tell(ProcessUp(kind="replica", index=1, incarnation=1, slots=4, version=0))
    assert run.state.clocks.longest["start"] == known


def test_a_trainer_may_train_the_steps_since_its_checkpoint_again_before_it_is_up() -> None:
    run = small(every(None, start_s=50.0, train_s=80.0), checkpoint_every=3, keeps_batches=True)
    for step in range(2):
        run.finish(2 * step, 2 * step + 1)
        run.train()
        run.publish()
        run.install()
    run.tell(ProcessLost(kind="trainer", index=0, incarnation=1, reason="killed"))
    assert run.ordered(StartProcess)[-1].redo == (0, 1)
    assert not cut_or_stopped(wait(run, run.clock + 50.0 + 2 * 80.0 - 1.0))
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


def test_a_store_that_is_stopped_has_the_run_begin_again_from_its_record() -> None:
    run = small(every(None, store_s=50.0))
    publishes(run)
    (stop,) = [one for one in wait(run, run.clock + 60.0) if isinstance(one, StopProcess)]
    assert stop.kind == "trajectory store"
    lost(run)
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.again) == ("stopped", True)
    assert "the trajectory store exceeded its time limit of 50 s (timeouts.store_s)" in end.reason


def test_work_of_an_added_state_that_takes_too_long_fails_and_its_late_answer_is_stale() -> None:
    run = small(every(None, stage_s=50.0), added_states=(TWO_AT_ONCE,))
    run.finish(0)
    first = run.ordered(EnterState)[-1]
    figures = {"state": "checking", "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}
    wait(run, run.clock + 10.0)
    run.finish(1)
    run.tell(StateLeft(group=1, attempt=run.ordered(EnterState)[-1].attempt, **figures))
    ordered = wait(run, run.clock + 41.0)
    assert not cut_or_stopped(ordered), "the process answers"
    again = run.ordered(EnterState)[-1]
    assert (again.group, again.attempt, run.state.groups[0].infrastructure_failures) == (0, first.attempt + 1, 1)
    assert "the state checking exceeded its time limit of 50 s (timeouts.stage_s)" in run.state.last_failure
    stale = run.state.stale_echoes
    run.tell(StateLeft(group=0, attempt=first.attempt, **figures))
    assert run.state.stale_echoes == stale + 1
    run.tell(StateLeft(group=0, attempt=again.attempt, **figures))
    assert run.state.groups[0].state == "batched"


def measuring(timeouts: Timeouts, **others: Any) -> Measured:
    """Version 0 is measured on one of two replicas: two chunks of two rows."""
    validation = ValidationLimits(rows=4, rows_per_slot=2, every=0, at_end=False)
    return Measured(validation, timeouts=timeouts, **{"slots": 4, **others})


def test_rows_that_take_too_long_are_cut_short_and_measured_again() -> None:
    run = measuring(every(None, rows_s=50.0))
    late, other = run.out()
    run.measured(other)
    ordered = wait(run, run.clock + 51.0)
    assert cut_or_stopped(ordered) == ["StopMeasuring"]
    (validation,) = run.state.validations.runs.values()
    chunk = validation.chunks[late.chunk]
    assert chunk.failures == 1 and not run.state.orders.open("rows"), "its replica has yet to stop"
    done(run, StopMeasuring)
    assert run.state.orders.find("rows", (validation.id, late.chunk)) is not None
    for order in run.out():
        run.measured(order)
    assert [one.state for one in run.ended] == ["reported"]


def test_only_the_rows_that_are_late_lose_an_attempt() -> None:
    run = measuring(every(None, rows_s=50.0))
    (validation,) = run.state.validations.runs.values()
    run.state.orders.find("rows", (validation.id, 1)).mark += 10.0  # type: ignore[union-attr]
    assert cut_or_stopped(wait(run, run.state.orders.find("rows", (0, 0)).at + 50.0)) == ["StopMeasuring"]  # type: ignore[union-attr]
    assert [chunk.failures for chunk in validation.chunks] == [1, 0]
    assert validation.out == 0


def test_a_replica_that_does_not_stop_measuring_is_stopped() -> None:
    run = measuring(every(None, rows_s=50.0, cut_s=5.0))
    wait(run, run.clock + 51.0)
    assert cut_or_stopped(wait(run, run.clock + 5.0)) == ["StopProcess"]
    (validation,) = run.state.validations.runs.values()
    assert validation.out == 2, "another replica measures them"
    assert run.out()[-1].replica == 1


# only what hung is charged


@pytest.mark.parametrize(("hangs", "charged"), [(True, [0, 0]), (False, [1, 1])])
def test_rows_on_a_replica_that_hangs_over_another_order_are_not_charged(hangs: bool, charged: list[int]) -> None:
    run = measuring(every(None, group_s=50.0, cut_s=5.0))
    (validation,) = run.state.validations.runs.values()
    (replica,) = validation.replicas
    if hangs:
        assert set(cut_or_stopped(wait(run, run.clock + 51.0))) == {"ParkGroup"}
        wait(run, run.clock + 5.0)
        assert replica in {stop.index for stop in run.ordered(StopProcess)}
    else:
        run.tell(ProcessLost(kind="replica", index=replica, incarnation=1, reason="killed"))
    assert [chunk.failures for chunk in validation.chunks] == charged


def test_when_a_replica_hangs_over_one_group_the_others_on_it_are_not_charged() -> None:
    run = small(every(None, group_s=100.0, cut_s=7.0))
    wait(run, run.clock + 60.0)
    run.keep_prefix(1, 2, 3, tokens=1)
    wait(run, run.clock + 40.0)
    parked = run.state.orders.find("park", 0)
    assert parked is not None and run.state.orders.find("park", 1) is None
    assert cut_or_stopped(wait(run, parked.at + 7.0)) == ["StopProcess"]
    assert [run.state.groups[id].infrastructure_failures for id in range(4)] == [1, 0, 0, 0]
    assert {run.state.groups[id].state for id in range(4)} == {"aborted"}
    lost(run)
    assert [run.state.groups[id].infrastructure_failures for id in range(4)] == [1, 0, 0, 0]


def test_when_a_replica_hangs_over_new_weights_its_groups_are_not_charged() -> None:
    run = small(every(None, sync_s=50.0))
    syncs(run)
    assert cut_or_stopped(wait(run, run.clock + 51.0)) == ["StopProcess"]
    lost(run)
    assert {group.infrastructure_failures for group in run.state.groups.values()} == {0}


def test_a_replica_that_dies_charges_each_of_its_groups() -> None:
    run = small(every(None))
    run.tell(ProcessLost(kind="replica", index=0, incarnation=1, reason="killed"))
    assert [run.state.groups[id].infrastructure_failures for id in range(4)] == [1, 1, 1, 1]


def test_when_the_trainer_hangs_over_a_checkpoint_the_train_step_behind_it_is_not_charged() -> None:
    run = small(every(None, checkpoint_s=50.0), checkpoint_every=1, keeps_batches=True)
    checkpoints(run)
    run.finish(2, 3)
    assert [order.subject for order in run.state.orders.owned("trainer")] == ["checkpoint", "train"]
    assert cut_or_stopped(wait(run, run.clock + 51.0)) == ["StopProcess"]
    lost(run)
    assert run.state.steps[1].failures == 0
    assert run.state.orders.find("train", 1) is not None


def test_the_process_of_added_states_is_stopped_if_it_answered_nothing() -> None:
    run = small(every(None, stage_s=50.0), added_states=(TWO_AT_ONCE,))
    run.finish(0)
    wait(run, run.clock + 30.0)
    run.finish(1)
    (stop,) = [one for one in wait(run, run.clock + 21.0) if isinstance(one, StopProcess)]
    assert stop.kind == "added states"
    lost(run)
    assert [run.state.groups[id].infrastructure_failures for id in (0, 1)] == [1, 0]
    up(run)
    assert {one.command.group for one in run.state.orders.all() if one.subject == "stage"} == {0, 1}  # type: ignore[attr-defined]


# what never stops healthy work


def test_each_stored_prefix_gives_a_group_its_full_time_again() -> None:
    run = small(every(None, group_s=100.0))
    for tokens in range(1, 20):
        assert not cut_or_stopped(wait(run, run.clock + 90.0))
        run.keep_prefix(0, 1, 2, 3, tokens=tokens)
    assert cut_or_stopped(wait(run, run.clock + 90.0)) == []
    assert cut_or_stopped(wait(run, run.clock + 20.0)) == ["ParkGroup"] * 4


def test_a_group_that_progresses_otherwise_gets_its_full_time_again_too() -> None:
    run = small(every(None, group_s=100.0, cut_s=9_000.0))
    report = GroupProgressed(group=0, attempt=1, replica=0, incarnation=1)
    for _ in range(19):
        assert not [one for one in wait(run, run.clock + 90.0) if isinstance(one, ParkGroup) and one.group == 0]
        run.tell(report)
    assert run.state.groups[0].state == "generating"
    stale = run.state.stale_echoes
    run.tell(replace(report, attempt=2))
    assert run.state.stale_echoes == stale + 1, "it is of another attempt"
    assert [one.group for one in wait(run, run.clock + 101.0) if isinstance(one, ParkGroup)] == [0]


def test_max_s_bounds_orders_that_have_a_longer_limit_of_their_own() -> None:
    run = small(every(None, group_s=1000.0, max_s=250.0))
    began = run.state.orders.find("group", 0).at  # type: ignore[union-attr]
    assert not cut_or_stopped(wait(run, began + 249.0))
    assert cut_or_stopped(wait(run, began + 250.0)) == ["ParkGroup"] * 4


def test_orders_that_were_answered_do_not_pile_up() -> None:
    run = small(every(None, group_s=1e6))
    for _ in range(60):
        run.finish(*run.running()[:2])
        run.train()
        run.publish()
        run.install()
    assert len(run.state.clocks._heap) <= 64 + 4 * len(run.state.clocks.looks)


def test_max_s_bounds_a_group_whatever_its_progress() -> None:
    run = small(every(None, group_s=100.0, max_s=250.0))
    began = run.state.orders.find("group", 0).at  # type: ignore[union-attr]
    for tokens in range(1, 4):
        wait(run, run.clock + 70.0)
        run.keep_prefix(0, 1, 2, 3, tokens=tokens)
    assert not run.ordered(ParkGroup)
    wait(run, began + 250.0)
    assert [order.group for order in run.ordered(ParkGroup)].count(0) == 1


def test_auto_waits_six_floors_for_the_first_answer_and_learns_from_answers() -> None:
    run = small(every(None, group_s=AUTO, floor_s=100.0))
    began = run.clock
    assert not cut_or_stopped(wait(run, began + 500.0)), "a first compilation may be slow"
    run.finish(0)
    took = run.state.clocks.longest["group"]
    assert 500.0 <= took <= 505.0
    order = run.state.orders.find("group", 1)
    assert order is not None and run.state.clocks.limit(order) == pytest.approx(10 * took)


def test_after_its_first_short_answer_a_process_has_the_floor_and_a_fresh_one_six_floors() -> None:
    run = small(every(None, sync_s=AUTO, floor_s=100.0))
    resumes(run)
    assert run.state.clocks.least["sync"] == 100.0
    for replica, expected in ((0, 100.0), (1, 600.0)):
        if replica == 1:
            run.tell(ProcessUp(kind="replica", index=1, incarnation=1, slots=4, version=0))
        else:
            run.finish(2, 3)
            run.train()
            run.publish()
        order = run.state.orders.find("sync", replica)
        assert order is not None and run.state.clocks.limit(order) == expected


def test_the_next_life_of_a_replica_is_fresh() -> None:
    run = small(every(None, sync_s=AUTO, floor_s=100.0))
    resumes(run)
    run.tell(ProcessLost(kind="replica", index=0, incarnation=1, reason="killed"))
    run.tell(ProcessUp(kind="replica", index=0, incarnation=2, slots=4, version=0))
    order = run.state.orders.find("sync", 0)
    assert order is not None and run.state.clocks.limit(order) == 600.0


def test_failures_and_parked_groups_teach_nothing() -> None:
    run = small(every(None, group_s=AUTO, floor_s=100.0))
    wait(run, run.clock + 400.0)
    run.fail(0, cause="data")
    run.abort(1)
    assert "group" not in run.state.clocks.longest


def test_the_floor_is_longer_for_slow_kinds_unless_it_is_lowered() -> None:
    floors = {kind: Timeouts().floor(kind) for kind in KINDS}
    assert {kind for kind, floor in floors.items() if floor == HOUR} == {"start", "publish", "checkpoint", "rows"}
    assert set(floors.values()) == {600.0, HOUR}
    assert {Timeouts(floor_s=60.0).floor(kind) for kind in KINDS} == {60.0}
    assert Timeouts(process_limits=(("group", 1000.0),)).floor("group") == 2000.0, "rewards may take that long"


@pytest.mark.parametrize("state", ["pausing", "installing"])
def test_groups_on_a_replica_that_takes_new_weights_stand_still(state: str) -> None:
    run = small(every(None, group_s=100.0))
    syncs(run)
    replica = run.state.fleet.replicas[0]
    place = {"replica": 0, "incarnation": 1, "attempt": replica.sync_attempt}
    wait(run, run.clock + 50.0)
    run.tell(WeightsStaged(**place, version=1))
    if state == "installing":
        run.tell(ReplicaPaused(**place))
    assert replica.state == state
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0))
    if state == "pausing":
        run.tell(ReplicaPaused(**place))
    run.tell(WeightsInstalled(**place, version=1))
    assert not cut_or_stopped(wait(run, run.clock + 40.0))
    assert cut_or_stopped(wait(run, run.clock + 15.0)) == ["ParkGroup", "ParkGroup"], "2 and 3, which ran before"


def test_a_pause_that_waits_for_groups_begins_when_the_last_one_ends() -> None:
    run = small(every(None, sync_s=50.0, group_s=1000.0), sync_mode="wait")
    syncs(run)
    run.install(pause=False)
    assert run.state.fleet.replicas[0].state == "pausing"
    assert not cut_or_stopped(wait(run, run.clock + 500.0))
    run.finish(*run.running())
    assert not cut_or_stopped(wait(run, run.clock + 45.0))
    assert "StopProcess" in cut_or_stopped(wait(run, run.clock + 10.0))


def test_in_mode_wait_a_group_on_a_pausing_replica_still_has_its_limit() -> None:
    run = small(every(None, group_s=100.0), sync_mode="wait")
    syncs(run)
    run.install(pause=False)
    assert "ParkGroup" in cut_or_stopped(wait(run, run.clock + 100.0))


def test_an_order_of_the_trainer_is_timed_from_the_end_of_the_one_ahead() -> None:
    run = small(every(None, train_s=100.0), checkpoint_every=1)
    checkpoints(run)
    run.finish(2, 3)
    assert [order.subject for order in run.state.orders.owned("trainer")] == ["checkpoint", "train"]
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0)), "the checkpoint takes that long"
    run.tell(CheckpointSaved(steps=1))
    assert not cut_or_stopped(wait(run, run.clock + 98.0))
    assert cut_or_stopped(wait(run, run.clock + 3.0)) == ["StopProcess"]


def test_what_runs_on_a_sleeping_replica_has_no_limit() -> None:
    pools = (Pool(tasks=("rollout", "train"), replicas=(0,)),)
    run = small(every(100.0, train_s=None, publish_s=None, store_s=None, draw_s=None), pools=pools)
    trains(run)
    pause = run.ordered(PauseReplica)[-1]
    assert pause.mode == "sleep"
    run.abort(*run.running())
    run.tell(ReplicaPaused(replica=0, incarnation=1, attempt=pause.attempt))
    assert run.state.fleet.replicas[0].state == "asleep"
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0))


def test_a_long_validation_is_not_overdue_while_its_rows_come_in() -> None:
    run = measuring(every(None, rows_s=100.0), slots=1)
    for _ in range(2):
        assert not cut_or_stopped(wait(run, run.clock + 90.0))
        run.measured(run.out()[0])
    assert [one.state for one in run.ended] == ["reported"]


def test_a_drain_stops_the_clocks_of_the_groups_it_parks() -> None:
    run = small(every(None, group_s=100.0))
    run.tell(DrainRequested(reason="maintenance"))
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0))


def test_a_resume_keeps_what_was_learned_and_times_nothing_of_before() -> None:
    run = small(every(AUTO, floor_s=100.0))
    checkpoints(run)
    run.finish(2)
    clocks = run.state.clocks
    clocks.double(run.state.orders.find("group", 3))  # type: ignore[arg-type]
    longest, doubled = dict(clocks.longest), dict(clocks.doubled)
    run.tell(RunResumed(steps=1, replicas=1, consumed=(), released=(), kept=True), at=1_000_000.0)
    assert (clocks.longest, clocks.doubled) == (longest, doubled)
    assert {order.subject for order in run.state.orders.all()} == {"publish", "start", "timer"}
    run.tell(ProcessUp(kind="replica", index=0, incarnation=2, slots=4, version=1))
    assert not cut_or_stopped(wait(run, run.clock + 590.0)), "every process is fresh"


def test_history_is_in_the_snapshot() -> None:
    run = small(every(AUTO, floor_s=100.0))
    checkpoints(run)
    wait(run, run.clock + 700.0)
    assert run.state.clocks.doubled
    again = restore([unpack(pack(part)) for part in snapshot(run.scheduler)])
    assert again.state_hash == run.scheduler.state_hash
    for name in ("longest", "doubled", "looks", "least", "timer_at"):
        assert getattr(again.state.clocks, name) == getattr(run.state.clocks, name)


def test_a_new_scheduler_process_and_one_that_stood_still_give_every_order_its_full_time() -> None:
    run = small(every(None, group_s=100.0))
    run.tell(SchedulerRecovered(), at=95.0)
    assert not cut_or_stopped(wait(run, 190.0))
    timer = run.state.limit_timer
    assert timer is not None
    assert not cut_or_stopped(run.tell(TimerFired(timer=timer), at=1000.0)), "its own process stood still"
    assert not cut_or_stopped(wait(run, 1099.0))
    assert cut_or_stopped(wait(run, 1100.0)) == ["ParkGroup"] * 4


def test_one_timer_serves_all_orders_and_an_order_that_is_due_sooner_gets_it() -> None:
    run = small(every(None, group_s=100.0, train_s=10.0))
    trains(run)
    assert [order.subject for order in run.state.orders.all()].count("timer") == 1
    assert run.state.clocks.timer_at == run.ordered(SetTimer)[-1].delay_s + run.clock == run.clock + 10.0
    run.train()
    assert not cut_or_stopped(wait(run, run.clock + 50.0))


def test_limits_may_be_set_and_lifted_at_any_time() -> None:
    run = small(every(None))
    trains(run)
    run.tell(SettingChanged(setting="timeouts.train_s", value="auto"))
    run.tell(SettingChanged(setting="timeouts.floor_s", value="10"))
    assert not cut_or_stopped(wait(run, run.clock + 59.0))
    run.tell(SettingChanged(setting="timeouts.train_s", value="off"))
    assert run.state.limit_timer is None
    run.tell(SettingChanged(setting="timeouts.train_s", value="30"))
    assert cut_or_stopped(wait(run, run.clock + 30.0)) == ["StopProcess"]


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"train_s": 0.0}, "timeouts.train_s is 0.0, .* at most, or auto, or off"),
        ({"train_s": "never"}, "timeouts.train_s is 'never'"),
        ({"floor_s": None}, "timeouts.floor_s is null, but must be a number of seconds above 0, 1000000 at most;"),
        ({"max_s": -1.0}, "timeouts.max_s is -1.0"),
        ({"cut_s": float("nan")}, "timeouts.cut_s is nan"),
    ],
)
def test_a_limit_out_of_bounds_is_refused(figures: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Timeouts(**figures)


def test_a_header_holds_the_limits_and_refuses_unknown_ones() -> None:
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4,
        timeouts=every(AUTO, train_s=9.0, rows_s=None, process_limits=(("group", 30.0),)),
    )  # fmt: skip
    assert Limits.from_plain(limits.to_plain()) == limits
    plain = limits.to_plain()
    plain["timeouts"]["nap_s"] = 3.0
    with pytest.raises(ConfigError, match="nap_s"):
        Limits.from_plain(plain)
