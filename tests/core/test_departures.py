"""Runs that come to rest, replicas that leave and come, settings that change, attempts that take too long: by hand."""

from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.commands import (
    FinishRun,
    ParkGroup,
    PauseReplica,
    ResumeGroup,
    ResumeReplica,
    SaveCheckpoint,
    StageWeights,
    StartProcess,
    StopProcess,
    TrainStep,
)
from engine.errors import ConfigError
from engine.events import (
    CheckpointSaved,
    DrainRequested,
    ProcessLost,
    ProcessUp,
    ReplicaLeaves,
    ReplicaPaused,
    ReplicasWanted,
    RunResumed,
    SettingChanged,
    SyncFailed,
)
from engine.policies import PolicySet
from engine.scheduling.settings import changed_settings, live_settings
from engine.states.limits import Limits, Pool
from engine.states.replicas import SAMPLES
from engine.states.timeouts import Timeouts
from tests.core.scripted import Scripted
from tests.core.test_validation import Measured


def small(**others: object) -> Scripted:
    """B = 2, S = 1, K = 4, two replicas."""
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, "replicas": 2, **others}
    return Scripted(**figures)  # type: ignore[arg-type]


def paused(run: Scripted, id: int) -> None:
    """A replica has parked what ran on it, with tokens, and samples no more."""
    replica = run.state.replicas.by_id[id]
    run.abort(*run.running_on(replica.id))
    run.tell(ReplicaPaused(replica=id, life=replica.life, attempt=replica.sync_attempt))


def joined(run: Scripted, id: int, life: int) -> None:
    run.tell(ProcessUp(kind="replica", index=id, life=life, slots=100, version=0))


# coming to rest


def test_a_run_that_drains_parks_its_groups_trains_its_batch_and_saves_a_checkpoint() -> None:
    run = small(checkpoint_every=5)
    run.finish(0, 1)
    assert len(run.ordered(TrainStep)) == 1
    starts = len(list(run.starts()))
    run.tell(DrainRequested(reason="maintenance"))
    assert [(order.replica, order.mode) for order in run.ordered(PauseReplica)] == [(0, "abort"), (1, "abort")]
    paused(run, 0)
    paused(run, 1)
    assert not run.ordered(SaveCheckpoint) and not run.ordered(FinishRun), "the batch being trained is trained"
    run.train()
    run.publish()
    assert run.ordered(SaveCheckpoint)[-1].steps == 1
    assert not run.ordered(StageWeights), "nobody needs the version any more"
    run.tell(CheckpointSaved(steps=1))
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.reason, end.word) == ("stopped", "maintenance", "drained")
    assert len(list(run.starts())) == starts, "nothing was started meanwhile"
    assert {group.infrastructure_failures for group in run.state.groups.live.values()} == {0}


def test_ready_groups_are_no_batch_while_a_run_drains() -> None:
    run = small()
    run.finish(0)
    run.tell(DrainRequested(reason="maintenance"))
    run.finish(1)
    paused(run, 0)
    paused(run, 1)
    assert not run.ordered(TrainStep)
    assert run.ordered(FinishRun)[-1].outcome == "stopped"
    assert list(run.state.groups.ready) == [0, 1], "the next life takes them"


def test_what_was_drained_goes_on_where_it_was() -> None:
    run = small()
    run.tell(DrainRequested(reason="maintenance"))
    paused(run, 0)
    paused(run, 1)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True))
    run.publish()
    joined(run, 0, 2)
    run.install()
    assert [order.group for order in run.ordered(ResumeGroup)] == [0, 1, 2, 3]


def test_a_replica_in_a_sync_drains_at_its_end_and_one_that_joins_does_at_once() -> None:
    run = small(max_concurrent_groups=2)
    run.train_on(0, 1)
    run.install(0, pause=False)
    replica = run.state.replicas.by_id[0]
    assert replica.state == "pausing"
    run.tell(DrainRequested(reason="maintenance"))
    assert replica.state == "pausing"
    place = {"replica": 0, "life": 1, "attempt": replica.sync_attempt}
    run.tell(SyncFailed(**place, version=1, reason="fault"))
    assert replica.state == "draining"
    joined(run, 5, 1)
    assert run.state.replicas.by_id[5].state == "draining"


def test_a_pause_that_fails_is_ordered_again() -> None:
    run = small(replicas=1)
    run.tell(DrainRequested(reason="maintenance"))
    first = run.ordered(PauseReplica)[-1]
    run.tell(SyncFailed(replica=0, life=1, attempt=first.attempt, version=0, reason="fault"))
    again = run.ordered(PauseReplica)[-1]
    assert again.attempt == first.attempt + 1
    paused(run, 0)
    assert run.ordered(FinishRun)


def test_replicas_that_share_a_pool_with_the_batch_under_way_sleep_instead() -> None:
    pools = (Pool(tasks=("rollout", "train"), replicas=(0,)),)
    run = small(replicas=1, pools=pools)
    run.tell(DrainRequested(reason="maintenance"))
    assert run.ordered(PauseReplica)[-1].mode == "sleep"
    paused(run, 0)
    assert run.ordered(FinishRun)[-1].outcome == "stopped" and not run.ordered(ResumeReplica)


def test_who_sleeps_while_a_run_drains_gets_no_weights() -> None:
    run = small(replicas=1, pools=(Pool(tasks=("rollout", "train"), replicas=(0,)),))
    run.finish(0, 1)
    paused(run, 0)
    run.tell(DrainRequested(reason="maintenance"))
    run.train()
    run.publish()
    assert run.ordered(FinishRun)[-1].outcome == "stopped" and not run.ordered(StageWeights)


def test_a_drain_waits_for_no_validation_and_the_weights_are_measured_later() -> None:
    run = Measured(replicas=2)
    run.next_version()
    run.install(0)
    run.install(1)
    assert run.out()
    run.tell(DrainRequested(reason="maintenance"))
    for id in (0, 1):
        paused(run, id)
    assert run.ordered(FinishRun)[-1].outcome == "stopped"
    run.tell(RunResumed(steps=1, replicas=1, consumed=(), released=(), kept=True))
    run.publish()
    assert [r.version for r in run.state.validations.live.values()] == [2], "the same weights under another version"


# replicas leave and come


def test_the_highest_replicas_leave_and_their_groups_go_on_elsewhere() -> None:
    run = small(slots=2)
    held = list(run.running_on(1))
    run.tell(SettingChanged(setting="scheduler.max_concurrent_groups", value="2"))
    run.finish(*run.running_on(0))
    run.tell(ReplicasWanted(replicas=1))
    assert [order.replica for order in run.ordered(PauseReplica)] == [1]
    paused(run, 1)
    (stop,) = run.ordered(StopProcess)
    assert (stop.kind, stop.index, stop.life) == ("replica", 1, 1)
    assert run.state.replicas.by_id[1].state == "down"
    assert [(order.group, order.replica) for order in run.ordered(ResumeGroup)] == [(group, 0) for group in held]
    assert {group.infrastructure_failures for group in run.state.groups.live.values()} == {0}
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="stopped"))
    assert not run.ordered(FinishRun) and not run.ordered(StartProcess)
    assert run.state.replicas.by_id[1].process.state == "gone"


def test_replicas_that_are_missing_are_started() -> None:
    run = small(replicas=1)
    run.tell(ReplicasWanted(replicas=3))
    assert [order.index for order in run.ordered(StartProcess)] == [1, 2]
    run.tell(ReplicasWanted(replicas=3))
    assert len(run.ordered(StartProcess)) == 2, "they are on their way"
    joined(run, 1, 1)
    assert run.state.replicas.by_id[1].state == "ready"


def test_a_replica_that_was_let_go_is_started_again_when_it_is_wanted_again() -> None:
    run = small()
    run.tell(ReplicasWanted(replicas=1))
    paused(run, 1)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="it was stopped"))
    run.tell(ReplicasWanted(replicas=2))
    assert [(order.index, order.life) for order in run.ordered(StartProcess)] == [(1, 2)]
    joined(run, 1, 2)
    assert [replica.state for replica in run.state.replicas.rollouts] == ["ready", "ready"]


def test_a_replica_that_is_wanted_again_before_it_is_gone_stays() -> None:
    run = small()
    run.tell(ReplicasWanted(replicas=1))
    run.tell(ReplicasWanted(replicas=2))
    paused(run, 1)
    assert not run.ordered(StopProcess)
    assert [order.replica for order in run.ordered(ResumeReplica)] == [1]
    assert run.state.replicas.by_id[1].state == "ready"


def test_a_replica_that_comes_up_as_it_is_stopped_gets_no_work() -> None:
    """Its report and the order to stop it have crossed."""
    run = small(replicas=1)
    run.tell(ReplicasWanted(replicas=2))
    run.tell(ReplicasWanted(replicas=1))
    joined(run, 1, 1)
    assert [order.index for order in run.ordered(StopProcess)] == [1] and run.state.orders.facts.stale_echoes == 1
    assert run.state.replicas.by_id[1].state == "down"
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="it was stopped"))
    assert run.state.replicas.by_id[1].process.state == "gone"


@pytest.mark.parametrize("failed", [True, False])
def test_a_stopping_replica_wanted_again_is_charged_if_it_was_stopped_for_failures(
    failed: bool,
) -> None:
    run = small(replica_restarts=1, **({"timeouts": Timeouts(sync_s=50.0)} if failed else {}))
    if failed:
        run.train_on(*run.running()[:2])
        run.wait(60.0)
    run.tell(ReplicasWanted(replicas=1))
    if not failed:
        paused(run, 1)
    stop = next(order for order in run.ordered(StopProcess) if order.index == 1)
    assert stop.hung == failed
    run.tell(ReplicasWanted(replicas=2))
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason=stop.reason))
    assert run.state.replicas.by_id[1].process.state == "starting"
    assert run.state.replicas.by_id[1].process.deaths == failed


def test_another_life_of_a_replica_that_is_not_wanted_leaves() -> None:
    run = small()
    run.tell(ReplicasWanted(replicas=1))
    paused(run, 1)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="it was stopped"))
    joined(run, 1, 2)
    paused(run, 1)
    assert [(order.index, order.life) for order in run.ordered(StopProcess)] == [(1, 1), (1, 2)]


def test_starting_replicas_no_longer_wanted_are_stopped_and_do_not_hide_an_end() -> None:
    run = small(replicas=1, give_up_s=60.0)
    run.tell(ReplicasWanted(replicas=3))
    run.tell(ReplicasWanted(replicas=1))
    assert [order.index for order in run.ordered(StopProcess)] == [1, 2]
    run.tell(ProcessLost(kind="replica", index=0, life=1, final=True, reason="the node is gone"))
    run.fire()
    (end,) = run.ordered(FinishRun)
    assert "no replica is left; the last one was lost: the node is gone" in end.reason


def test_a_lost_replica_that_was_to_return_and_is_not_wanted_any_more_is_stopped() -> None:
    run = small()
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    run.tell(ReplicasWanted(replicas=1))
    assert [(order.index, order.life) for order in run.ordered(StopProcess)] == [(1, 2)]
    run.tell(ProcessLost(kind="replica", index=1, life=2, reason="not wanted"))
    joined(run, 1, 2)
    assert run.state.orders.facts.stale_echoes == 1 and run.state.replicas.by_id[1].state == "down", (
        "it was stopped as it came"
    )
    run.tell(ReplicasWanted(replicas=2))
    assert run.ordered(StartProcess)[-1].life == 3
    joined(run, 1, 3)
    assert run.state.replicas.by_id[1].state == "ready"


def test_a_replica_wanted_again_while_it_is_stopped_starts_once_it_has_stopped() -> None:
    """The end of the life that was to end does not answer the order to start the next."""
    run = small(replica_restarts=0)
    run.tell(ReplicasWanted(replicas=1))
    paused(run, 1)
    assert [order.index for order in run.ordered(StopProcess)] == [1]
    run.tell(ReplicasWanted(replicas=2))
    run.tell(ProcessLost(kind="replica", index=0, life=1, final=True, reason="the node is gone"))
    assert not run.ordered(StartProcess) and not run.ordered(FinishRun)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="it was stopped"))
    assert [order.index for order in run.ordered(StartProcess)] == [1] and not run.ordered(FinishRun)
    assert run.state.replicas.by_id[1].process.deaths == 0, "it did not end by itself"
    joined(run, 1, 2)
    assert run.state.replicas.by_id[1].state == "ready" and not run.state.orders.open["start"]


def test_a_replica_that_is_taken_away_may_come_back() -> None:
    run = small()
    run.tell(ReplicaLeaves(replica=1, life=1, reason="spot instance"))
    run.tell(ReplicaLeaves(replica=0, life=7, reason="an echo"))
    assert run.state.orders.facts.stale_echoes == 1
    paused(run, 1)
    (stop,) = run.ordered(StopProcess)
    assert (stop.index, stop.reason) == (1, "spot instance")
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="it was stopped"))
    assert [(order.index, order.life) for order in run.ordered(StartProcess)] == [(1, 2)]
    joined(run, 1, 2)
    assert run.state.replicas.by_id[1].state == "ready"


def test_a_life_that_follows_ends_the_order_to_stop_the_one_before() -> None:
    """Where the scheduler's process died with it, nobody says that the life is over."""
    run = small()
    run.tell(ReplicaLeaves(replica=1, life=1, reason="spot instance"))
    paused(run, 1)
    assert run.state.orders.find("stop", ("replica", 1)) is not None
    joined(run, 1, 2)
    assert run.state.replicas.by_id[1].state == "ready" and run.state.orders.find("stop", ("replica", 1)) is None


@pytest.mark.parametrize("order", ["notice first", "fewer first"])
def test_who_is_taken_away_leaves_however_many_are_wanted_meanwhile(order: str) -> None:
    run = small()
    events = [ReplicaLeaves(replica=1, life=1, reason="spot instance"), ReplicasWanted(replicas=1)]
    for event in events if order == "notice first" else reversed(events):
        run.tell(event)
    run.tell(ReplicasWanted(replicas=2))
    paused(run, 1)
    (stop,) = run.ordered(StopProcess)
    assert (stop.index, stop.reason) == (1, "spot instance")
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="it was stopped"))
    assert [(order.index, order.life) for order in run.ordered(StartProcess)] == [(1, 2)]
    joined(run, 1, 2)
    assert run.state.replicas.by_id[1].state == "ready"


def test_who_is_taken_away_does_not_come_back_where_fewer_are_wanted() -> None:
    run = small()
    run.tell(ReplicaLeaves(replica=1, life=1, reason="spot instance"))
    run.tell(ReplicasWanted(replicas=1))
    paused(run, 1)
    assert run.ordered(StopProcess)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="it was stopped"))
    assert not run.ordered(StartProcess) and run.state.replicas.by_id[1].process.state == "gone"


def test_who_shares_a_pool_and_stays_after_all_sleeps_where_the_run_drains() -> None:
    """The batch in progress needs the pool; who is drained would keep it."""
    pools = (Pool(tasks=("rollout", "train"), replicas=(0, 1)),)
    run = small(pools=pools)
    run.finish(0, 1)
    paused(run, 0)
    replica = run.state.replicas.by_id[1]
    assert replica.state == "yielding"
    run.tell(SyncFailed(replica=1, life=1, attempt=replica.sync_attempt, version=0, reason="fault"))
    assert replica.state == "yielding"
    run.tell(ReplicasWanted(replicas=1))
    run.tell(SyncFailed(replica=1, life=1, attempt=replica.sync_attempt, version=0, reason="fault"))
    assert replica.state == "draining"
    run.tell(ReplicasWanted(replicas=2))
    run.tell(DrainRequested(reason="maintenance"))
    paused(run, 1)
    assert replica.state == "yielding" and run.ordered(PauseReplica)[-1].mode == "sleep"
    paused(run, 1)
    run.train()
    run.publish()
    assert run.ordered(FinishRun)[-1].outcome == "stopped"


def test_a_replica_that_dies_on_its_way_out_is_not_let_go_twice() -> None:
    run = small()
    run.tell(ReplicaLeaves(replica=1, life=1, reason="spot instance"))
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    joined(run, 1, 2)
    assert run.state.replicas.by_id[1].state == "ready" and not run.ordered(StopProcess)


# no replica is left


def test_the_last_replica_is_waited_for_as_long_as_was_said() -> None:
    run = small(replicas=1, give_up_s=600.0)
    run.tell(ProcessLost(kind="replica", index=0, life=1, final=True, reason="the node is gone"))
    assert not run.ordered(FinishRun)
    joined(run, 0, 2)
    run.tell(ProcessLost(kind="replica", index=0, life=2, final=True, reason="again"))
    run.fire()
    (end,) = run.ordered(FinishRun)
    assert end.outcome == "failed" and "no replica is left; the last one was lost: again" in end.reason


# settings


def test_a_larger_staleness_holds_for_later_admissions() -> None:
    run = small()
    before = {group.id: group.deadline for group in run.state.groups.live.values() if group.deadline >= 0}
    run.tell(SettingChanged(setting="scheduler.max_staleness_steps", value="3"))
    run.tell(SettingChanged(setting="scheduler.max_concurrent_groups", value="8"))
    assert len(run.running()) == 8
    deadlines = {id: run.state.groups.live[id].deadline for id in run.running()}
    assert deadlines == {**before, **dict.fromkeys(range(4, 8), 3)}


def test_another_policy_decides_from_now_on_and_the_others_keep_what_they_remember() -> None:
    run = small()
    policies = run.scheduler.policies
    run.tell(SettingChanged(setting="scheduler.policies.filter", value="zero-variance"))
    assert run.scheduler.policies.names["filter"] == "zero-variance"
    assert run.scheduler.policies.dispatch is policies.dispatch
    run.finish(0, spread=0.0)
    assert 0 not in run.state.groups.live


@pytest.mark.parametrize(
    ("setting", "value", "law"),
    [
        ("scheduler.max_staleness_steps", "-1", "must be a whole number from 0 to 10000"),
        ("scheduler.max_staleness_steps", "0", r"B <= K <= B \* \(S \+ 1\)"),
        ("scheduler.max_staleness_steps", "many", "must be a whole number from 0 to 10000"),
        ("scheduler.max_concurrent_groups", "1", "use a value from 2 to 4"),
        ("scheduler.deadline_timeout_s", "inf", "must be a number above 0, 86400 at most"),
        ("timeouts.group_s", "0", "above 0, 1000000 at most, or auto, or off"),
        ("scheduler.policies.filter", "zero-varianc", "did you mean zero-variance"),
        ("scheduler.policies.fliter", "none", "this decision does not exist"),
        ("scheduler.train_batch_size", "4", "cannot be changed while the run is running"),
    ],
)
def test_a_setting_that_breaks_a_law_is_refused(setting: str, value: str, law: str) -> None:
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)
    with pytest.raises(ConfigError, match=law):
        changed_settings(limits, PolicySet.from_names({}), setting, value)
    assert "scheduler.max_staleness_steps" in live_settings()


# attempts that take too long


def test_groups_on_one_replica_have_their_own_times() -> None:
    run = small(timeouts=Timeouts(group_s=10.0), replicas=1, policies={"filter": "zero-variance"})
    run.wait(5.0)
    run.finish(0, spread=0.0)
    assert run.running() == [1, 2, 3, 4]
    run.wait(5.0)
    assert [order.group for order in run.ordered(ParkGroup)] == [1, 2, 3]
    run.wait(6.0)
    assert [order.group for order in run.ordered(ParkGroup)] == [1, 2, 3, 4]


def test_an_attempt_that_began_as_the_run_did_is_parked_like_any_other() -> None:
    """A virtual clock stands at 0 then."""
    run = small(timeouts=Timeouts(group_s=10.0), replicas=0)
    run.tell(ProcessUp(kind="replica", index=0, life=1, slots=100, version=0), at=0.0)
    run.wait(12.0)
    run.abort(0, 1, 2, 3)
    assert not run.state.orders.open["park"], "that is over with the attempt"
    parked = len(run.ordered(ParkGroup))
    run.wait(24.0)
    assert len(run.ordered(ParkGroup)) == parked + 4 and not run.ordered(StopProcess), "it parks before it is hung"


# slow replicas


def paced(run: Scripted, seconds: dict[int, float], rounds: int = 4) -> None:
    """Groups end on each replica, in so many seconds; their tokens are ten each."""
    for _ in range(rounds):
        for id, took in seconds.items():
            group = next(iter(run.running_on(id)))
            run.tell(run.generated(group, spread=0.0), at=run.state.orders.find("group", group).at + took)


def compared(**others: object) -> Scripted:
    """Two replicas of two slots; what ends is filtered, so that the next group starts in its place."""
    figures = {"policies": {"filter": "zero-variance"}, "straggler_factor": 2.0, "slots": 2, **others}
    return small(**figures)


def test_an_idle_replica_takes_over_from_a_slow_one() -> None:
    run = compared(prompts=14)
    paced(run, {0: 100.0, 1: 10.0})
    slow, fast = run.state.replicas.by_id[0], run.state.replicas.by_id[1]
    assert run.state.replicas.slow(2.0) == [slow]
    assert not run.ordered(ParkGroup), "the fast one has groups of its own"
    moved = min(run.running_on(slow.id), key=lambda id: (run.state.groups.live[id].deadline, id))
    while not run.ordered(ParkGroup):
        run.finish(next(iter(run.running_on(fast.id))))
    order = run.ordered(ParkGroup)[0]
    assert (order.group, order.replica) == (moved, 0)
    run.keep_prefix(*run.running_on(slow.id))
    assert len(run.ordered(ParkGroup)) == 1, "one slot is free, and one group on its way"
    run.abort(moved)
    resumed = run.ordered(ResumeGroup)[-1]
    assert (resumed.group, resumed.replica) == (moved, 1)
    assert run.state.groups.live[moved].infrastructure_failures == 0


@given(
    st.lists(st.sampled_from([0.1, 1.0, 1.5, 2.0, 2.9, 3.0, 9.0]), min_size=1, max_size=7), st.sampled_from([1.1, 2.0])
)
@example([0.1, 2.0, 2.9], 1.1)
def test_a_replica_is_slow_against_the_median_of_the_others(paces: list[float], factor: float) -> None:
    """In the first example, the median of the others is the mean of two, and the slow one stands between them."""
    replicas = small(replicas=len(paces)).state.replicas
    for replica, pace in zip(replicas.by_id.values(), paces, strict=True):
        replica.pace, replica.paced = pace, SAMPLES
    others = [paces[:place] + paces[place + 1 :] for place in range(len(paces))]
    slow = [id for id, pace in enumerate(paces) if others[id] and pace > factor * median(others[id])]
    assert [replica.id for replica in replicas.slow(factor)] == slow


def test_replicas_of_the_same_pace_keep_their_groups() -> None:
    run = compared(prompts=14)
    paced(run, {0: 15.0, 1: 10.0})
    assert not run.state.replicas.slow(2.0)
    paced(run, {0: 40.0}, rounds=3)
    assert run.state.replicas.slow(2.0) == [run.state.replicas.by_id[0]], "what it does now outweighs what it did"


def test_a_resumed_group_tells_the_pace_of_its_replica_by_the_tokens_generated_there() -> None:
    run = compared(replicas=1)
    run.keep_prefix(0, tokens=5)
    run.fail(0, cause="infrastructure")
    assert run.ordered(ResumeGroup)[-1].group == 0
    run.tell(run.generated(0), at=run.clock + 50.0)
    assert run.state.replicas.by_id[0].pace == 50.0 / 5, "five of its ten tokens are from before"


@pytest.mark.parametrize("earlier", [False, True])
def test_a_group_resumed_while_paces_were_not_compared_tells_nothing(earlier: bool) -> None:
    """Nobody knows how many of its tokens were generated there. `earlier`: it was also resumed before that."""
    run = compared(replicas=1, straggler_factor=2.0 if earlier else None)

    def resume(tokens: int) -> None:
        run.keep_prefix(0, tokens=tokens)
        run.fail(0, cause="infrastructure")
        assert run.ordered(ResumeGroup)[-1].group == 0

    if earlier:
        resume(tokens=5)
        run.tell(SettingChanged(setting="rollout.straggler_factor", value="null"))
    resume(tokens=7)
    run.tell(SettingChanged(setting="rollout.straggler_factor", value="2.0"))
    run.tell(run.generated(0))
    assert run.state.replicas.by_id[0].paced == 0
    run.tell(run.generated(1), at=run.clock + 50.0)
    assert run.state.replicas.by_id[0].paced == 1


def test_a_group_moves_once_and_a_new_life_begins_unjudged() -> None:
    run = compared(prompts=14)
    paced(run, {0: 100.0, 1: 10.0})
    fast = run.state.replicas.by_id[1]
    while not run.ordered(ParkGroup):
        run.finish(next(iter(run.running_on(fast.id))))
    moved = run.ordered(ParkGroup)[0].group
    run.abort(moved)
    assert run.state.groups.live[moved].moved
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    joined(run, 0, 2)
    replica = run.state.replicas.by_id[0]
    assert (run.state.replicas.slow(2.0), replica.paced) == ([], 0)
