"""What a drain, a request or a changed setting meets halfway: timers that were set, replicas on their way, by hand."""

from engine.commands import FinishRun, ParkGroup, SetTimer, TrainStep
from engine.events import (
    BatchScored,
    CheckpointSaved,
    DrainRequested,
    ReplicasWanted,
    RunResumed,
    SettingChanged,
    StepFailed,
    StepTrained,
    TimerFired,
)
from engine.states.limits import Pool
from engine.states.timeouts import Timeouts
from tests.core.test_departures import paused, small


def test_stragglers_are_not_dropped_while_a_run_drains() -> None:
    run = small(policies={"deadline": "drop"}, deadline_timeout_s=10.0)
    run.finish(0)
    timer = run.ordered(SetTimer)[-1]
    run.tell(DrainRequested(reason="maintenance"))
    run.tell(TimerFired(timer=timer.timer), at=run.clock + 100.0)
    paused(run, 0)
    paused(run, 1)
    assert run.ordered(FinishRun)[-1].outcome == "stopped"
    assert [group.state for group in run.state.groups.live.values() if group.attempt] == ["generated", *["aborted"] * 3]


def test_in_a_drain_a_formed_batch_does_not_wait_for_weights_that_nobody_gets() -> None:
    pools = (Pool(tasks=("rollout", "ref_logprobs"), replicas=(0,)), Pool(tasks=("train",)))
    run = small(replicas=1, pools=pools, scoring_tasks=("ref_logprobs",), train_after_sync=True)
    run.finish(0, 1, 2, 3)
    paused(run, 0)
    run.tell(BatchScored(step=0, attempt=1, task="ref_logprobs"))
    run.train()
    run.publish()
    assert len(run.state.training.formed_steps) == 1
    run.tell(DrainRequested(reason="maintenance"))
    if run.state.replicas.by_id[0].state == "yielding":
        paused(run, 0)
    run.tell(BatchScored(step=1, attempt=1, task="ref_logprobs"))
    assert [order.step for order in run.ordered(TrainStep)] == [0, 1]
    run.train()
    run.publish()
    assert run.ordered(FinishRun)[-1].outcome == "stopped"


def test_a_replica_that_stays_after_all_is_waited_for_while_a_run_drains() -> None:
    run = small(pools=(Pool(tasks=("rollout", "train"), replicas=(0, 1)),))
    run.tell(ReplicasWanted(replicas=1))
    run.tell(DrainRequested(reason="maintenance"))
    run.tell(ReplicasWanted(replicas=2))
    paused(run, 0)
    paused(run, 1)
    assert [replica.state for replica in run.state.replicas.by_id.values()] == ["asleep", "yielding"]
    assert not run.ordered(FinishRun), "it is still to sleep"
    paused(run, 1)
    assert run.ordered(FinishRun)[-1].outcome == "stopped"


def test_a_group_that_is_being_parked_may_outlive_the_limit_on_its_attempt() -> None:
    run = small(timeouts=Timeouts(group_s=100.0))
    run.wait(106.0)
    assert [order.group for order in run.ordered(ParkGroup)] == [0, 1, 2, 3]
    run.tell(SettingChanged(setting="timeouts.group_s", value="null"))
    run.abort(0)
    assert run.state.groups.live[0].infrastructure_failures == 1
    assert run.state.ending.last_failure == "an attempt exceeded its time limit of 100 s (timeouts.group_s)"


def test_a_step_that_ended_a_run_has_its_attempts_again_where_the_run_goes_on() -> None:
    run = small(replicas=1, infrastructure_attempts=2)
    run.finish(0, 1)
    for attempt in (1, 2):
        run.tell(StepFailed(step=0, attempt=attempt, reason="no memory"))
    assert run.ordered(FinishRun)[-1].outcome == "failed"
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True))
    run.publish()
    last = run.ordered(TrainStep)[-1]
    run.tell(StepFailed(step=0, attempt=last.attempt, reason="a passing fault"))
    assert len(run.ordered(FinishRun)) == 1 and run.ordered(TrainStep)[-1].attempt == last.attempt + 1


def test_a_resumed_run_publishes_anew_and_counts_on_no_weights_of_before() -> None:
    run = small(replicas=1)
    run.train_on(0, 1)
    assert list(run.state.training.versions) == [1]
    run.tell(RunResumed(steps=1, replicas=1, consumed=(), released=(), kept=True))
    assert not run.state.training.versions


def test_the_state_counts_the_optimizer_s_updates_and_a_branch_takes_them_back() -> None:
    run = small(replicas=1, checkpoint_every=1)
    for step in (0, 1):
        run.finish(*run.running()[:2])
        run.tell(StepTrained(step=step, attempt=1, updates=3))
        run.tell(CheckpointSaved(steps=step + 1))
        run.publish()
        run.install(0)
    assert run.state.training.updates_in == {0: 0, 1: 3, 2: 6}
    gone = tuple(run.ordered(TrainStep)[-1].groups)
    run.tell(RunResumed(steps=1, replicas=1, consumed=gone, released=()))
    assert run.state.training.updates_in == {0: 0, 1: 3}
