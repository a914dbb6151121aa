"""Time limits of orders: what exceeds its limit is cut short or stopped, and healthy work never is."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from engine.commands import (
    Command,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
    ParkGroup,
    PauseReplica,
    ResumeGroup,
    RetireWeights,
    StartProcess,
    StopMeasuring,
    StopProcess,
    TrainStep,
    TruncateGroup,
)
from engine.errors import ConfigError
from engine.events import (
    BatchScored,
    CheckpointSaved,
    DrainRequested,
    OrderDone,
    OrderProgressed,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    PromptsDrawn,
    ReplicaPaused,
    ReplicasWanted,
    RunResumed,
    SchedulerRecovered,
    SettingChanged,
    StateLeft,
    StepFailed,
    WeightsInstalled,
    WeightsStaged,
)
from engine.runtime.order_times import NEVER, OrderTimes
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.states.order_times import limit_of
from engine.states.timeouts import AUTO, KINDS, Timeouts
from tests.core.added_states import CHECKING
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
    """Let time pass: the watchdog looks when an order may be overdue. Returns what was ordered."""
    ordered: list[Command] = []
    while run.state.ending.outcome is None and run.times.look_at <= until:
        run.clock = max(run.clock, run.times.look_at)
        ordered += run.look()
    run.clock = until
    return ordered


def time_taken_by(run: Scripted, subject: str, id: Any) -> float:
    order = run.state.orders.find(subject, id)
    assert order is not None
    return run.times.took_s(order, run.clock)


def limit(run: Scripted, subject: str, id: Any) -> float:
    order = run.state.orders.find(subject, id)
    assert order is not None
    return limit_of(run.state, order, run.times.longest)  # type: ignore[return-value]


def cut_or_stopped(commands: list[Command]) -> list[str]:
    kinds = (ParkGroup, StopMeasuring, StopProcess, FinishRun)
    return [type(command).__name__ for command in commands if isinstance(command, kinds)]


def done(run: Scripted, kind: type[Any]) -> None:
    """The last order of a kind is acknowledged."""
    run.tell(OrderDone(orders=(run.ordered(kind)[-1].number,)))


# escalation


def test_an_overdue_group_is_parked_and_its_next_attempt_has_twice_the_time() -> None:
    run = small(every(None, group_s=100.0))
    given = run.state.orders.find("group", 0).at  # type: ignore[union-attr]
    assert not cut_or_stopped(wait(run, given + 99.0))
    assert cut_or_stopped(wait(run, given + 105.0)) == ["ParkGroup"] * 4
    run.abort(0)
    group = run.state.groups.live[0]
    assert (group.infrastructure_failures, run.ordered(ResumeGroup)[-1].group) == (1, 0)
    assert run.state.ending.last_failure == "an attempt exceeded its time limit of 100 s (timeouts.group_s)"
    run.abort(1, 2, 3)
    again = run.state.orders.find("group", 0).at  # type: ignore[union-attr]
    assert not cut_or_stopped(wait(run, again + 199.0))
    assert cut_or_stopped(wait(run, again + 205.0))[:1] == ["ParkGroup"]


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(
    ("others_end", "charged"),
    [(True, [(1, 0), (1, 1), None]), (False, [(1, 0), (2, 0), (3, 0)])],
    ids=["while others end", "while all hang"],
)
def test_a_prompt_that_hangs_again_is_to_blame(others_end: bool, charged: list[Any], dies: bool) -> None:
    """`charged`: for infrastructure and for data, after 100 s, 200 s and 400 s; a prompt has two attempts for data.
    `dies`: the replica does not park its groups."""
    run = small(every(None, group_s=100.0, cut_s=7.0))
    seen = []
    for life, limit_s in enumerate((100.0, 200.0, 400.0), start=1):
        if others_end:
            run.finish(life)
        run.wait(limit_s + 8.0 * dies)
        if dies:
            lost(run)
            run.tell(ProcessUp(kind="replica", index=0, life=life + 1, slots=4))
        else:
            run.abort(*run.running())
        group = run.view.group(0)
        seen.append(None if group is None else (group.infrastructure_failures, group.data_failures))
    assert seen == charged
    assert run.view.phase_counts()["released"] == seen.count(None)


def test_a_replica_that_does_not_cut_a_group_short_is_stopped() -> None:
    run = small(every(None, group_s=100.0, cut_s=7.0))
    wait(run, 103.0)
    parked = run.state.orders.find("park", 0).at  # type: ignore[union-attr]
    assert cut_or_stopped(wait(run, parked + 6.0)) == []
    (stop,) = [one for one in wait(run, parked + 7.0) if isinstance(one, StopProcess)]
    said = "replica 0 exceeded its time limit of 7 s (timeouts.cut_s) after 7 s in ParkGroup (group 0)"
    assert stop.reason == said
    assert {group.infrastructure_failures for group in run.state.groups.live.values() if group.attempt} == {1}


def test_a_group_that_already_moves_is_not_ordered_to_park_twice() -> None:
    run = small(every(None, group_s=100.0))
    wait(run, 103.0)
    run.tell(SettingChanged(setting="timeouts.group_s", value="50"))
    assert not cut_or_stopped(wait(run, run.clock + 51.0)), "the cut has its own limit"


def test_an_attempt_that_progresses_while_it_is_parked_exceeds_its_limit_once() -> None:
    run = small(every(None, group_s=100.0, cut_s=9_000.0))
    wait(run, run.clock + 105.0)
    run.keep_prefix(0, tokens=3)
    wait(run, run.clock + 225.0)
    assert [order.group for order in run.ordered(ParkGroup)].count(0) == 1
    assert run.state.groups.live[0].exceeded == 1


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


TRAINS = r"the trainer exceeded its time limit of 50 s \(timeouts.train_s\) after 50 s in TrainStep \(step 0\)"


@pytest.mark.parametrize(
    ("kind", "prepare", "others", "ends", "says"),
    [
        ("draw", lambda run: None, {"answers_draws": False}, "FinishRun", "the data source .* in DrawPrompts"),
        ("score", trains, {"scoring_tasks": ("old_logprobs",)}, "StopProcess", ".* in ScoreBatch .*old_logprobs"),
        ("train", trains, {}, "StopProcess", TRAINS),
        ("publish", publishes, {}, "StopProcess", "the trainer .* in PublishWeights .*version 1"),
        ("checkpoint", checkpoints, {"checkpoint_every": 1}, "StopProcess", "the trainer .* in SaveCheckpoint"),
        ("sync", syncs, {}, "StopProcess", "replica 0 .* in StageWeights"),
        ("resume", resumes, {}, "StopProcess", "replica 0 .* in ResumeReplica"),
        ("store", publishes, {}, "StopProcess", "the trajectory store .* in DiscardGroups"),
    ],
)  # fmt: skip
def test_a_process_that_does_not_execute_its_order_is_stopped(
    kind: str, prepare: Callable[[Scripted], None], others: dict[str, Any], ends: str, says: str
) -> None:
    run = small(Timeouts(**{f"{kind}_s": 50.0}), **others)
    prepare(run)
    (order,) = [one for one in run.state.orders.all() if one.subject in (kind, "discard" if kind == "store" else kind)]
    began = run.clock - run.times.took_s(order, run.clock)
    assert not cut_or_stopped(wait(run, began + 49.0))
    (last,) = [one for one in wait(run, began + 52.5) if type(one).__name__ == ends]
    assert re.match(says, last.reason), last.reason  # type: ignore[attr-defined]
    if isinstance(last, FinishRun):
        assert last.outcome == "stopped" and not last.again, "it can be resumed"


def test_the_pause_and_the_install_of_a_replica_have_a_limit_too() -> None:
    run = small(every(None, sync_s=50.0))
    syncs(run)
    run.install(pause=False)
    assert isinstance(run.commands[-1], PauseReplica)
    assert cut_or_stopped(wait(run, run.clock + 49.0)) == []
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


def test_a_replica_hung_at_start_is_stopped_and_one_that_does_not_stop_ends_the_run() -> None:
    run = small(every(None, start_s=50.0))
    run.tell(ReplicasWanted(replicas=2))
    assert run.ordered(StartProcess)
    assert cut_or_stopped(wait(run, run.clock + 53.0)) == ["StopProcess"]
    stop = run.ordered(StopProcess)[-1]
    assert (stop.kind, stop.index, stop.life) == ("replica", 1, 1)
    assert cut_or_stopped(wait(run, run.clock + 53.0)) == ["FinishRun"]
    end = run.ordered(FinishRun)[-1]
    assert (end.outcome, end.again) == ("stopped", True)
    assert end.reason.startswith("replica 1 exceeded its time limit of 50 s (timeouts.start_s)")


def lost(run: Scripted) -> list[Command]:
    """The process that was to stop last has ended."""
    stop = run.ordered(StopProcess)[-1]
    return run.tell(ProcessLost(kind=stop.kind, index=stop.index, life=stop.life, published=0, reason=stop.reason))


def up(run: Scripted) -> list[Command]:
    """The process that was to start last is up."""
    start = run.ordered(StartProcess)[-1]
    return run.tell(ProcessUp(kind=start.kind, index=start.index, life=start.life))


def test_a_stopped_trainer_restarts_and_its_orders_stand_still_until_it_is_up() -> None:
    run = small(every(None, train_s=50.0))
    trains(run)
    (stop,) = [one for one in wait(run, run.clock + 60.0) if isinstance(one, StopProcess)]
    assert (stop.kind, run.state.processes["trainer"].state) == ("trainer", "stopping")
    assert run.state.orders.find("train", 0) is not None, "it is charged once the process has ended"
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0)), "one stop is enough"
    lost(run)
    assert run.state.training.steps[0].failures == 1
    again = run.state.orders.find("train", 0)
    assert again is not None and run.ordered(StartProcess)[-1].life == 2
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0)), "it loads a model"
    up(run)
    began = run.clock
    assert not cut_or_stopped(wait(run, began + 99.0)), "an order that was overdue has twice the time"
    assert cut_or_stopped(wait(run, began + 100.0)) == ["StopProcess"]


def test_the_limit_of_a_train_step_stays_doubled_while_its_batch_is_scored_again() -> None:
    run = small(every(None, train_s=100.0, score_s=1000.0), scoring_tasks=("old_logprobs",))
    run.finish(0, 1)
    score = {"step": 0, "task": "old_logprobs"}
    run.tell(BatchScored(**score, attempt=1))
    wait(run, run.clock + 106.0)
    lost(run)
    up(run)
    run.tell(BatchScored(**score, attempt=2))
    assert limit(run, "train", 0) == 200.0


def test_the_limit_of_an_install_stays_doubled_while_the_weights_are_staged_again() -> None:
    run = small(every(None, sync_s=100.0))
    syncs(run)
    place = {"replica": 0, "life": 1, "attempt": 1}
    run.tell(WeightsStaged(**place, version=1))
    run.tell(ReplicaPaused(**place))
    wait(run, run.clock + 106.0)
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="stopped"))
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=100))
    place["life"] = 2
    run.tell(WeightsStaged(**place, version=1))
    run.tell(ReplicaPaused(**place))
    assert limit(run, "sync", 0) == 200.0
    run.tell(WeightsInstalled(**place, version=1))
    assert run.state.replicas.by_id[0].exceeded == 0


@pytest.mark.parametrize(
    "then", [SettingChanged(setting="timeouts.group_s", value="900"), SchedulerRecovered()], ids=["setting", "failover"]
)
def test_a_hang_is_charged_whatever_happens_before_its_process_has_ended(then: Any) -> None:
    """Every order gets its full time then, but the trainer is being stopped for this one."""
    run = small(every(None, train_s=100.0), checkpoint_every=1)
    run.finish(0, 1)
    assert "StopProcess" in cut_or_stopped(run.wait(120.0))
    run.tell(structs.replace(then))
    lost(run)
    assert run.state.training.steps[0].failures == 1


def test_a_start_that_waits_for_room_stands_still() -> None:
    run = small(every(None, start_s=50.0))
    run.tell(ReplicasWanted(replicas=2))
    waits = {"kind": "replica", "index": 1, "life": 1}
    run.tell(ProcessWaits(**waits, reason="no GPU is free"))
    assert not cut_or_stopped(wait(run, run.clock + 10_000.0))
    run.tell(ProcessWaits(**waits, reason="two GPUs are not free"))
    run.tell(ProcessWaits(**waits, reason=""))
    assert not cut_or_stopped(wait(run, run.clock + 49.0))
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


@pytest.mark.parametrize("then", [None, SettingChanged(setting="timeouts.group_s", value="900"), SchedulerRecovered()])
def test_the_delay_of_a_start_does_not_count(then: Any) -> None:
    """Also after a change of `timeouts` and a failover, which give every order its full time again."""
    run = small(every(None, start_s=50.0), replica_restarts=9)
    run.tell(ReplicasWanted(replicas=2))
    for life in range(1, 8):
        run.tell(ProcessLost(kind="replica", index=1, life=life, reason="it does not start"))
    start = run.ordered(StartProcess)[-1]
    assert (start.life, start.delay_s) == (8, 60.0)
    if then is not None:
        run.tell(structs.replace(then))
    assert not cut_or_stopped(wait(run, run.clock + 60.0 + 49.0))
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


def test_a_part_of_a_start_teaches_nothing_about_whole_starts() -> None:
    """Otherwise a trainer that has loaded its weights would shorten the limit of an engine that takes longer."""
    run = small(every(None, start_s=AUTO))
    run.tell(ReplicasWanted(replicas=2))
    start, known = run.ordered(StartProcess)[-1], dict(run.times.longest)
    run.clock += 500.0
    run.tell(OrderProgressed(order=start.number))
    assert run.times.longest == known
    (order,) = [order for order in run.state.orders.all() if order.number == start.number]
    assert run.times.took_s(order, run.clock) == 0.0


def test_a_start_that_waited_for_room_teaches_nothing_about_starts() -> None:
    run = small(every(None, start_s=AUTO))
    run.tell(ReplicasWanted(replicas=2))
    run.tell(ProcessWaits(kind="replica", index=1, life=1, reason="no GPU is free"))
    known = run.times.longest["start"]
    run.clock += 50_000.0
    run.tell(ProcessUp(kind="replica", index=1, life=1, slots=4, version=0))
    assert run.times.longest["start"] == known


def test_a_trainer_may_train_the_steps_since_its_checkpoint_again_before_it_is_up() -> None:
    run = small(every(None, start_s=50.0, train_s=80.0), checkpoint_every=3, keeps_batches=True)
    for step in range(2):
        run.train_on(2 * step, 2 * step + 1)
        run.install()
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason="killed"))
    assert run.ordered(StartProcess)[-1].redo == (0, 1)
    assert not cut_or_stopped(wait(run, run.clock + 50.0 + 2 * 80.0 - 1.0))
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["StopProcess"]


def test_overdue_work_of_an_added_state_fails_and_its_late_answer_is_stale() -> None:
    run = small(every(None, state_s=50.0), added_states=(TWO_AT_ONCE,))
    run.finish(0)
    first = run.ordered(EnterState)[-1]
    figures = {"state": "checking", "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}
    wait(run, run.clock + 10.0)
    run.finish(1)
    run.tell(StateLeft(group=1, attempt=run.ordered(EnterState)[-1].attempt, **figures))
    ordered = wait(run, run.clock + 41.0)
    assert not cut_or_stopped(ordered), "the process answers"
    again = run.ordered(EnterState)[-1]
    assert (again.group, again.attempt, run.state.groups.live[0].infrastructure_failures) == (
        0,
        first.attempt + 1,
        1,
    )
    assert "the state checking exceeded its time limit of 50 s (timeouts.state_s)" in run.state.ending.last_failure
    stale = run.state.orders.facts.stale_echoes
    run.tell(StateLeft(group=0, attempt=first.attempt, **figures))
    assert run.state.orders.facts.stale_echoes == stale + 1
    run.tell(StateLeft(group=0, attempt=again.attempt, **figures))
    assert run.state.groups.live[0].state == "batched"


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
    (validation,) = run.state.validations.live.values()
    chunk = validation.chunks[late.chunk]
    assert chunk.failures == 1 and not run.state.orders.open["rows"], "its replica has yet to stop"
    done(run, StopMeasuring)
    assert run.state.orders.find("rows", (validation.id, late.chunk)) is not None
    for order in run.out():
        run.measured(order)
    assert [one.state for one in run.ended] == ["reported"]


def test_only_the_rows_that_are_late_lose_an_attempt() -> None:
    run = measuring(every(None, rows_s=50.0))
    (validation,) = run.state.validations.live.values()
    wait(run, run.clock + 10.0)
    run.tell(run.progress_of("rows", (validation.id, 1)), at=run.clock)
    assert cut_or_stopped(wait(run, run.state.orders.find("rows", (0, 0)).at + 50.0)) == ["StopMeasuring"]  # type: ignore[union-attr]
    assert [chunk.failures for chunk in validation.chunks] == [1, 0]
    assert run.state.validations.out == 0


def test_a_replica_that_does_not_stop_measuring_is_stopped() -> None:
    run = measuring(every(None, rows_s=50.0, cut_s=5.0))
    wait(run, run.clock + 51.0)
    assert cut_or_stopped(wait(run, run.clock + 5.0)) == ["StopProcess"]
    assert run.state.validations.out == 2, "another replica measures them"
    assert run.out()[-1].replica == 1


# only what hung is charged


@pytest.mark.parametrize(("hangs", "charged"), [(True, [0, 0]), (False, [1, 1])])
def test_rows_on_a_replica_that_hangs_over_another_order_are_not_charged(hangs: bool, charged: list[int]) -> None:
    run = measuring(every(None, group_s=50.0, cut_s=5.0))
    (validation,) = run.state.validations.live.values()
    (replica,) = validation.replicas
    if hangs:
        assert set(cut_or_stopped(wait(run, run.clock + 51.0))) == {"ParkGroup"}
        wait(run, run.clock + 5.0)
        assert replica in {stop.index for stop in run.ordered(StopProcess)}
    else:
        run.tell(ProcessLost(kind="replica", index=replica, life=1, reason="killed"))
    assert [chunk.failures for chunk in validation.chunks] == charged


def test_when_a_replica_hangs_over_one_group_the_others_on_it_are_not_charged() -> None:
    run = small(every(None, group_s=100.0, cut_s=7.0))
    wait(run, run.clock + 60.0)
    run.keep_prefix(1, 2, 3, tokens=1)
    wait(run, run.clock + 40.0)
    parked = run.state.orders.find("park", 0)
    assert parked is not None and run.state.orders.find("park", 1) is None
    assert cut_or_stopped(wait(run, parked.at + 7.0)) == ["StopProcess"]
    assert [run.state.groups.live[id].infrastructure_failures for id in range(4)] == [1, 0, 0, 0]
    assert {run.state.groups.live[id].state for id in range(4)} == {"aborted"}
    lost(run)
    assert [run.state.groups.live[id].infrastructure_failures for id in range(4)] == [1, 0, 0, 0]


def test_when_a_replica_hangs_over_new_weights_its_groups_are_not_charged() -> None:
    run = small(every(None, sync_s=50.0))
    syncs(run)
    assert cut_or_stopped(wait(run, run.clock + 51.0)) == ["StopProcess"]
    lost(run)
    assert {group.infrastructure_failures for group in run.state.groups.live.values()} == {0}


def test_a_replica_that_dies_charges_each_of_its_groups() -> None:
    run = small(every(None))
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    assert [run.state.groups.live[id].infrastructure_failures for id in range(4)] == [1, 1, 1, 1]


def test_a_trainer_hang_in_a_checkpoint_is_not_charged_to_the_train_step_behind_it() -> None:
    run = small(every(None, checkpoint_s=50.0), checkpoint_every=1, keeps_batches=True)
    checkpoints(run)
    run.finish(2, 3)
    assert [order.subject for order in run.state.orders.owned("trainer")] == ["checkpoint", "train"]
    assert cut_or_stopped(wait(run, run.clock + 51.0)) == ["StopProcess"]
    lost(run)
    assert run.state.training.steps[1].failures == 0
    assert run.state.orders.find("train", 1) is not None


def test_the_process_of_added_states_is_stopped_if_it_answered_nothing() -> None:
    run = small(every(None, state_s=50.0), added_states=(TWO_AT_ONCE,))
    run.finish(0)
    wait(run, run.clock + 30.0)
    run.finish(1)
    (stop,) = [one for one in wait(run, run.clock + 21.0) if isinstance(one, StopProcess)]
    assert stop.kind == "added states"
    lost(run)
    assert [run.state.groups.live[id].infrastructure_failures for id in (0, 1)] == [1, 0]
    up(run)
    assert {one.command.group for one in run.state.orders.all() if one.subject == "state"} == {0, 1}  # type: ignore[attr-defined]


# what never stops healthy work


def test_each_stored_prefix_gives_a_group_its_full_time_again() -> None:
    run = small(every(None, group_s=100.0))
    for tokens in range(1, 20):
        assert not cut_or_stopped(wait(run, run.clock + 90.0))
        run.keep_prefix(0, 1, 2, 3, tokens=tokens)
    assert cut_or_stopped(wait(run, run.clock + 90.0)) == []
    assert cut_or_stopped(wait(run, run.clock + 20.0)) == ["ParkGroup"] * 4


def test_a_group_that_progresses_while_it_is_truncated_has_its_full_time_again() -> None:
    run = small(every(None, group_s=100.0), policies={"deadline": "truncate"}, deadline_timeout_s=10.0)
    run.wait(11.0)
    assert {order.group for order in run.ordered(TruncateGroup)} == {0, 1}
    for tokens in range(1, 4):
        assert not cut_or_stopped(wait(run, run.clock + 70.0))
        run.keep_prefix(0, 1, 2, 3, tokens=tokens)
    assert {order.group for order in wait(run, run.clock + 106.0) if isinstance(order, ParkGroup)} == {0, 1, 2, 3}


def starts(run: Scripted) -> None:
    run.tell(ReplicasWanted(replicas=2))


PROGRESSES: list[tuple[str, Callable[[Scripted], None], dict[str, Any]]] = [
    ("group", lambda run: None, {"max_concurrent_groups": 2}),
    ("rows", lambda run: None, {"validation": ValidationLimits(rows=2, every=0, at_end=False)}),
    ("score", trains, {"scoring_tasks": ("old_logprobs",)}),
    ("train", trains, {}),
    ("publish", publishes, {}),
    ("checkpoint", checkpoints, {"checkpoint_every": 1}),
    ("start", starts, {}),
]


@pytest.mark.parametrize(("kind", "prepare", "others"), PROGRESSES)
@pytest.mark.parametrize("most_s", [None, 300.0])
def test_an_order_that_progresses_is_overdue_only_by_max_s(
    kind: str, prepare: Callable[[Scripted], None], others: dict[str, Any], most_s: float | None
) -> None:
    run = small(every(None, **{f"{kind}_s": 100.0}, max_s=most_s, cut_s=9_000.0), **others)
    prepare(run)
    orders = [one for one in run.state.orders.all() if one.subject == kind]
    given_at = run.clock
    for _ in range(9):
        late = cut_or_stopped(wait(run, run.clock + 90.0))
        assert bool(late) == (most_s is not None and run.clock - given_at > most_s + 5.0), late
        if late:
            return
        for order in orders:
            run.tell(run.progress_of(kind, order.id), at=run.clock)
    assert most_s is None and cut_or_stopped(wait(run, run.clock + 106.0))


def test_progress_of_an_earlier_attempt_or_life_changes_nothing() -> None:
    run = small(every(None, train_s=100.0, group_s=100.0))
    generates = run.progress_of("group", 0, finished=1)
    trains(run)
    echoes = [generates, run.progress_of("train", 0)]
    wait(run, run.clock + 60.0)
    run.tell(StepFailed(step=0, attempt=1, reason="no memory"))
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason="killed"))
    up(run)
    echoes.append(run.progress_of("train", 0))
    run.tell(ProcessLost(kind="trainer", index=0, life=2, reason="killed"))
    assert run.ordered(TrainStep)[-1].attempt == 4
    up(run)
    wait(run, run.clock + 60.0)
    echoes.append(OrderProgressed(order=run.ordered(TrainStep)[-1].number + 1000))
    stale = run.state.orders.facts.stale_echoes
    for echo in echoes:
        run.tell(echo, at=run.clock)
    assert run.state.orders.facts.stale_echoes == stale + 4 and time_taken_by(run, "train", 0) == 60.0


def test_progress_is_reported_of_the_kinds_that_the_table_names_and_of_no_other() -> None:
    run = small(every(100.0))
    syncs(run)
    sync = run.state.orders.find("sync", 0)
    assert sync is not None
    wait(run, run.clock + 50.0)
    stale = run.state.orders.facts.stale_echoes
    run.tell(OrderProgressed(order=sync.number))
    assert run.state.orders.facts.stale_echoes == stale + 1 and run.times.took_s(sync, run.clock) >= 50.0


def test_a_report_about_an_order_that_has_progressed_since_has_no_effect() -> None:
    run = small(every(None, train_s=100.0))
    trains(run)
    run.clock = run.times.look_at
    (late,) = run.times.overdue(run.clock)
    report = run.overdue(late)
    run.tell(run.progress_of("train", 0))
    stale = run.state.orders.facts.stale_echoes
    assert not cut_or_stopped(run.tell(report, at=run.clock))
    assert run.state.orders.facts.stale_echoes == stale + 1
    assert not cut_or_stopped(wait(run, run.clock + 98.0))
    assert cut_or_stopped(wait(run, run.clock + 3.0)) == ["StopProcess"]


def test_progress_is_reported_ten_times_within_the_smallest_limit_of_its_kind() -> None:
    timeouts = Timeouts(train_s=50.0, score_s=5000.0, publish_s=None)
    reported = {kind: timeouts.progress_every_s(kind) for kind in ("group", "rows", "train", "score", "publish")}
    assert reported == {"group": 60.0, "rows": 360.0, "train": 5.0, "score": 60.0, "publish": 360.0}


@pytest.mark.parametrize("group_s", [1000.0, None])
def test_max_s_bounds_orders_with_a_longer_limit_or_none(group_s: float | None) -> None:
    run = small(every(None, group_s=group_s, max_s=250.0))
    began = run.state.orders.find("group", 0).at  # type: ignore[union-attr]
    assert not cut_or_stopped(wait(run, began + 249.0))
    assert cut_or_stopped(wait(run, began + 263.0)) == ["ParkGroup"] * 4
    run.abort(0)
    assert run.state.ending.last_failure == "an attempt exceeded its time limit of 250 s (timeouts.max_s)"
    assert cut_or_stopped(wait(run, run.clock + 73.0)) == ["StopProcess"], "cut_s holds, too"


def test_max_s_bounds_an_order_that_stands_still_while_nothing_else_is_open() -> None:
    run = small(every(None, max_s=100.0), replicas=0)
    run.tell(ReplicasWanted(replicas=1))
    run.tell(ProcessWaits(kind="replica", index=0, life=1, reason="it needs a GPU"))
    assert cut_or_stopped(wait(run, run.clock + 106.0)) == ["StopProcess"]


def test_a_data_source_has_one_floor_once_it_has_answered() -> None:
    run = small(every(None, draw_s=AUTO, floor_s=100.0), answers_draws=False)
    assert limit(run, "draw", None) == 600.0
    run.tell(PromptsDrawn(first=0, count=2, exhausted=False, number=run.ordered(DrawPrompts)[-1].number))
    assert limit(run, "draw", None) == 100.0


def test_auto_waits_six_floors_for_the_first_answer_and_learns_from_answers() -> None:
    run = small(every(None, group_s=AUTO, floor_s=100.0))
    began = run.clock
    assert not cut_or_stopped(wait(run, began + 500.0)), "a first compilation may be slow"
    run.finish(0)
    took = run.times.longest["group"]
    assert 500.0 <= took <= 505.0
    order = run.state.orders.find("group", 1)
    assert order is not None and limit(run, "group", 1) == pytest.approx(10 * took)


def test_a_limit_that_is_learned_holds_for_orders_that_were_given_before() -> None:
    run = small(every(None, group_s=AUTO, floor_s=100.0), prompts=2)
    run.finish(0)
    assert cut_or_stopped(wait(run, run.clock + 105.0)) == ["ParkGroup"]


def test_failures_and_parked_groups_teach_nothing() -> None:
    run = small(every(None, group_s=AUTO, floor_s=100.0))
    wait(run, run.clock + 400.0)
    run.fail(0, cause="data")
    run.abort(1)
    assert "group" not in run.times.longest


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
    replica = run.state.replicas.by_id[0]
    place = {"replica": 0, "life": 1, "attempt": replica.sync_attempt}
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
    assert run.state.replicas.by_id[0].state == "pausing"
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
    run.tell(ReplicaPaused(replica=0, life=1, attempt=pause.attempt))
    assert run.state.replicas.by_id[0].state == "asleep"
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


def test_a_resume_keeps_doubled_limits_and_times_nothing_of_before() -> None:
    run = small(every(AUTO, floor_s=100.0))
    checkpoints(run)
    run.finish(2)
    run.state.groups.live[3].exceeded = 1
    run.tell(RunResumed(steps=1, replicas=1, consumed=(), released=(), kept=True), at=1_000_000.0)
    assert run.state.groups.live[3].exceeded == 1
    assert {order.subject for order in run.state.orders.all()} == {"publish", "start"}
    run.times = OrderTimes(run.state)
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=4, version=1))
    assert not cut_or_stopped(wait(run, run.clock + 590.0)), "longest times are learned anew"


def test_the_limit_of_the_first_publication_after_a_resume_doubles_too() -> None:
    """The version before it is retired by then, and the count must not be lost with it."""
    run = small(every(None, publish_s=100.0), checkpoint_every=1)
    checkpoints(run)
    run.tell(CheckpointSaved(steps=1))
    run.tell(RunResumed(steps=1, replicas=1, consumed=(), released=(), kept=True))
    assert limit(run, "publish", 2) == 100.0
    assert "StopProcess" in cut_or_stopped(run.wait(110.0))
    lost(run)
    assert limit(run, "publish", 2) == 200.0


def test_a_trainer_that_hangs_after_a_resume_is_stopped() -> None:
    """The run had ended because an earlier trainer hung over the deletion of a checkpoint."""
    run = small(every(None, store_s=50.0), checkpoint_every=1, keep_checkpoints=1, trainer_restarts=0)
    for saved in (1, 2):
        run.train_on(*run.running()[:2])
        run.install()
        run.tell(CheckpointSaved(steps=saved))
    run.tell(OrderDone(orders=tuple(one.number for one in (*run.ordered(DiscardGroups), *run.ordered(RetireWeights)))))
    assert cut_or_stopped(run.wait(60.0)) == ["StopProcess"]
    lost(run)
    assert run.state.ending.outcome is not None
    run.tell(RunResumed(steps=2, replicas=1, consumed=(), released=(), kept=True))
    (stop,) = [command for command in run.wait(200.0) if isinstance(command, StopProcess)]
    assert stop.kind == "trainer" and "in DeleteCheckpoint (steps 1)" in stop.reason


@pytest.mark.parametrize("hears_first", [False, True])
def test_a_scheduler_that_is_new_or_stood_still_blames_nobody(hears_first: bool) -> None:
    """`hears_first`: an answer that waited is handled before the watchdog wakes up."""
    run = small(every(None, group_s=100.0))
    run.tell(SchedulerRecovered(), at=95.0)
    assert not cut_or_stopped(wait(run, 175.0))
    run.clock = 1000.0
    if hears_first:
        run.tell(run.generated(3), at=run.clock)
    assert not cut_or_stopped(run.look()), "answers that came while its own process stood still wait"
    assert time_taken_by(run, "group", 0) <= 100.0, "of 825 s, no more than an interval counts"
    assert set(cut_or_stopped(wait(run, 1100.0))) == {"ParkGroup"}


def test_a_standstill_before_the_first_look_blames_nobody() -> None:
    run = small(every(None, group_s=20.0))
    run.clock += 25.0
    assert not cut_or_stopped(run.look()) and time_taken_by(run, "group", 0) <= 2.0


def test_a_standstill_after_a_look_at_orders_with_longer_limits_blames_nobody() -> None:
    run = small(every(None, group_s=20.0, train_s=HOUR))
    trains(run)
    run.finish(*run.running())
    wait(run, run.clock + HOUR - 60.0)
    run.train()
    run.publish()
    run.install()
    run.clock += 25.0
    assert run.running() and not cut_or_stopped(run.look())


def test_a_standstill_of_the_run_while_a_replica_pauses_counts_once() -> None:
    run = small(every(None, group_s=100.0))
    syncs(run)
    run.install(pause=False)
    assert run.state.replicas.by_id[0].state == "pausing"
    taken = time_taken_by(run, "group", 2)
    run.clock += 500.0
    assert taken > 0.0 and not cut_or_stopped(run.look()), "all of it is a standstill of the replica"
    place = {"replica": 0, "life": 1, "attempt": run.state.replicas.by_id[0].sync_attempt}
    run.tell(ReplicaPaused(**place))
    run.tell(WeightsInstalled(**place, version=1))
    assert time_taken_by(run, "group", 2) == taken
    assert not cut_or_stopped(wait(run, run.clock + 99.0 - taken))
    assert cut_or_stopped(wait(run, run.clock + 2.0)) == ["ParkGroup", "ParkGroup"], "2 and 3, which ran before"


def test_a_process_of_the_run_that_is_often_late_still_finds_what_hangs() -> None:
    run = small(every(None, group_s=100.0))
    for _ in range(60):
        run.clock += 50.0
        if cut_or_stopped(run.look()):
            return
    raise AssertionError("nothing was found in 50 minutes")


def test_the_watchdog_sleeps_until_an_order_can_be_overdue() -> None:
    run = small(every(None, group_s=100.0, train_s=10.0))
    assert run.times.look_at == run.state.orders.find("group", 0).at + 100.0  # type: ignore[union-attr]
    trains(run)
    assert run.times.look_at == run.clock + 10.0
    run.train()
    assert not cut_or_stopped(wait(run, run.clock + 50.0))
    run.finish(*run.running())
    wait(run, run.clock + 1000.0)
    assert run.times.look_at == NEVER, "no order with a limit is open"


def test_limits_may_be_set_and_lifted_at_any_time() -> None:
    run = small(every(None))
    trains(run)
    run.tell(SettingChanged(setting="timeouts.train_s", value="auto"))
    run.tell(SettingChanged(setting="timeouts.floor_s", value="10"))
    assert not cut_or_stopped(wait(run, run.clock + 59.0))
    run.tell(SettingChanged(setting="timeouts.train_s", value="off"))
    assert run.times.look_at == NEVER
    run.tell(SettingChanged(setting="timeouts.train_s", value="30"))
    assert cut_or_stopped(wait(run, run.clock + 31.5)) == ["StopProcess"]


def test_a_change_of_another_setting_gives_no_order_more_time() -> None:
    """Otherwise a program that changes one every minute would keep every hang from being found."""
    run = small(every(None, group_s=100.0))
    for _ in range(3):
        assert not cut_or_stopped(wait(run, run.clock + 30.0))
        run.tell(SettingChanged(setting="rollout.give_up_s", value="9"))
    assert set(cut_or_stopped(wait(run, run.clock + 15.0))) == {"ParkGroup"}


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
