"""Lives of processes: which follow one that ended, where a trainer begins again, and what a lost one costs."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands import (
    DeleteCheckpoint,
    EnterState,
    FinishRun,
    PublishWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StartProcess,
    StopProcess,
    TrainStep,
)
from engine.events import (
    BatchScored,
    CheckpointDamaged,
    CheckpointSaved,
    DrainRequested,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    ReplicaLeaves,
    ReplicaPaused,
    ReplicasWanted,
    RunResumed,
    SettingChanged,
    StateLeft,
    StepFailed,
    StopRequested,
)
from engine.ids import NO_VERSION
from engine.metrics.waits import waits
from engine.states.limits import Pool
from engine.states.process import KINDS, Process
from tests.core.added_states import CHECKING
from tests.core.core_rig import state_of
from tests.core.scripted import Scripted
from tests.core.test_departures import paused, small

APART = (
    Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",), replicas=()),
    Pool(tasks=("ref_logprobs",), replicas=()),
)  # fmt: skip
"""The scorer of `ref_logprobs` is a process of its own."""


def trains(**others: Any) -> Scripted:
    """B = 1, S = 3, K = 1, one replica: every finished group is a train step."""
    return small(
        **{"replicas": 1, "train_batch_size": 1, "max_staleness_steps": 3, "max_concurrent_groups": 1, **others}
    )


def process(run: Scripted, kind: str, index: int = 0) -> Process:
    found = run.state.find_process(kind, index)
    assert found is not None
    return found


def lose(run: Scripted, kind: str, index: int = 0, **said: Any) -> list[Any]:
    """The newest life of a process ends."""
    life = process(run, kind, index).life
    return run.tell(ProcessLost(kind=kind, index=index, life=life, **{"reason": "killed", **said}))


def come_up(run: Scripted, kind: str, index: int = 0) -> list[Any]:
    """The life that was ordered is up."""
    slots = 100 if kind == "replica" else 0
    life = process(run, kind, index).life
    return run.tell(ProcessUp(kind=kind, index=index, life=life, slots=slots))


def step(run: Scripted, publish: bool = True) -> None:
    """One train step more."""
    run.finish(run.running()[0])
    run.train()
    if publish:
        run.publish()
        run.install()


def saved(run: Scripted) -> None:
    """The newest checkpoint that was ordered is written."""
    run.tell(CheckpointSaved(steps=run.ordered(SaveCheckpoint)[-1].steps))


def started(run: Scripted, kind: str) -> list[int]:
    """The lives of a kind that were ordered since the run began."""
    return [order.life for order in run.ordered(StartProcess) if order.kind == kind]


# restart budgets


def test_a_replica_that_dies_too_often_is_given_up_and_the_run_ends_with_the_reason() -> None:
    run = small(replicas=1, replica_restarts=2)
    for _ in range(2):
        lose(run, "replica")
        come_up(run, "replica")
    assert started(run, "replica") == [2, 3] and not run.ordered(FinishRun)
    lose(run, "replica", reason="no GPU")
    assert started(run, "replica") == [2, 3] and process(run, "replica").state == "gone"
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.again) == ("failed", False) and "no GPU" in end.reason


def test_a_life_that_never_began_costs_a_restart_too() -> None:
    run = small(replicas=1, replica_restarts=2, infrastructure_attempts=9)
    for _ in range(3):
        lose(run, "replica")
    assert started(run, "replica") == [2, 3] and run.ordered(FinishRun)[-1].outcome == "failed"


@pytest.mark.parametrize(("kind", "limit"), [("replica", "replica_restarts"), ("trainer", "trainer_restarts")])
def test_each_life_that_could_not_be_started_delays_the_next_one_longer(kind: str, limit: str) -> None:
    run = small(replicas=1, infrastructure_attempts=9, **{limit: 9})
    lose(run, kind)
    for _ in range(8):
        lose(run, kind, reason="its factory raised")
    delays = [order.delay_s for order in run.ordered(StartProcess) if order.kind == kind]
    assert delays == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0], "the first life was up"


def test_the_first_life_that_could_not_be_started_delays_the_next_one_by_a_second() -> None:
    run = small()
    run.tell(ReplicasWanted(replicas=3))
    lose(run, "replica", 2)
    assert [order.delay_s for order in run.ordered(StartProcess)] == [0.0, 1.0]
    come_up(run, "replica", 2)
    lose(run, "replica", 2)
    assert run.ordered(StartProcess)[-1].delay_s == 0.0, "it has been up"


def test_a_replica_that_is_let_go_before_it_is_up_delays_nothing() -> None:
    run = small()
    run.tell(ReplicasWanted(replicas=3))
    run.tell(ReplicasWanted(replicas=2))
    run.tell(ReplicasWanted(replicas=3))
    lose(run, "replica", 2)
    assert [order.delay_s for order in run.ordered(StartProcess)] == [0.0, 0.0]


def test_a_train_step_fills_the_budgets_of_replicas_and_trainer() -> None:
    run = trains(replica_restarts=1, trainer_restarts=1)
    for _ in range(3):
        for kind in ("replica", "trainer"):
            lose(run, kind)
            come_up(run, kind)
        run.install()
        step(run)
    assert started(run, "replica") == started(run, "trainer") == [2, 3, 4]
    lose(run, "trainer")
    come_up(run, "trainer")
    lose(run, "trainer", reason="no memory")
    assert run.ordered(FinishRun)[-1].reason.endswith("no memory; it ended 2 times without progress")


def test_each_replica_has_its_own_budget() -> None:
    run = small(replica_restarts=1)
    for index in (0, 1):
        lose(run, "replica", index)
        come_up(run, "replica", index)
    lose(run, "replica", 1)
    assert process(run, "replica", 1).state == "gone" and process(run, "replica", 0).deaths == 1
    assert not run.ordered(FinishRun)


def test_a_replica_that_is_taken_away_costs_no_restart() -> None:
    run = small(replica_restarts=0)
    for life in (1, 2, 3):
        run.tell(ReplicaLeaves(replica=1, life=life, reason="spot instance"))
        if life == 2:
            paused(run, 1)
        lose(run, "replica", 1)
        come_up(run, "replica", 1)
    assert started(run, "replica") == [2, 3, 4] and process(run, "replica", 1).deaths == 0
    lose(run, "replica", 1)
    assert process(run, "replica", 1).state == "gone", "without a notice it does cost one"


def test_a_replica_that_is_wanted_again_after_it_was_given_up_has_its_whole_budget() -> None:
    run = small(replica_restarts=1)
    for _ in range(2):
        lose(run, "replica", 1)
    assert process(run, "replica", 1).state == "gone"
    run.tell(ReplicasWanted(replicas=2))
    assert (process(run, "replica", 1).state, process(run, "replica", 1).deaths) == ("starting", 0)
    lose(run, "replica", 1)
    assert started(run, "replica") == [2, 3, 4]


def test_what_cannot_be_started_again_is_not_ordered() -> None:
    run = small()
    lose(run, "replica", 1, final=True)
    assert not started(run, "replica") and process(run, "replica", 1).state == "gone"
    lose(run, "trainer", final=True, reason="its node is gone")
    (end,) = run.ordered(FinishRun)
    assert not started(run, "trainer")
    assert (end.outcome, end.reason, end.again) == ("failed", "the trainer is lost: its node is gone", False)


def scored(**others: Any) -> Scripted:
    """A step is scored by a process of its own."""
    run = trains(scoring_tasks=("ref_logprobs",), pools=APART, infrastructure_attempts=9, **others)
    run.finish(run.running()[0])
    return run


def test_a_scorer_starts_again_and_each_lost_score_costs_its_step_one_attempt() -> None:
    run = scored(worker_restarts=1)
    assert [order.attempt for order in run.ordered(ScoreBatch)] == [1]
    lose(run, "scorer")
    assert started(run, "scorer") == [2] and run.state.training.steps[0].failures == 1
    assert [order.attempt for order in run.ordered(ScoreBatch)] == [1, 2], "it waits for the next life"
    come_up(run, "scorer")
    run.tell(BatchScored(step=0, attempt=2, task="ref_logprobs"))
    assert process(run, "scorer").deaths == 0, "an answer fills the budget"
    lose(run, "scorer")
    lose(run, "scorer", reason="no memory")
    (end,) = run.ordered(FinishRun)
    assert end.outcome == "failed" and started(run, "scorer") == [2, 3]
    assert end.reason == "the scorer of ref_logprobs is lost: no memory; it ended 2 times without progress"


def test_a_lost_scorer_that_ends_the_run_costs_its_step_no_attempt() -> None:
    run = scored(worker_restarts=0)
    lose(run, "scorer")
    assert run.ordered(FinishRun) and run.state.training.steps[0].failures == 0


def test_an_answer_fills_the_budget_of_its_own_scorer_alone() -> None:
    pools = (*APART, Pool(tasks=("critic_values",), replicas=()))
    run = trains(scoring_tasks=("ref_logprobs", "critic_values"), pools=pools, infrastructure_attempts=9)
    run.finish(run.running()[0])
    for index in (0, 1):
        lose(run, "scorer", index)
        come_up(run, "scorer", index)
    run.tell(BatchScored(step=0, attempt=1, task="critic_values"))
    assert [process(run, "scorer", index).deaths for index in (0, 1)] == [1, 1], "that attempt is lost"
    run.tell(BatchScored(step=0, attempt=3, task="critic_values"))
    assert [process(run, "scorer", index).deaths for index in (0, 1)] == [1, 0]


def test_the_process_of_added_states_restarts_and_each_group_there_is_charged_once() -> None:
    run = small(
        worker_restarts=1, added_states=(replace(CHECKING, concurrency=2),), infrastructure_attempts=3,
    )  # fmt: skip
    run.finish(0, 1)
    assert [order.group for order in run.ordered(EnterState)] == [0, 1]
    lose(run, "added states")
    assert started(run, "added states") == [2]
    assert [run.state.groups.live[id].infrastructure_failures for id in (0, 1)] == [1, 1]
    again = run.ordered(EnterState)[2:]
    assert [order.group for order in again] == [0, 1]
    come_up(run, "added states")
    left = {"state": "checking", "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}
    run.tell(StateLeft(group=0, attempt=again[0].attempt, **left))
    assert process(run, "added states").deaths == 0
    lose(run, "added states")
    lose(run, "added states")
    assert run.ordered(FinishRun)[-1].reason.startswith(
        "the process of the added states is lost: killed; it ended 2 times"
    )


# reports that cross


def test_a_life_that_nobody_ordered_takes_the_place_of_the_one_before() -> None:
    run = small(slots=2)
    groups = list(run.running_on(1))
    run.tell(ProcessUp(kind="replica", index=1, life=5, slots=100))
    assert process(run, "replica", 1).life == run.state.replicas.by_id[1].life == 5
    assert [run.state.groups.live[id].infrastructure_failures for id in groups] == [1, 1]
    lose(run, "replica", 1)
    assert started(run, "replica") == [6], "no number is used twice"


def test_a_life_that_nobody_ordered_ends_the_order_to_start_an_older_one() -> None:
    run = small()
    lose(run, "replica", 1)
    run.tell(ProcessUp(kind="replica", index=1, life=7, slots=100))
    assert not run.state.orders.open["start"] and run.state.replicas.by_id[1].state == "ready"
    run.tell(ProcessUp(kind="replica", index=1, life=2, slots=100))
    assert run.state.orders.facts.stale_echoes == 1 and process(run, "replica", 1).life == 7


@pytest.mark.parametrize("kind", ["replica", "trainer", "trajectory store"])
def test_events_about_a_life_that_has_ended_change_nothing(kind: str) -> None:
    run = small()
    if kind != "trajectory store":
        lose(run, kind)
        come_up(run, kind)
    life = process(run, kind).life
    echoes = run.state.orders.facts.stale_echoes
    before = state_of(run.scheduler)
    for event in (
        ProcessLost(kind=kind, index=0, life=life - 1, reason="late", final=True),
        ProcessUp(kind=kind, index=0, life=life - 1, slots=100),
        ProcessUp(kind=kind, index=0, life=life, slots=100),
    ):
        assert run.tell(event) == [] and process(run, kind).state == "up"
    assert run.state.orders.facts.stale_echoes == echoes + 3, "stale echoes are counted"
    assert state_of(run.scheduler) != before
    if kind != "trajectory store":
        lose(run, kind)
        charged = process(run, kind).deaths
        run.tell(ProcessLost(kind=kind, index=0, life=life, reason="said twice"))
        assert (process(run, kind).deaths, process(run, kind).state) == (charged, "starting")


# a lost trainer


def test_the_step_in_training_costs_one_attempt_and_is_trained_by_the_next_life() -> None:
    run = trains()
    run.finish(run.running()[0])
    lose(run, "trainer")
    (start,) = run.ordered(StartProcess)
    assert (start.steps, start.version, start.redo, start.updates) == (0, NO_VERSION, (), 0)
    assert [order.attempt for order in run.ordered(TrainStep)] == [1, 2] and run.state.training.steps[0].failures == 1
    come_up(run, "trainer")
    run.train()
    assert run.state.training.steps_trained == 1


def test_all_scores_of_a_step_cost_one_attempt_together() -> None:
    pools = (APART[0], Pool(tasks=("train", "old_logprobs"), replicas=()), APART[2])
    run = trains(scoring_tasks=("old_logprobs", "ref_logprobs"), pools=pools)
    run.finish(run.running()[0])
    assert len(run.state.orders.open["score"]) == 2
    lose(run, "trainer")
    assert run.state.training.steps[0].failures == 1
    assert {order.command.attempt for order in run.state.orders.open["score"].values()} == {2}


@pytest.mark.parametrize("reached", [True, False])
def test_a_publication_is_charged_unless_it_has_reached_the_store(reached: bool) -> None:
    run = trains()
    run.finish(run.running()[0])
    run.train()
    assert run.state.publishing
    lose(run, "trainer", published=1 if reached else 0)
    if not reached:
        (end,) = run.ordered(FinishRun)
        assert end.outcome == "failed" and "the weights after 1 train steps are lost" in end.reason
        assert run.state.training.publish_failures == 0, "nothing publishes it any more"
        return
    assert (
        run.state.training.latest_version == 1 and run.state.training.publish_failures == 0 and not run.state.publishing
    )
    (start,) = run.ordered(StartProcess)
    assert (start.steps, start.version) == (1, 1)
    run.install()
    assert run.state.replicas.by_id[0].version == 1


def test_a_checkpoint_unreported_by_a_lost_trainer_counts_and_starts_the_next_life() -> None:
    run = trains(checkpoint_every=2, keeps_batches=True, keep_checkpoints=1)
    for _ in range(2):
        step(run)
    saved(run)
    for _ in range(2):
        step(run)
    assert [order.steps for order in run.ordered(SaveCheckpoint)] == [2, 4] and run.state.checkpoints.steps == [2]
    lose(run, "trainer", published=4, saved=(4,))
    (start,) = run.ordered(StartProcess)
    assert (start.steps, start.version, start.redo) == (4, NO_VERSION, ())
    assert (
        run.state.checkpoints.steps == [2, 4] and run.state.checkpoints.newest == 4 and not run.state.checkpoint_pending
    )
    assert [order.steps for order in run.ordered(DeleteCheckpoint)] == [2], "it counts like any other"
    orders = [type(order) for order in run.commands]
    assert orders.index(StartProcess) < orders.index(DeleteCheckpoint), "the next life gets the order to delete"


def test_a_checkpoint_that_was_not_complete_is_ordered_again() -> None:
    run = trains(checkpoint_every=2, keeps_batches=True)
    for _ in range(2):
        step(run)
    lose(run, "trainer", published=2, saved=(1, 3))
    assert run.state.checkpoints.steps == [] and run.state.checkpoints.ordered == 0
    assert run.ordered(StartProcess)[-1].redo == (0, 1)


@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_unreported_as_all_processes_died_counts_if_resumed_from(there: bool) -> None:
    run = trains(checkpoint_every=2, keeps_batches=True)
    for _ in range(3):
        step(run)
    assert run.state.checkpoint_pending
    run.tell(RunResumed(steps=3, replicas=1, consumed=(), released=(), kept=True, checkpoint=2 if there else 0))
    assert run.state.checkpoints.steps == ([2] if there else [])
    assert [order.steps for order in run.ordered(SaveCheckpoint)][1:] == ([] if there else [3])


def test_a_failed_publication_is_ordered_again_from_weights_that_can_be_remade() -> None:
    run = trains(checkpoint_every=5, keeps_batches=True)
    run.finish(run.running()[0])
    run.train()
    lose(run, "trainer", published=0)
    assert [order.attempt for order in run.ordered(PublishWeights)] == [
        1,
        2,
    ] and run.state.training.publish_failures == 1
    (start,) = run.ordered(StartProcess)
    assert (start.steps, start.version, start.redo) == (0, NO_VERSION, (0,))


def test_checkpoints_that_the_trainer_was_to_write_or_delete() -> None:
    """One that was being written is not there: the run continues without it. A deletion is ordered again."""
    run = trains(checkpoint_every=1, keep_checkpoints=1, keeps_batches=True)
    for _ in range(2):
        step(run)
        saved(run)
    step(run)
    assert [order.steps for order in run.ordered(DeleteCheckpoint)] == [1] and run.state.checkpoint_pending
    lose(run, "trainer", published=3)
    assert not run.state.checkpoint_pending
    assert [order.steps for order in run.ordered(DeleteCheckpoint)] == [1, 1]
    assert {*run.state.orders.open["delete"]} == {1}
    (start,) = run.ordered(StartProcess)
    assert (start.steps, start.redo) == (2, (2,))


def test_a_lost_trainer_that_ends_the_run_costs_its_step_no_attempt() -> None:
    """The resumed step has all of its attempts."""
    run = trains(infrastructure_attempts=2, trainer_restarts=0, keeps_batches=True, checkpoint_every=5)
    run.finish(run.running()[0])
    lose(run, "trainer", final=True)
    assert run.ordered(FinishRun) and run.state.training.steps[0].failures == 0
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True))
    come_up(run, "trainer")
    run.publish()
    for _ in range(2):
        assert len(run.ordered(FinishRun)) == 1
        run.tell(StepFailed(step=0, attempt=run.ordered(TrainStep)[-1].attempt, reason="out of memory"))
    assert "train step 0 failed 2 times" in run.ordered(FinishRun)[-1].reason


# where a trainer begins


def test_a_checkpoint_lost_with_the_trainer_is_written_before_a_drain_ends() -> None:
    run = trains(checkpoint_every=1, keeps_batches=True)
    step(run)
    run.tell(DrainRequested(reason="maintenance"))
    lose(run, "trainer")
    run.abort(*run.running())
    for replica in run.state.replicas.by_id.values():
        if replica.state == "draining":
            run.tell(ReplicaPaused(replica=replica.id, life=replica.life, attempt=replica.sync_attempt))
    assert run.state.ending.outcome is None, "the checkpoint is still to be written"
    come_up(run, "trainer")
    assert [order.steps for order in run.ordered(SaveCheckpoint)] == [1, 1]
    saved(run)
    outcome = run.state.ending.outcome
    assert outcome is not None and outcome.outcome == "stopped"


def test_a_life_that_begins_at_published_weights_writes_a_checkpoint_at_once() -> None:
    """The steps that a damaged checkpoint held cannot be trained again: nothing else on disk could be resumed from."""
    run = trains(checkpoint_every=1, keeps_batches=True)
    for _ in range(2):
        step(run)
        saved(run)
    run.tell(CheckpointDamaged(steps=2, reason="another SHA-256"))
    lose(run, "trainer")
    (start,) = run.ordered(StartProcess)
    assert (start.steps, start.version) == (2, 2)
    assert [order.steps for order in run.ordered(SaveCheckpoint)] == [1, 2, 2] and run.state.checkpoint_pending


def test_a_trainer_lost_after_a_branch_begins_at_the_checkpoint_that_was_branched_to() -> None:
    """It was written, and all processes ended before it was reported."""
    run = trains(checkpoint_every=2)
    for _ in range(2):
        step(run)
    run.tell(StopRequested(reason="killed"))
    run.tell(RunResumed(steps=2, replicas=1, consumed=(), released=tuple(run.state.groups.live)[:0]))
    lose(run, "trainer")
    start = run.ordered(StartProcess)[-1]
    assert (start.kind, start.steps, start.version, start.redo) == ("trainer", 2, NO_VERSION, ())


def test_from_published_weights_where_no_checkpoint_and_no_batches_are_there() -> None:
    run = trains()
    step(run)
    step(run)
    lose(run, "trainer")
    (start,) = run.ordered(StartProcess)
    assert (start.steps, start.version, start.redo) == (2, 2, ())
    assert start.updates == run.state.training.updates_in[2]


def test_from_nowhere_the_run_ends_and_says_what_is_lost() -> None:
    """Two steps a version: the first of them is in no weights that are left."""
    run = trains(sync_every=2)
    step(run, publish=False)
    lose(run, "trainer", reason="out of memory")
    (end,) = run.ordered(FinishRun)
    assert not run.ordered(StartProcess) and (end.outcome, end.again) == ("failed", False)
    assert end.reason == (
        "the trainer is lost: out of memory; the weights after 1 train steps are lost: the last "
        "checkpoint is after 0, and neither published weights nor batches of the later steps exist"
    )


def test_after_a_life_found_its_checkpoint_damaged_the_next_begins_elsewhere() -> None:
    run = trains(checkpoint_every=1, keep_checkpoints=2, keeps_batches=True)
    for _ in range(2):
        step(run)
        saved(run)
    lose(run, "trainer")
    assert run.ordered(StartProcess)[-1].steps == 2
    run.tell(CheckpointDamaged(steps=2, reason="a checksum is wrong"))
    lose(run, "trainer", reason="its checkpoint is damaged")
    start = run.ordered(StartProcess)[-1]
    assert (start.life, start.steps, start.version) == (3, 2, 2), "the published weights hold the same steps"


def test_a_damaged_checkpoint_that_nothing_replaces_ends_the_run() -> None:
    run = trains(checkpoint_every=2, sync_every=2, keeps_batches=True)
    for publish in (False, True):
        step(run, publish=publish)
    saved(run)
    step(run, publish=False)
    lose(run, "trainer")
    assert run.ordered(StartProcess)[-1].redo == (2,)
    run.tell(CheckpointDamaged(steps=2, reason="a checksum is wrong"))
    lose(run, "trainer", reason="its checkpoint is damaged")
    assert "the weights after 3 train steps are lost" in run.ordered(FinishRun)[-1].reason


# what cannot be replaced while the run continues


@pytest.mark.parametrize("kind", ["trajectory store", "weights store", "gateway"])
@pytest.mark.parametrize("final", [False, True])
def test_a_lost_store_or_gateway_stops_the_run_to_begin_again(kind: str, final: bool) -> None:
    run = small()
    run.tell(ProcessLost(kind=kind, index=0, life=1, reason="killed", final=final))
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.reason, end.again) == ("stopped", f"the {kind} is lost: killed", not final)
    assert not run.ordered(StartProcess)


# waiting, draining, resuming


@pytest.mark.parametrize(
    ("kind", "by", "doing"),
    [("replica", "replica 0", "restarting"), ("trainer", "the trainer", "restarting from the initial weights")],
)
def test_a_process_that_waits_for_room_is_named_until_it_is_up(kind: str, by: str, doing: str) -> None:
    run = small(replicas=1)
    lose(run, kind)
    life = {"kind": kind, "index": 0, "life": 2}
    before = state_of(run.scheduler)
    run.tell(ProcessWaits(**life, reason="1 GPU is needed, 0 are free"))
    assert state_of(run.scheduler) != before
    (wait,) = [wait for wait in waits(run.state) if wait.by == by]
    assert (wait.doing, wait.detail) == (doing, "the cluster has no room for it: 1 GPU is needed, 0 are free")
    run.tell(ProcessWaits(**life, reason=""))
    assert [(wait.doing, wait.detail) for wait in waits(run.state) if wait.by == by] == [(doing, "")]
    run.tell(ProcessWaits(**life, reason="again"))
    come_up(run, kind)
    assert process(run, kind).no_room == "" and run.state.orders.facts.stale_echoes == 0
    run.tell(ProcessWaits(**life, reason="an echo"))
    assert run.state.orders.facts.stale_echoes == 1 and process(run, kind).no_room == ""


def test_a_drain_that_takes_too_long_stops_the_run_as_it_is() -> None:
    run = small(drain_s=30.0)
    run.tell(DrainRequested(reason="maintenance"))
    run.tell(DrainRequested(reason="once more"))
    (timer,) = run.ordered(SetTimer)
    assert timer.delay_s == 30.0 and not run.ordered(FinishRun)
    run.fire()
    (end,) = run.ordered(FinishRun)
    assert (end.outcome, end.reason) == ("stopped", "the drain exceeded durability.drain_s = 30")
    assert end.word == "stopped"


@pytest.mark.parametrize(("setting", "none"), [("durability.drain_s", "null"), ("rollout.give_up_s", "0")])
@given(changes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["none", "5", "30", "90"])), max_size=4))
def test_a_wait_obeys_the_limit_that_was_set_last(setting: str, none: str, changes: list[tuple[int, str]]) -> None:
    """Set, raised, lowered or lifted during a drain, or a wait for a replica."""
    drains = setting == "durability.drain_s"
    run = small(replicas=1, **{setting.partition(".")[2]: 30.0})
    if drains:
        run.tell(DrainRequested(reason="maintenance"))
    else:
        lose(run, "replica", final=True)
    began, limit_s = run.clock, 30.0
    for wait_s, value in changes:
        run.wait(wait_s)
        if run.ordered(FinishRun):
            break
        assert run.clock < began + limit_s
        run.tell(SettingChanged(setting=setting, value=none if value == "none" else value))
        limit_s = inf if value == "none" else float(value)
        due = [] if value == "none" else [max(began + limit_s, run.clock)]
        assert [*run.timers.values()] == due
        assert not due or f" {value} s" in " ".join(wait.detail for wait in waits(run.state))
    run.wait(100.0)
    lifted = limit_s == inf and drains  # a run that has lost its replicas ends if it may not wait
    assert bool(run.ordered(FinishRun)) == (not lifted)


def test_a_drain_that_ends_in_time_needs_its_timer_no_more() -> None:
    run = small(drain_s=30.0)
    run.tell(DrainRequested(reason="maintenance"))
    for id in (0, 1):
        paused(run, id)
    assert run.ordered(FinishRun)[-1].reason == "maintenance" and not run.state.orders.open["timer"]
    run.tell(RunResumed(steps=0, replicas=2, consumed=(), released=(), kept=True))


def test_a_resume_numbers_the_next_lives_and_fills_every_budget() -> None:
    run = small(replica_restarts=3)
    lose(run, "replica", 1)
    come_up(run, "replica", 1)
    lose(run, "trainer")
    come_up(run, "trainer")
    new = run.tell(RunResumed(steps=0, replicas=3, consumed=(), released=(), kept=True))
    starts = [(order.index, order.life) for order in new if isinstance(order, StartProcess)]
    assert starts == [(0, 2), (1, 3), (2, 1)]
    assert (process(run, "trainer").life, process(run, "trainer").state) == (3, "up")
    assert process(run, "replica", 1).deaths == process(run, "trainer").deaths == 0
    run.tell(ProcessLost(kind="trainer", index=0, life=2, reason="of the life before"))
    assert run.state.orders.facts.stale_echoes == 1 and process(run, "trainer").state == "up"


# snapshots


def test_no_two_processes_have_one_name() -> None:
    names = [
        Process(kind, index).id for kind in KINDS for index in (range(2) if kind in ("replica", "scorer") else (0,))
    ]
    assert len({*names}) == len(names)


def test_who_is_stopped_may_report_nothing_more() -> None:
    """It is up, and its order to stop is on its way: what it reports is over."""
    run = small()
    run.tell(ReplicaLeaves(replica=1, life=1, reason="spot instance"))
    paused(run, 1)
    assert [order.life for order in run.ordered(StopProcess)] == [1]
    before = run.state.orders.facts.stale_echoes
    run.tell(ReplicaLeaves(replica=1, life=1, reason="spot instance, again"))
    assert run.state.orders.facts.stale_echoes == before + 1
    lose(run, "replica", 1)
    assert started(run, "replica") == [2]
