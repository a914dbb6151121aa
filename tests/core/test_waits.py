"""What a run is said to wait for, in every state that a wait can be in."""

from dataclasses import replace

import pytest
from steady_world import FOREVER, SteadyWorld, steady_world

from engine import events as fact
from engine.runtime.control_requests import Silence
from engine.states.limits import AddedState, Limits, ValidationLimits
from engine.states.waits import Wait, held_up, waits
from tests.core.scripted import Scripted
from tests.core.test_pools import TOGETHER
from tests.core.test_scenarios import straggling
from tests.core.test_validation import Measured


def told(world: SteadyWorld) -> list[str]:
    return [wait.sentence(world.time) for wait in waits(world.scheduler.state, world.metrics.since)]


def whose(world: SteadyWorld) -> list[str]:
    return [wait.by for wait in waits(world.scheduler.state, world.metrics.since)]


def test_groups_are_told_by_replica_with_their_oldest() -> None:
    """Groups 4 and 5 start once replica 0 has version 1: 1 s for its groups, 1 s for the step, and 0.5 s each to
    publish, stage, pause and install."""
    world = steady_world(lengths=lambda group: 1 if group < 2 else FOREVER, train_s=1.0, sync_s=0.5)
    world.until(lambda state: state.steps_trained == 1 and state.ledger.running == 4)
    assert world.time == 4.0
    world.run_for(100.0)
    ends = "(until GroupGenerated, GroupAborted, GroupFailed or ProcessLost)"
    assert told(world)[:2] == [
        f"replica 1: generates groups 2, 3, the oldest for 104 s {ends}",
        f"replica 0: generates groups 4, 5, the oldest for 100 s {ends}",
    ]


def test_the_trainer_comes_first_with_the_step_its_task_and_its_time() -> None:
    world = steady_world(train_s=FOREVER)
    world.until(lambda state: state.ledger.ready == 2)  # those of step 1, generated beside
    began = world.metrics.since["step", 0]
    world.run_for(began + 40.0 - world.time)
    assert (
        told(world)[0]
        == "the trainer: trains step 0 on 2 groups for 40 s (until StepTrained, StepFailed or ProcessLost)"
    )
    assert began == 1.0, "as soon as its groups were generated"
    formed = world.scheduler.state.steps[0]
    world.tell(fact.StepFailed(step=0, attempt=formed.attempt, reason="a cosmic ray"))
    assert "attempt 2" in told(world)[0], "and again"


def test_a_publication_is_waited_for() -> None:
    world = steady_world(sync_s=FOREVER).until(lambda state: state.publishing)
    assert told(world)[0].startswith("the trainer: publishes version 1 for 0 s")


def test_replicas_on_their_way_to_new_weights_are_told() -> None:
    world = steady_world(sync_s=100.0)
    world.until(lambda state: [r.state for r in state.fleet.replicas.values()] == ["installing"] * 2)
    world.run_for(7.0)
    ends = "(until WeightsInstalled, SyncFailed or ProcessLost)"
    assert f"replica 0: installs version 1 for 7 s {ends}" in told(world)
    assert f"replica 1: installs version 1 for 7 s {ends}" in told(world)


def test_a_replica_that_is_to_return_is_told() -> None:
    world = steady_world().until(lambda state: state.ledger.running == 4)
    world.tell(fact.ProcessLost(kind="replica", index=1, incarnation=1, reason="burnt"))
    assert "replica 1: restarts for 0 s (until ProcessUp or ProcessLost)" in told(world)
    world.tell(fact.ProcessLost(kind="replica", index=1, incarnation=2, final=True, reason="for good"))
    assert whose(world) == ["replica 0"]


def test_a_validation_a_state_of_ones_own_prompts_and_a_checkpoint_are_told() -> None:
    world = steady_world(validation=ValidationLimits(rows=4), measure_s=FOREVER)
    world.until(lambda state: state.validations.out > 0)
    assert any(said.startswith("replica 0: measure 4 held-out rows under version 0") for said in told(world))
    world = steady_world()
    world.until(lambda state: state.asked > 0)
    assert whose(world) == ["replica 0", "replica 1", "the data source"]
    assert told(world)[0] == "replica 0: starts for 0 s (until ProcessUp or ProcessLost)"
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=4)
    judged = SteadyWorld(replace(limits, added_states=(AddedState(name="rewarding", concurrency=2),)))
    judged.until(lambda state: state.stages.out == 2)
    assert "the state rewarding" in whose(judged)
    saved = SteadyWorld(replace(limits, checkpoint_every=1))
    saved.until(lambda state: state.checkpoint_pending)
    assert "the trainer: writes the checkpoint after 1 train step for 0 s" in "\n".join(told(saved))


def test_one_of_a_kind_is_told_as_one() -> None:
    world = steady_world(batch=1, stale=0, workers=1, lengths=lambda group: FOREVER)
    world.until(lambda state: state.ledger.running == 1)
    said = held_up(world.scheduler.state)
    assert said.startswith(
        "step 0 waits for 1 group, 0 of 1 are ready, and 1 that is due by step 0 is not; 1 group waits "
    )
    measured = steady_world(validation=ValidationLimits(rows=1), measure_s=FOREVER)
    measured.until(lambda state: state.validations.out > 0)
    assert any(" measure 1 held-out row under " in line for line in told(measured))


def test_a_run_that_is_over_waits_for_nothing() -> None:
    world = steady_world().until(lambda state: state.ledger.running == 4)
    world.tell(fact.StopRequested(reason="enough"))
    assert waits(world.scheduler.state) == []


def test_a_time_that_is_not_known_is_left_out() -> None:
    wait = Wait(what="draws 4 prompts", by="the data source", since=None, ends="PromptsDrawn or DrawFailed")
    assert wait.sentence(12.0) == "the data source: draws 4 prompts (until PromptsDrawn or DrawFailed)"


def test_a_stuck_run_is_told_as_who_waits_for_what() -> None:
    world = steady_world(lengths=lambda group: FOREVER)
    world.until(lambda state: state.ledger.running == 4)
    said = held_up(world.scheduler.state)
    assert said.startswith("step 0 waits for 2 groups, 0 of 2 are ready")
    assert "2 groups wait to be started, where 0 may be and 0 slots are free" in said


def timers(run: Scripted) -> list[str]:
    return [wait.what for wait in waits(run.state) if wait.by.startswith("timer")]


def test_what_each_timer_does_is_told() -> None:
    assert timers(straggling("drop")) == ["step 1 waits for stragglers, then the deadline policy acts"]
    draining = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, drain_s=30.0)
    draining.tell(fact.DrainRequested(reason="maintenance"))
    assert timers(draining) == ["stops the run as it is once the drain exceeds 30 s"]
    alone = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, give_up_s=60.0)
    alone.tell(fact.ProcessLost(kind="replica", index=0, incarnation=1, final=True, reason="gone"))
    assert timers(alone) == ["no replica is left; the run ends after 60 s without one"]


def test_waits_without_an_order_are_told() -> None:
    batches = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4}
    pooled = Scripted(pools=TOGETHER, scoring_tasks=("old_logprobs",), **batches)
    pooled.finish(0, 1)
    (said,) = [wait.what for wait in waits(pooled.state) if wait.by == "the scheduler"]
    assert said == "step 0 on 2 groups waits for its pool, or for replicas to take the newest weights"
    measured = Measured()
    measured.next_version()
    (wait,) = [wait for wait in waits(measured.state) if wait.by == "the validation"]
    assert wait.what == "4 held-out rows wait for a replica with version 1"
    assert wait.since == measured.clock, "as soon as it is queued"
    measured.install(0)
    began = measured.clock
    measured.lose(0)
    (wait,) = [wait for wait in waits(measured.state) if wait.by == "the validation"]
    assert wait.since == began, "since it started, once it has"


def test_parked_groups_are_told_with_the_version_that_they_wait_for() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, give_up_s=60.0)
    run.tell(fact.ProcessLost(kind="replica", index=0, incarnation=1, final=True, reason="gone"))
    said = held_up(run.state)
    assert "4 groups wait for a replica with version 0 or newer, none has a free slot" in said


def silent(after_s: float) -> tuple[SteadyWorld, Silence]:
    world = steady_world(lengths=lambda group: FOREVER)
    silence = Silence(world.metrics, after_s)
    world.until(lambda state: state.ledger.running == 4)
    return world, silence


def test_a_silence_is_told_once_and_again_after_twice_as_long() -> None:
    world, silence = silent(300.0)
    assert silence.look(200.0) == 100.0 and world.metrics.status(200.0).silence == ""
    assert silence.look(300.0) == 600.0
    first = world.metrics.status(310.0).silence
    assert first.startswith("nothing has changed for 300 s; the run waits for replica 0: generates groups 0, 1, the")
    assert silence.look(900.0) == 1200.0
    assert world.metrics.status(910.0).silence.startswith("nothing has changed for 900 s")


def test_what_changes_something_ends_a_silence_and_an_echo_does_not() -> None:
    world, silence = silent(300.0)
    silence.look(300.0)
    echo = fact.GroupFailed(group=0, attempt=9, replica=0, incarnation=1, cause="data", reason="long ago")
    world.run_for(310.0)
    world.tell(echo)
    assert world.metrics.status(310.0).silence
    world.tell(fact.GroupFailed(group=0, attempt=1, replica=0, incarnation=1, cause="data", reason="no reward"))
    assert world.metrics.status(310.0).silence == ""
    assert silence.look(500.0) == pytest.approx(110.0), "300 s after the event at 310"
