"""Decisions and their order of effects, each worked by hand: what a mutation of the core must not get past."""

from dataclasses import replace

import pytest
from msgspec import structs

from engine.commands import (
    AbortGroup,
    CancelTimer,
    DiscardGroups,
    DrawPrompts,
    FinishRun,
    PublishWeights,
    ResumeGroup,
    RetireWeights,
    ScoreBatch,
    SetTimer,
    StartGroup,
    StopProcess,
    TrainStep,
)
from engine.errors import InvariantViolated, PolicyError
from engine.events import (
    BatchScored,
    CheckpointSaved,
    GroupFailed,
    ProcessLost,
    ProcessUp,
    PublishFailed,
    RunStarted,
    StepFailed,
    SyncFailed,
    TimerFired,
    WeightsStaged,
)
from engine.runtime.driver import Driver
from engine.states.orders import DEADLINE
from tests.core.scripted import Scripted
from tests.core.test_scenarios import small, straggling


def with_policy(decision, method, answer, **others):
    """`small`, with one decision made by `answer`."""
    run = small(**others)
    policy = type("Own", (), {method: answer, "acts": True})()
    policies = replace(run.scheduler.policies, **{decision: policy})
    run.scheduler.decisions.use(policies)
    return run


def a_step(run):
    run.train_on(*run.running()[:2])
    run.install()


def boom(*args):
    raise ValueError("boom")


ILLEGAL = {
    "admission too many": ("admission", "admit", lambda self, v, legal: legal + 1),
    "admission not a number": ("admission", "admit", lambda self, v, legal: 0.5),
    "admission raises": ("admission", "admit", boom),
    "dispatch unknown": ("dispatch", "choose", lambda self, v, oldest, g: 99),
    "dispatch unhashable": ("dispatch", "choose", lambda self, v, oldest, g: [0]),
    "batching too few": ("batching", "select", lambda self, v, n: [next(iter(v.ready_ids()))]),
    "batching twice": ("batching", "select", lambda self, v, n: [next(iter(v.ready_ids()))] * n),
    "batching unready": ("batching", "select", lambda self, v, n: [900, 901]),
    "batching lazily raises": ("batching", "select", lambda self, v, n: (1 // 0 for _ in range(n))),
    "batching not a sequence": ("batching", "select", lambda self, v, n: 7),
    "batching no ids": ("batching", "select", lambda self, v, n: [float(id) for id in v.ready_ids()]),
    "sync twice": ("sync", "pause", lambda self, v, staged, busy: staged * 2),
    "sync nobody": ("sync", "pause", lambda self, v, staged, busy: ()),
    "sync unknown": ("sync", "pause", lambda self, v, staged, busy: (99,)),
    "filter says nothing": ("filter", "keep", lambda self, v, o: None),
    "retry says nothing": ("retry", "retry", lambda self, v, g, c: None),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_answer_is_the_policys_fault_and_named(case):
    decision, method, answer = ILLEGAL[case]
    run = with_policy(decision, method, answer)
    says = "return ids of type int" if case == "batching no ids" else ""
    with pytest.raises(PolicyError, match=f"the {decision} policy .*{says}"):
        run.tell(GroupFailed(group=3, attempt=1, replica=0, life=1, cause="data", reason="x"))
        a_step(run)


def test_a_batch_that_leaves_a_deadline_behind_is_refused():
    run = small()
    a_step(run)  # 2, 3 are due by step 1; 4, 5 by step 2
    policy = type("Own", (), {"select": lambda self, v, n: list(v.ready_ids())[:n]})()
    run.scheduler.decisions.use(replace(run.scheduler.policies, batching=policy))
    with pytest.raises(PolicyError, match="must take 2 groups due by step 1"):
        run.finish(4, 5)


def test_an_unknown_deadline_decision_is_refused():
    run = straggling("drop")
    policy = type("Own", (), {"acts": True, "decide": lambda self, v, s: "dorp"})()
    run.scheduler.decisions.use(replace(run.scheduler.policies, deadline=policy))
    with pytest.raises(PolicyError, match="it must return one of wait, truncate, drop, shrink"):
        run.fire()


# discards


def discarded(run):
    return [g for c in run.ordered(DiscardGroups) for g in c.groups]


def test_trajectories_are_forgotten_when_their_step_is_trained_and_not_before():
    run = small(scoring_tasks=("ref",))
    run.finish(0, 1)
    assert discarded(run) == []
    run.tell(BatchScored(step=0, attempt=1, task="ref"))
    assert discarded(run) == []
    run.train()
    assert discarded(run) == [0, 1]


def test_trajectories_of_a_filtered_group_are_forgotten():
    run = small(policies={"filter": "zero-variance"})
    run.finish(0, spread=0.0)
    assert discarded(run) == [0]


def test_a_version_being_staged_is_not_retired():
    run = small(replicas=2, slots=2, max_staleness_steps=2, max_concurrent_groups=6)
    run.train_on(0, 1)
    run.install(0)
    run.train_on(*[g for g in run.running()][:2])
    assert 1 not in [c.version for c in run.ordered(RetireWeights)], "replica 1 is still staging version 1"
    run.tell(WeightsStaged(replica=1, life=1, attempt=1, version=1))
    assert 1 in [c.version for c in run.ordered(RetireWeights)]


# budgets


def test_a_success_restores_the_budget_of_publication_and_of_syncs():
    run = small(infrastructure_attempts=2)
    for _ in range(3):
        run.finish(*run.running()[:2])
        run.train()
        last = run.ordered(PublishWeights)[-1]
        run.tell(PublishFailed(version=last.version, attempt=last.attempt, reason="away"))
        run.publish()
        replica = run.state.replicas.by_id[0]
        run.tell(SyncFailed(replica=0, life=1, attempt=replica.sync_attempt, version=last.version, reason="x"))
        run.install()
    assert not run.ordered(FinishRun) and not run.ordered(StopProcess)


def test_after_a_data_failure_a_partial_group_starts_from_nothing():
    run = small(data_attempts=2)
    run.abort(0)
    run.tell(GroupFailed(group=0, attempt=2, replica=0, life=1, cause="data", reason="x"))
    assert [type(c) for c in run.starts() if c.group == 0] == [StartGroup, ResumeGroup, StartGroup]
    run.abort(1)
    run.tell(GroupFailed(group=1, attempt=2, replica=0, life=1, cause="infrastructure", reason="x"))
    assert [type(c) for c in run.starts() if c.group == 1] == [StartGroup, ResumeGroup, ResumeGroup]


# order of work


def test_parked_groups_resume_before_new_ones_start_and_the_earliest_deadline_first():
    run = Scripted(train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=4)
    run.train_on(0, 1)
    run.install()
    run.finish(2, 3)
    due = {g: run.state.groups.live[g].deadline for g in run.running()}
    assert due == {4: 2, 5: 2, 6: 3, 7: 3}
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="x"))
    run.train()
    run.publish()
    assert run.view.capacity() > 0 and run.view.waiting > 0, (run.view.capacity(), run.view.waiting)
    before = len(list(run.starts()))
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=3, version=2))
    assert [c.group for c in list(run.starts())[before:]] == [4, 5, 6]


def test_a_replica_behind_takes_groups_while_its_version_has_places():
    run = Scripted(
        train_batch_size=2,
        max_staleness_steps=2,
        max_concurrent_groups=2,
        replicas=2,
        slots=1,
        policies={"sync": "rolling"},
    )
    run.finish(0)
    run.train_on(1)
    run.install(0)
    assert {run.replica_of(g): run.state.groups.live[g].admitted_version for g in run.running()}[1] == 0
    run.finish(next(g for g in run.running() if run.replica_of(g) == 1))
    assert 1 in {run.replica_of(g) for g in run.running()}, "version 0 still has places"


def test_the_tail_waits_for_a_parked_group():
    run = small(prompts=2, replicas=2, slots=1)
    run.finish(0)
    for id in (0, 1):
        run.tell(ProcessLost(kind="replica", index=id, life=1, reason="x"))
    assert run.state.no_more_prompts and (run.view.ready, run.view.parked, run.view.running) == (1, 1, 0)
    assert not run.ordered(TrainStep)


def test_prompts_are_drawn_no_further_ahead_than_a_batch():
    run = small()
    assert run.view.waiting == 2
    assert all(c.count <= 4 + 2 for c in run.ordered(DrawPrompts))


def test_among_replicas_new_enough_the_least_loaded_is_chosen():
    run = Scripted(
        replicas=3,
        slots=2,
        train_batch_size=2,
        max_staleness_steps=2,
        max_concurrent_groups=6,
        policies={"sync": "rolling"},
    )
    run.finish(0, 1)
    replicas, free = run.state.replicas.by_id, run.state.replicas
    for group in list(run.state.orders.open["group"]):
        run.state.orders.withdraw("group", group)
    for r, v, n in ((0, 0, 0), (1, 1, 2), (2, 1, 1)):
        replicas[r].version, replicas[r].slots = v, 4
        for group in range(n):
            order = StartGroup(group=10 * r + group, attempt=1, replica=r, life=1, admitted_version=v)
            run.state.orders.add(order)
    assert free.free_slots.least_loaded(0) == 0
    assert free.free_slots.least_loaded(1) == 2


# stragglers


def test_no_timer_while_more_than_stragglers_are_missing():
    run = Scripted(train_batch_size=3, max_staleness_steps=2, max_concurrent_groups=3, policies={"deadline": "drop"})
    run.train_on(0, 1, 2)
    run.install()
    run.finish(4, 5, 6)  # 3 is the straggler, due by step 2
    run.train()
    run.publish()
    run.install()
    assert run.view.requirements()[0] == (2, 1, 0)
    assert not run.ordered(SetTimer), "two more places are not ready either"
    run.finish(*[g for g in run.running() if g != 3])
    assert run.ordered(SetTimer)


def test_a_batch_formed_cancels_its_timer():
    run = straggling("drop")
    timer = run.ordered(SetTimer)[-1].timer
    run.finish(3)
    assert run.ordered(CancelTimer)[-1].timer == timer


def test_a_timer_finds_nobody_late_once_the_straggler_was_filtered():
    run = small(prompts=5, policies={"deadline": "drop", "filter": "zero-variance"})
    run.train_on(0, 1)
    run.install()
    run.finish(2)
    run.finish(3, spread=0.0)
    assert run.state.timer_is_set(DEADLINE)
    run.fire()
    assert not run.ordered(AbortGroup)


def test_truncation_finishes_a_group_with_a_prefix_and_drops_one_that_lost_all():
    run = straggling("truncate")
    run.fire()
    run.abort(3, tokens=0)
    assert run.view.group(3) is None
    run = straggling("truncate")
    run.fire()
    run.abort(3, tokens=5)
    assert [c.truncate for c in run.starts() if c.group == 3 and isinstance(c, ResumeGroup)] == [True]


# the driver


class Log:
    next_tick = 0

    def __init__(self):
        self.calls = []

    def write(self, events, commands):
        self.calls.append(("write", len(commands)))

    def reject(self, events, reason):
        self.calls.append(("reject", reason))

    def flush(self):
        self.calls.append(("flush",))

    def close(self): ...
    def execute(self, commands):
        self.calls.append(("execute", len(commands)))

    def now(self):
        return 0.0


def test_frames_are_flushed_before_their_commands_and_rejected_events_are_recorded():
    log, run = Log(), small()
    driver = Driver(run.scheduler, log, log, log)
    driver.deliver(RunStarted())
    assert [c[0] for c in log.calls] == ["write", "flush", "execute"]
    bad = structs.replace(run.generated(0), oldest_version=9, newest_version=9)
    with pytest.raises(Exception, match="law 6"):
        driver.deliver(bad)
    assert [c[0] for c in log.calls[3:]] == ["reject", "flush"]


def test_scoring_begins_anew_when_a_step_failed():
    run = small(scoring_tasks=("ref", "old"))
    run.finish(0, 1)
    run.tell(BatchScored(step=0, attempt=1, task="ref"))
    run.tell(StepFailed(step=0, attempt=1, reason="x"))
    assert [(c.attempt, c.task) for c in run.ordered(ScoreBatch)] == [(1, "ref"), (1, "old"), (2, "ref")]


def test_an_echo_of_an_earlier_checkpoint_does_not_end_the_run():
    run = small(checkpoint_every=1, max_steps=2)
    for step in range(2):
        run.train_on(*run.running()[:2])
        if step == 0:
            run.install()
    run.tell(CheckpointSaved(steps=1))
    assert not run.ordered(FinishRun)
    run.tell(CheckpointSaved(steps=2))
    assert run.ordered(FinishRun)


def test_the_room_is_checked_whatever_chose_the_batch(monkeypatch):
    run = small()
    a_step(run)
    monkeypatch.setattr("engine.states.ledger.Deadlines.requirements", lambda self, step, batch: [])
    monkeypatch.setattr("tests.core.core_rig.check_all", lambda state: None)
    with pytest.raises(InvariantViolated, match="law 4"):
        run.finish(4, 5)


# what cannot continue


def test_a_replica_on_which_group_after_group_fails_is_replaced() -> None:
    run = small(replicas=2, slots=2, infrastructure_attempts=3)
    sick = [g for g in run.running() if run.replica_of(g) == 0]
    for group in (*sick, *sick):
        if 0 <= run.replica_of(group) == 0:
            fail(run, group)
    while not run.ordered(StopProcess):
        fail(run, next(g for g in run.running() if run.replica_of(g) == 0))
    assert run.ordered(StopProcess)[0].index == 0
    assert "3 groups in a row failed on it" in run.ordered(StopProcess)[0].reason


def test_one_group_that_fails_again_and_again_does_not_cost_its_replica() -> None:
    run = small(infrastructure_attempts=3)
    for _ in range(3):
        fail(run, 0)
    assert [start.attempt for start in run.starts() if start.group == 0] == [1, 2, 3]
    assert run.view.group(0) is None
    assert not run.ordered(StopProcess)


def test_a_failed_group_goes_on_elsewhere_if_it_can() -> None:
    run = small(replicas=2, slots=3)
    failed_on = run.replica_of(0)
    fail(run, 0)
    assert run.replica_of(0) != failed_on


def fail(run: Scripted, id: int) -> None:
    run.fail(id, cause="infrastructure", reason="out of memory")


def test_a_version_that_no_replica_can_take_ends_the_run() -> None:
    run = small(infrastructure_attempts=2)
    run.train_on(0, 1)
    for life in (1, 2):
        for _ in range(2):
            attempt = run.state.replicas.by_id[0].sync_attempt
            run.tell(SyncFailed(replica=0, life=life, attempt=attempt, version=1, reason="wrong shape"))
        if life == 1:
            run.tell(ProcessUp(kind="replica", index=0, life=2, slots=4, version=0))
    (end,) = run.ordered(FinishRun)
    assert end.outcome == "failed"
    assert "version 1 could not be installed; last error: wrong shape; 2 replicas were stopped for it" in end.reason


def test_a_run_that_needs_no_replica_any_more_ends_well_without_one() -> None:
    run = small(max_steps=1)
    run.finish(0, 1)
    run.tell(ProcessLost(kind="replica", index=0, life=1, final=True, reason="gone"))
    run.train()
    run.publish()
    assert run.ordered(FinishRun)[0].outcome == "finished"


def test_the_timer_is_set_also_when_everything_hangs() -> None:
    run = Scripted(train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1, policies={"deadline": "drop"})
    assert run.ordered(SetTimer)
    run.fire()
    assert run.view.group(0) is None and run.running() == [1]


def test_a_group_started_after_the_timer_was_set_has_its_own_time() -> None:
    run = Scripted(
        train_batch_size=2, max_staleness_steps=0, max_concurrent_groups=2, deadline_timeout_s=60.0,
        policies={"deadline": "drop", "filter": "zero-variance"},
    )  # fmt: skip
    run.finish(0)
    timer = run.ordered(SetTimer)[-1]
    run.tell(run.generated(1, spread=0.0), at=run.clock + 59.0)
    assert run.running() == [2], "it took the place of the filtered one"
    run.tell(TimerFired(timer=timer.timer), at=run.clock + 1.0)
    assert run.running() == [2]
    assert run.ordered(SetTimer)[-1].delay_s == pytest.approx(59.0)


def test_the_timer_is_set_again_for_the_first_later_group_to_use_up_its_time() -> None:
    run = Scripted(
        train_batch_size=2, max_staleness_steps=0, max_concurrent_groups=2, deadline_timeout_s=60.0,
        policies={"deadline": "drop", "filter": "zero-variance"},
    )  # fmt: skip
    timer = run.ordered(SetTimer)[-1]
    began = run.clock
    run.tell(run.generated(0, spread=0.0), at=began + 20.0)
    run.tell(run.generated(1, spread=0.0), at=began + 50.0)
    run.tell(TimerFired(timer=timer.timer), at=began + 60.0)
    assert run.ordered(SetTimer)[-1].delay_s == pytest.approx(20.0)
    run.fire()
    assert [order.group for order in run.ordered(AbortGroup)] == [2]


def test_shrinking_needs_something_to_shrink_to() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=2, policies={"deadline": "shrink"})
    run.train_on(0, 1)
    run.install()
    trained = len(run.ordered(TrainStep))
    if run.ordered(SetTimer):
        run.fire()
    run.finish(run.running()[0])
    assert len(run.ordered(TrainStep)) == trained, "one group of two is no step that stragglers alone held"


def test_after_a_rejected_event_the_driver_takes_nothing_more() -> None:
    log, run = Log(), small()
    driver = Driver(run.scheduler, log, log, log)
    bad = structs.replace(run.generated(0), oldest_version=9, newest_version=9)
    for event in (bad, RunStarted()):
        with pytest.raises(InvariantViolated, match="law 6"):
            driver.deliver(event)
    assert [call[0] for call in log.calls] == ["reject", "flush"]


# a source without end


def fail_for_good(run, count):
    """The running group with the lowest number fails, again and again."""
    for _ in range(count):
        if run.state.ending.outcome is not None:
            return
        run.fail(run.running()[0], cause="data", reason="burnt")


def test_a_run_whose_groups_all_fail_ends_before_its_prompts_do():
    run = small(data_attempts=1)
    fail_for_good(run, 63)
    assert run.state.ending.outcome is None
    fail_for_good(run, 1)
    assert run.ordered(FinishRun)[-1].outcome == "failed"
    assert run.ordered(FinishRun)[-1].reason == "64 prompt groups in a row have failed; last error: burnt"


def test_one_group_that_is_generated_shows_that_going_on_has_a_point():
    run = small(data_attempts=1)
    fail_for_good(run, 63)
    run.finish(run.running()[0])
    fail_for_good(run, 63)
    assert run.state.ending.outcome is None
