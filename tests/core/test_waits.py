"""What a run is said to wait for, in every state that a wait can be in."""

from dataclasses import replace
from typing import Any

import pytest
from steady_world import FOREVER, SteadyWorld, steady_world

from engine import events as e
from engine.metrics.status import read_status
from engine.metrics.waits import agent_wait, reward_wait, waits
from engine.record.codec import pack, unpack
from engine.record.snapshots import restore, snapshot
from engine.runtime.control_requests import Silence
from engine.scheduling.ending import why_stuck
from engine.states.limits import AddedState, Limits, ValidationLimits
from tests.core.scripted import Scripted
from tests.core.test_pools import TOGETHER
from tests.core.test_scenarios import straggling
from tests.core.test_validation import Measured


def sentences(world: SteadyWorld) -> list[str]:
    return [wait.sentence(world.time) for wait in waits(world.scheduler.state)]


def whose(world: SteadyWorld) -> list[str]:
    return [wait.by for wait in waits(world.scheduler.state)]


def test_groups_are_listed_by_replica_with_their_oldest() -> None:
    """Groups 4 and 5 start once replica 0 has version 1: 1 s for its groups, 1 s for the step, and 0.5 s each to
    publish, stage, pause and install."""
    world = steady_world(lengths=lambda group: 1 if group < 2 else FOREVER, train_s=1.0, sync_s=0.5)
    world.until(lambda state: state.training.steps_trained == 1 and state.groups.ledger.running == 4)
    assert world.time == 4.0
    world.run_for(100.0)
    ends = "(until GroupGenerated, GroupAborted, GroupFailed or ProcessLost)"
    assert sentences(world)[:2] == [
        f"replica 1 has been generating groups 2, 3, the oldest for 104 s {ends}",
        f"replica 0 has been generating groups 4, 5, the oldest for 100 s {ends}",
    ]


def test_the_trainer_comes_first_with_the_step_its_task_and_its_time() -> None:
    world = steady_world(train_s=FOREVER)
    world.until(lambda state: state.groups.ledger.ready == 2)  # those of step 1, generated beside
    began = world.scheduler.state.training.steps[0].entered_at
    world.run_for(began + 40.0 - world.time)
    assert (
        sentences(world)[0]
        == "the trainer has been training step 0 on 2 groups for 40 s (until StepTrained, StepFailed or ProcessLost)"
    )
    assert began == 1.0, "as soon as its groups were generated"
    formed = world.scheduler.state.training.steps[0]
    world.tell(e.StepFailed(step=0, attempt=formed.attempt, reason="a cosmic ray"))
    assert "attempt 2" in sentences(world)[0], "and again"


def test_a_publication_is_waited_for() -> None:
    world = steady_world(sync_s=FOREVER).until(lambda state: state.publishing)
    assert sentences(world)[0].startswith("the trainer has been publishing version 1 for 0 s")


def test_replicas_that_install_new_weights_are_named() -> None:
    world = steady_world(sync_s=100.0)
    world.until(lambda state: [r.state for r in state.replicas.by_id.values()] == ["installing"] * 2)
    world.run_for(7.0)
    ends = "(until WeightsInstalled, SyncFailed or ProcessLost)"
    assert f"replica 0 has been installing version 1 for 7 s {ends}" in sentences(world)
    assert f"replica 1 has been installing version 1 for 7 s {ends}" in sentences(world)


def test_a_replica_that_restarts_is_named() -> None:
    world = steady_world().until(lambda state: state.groups.ledger.running == 4)
    world.tell(e.ProcessLost(kind="replica", index=1, life=1, reason="burnt"))
    assert "replica 1 has been restarting for 0 s (until ProcessUp or ProcessLost)" in sentences(world)
    world.tell(e.ProcessLost(kind="replica", index=1, life=2, final=True, reason="for good"))
    assert whose(world) == ["replica 0"]


def test_waits_name_a_validation_an_added_state_the_data_source_and_a_checkpoint() -> None:
    world = steady_world(validation=ValidationLimits(rows=4), measure_s=FOREVER)
    world.until(lambda state: state.validations.out > 0)
    assert any(
        said.startswith("replica 0 has been measuring 4 validation rows under version 0") for said in sentences(world)
    )
    world = steady_world()
    world.until(lambda state: state.asked > 0)
    assert whose(world) == ["replica 0", "replica 1", "the data source"]
    assert sentences(world)[0] == "replica 0 has been starting for 0 s (until ProcessUp or ProcessLost)"
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=4)
    judged = SteadyWorld(replace(limits, added_states=(AddedState(name="rewarding", concurrency=2),)))
    judged.until(lambda state: state.groups.state_queues.out == 2)
    assert "the state rewarding" in whose(judged)
    saved = SteadyWorld(replace(limits, checkpoint_every=1))
    saved.until(lambda state: state.checkpoint_pending)
    assert "the trainer has been writing the checkpoint after 1 train step for 0 s" in "\n".join(sentences(saved))


def test_one_of_a_kind_is_named_in_the_singular() -> None:
    world = steady_world(batch=1, stale=0, workers=1, lengths=lambda group: FOREVER)
    world.until(lambda state: state.groups.ledger.running == 1)
    said = why_stuck(world.scheduler.state)
    assert said.startswith("step 0 waits for 1 group; 0 of 1 ready, 1 running; 1 group waits ")
    measured = steady_world(validation=ValidationLimits(rows=1), measure_s=FOREVER)
    measured.until(lambda state: state.validations.out > 0)
    assert any(" measuring 1 validation row under " in line for line in sentences(measured))


def test_a_run_that_is_over_waits_for_nothing() -> None:
    world = steady_world().until(lambda state: state.groups.ledger.running == 4)
    world.tell(e.StopRequested(reason="enough"))
    assert waits(world.scheduler.state) == []


CALLS = {"kind": "replica", "index": 0, "life": 1, "at_once": 4, "setting": "reward.concurrency"}


def judged() -> Scripted:
    """Four groups run; all trajectories of three have ended."""
    run = Scripted(samples=2, train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4)
    for group in range(3):
        run.end_trajectories(group, 2)
    return run


def measured(run: Scripted, function: str, **figures: Any) -> None:
    run.tell(
        e.CallsMeasured(
            **{**CALLS, "groups": 3, "queued": 8, "calls": 0, "seconds": 0.0, "running_s": 0.0, "function": function,
               **figures},
        )
    )  # fmt: skip


def test_groups_that_lack_only_their_rewards_are_named_separately() -> None:
    run = judged()
    rewards, generates = waits(run.state)
    assert (rewards.doing, generates.doing) == ("waiting for the rewards of 3 groups, the oldest", "generating group 3")
    run.finish(0, 1, 2)
    assert [wait.doing for wait in waits(run.state)] == ["generating group 3"]


def test_a_wait_for_rewards_names_the_slowest_function_and_its_limit() -> None:
    run = judged()
    measured(run, "reward quick", queued=0, calls=100, seconds=1.0)
    measured(run, "reward slow", running_s=1.0)
    slow = "{} s a call, 4 at once; raise reward.concurrency"
    assert reward_wait(run.state) == f"3 groups wait for reward slow: {slow.format('over 1')}"
    measured(run, "reward slow", calls=4, seconds=8.0)
    began = waits(run.state)[0].since
    assert began is not None
    assert waits(run.state)[0].sentence(began + 31.0) == (
        f"replica 0 has been waiting for reward slow of 3 groups, the oldest for 31 s: {slow.format(2)} "
        "(until GroupGenerated, GroupAborted, GroupFailed or ProcessLost)"
    )
    measured(run, "reward slow", groups=1, queued=0, calls=4, seconds=8.0)
    assert reward_wait(run.state) == "3 groups wait for reward slow: 2 s a call, 4 at once", "more would not help"
    run.tell(e.ProcessLost(kind="replica", index=0, life=1, reason="gone"))
    assert reward_wait(run.state) == ""
    events = run.state.orders.facts.stale_echoes
    measured(run, "reward slow")
    assert run.state.orders.facts.stale_echoes == events + 1, "of a life that has ended"


AGENT = {"setting": "rollout.slots", "queued": 0}


def test_a_wait_for_an_agent_names_it_and_the_setting_that_limits_it() -> None:
    run = Scripted(samples=2, train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4)
    assert agent_wait(run.state) == ""
    measured(run, "agent my_agent", **AGENT, groups=2, calls=4, seconds=8.0)
    said = "2 groups wait for agent my_agent: 2 s a call, 4 at once; raise scheduler.max_concurrent_groups"
    assert agent_wait(run.state) == said and reward_wait(run.state) == ""
    (wait,) = waits(run.state)
    assert (wait.doing, wait.detail) == ("generating groups 0, 1, 2 and 1 more, the oldest", said)
    measured(run, "agent my_agent", **AGENT, groups=0, calls=4, seconds=8.0)
    assert agent_wait(run.state) == waits(run.state)[0].detail == ""


def test_a_slow_agent_and_a_slow_reward_are_each_named_for_their_groups() -> None:
    run = judged()
    measured(run, "agent my_agent", **AGENT, groups=1, calls=4, seconds=8.0)
    measured(run, "judge big", calls=4, seconds=40.0)
    rewards, generates = waits(run.state)
    assert rewards.doing == "waiting for judge big of 3 groups, the oldest"
    assert generates.detail.startswith("1 group waits for agent my_agent: 2 s a call")


def test_more_slots_are_the_remedy_while_every_slot_is_taken_and_k_allows_more() -> None:
    run = Scripted(samples=2, slots=2, train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8)
    measured(run, "environment mine:Game", **AGENT, groups=2, calls=1, seconds=3.0)
    assert agent_wait(run.state).endswith("wait for environment mine:Game: 3 s a call, 4 at once; raise rollout.slots")


def test_a_validation_names_the_reward_that_it_waits_for() -> None:
    run = Measured()
    run.next_version()
    run.install(0)
    measured(run, "judge big", groups=4, calls=4, seconds=40.0)
    (wait,) = [wait for wait in waits(run.state) if "measuring" in wait.doing]
    assert wait.detail == "judge big: 10 s a call, 4 at once; raise reward.concurrency"


def test_a_restored_scheduler_knows_what_groups_wait_for() -> None:
    run = judged()
    measured(run, "reward slow", calls=4, seconds=8.0)
    again = restore([unpack(pack(part)) for part in snapshot(run.scheduler)])
    assert reward_wait(again.state) == reward_wait(run.state) != ""


def test_groups_that_wait_for_an_added_state_are_counted() -> None:
    run = Scripted(
        train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4,
        added_states=(AddedState(name="rewarding", concurrency=1),),
    )  # fmt: skip
    run.finish(0, 1, 2)
    (wait,) = [wait for wait in waits(run.state) if wait.by == "the state rewarding"]
    queue = "2 groups wait for a place, 1 at once; raise the concurrency of the state"
    assert (wait.doing, wait.detail) == ("working on group 0", queue)
    assert reward_wait(run.state) == "3 groups wait for state rewarding"


def test_a_stuck_run_says_who_waits_for_what() -> None:
    world = steady_world(lengths=lambda group: FOREVER)
    world.until(lambda state: state.groups.ledger.running == 4)
    said = why_stuck(world.scheduler.state)
    assert said.startswith("step 0 waits for 2 groups; 0 of 2 ready, 4 running")
    assert "2 groups wait to be started, where 0 may be and 0 slots are free" in said


def timers(run: Scripted) -> list[str]:
    return [f"{wait.by} is {wait.doing}: {wait.detail}" for wait in waits(run.state) if wait.ends == "TimerFired"]


def test_each_timer_says_what_it_does() -> None:
    assert timers(straggling("drop")) == ["step 1 is waiting for stragglers: then the deadline policy acts"]
    draining = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, drain_s=30.0)
    draining.tell(e.DrainRequested(reason="maintenance"))
    assert timers(draining) == ["the run is draining: it stops as it is once that exceeds 30 s"]
    alone = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, give_up_s=60.0)
    alone.tell(e.ProcessLost(kind="replica", index=0, life=1, final=True, reason="gone"))
    assert timers(alone) == ["the run is waiting for a replica: none is left; it ends after 60 s without one"]


def test_waits_without_an_order_are_named() -> None:
    batches = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4}
    pooled = Scripted(pools=TOGETHER, scoring_tasks=("old_logprobs",), **batches)
    pooled.finish(0, 1)
    (said,) = [wait.doing for wait in waits(pooled.state) if wait.by == "step 0 on 2 groups"]
    assert said == "waiting for its pool: replicas go to sleep or start"
    measured = Measured()
    measured.next_version()
    (wait,) = [wait for wait in waits(measured.state) if wait.by == "the validation"]
    assert wait.doing == "waiting for a replica with version 1" and wait.detail == "4 validation rows are not measured"
    assert wait.since == measured.clock, "as soon as it is queued"
    measured.install(0)
    began = measured.clock
    measured.lose(0)
    (wait,) = [wait for wait in waits(measured.state) if wait.by == "the validation"]
    assert wait.since == began, "since it started, once it has"


def test_parked_groups_are_named_with_the_version_that_they_wait_for() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, give_up_s=60.0)
    run.tell(e.ProcessLost(kind="replica", index=0, life=1, final=True, reason="gone"))
    said = why_stuck(run.state)
    assert "4 groups wait for a replica with version 0 or newer, none has a free slot" in said


def silent(after_s: float) -> tuple[SteadyWorld, Silence]:
    world = steady_world(lengths=lambda group: FOREVER)
    silence = Silence(world.metrics, after_s)
    world.until(lambda state: state.groups.ledger.running == 4)
    return world, silence


def test_a_silence_is_reported_once_and_again_after_twice_as_long() -> None:
    world, silence = silent(300.0)
    assert silence.look(200.0) == 100.0 and read_status(world.metrics, 200.0).silence == ""
    assert silence.look(300.0) == 600.0
    first = read_status(world.metrics, 310.0).silence
    assert first.startswith("nothing has changed for 300 s: replica 0 has been generating groups 0, 1, the")
    assert silence.look(900.0) == 1200.0
    assert read_status(world.metrics, 910.0).silence.startswith("nothing has changed for 900 s")


def test_what_changes_something_ends_a_silence_and_an_echo_does_not() -> None:
    world, silence = silent(300.0)
    silence.look(300.0)
    echo = e.GroupFailed(group=0, attempt=9, replica=0, life=1, cause="data", reason="long ago")
    world.run_for(310.0)
    world.tell(echo)
    assert read_status(world.metrics, 310.0).silence
    world.tell(e.GroupFailed(group=0, attempt=1, replica=0, life=1, cause="data", reason="no reward"))
    assert read_status(world.metrics, 310.0).silence == ""
    assert silence.look(500.0) == pytest.approx(110.0), "300 s after the event at 310"
