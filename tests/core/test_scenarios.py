"""Schedules worked out by hand: capacity, deadlines, stragglers, syncs, failures, the end of a run."""

import pytest
from msgspec import structs

from engine.commands import (
    AbortGroup,
    FinishRun,
    InstallWeights,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StageWeights,
    StartGroup,
    StopProcess,
    TrainStep,
    TruncateGroup,
)
from engine.errors import ConfigError, InvariantViolated
from engine.events import (
    BatchScored,
    CheckpointSaved,
    DrainRequested,
    GroupAborted,
    GroupFailed,
    ProcessLost,
    ProcessUp,
    PublishFailed,
    ReplicaPaused,
    SettingChanged,
    StateLeft,
    StepFailed,
    StepTrained,
    StopRequested,
    SyncFailed,
    TimerFired,
    WeightsStaged,
)
from engine.states.limits import Limits
from tests.core.added_states import FETCHING
from tests.core.scripted import Scripted


def small(**others: object) -> Scripted:
    """B = 2, S = 1, K = 4."""
    return Scripted(**{"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, **others})


# bounds


def test_capacity_ends_at_four_and_a_filtered_group_gives_its_place_back() -> None:
    run = small(policies={"filter": "zero-variance"})
    assert run.running() == [0, 1, 2, 3]
    assert run.view.capacity() == 0
    run.finish(0, spread=0.0)
    assert run.running() == [1, 2, 3, 4], "its place was refilled at once"
    assert run.view.phase_counts()["released"] == 1


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"max_concurrent_groups": 1}, "use a value from 2 to 4"),
        ({"max_staleness_steps": 0, "max_concurrent_groups": 4}, r"is 4, but must be 2 \(B <= K .*; use 2$"),
        ({"max_concurrent_groups": 5}, r"B <= K <= B \* \(S \+ 1\)"),
        ({"sync_every": 3}, "S >= sync_every - 1"),
        ({"max_staleness_steps": -1}, "must be a whole number from 0 to 10000"),
        ({"train_batch_size": 0}, "must be a whole number from 1 to"),
        ({"sync_mode": "later"}, "keep, abort, wait"),
        ({"max_steps": 0}, "must be a whole number from 1 to"),
        ({"scoring_tasks": ("ref_logprobs", "ref_logprobs")}, "names a task twice"),
        ({"keeps_batches": True}, "the kept batches need checkpoints"),
    ],
)
def test_figures_out_of_law_are_refused_with_the_law(figures: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Limits(**{"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, **figures})


def test_bounds_above_which_a_figure_must_be_do_not_shut_out_small_ones() -> None:
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4}
    limits = Limits(**figures, drain_s=0.05, straggler_factor=1.05)
    assert (limits.drain_s, limits.straggler_factor) == (0.05, 1.05)
    for wrong in ({"drain_s": 0.0}, {"straggler_factor": 1.0}):
        with pytest.raises(ConfigError, match="above"):
            Limits(**figures, **wrong)


def test_slots_bound_each_replica_and_load_is_even() -> None:
    run = small(replicas=2, slots=1)
    assert [(s.group, s.replica) for s in run.starts()] == [(0, 0), (1, 1)]


def test_ended_trajectories_of_several_groups_make_room_for_the_next_group() -> None:
    run = small(slots=2, samples=4)
    assert [start.group for start in run.starts()] == [0, 1]
    run.end_trajectories(0, 3)
    assert not [order for order in run.end_trajectories(0, 2) if isinstance(order, StartGroup)], "an older report"
    assert [start.group for start in run.starts()] == [0, 1], "three trajectories are not a group"
    run.end_trajectories(1, 1)
    assert [start.group for start in run.starts()] == [0, 1, 2]
    run.end_trajectories(1, 4)
    assert [start.group for start in run.starts()] == [0, 1, 2], "7 of 8 are not two groups"
    run.end_trajectories(0, 4)
    assert [start.group for start in run.starts()] == [0, 1, 2, 3], "both wait only for their rewards"
    run.finish(0)
    assert [start.group for start in run.starts()] == [0, 1, 2, 3], "the replica gave its slot away before"
    run.abort(1, 2, 3)
    resumed = [order.group for order in run.commands if isinstance(order, ResumeGroup)]
    assert resumed == [1, 2, 3][: len(resumed)] and len(resumed) == 2, "after an abort each counts in full again"


def test_the_dispatch_counts_the_trajectories_that_have_not_ended() -> None:
    run = small(replicas=2, slots=2, samples=4)
    assert [(s.group, s.replica) for s in run.starts()] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    run.end_trajectories(2, 4)
    run.end_trajectories(3, 1)
    run.finish(0)
    assert [*run.starts()][-1].replica == 1, "three trajectories there, four on the other"


def test_a_short_step_is_charged_in_full() -> None:
    run = small(policies={"deadline": "shrink"}, prompts=100)
    run.train_on(0, 1)
    run.install()
    run.finish(2)
    assert run.ordered(SetTimer)
    run.fire()
    assert run.ordered(TrainStep)[-1].groups == (2,)
    assert run.state.held == run.state.groups.ledger.unconsumed + 2 * 2


# the deadline rule


def test_a_step_takes_the_first_ready_when_no_deadline_binds() -> None:
    run = small()
    run.finish(3, 1)
    assert run.ordered(TrainStep)[0].groups == (3, 1)


def test_a_deadline_out_of_room_makes_the_step_wait_for_its_straggler() -> None:
    """B = 1, S = 2: groups 0 to 2 are due by step 2. Once group 1 fills the place of step 0 and 2 that of step 1,
    step 2 is the last that may take group 0."""
    run = Scripted(train_batch_size=1, max_staleness_steps=2, max_concurrent_groups=3)
    for group in (1, 2):
        run.train_on(group)
        run.install()
    run.finish(3)
    assert len(run.ordered(TrainStep)) == 2, "group 3 is ready, but group 0 must come first"
    run.finish(0)
    assert run.ordered(TrainStep)[2].groups == (0,)
    assert run.ordered(TrainStep)[2].staleness == (2,)


def test_taking_only_what_is_due_now_would_not_do() -> None:
    """Two groups with one deadline and B = 1: one must go a step before the deadline."""
    run = Scripted(train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=2)
    run.train_on(0)
    run.install()
    assert run.state.groups.live[1].deadline == 1
    run.finish(2)
    assert len(run.ordered(TrainStep)) == 1, "group 1 is due by step 1"
    run.finish(1)
    assert run.ordered(TrainStep)[1].groups == (1,)


def straggling(policy: str, **others: object) -> Scripted:
    """Group 3 is a straggler whose deadline binds at step 1; groups 0, 1, 2 are generated."""
    run = small(policies={"deadline": policy}, **others)
    run.train_on(0, 1)
    run.install()
    run.finish(2)
    assert run.state.groups.live[3].deadline == 1
    return run


def test_waiting_sets_no_timer() -> None:
    assert not straggling("wait").ordered(SetTimer)


def test_dropping_stragglers_fills_the_batch_with_others() -> None:
    run = straggling("drop", deadline_timeout_s=7.0)
    timer = run.ordered(SetTimer)[-1]
    assert timer.delay_s == 7.0
    run.fire()
    assert [c.group for c in run.ordered(AbortGroup)] == [3]
    assert len(run.ordered(TrainStep)) == 1, "the batch is full again only with another group"
    run.finish(4)
    assert run.ordered(TrainStep)[1].groups == (2, 4)


def test_truncating_finishes_stragglers_with_what_they_have() -> None:
    run = straggling("truncate")
    run.fire()
    assert [c.group for c in run.ordered(TruncateGroup)] == [3]
    run.finish(3)
    assert run.ordered(TrainStep)[1].groups == (2, 3)


def test_the_policy_acts_at_most_max_drops_times_a_step() -> None:
    run = straggling("drop", max_drops=0)
    assert not run.ordered(SetTimer)


def test_a_changed_deadline_timeout_counts_for_stragglers_that_are_waited_for() -> None:
    run = straggling("drop", deadline_timeout_s=600.0)
    began = run.ordered(SetTimer)[-1].timer
    since = run.state.orders.by_number[began].at
    run.wait(100.0)
    run.tell(SettingChanged(setting="scheduler.deadline_timeout_s", value="300"))
    assert [*run.timers.values()] == [since + 300.0], "since it was set first"
    run.tell(SettingChanged(setting="scheduler.max_drops", value="0"))
    run.wait(300.0)
    assert not run.ordered(AbortGroup), "the policy may not act any more"
    run.tell(SettingChanged(setting="scheduler.max_drops", value="1"))
    run.wait(300.0)
    assert [c.group for c in run.ordered(AbortGroup)] == [3]


def test_a_timer_of_a_step_already_formed_is_an_echo() -> None:
    run = straggling("drop")
    timer = run.ordered(SetTimer)[-1].timer
    run.finish(3)
    echoes = run.state.orders.facts.stale_echoes
    run.tell(TimerFired(timer=timer))
    assert run.state.orders.facts.stale_echoes == echoes + 1


# training


def test_scoring_runs_task_by_task_before_training() -> None:
    run = small(scoring_tasks=("ref_logprobs", "old_logprobs"))
    run.finish(0, 1)
    for task in ("ref_logprobs", "old_logprobs"):
        assert run.ordered(ScoreBatch)[-1].task == task
        assert not run.ordered(TrainStep)
        run.tell(BatchScored(step=0, attempt=1, task=task))
    assert run.ordered(TrainStep)[-1].groups == (0, 1)


def test_a_failed_step_is_done_again_with_the_same_batch_until_its_budget_is_spent() -> None:
    run = small(infrastructure_attempts=3)
    run.finish(0, 1)
    for attempt in (1, 2):
        run.tell(StepFailed(step=0, attempt=attempt, reason="out of memory"))
    assert [(c.attempt, c.groups) for c in run.ordered(TrainStep)] == [(1, (0, 1)), (2, (0, 1)), (3, (0, 1))]
    run.tell(StepFailed(step=0, attempt=2, reason="an echo"))
    assert not run.ordered(FinishRun)
    run.tell(StepFailed(step=0, attempt=3, reason="out of memory"))
    assert run.ordered(FinishRun)[0].outcome == "failed"
    assert "train step 0 failed 3 times; last error: out of memory" in run.ordered(FinishRun)[0].reason


def test_a_version_comes_every_k_steps_and_after_the_last() -> None:
    run = Scripted(train_batch_size=1, max_staleness_steps=2, max_concurrent_groups=3, sync_every=2, max_steps=3)
    for step in range(3):
        run.finish(run.running()[0])
        run.train()
        if step == 1:
            run.publish()
            run.install()
    assert [(c.version, c.steps) for c in run.ordered(PublishWeights)] == [(1, 2), (2, 3)]
    assert not run.ordered(FinishRun)
    run.publish()
    assert run.ordered(FinishRun)[0].outcome == "finished"


def test_a_failed_publication_is_tried_again() -> None:
    run = small(infrastructure_attempts=2)
    run.finish(0, 1)
    run.train()
    run.tell(PublishFailed(version=1, attempt=1, reason="store away"))
    assert [c.attempt for c in run.ordered(PublishWeights)] == [1, 2]
    run.tell(PublishFailed(version=1, attempt=2, reason="store away"))
    assert "version 1 could not be published" in run.ordered(FinishRun)[0].reason


def test_checkpoints_come_as_asked_and_the_run_waits_for_the_last() -> None:
    run = small(checkpoint_every=2, max_steps=1)
    run.train_on(0, 1)
    assert [c.steps for c in run.ordered(SaveCheckpoint)] == [1]
    assert not run.ordered(FinishRun)
    run.tell(CheckpointSaved(steps=1))
    assert run.ordered(FinishRun)


# weight sync


def test_a_version_is_staged_then_the_pause_covers_only_the_swap() -> None:
    run = small(sync_mode="keep")
    run.train_on(0, 1)
    assert run.ordered(StageWeights) and not run.ordered(PauseReplica)
    run.install()
    sync = [
        type(c) for c in run.commands if isinstance(c, StageWeights | PauseReplica | InstallWeights | ResumeReplica)
    ]
    assert sync == [StageWeights, PauseReplica, InstallWeights, ResumeReplica]
    assert run.running()[:2] == [2, 3], "kept requests hold their slots"
    assert [c.version for c in run.ordered(RetireWeights)] == [0]


def test_nothing_starts_on_a_replica_that_is_pausing() -> None:
    run = small(sync_mode="wait")
    run.train_on(0, 1)
    run.install(pause=False)
    before = len(list(run.starts()))
    run.finish(2)
    assert len(list(run.starts())) == before


def test_rolling_takes_one_replica_at_a_time() -> None:
    run = small(replicas=2, slots=2, policies={"sync": "rolling"})
    run.train_on(0, 1)
    for id in (0, 1):
        run.install(id, pause=False)
    assert [c.replica for c in run.ordered(PauseReplica)] == [0]
    replica = run.state.replicas.by_id[0]
    run.tell(ReplicaPaused(replica=0, life=1, attempt=replica.sync_attempt))
    assert [c.replica for c in run.ordered(PauseReplica)] == [0]


def test_a_parked_group_waits_for_weights_as_new_as_its_tokens() -> None:
    run = small(replicas=2, slots=2, sync_mode="abort", policies={"sync": "rolling"})
    run.train_on(0, 1)
    run.install(0)
    run.finish(2)
    newest = next(g for g in run.running() if run.state.groups.live[g].admitted_version == 1)
    run.abort(newest)
    order = [c for c in run.starts() if c.group == newest][-1]
    assert run.state.replicas.by_id[order.replica].version == 1


def test_a_failed_sync_goes_on_with_the_old_weights_and_is_tried_again() -> None:
    run = small(infrastructure_attempts=2)
    run.train_on(0, 1)
    run.install(pause=False)
    replica = run.state.replicas.by_id[0]
    run.tell(SyncFailed(replica=0, life=1, attempt=1, version=1, reason="timeout"))
    assert (replica.state, replica.version) == ("ready", 0)
    assert isinstance(run.ordered(ResumeReplica)[-1], ResumeReplica)
    assert [c.attempt for c in run.ordered(StageWeights)] == [1, 2]
    run.tell(WeightsStaged(replica=0, life=1, attempt=1, version=1))
    assert run.state.is_staging(replica), "the echo of the first sync does not answer the second"
    run.tell(SyncFailed(replica=0, life=1, attempt=2, version=1, reason="timeout"))
    assert run.ordered(StopProcess)[0].index == 0
    assert replica.state == "down"


# failures


def test_a_failed_group_is_retried_in_its_own_place_by_the_budget_of_its_cause() -> None:
    run = small(data_attempts=2)
    for attempt in (1, 2):
        event = GroupFailed(group=0, attempt=attempt, replica=0, life=1, cause="data", reason="no answer")
        run.tell(event)
        run.tell(GroupFailed(group=0, attempt=attempt, replica=0, life=1, cause="data", reason="an echo"))
    assert [c.attempt for c in run.starts() if c.group == 0] == [1, 2]
    assert run.view.group(0) is None
    assert run.view.phase_counts()["released"] == 1
    assert 4 in run.running(), "its place was refilled"


def test_a_lost_replica_parks_its_groups_and_its_late_answers_change_nothing() -> None:
    run = small(replicas=2, slots=2)
    late = run.generated(0)
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    assert run.view.parked == 2, "no slot is free elsewhere"
    run.tell(late)
    assert run.view.ready == 0
    assert run.state.orders.facts.stale_echoes == 1
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=2, version=0))
    assert run.view.parked == 0
    assert [c.attempt for c in run.starts() if c.group == 0] == [1, 2]


def test_what_a_group_stored_on_its_way_survives_its_replica() -> None:
    run = small(replicas=2, slots=4)
    lost = run.replica_of(0)
    run.keep_prefix(0, tokens=7)
    assert run.state.groups.live[0].state == "generating" and run.state.groups.live[0].tokens == 7
    run.tell(ProcessLost(kind="replica", index=lost, life=1, final=True, reason="power"))
    (order,) = [command for command in run.starts() if command.group == 0 and command.attempt == 2]
    assert isinstance(order, ResumeGroup) and order.replica != lost
    others = [command for command in run.starts() if command.group != 0 and command.attempt == 2]
    assert others and all(isinstance(command, StartGroup) for command in others)


def test_a_stored_prefix_resumes_only_on_weights_as_new_as_its_tokens() -> None:
    run = small(replicas=2, slots=4, policies={"sync": "rolling"})
    run.train_on(0, 1)
    ahead = 0
    run.install(ahead)
    old = next(g for g in run.running() if run.replica_of(g) == ahead)
    run.keep_prefix(old)
    assert run.state.groups.live[old].newest_version == 1
    run.tell(ProcessLost(kind="replica", index=ahead, life=1, final=True, reason="power"))
    behind = 1 - ahead
    assert run.state.groups.live[old].state == "aborted", "the replica that is left has older weights"
    run.install(behind)
    assert run.state.groups.live[old].state == "resumed" and run.replica_of(old) == behind


def test_a_prefix_found_to_be_newer_than_was_known_waits_for_weights_as_new() -> None:
    run = small(replicas=2, slots=4, policies={"sync": "rolling"})
    run.train_on(0, 1)
    old = next(g for g in run.running() if run.replica_of(g) == 0)
    run.keep_prefix(old)
    run.install(0)
    run.tell(ProcessLost(kind="replica", index=0, life=1, final=True, reason="power"))
    group = run.state.groups.live[old]
    assert group.state == "resumed" and run.replica_of(old) == 1, "as far as is known, it has tokens of version 0 alone"
    run.tell(
        GroupAborted(group=old, attempt=group.attempt, replica=1, life=1, tokens=9, oldest_version=0, newest_version=1)
    )
    assert group.state == "aborted" and group.infrastructure_failures == 2
    run.install(1)
    assert group.state == "resumed" and run.replica_of(old) == 1


def test_a_life_that_never_came_up_ends_the_wait_for_it() -> None:
    run = small()
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    assert not run.ordered(FinishRun)
    run.tell(ProcessLost(kind="replica", index=0, life=2, final=True, reason="cannot start"))
    assert run.ordered(FinishRun)


def test_a_replica_with_a_version_that_was_never_published_is_a_defect() -> None:
    run = small()
    with pytest.raises(InvariantViolated, match="law 6: a replica must join with a published version"):
        run.tell(ProcessUp(kind="replica", index=1, life=1, slots=1, version=1))


def test_tokens_of_an_impossible_version_are_a_defect() -> None:
    run = small()
    with pytest.raises(InvariantViolated, match="law 6"):
        run.finish(0, oldest=-1)
        event = run.generated(1)
        structs.force_setattr(event, "newest_version", 5)
        run.tell(event)


# the end


def test_the_tail_of_the_data_is_trained_in_a_short_step() -> None:
    run = small(prompts=5)
    for groups in ((0, 1), (2, 3), (4,)):
        run.train_on(*groups)
        run.install()
    assert [len(c.groups) for c in run.ordered(TrainStep)] == [2, 2, 1]
    assert run.ordered(FinishRun)[0].outcome == "finished"
    assert run.view.phase_counts()["consumed"] == run.state.groups.ledger.drawn == 5


def test_no_more_groups_are_started_than_the_last_step_needs() -> None:
    run = small(max_steps=1)
    assert run.running() == [0, 1]
    assert run.state.groups.ledger.drawn == 2


def test_a_request_to_stop_is_obeyed_and_nothing_follows() -> None:
    run = small()
    run.tell(StopRequested(reason="Ctrl-C"))
    assert run.ordered(FinishRun)[0].outcome == "stopped"
    late = run.generated(0)
    assert run.tell(late) == []


# the filter


@pytest.mark.parametrize(
    ("trainable", "spread", "kept"),
    [(2, 0.0, False), (2, 0.5, True), (1, 0.0, True), (0, 0.0, True), (8, 1e-7, False), (8, 1e-5, True)],
)
def test_zero_variance_filter(trainable: int, spread: float, kept: bool) -> None:
    run = small(policies={"filter": "zero-variance"})
    run.finish(0, trainable=trainable, spread=spread)
    assert (run.view.ready == 1) is kept


def test_a_start_names_what_freed_its_slot_and_a_step_what_completed_its_batch() -> None:
    run = small(
        replicas=3, slots=1, max_staleness_steps=3, max_concurrent_groups=3, scoring_tasks=("old_logprobs",)
    )  # fmt: skip
    answers = [run.generated(id) for id in (0, 1, 2)]
    orders = run.tell_together(*answers)
    assert [one.cause for one in orders if isinstance(one, ScoreBatch)] == [answers[1].id]
    starts = {one.replica: one.cause for one in orders if isinstance(one, StartGroup)}
    assert starts == {0: answers[0].id, 1: answers[1].id}


def test_an_order_names_the_event_or_the_timer_that_is_handled() -> None:
    run = small(drain_s=10.0)
    run.finish(0, 1)
    trained = StepTrained(step=0, attempt=1)
    (publish,) = [one for one in run.tell_together(trained, run.generated(2)) if isinstance(one, PublishWeights)]
    assert publish.cause == trained.id
    run.tell(DrainRequested(reason="enough"))
    fired = TimerFired(timer=run.ordered(SetTimer)[-1].timer)
    run.tell_together(fired, run.generated(3))
    assert run.ordered(FinishRun)[-1].cause == fired.id


def test_every_start_names_its_cause() -> None:
    run = small()
    causes = {command.cause for command in run.starts() if isinstance(command, StartGroup)}
    assert causes == {2}, "the draw, which is the third event"


def test_the_deadline_policy_acts_on_groups_that_started_first_not_drawn_first() -> None:
    run = small(policies={"deadline": "drop"}, added_states=(FETCHING,))
    assert run.running() == [1, 4], "0 and 2 are prepared first"
    for id in (0, 2):
        run.tell(StateLeft(group=id, attempt=1, state="fetching", trainable=0, reward_mean=0.0, reward_spread=0.0))
    run.wait(60.0)
    assert sorted(order.group for order in run.ordered(AbortGroup)) == [1, 4]


def test_the_mean_reward_of_a_step_does_not_depend_on_how_python_adds() -> None:
    run = small(train_batch_size=10, max_concurrent_groups=20)
    for id in range(10):
        run.tell(structs.replace(run.generated(id), reward_mean=0.1))
    run.train()
    assert run.view.step_reward == 0.1, "sum() gives 0.09999999999999999 before Python 3.12, and 0.1 from then on"
