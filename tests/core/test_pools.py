"""Tasks that share hardware take turns on it; those that do not, overlap. Each line is one event or one order."""

from typing import Any

import pytest

from engine.commands import (
    Command,
    InspectStep,
    InstallWeights,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    SaveCheckpoint,
    ScoreBatch,
    StartProcess,
    TrainStep,
)
from engine.errors import ConfigError
from engine.events import (
    BatchScored,
    DrainRequested,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    ReplicaPaused,
    ReplicasWanted,
    RowsFailed,
    RowsMeasured,
    StepFailed,
    SyncFailed,
    WeightsInstalled,
    WeightsStaged,
)
from engine.states.limits import Limits, Pool, ValidationLimits
from tests.core.added_states import GATING
from tests.core.agents import inspection_answer
from tests.core.scripted import Scripted

TOGETHER = (Pool(tasks=("rollout", "train", "old_logprobs", "ref_logprobs"), replicas=(0,)),)
REFERENCE_APART = (
    Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train", "old_logprobs")), Pool(tasks=("ref_logprobs",)),
)  # fmt: skip
TWO_TOGETHER = (Pool(tasks=("rollout", "train"), replicas=(0, 1)),)
LENT = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("rollout", "train"), replicas=(1,)))


def small(pools: tuple[Pool, ...], *, replicas: int = 1, slots: int = 100, **limits: Any) -> Scripted:
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, **limits}
    return Scripted(replicas=replicas, slots=slots, prompts=100, pools=pools, **figures)


def place(run: Scripted, id: int = 0) -> dict[str, int]:
    replica = run.state.replicas.by_id[id]
    return {"replica": id, "life": replica.life, "attempt": replica.sync_attempt}


def sleep(run: Scripted, id: int = 0) -> list[Command]:
    """A replica that was sent to sleep parks what it runs and sleeps."""
    run.abort(*run.running_on(id))
    return run.tell(ReplicaPaused(**place(run, id)))


def states(run: Scripted) -> list[str]:
    return [replica.state for replica in run.state.replicas.by_id.values()]


def score(run: Scripted, task: str) -> list[Command]:
    last = next(order for order in reversed(run.ordered(ScoreBatch)) if order.task == task)
    return run.tell(BatchScored(step=last.step, attempt=last.attempt, task=task))


def scores(run: Scripted) -> list[tuple[int, str]]:
    return [(order.step, order.task) for order in run.ordered(ScoreBatch)]


def test_replicas_sleep_while_their_pool_trains_and_wake_with_the_new_weights() -> None:
    run = small(TOGETHER)
    run.finish(0, 1)
    assert states(run) == ["yielding"] and not run.ordered(TrainStep)
    assert run.ordered(PauseReplica)[-1].mode == "sleep"
    orders = sleep(run)
    assert states(run) == ["asleep"] and [order.groups for order in orders if isinstance(order, TrainStep)] == [(0, 1)]
    assert run.state.groups.ledger.parked == 2 and not run.running()
    run.train()
    assert states(run) == ["asleep"], "the weights leave the pool before the lease passes on"
    run.publish()
    assert states(run) == ["asleep"], "nothing runs on old weights where newer ones are on their way"
    run.tell(WeightsStaged(**place(run), version=1))
    assert run.ordered(InstallWeights)[-1].version == 1 and states(run) == ["installing"]
    orders = run.tell(WeightsInstalled(**place(run), version=1))
    assert states(run) == ["ready"] and any(isinstance(order, ResumeReplica) for order in orders)
    assert [order.group for order in orders if isinstance(order, ResumeGroup)] == [2, 3], "from their prefixes"


def test_a_step_that_publishes_nothing_wakes_replicas_as_they_are() -> None:
    run = small(TOGETHER, sync_every=2)
    run.finish(0, 1)
    sleep(run)
    run.train()
    assert states(run) == ["ready"] and not run.ordered(InstallWeights)
    assert isinstance(run.ordered(ResumeReplica)[-1], ResumeReplica) and run.running() == [2, 3]


def test_rollout_yields_once_for_all_tasks_of_a_step() -> None:
    run = small(TOGETHER, scoring_tasks=("ref_logprobs", "old_logprobs"))
    run.finish(0, 1)
    sleep(run)
    assert scores(run) == [(0, "ref_logprobs")]
    score(run, "ref_logprobs")
    assert scores(run) == [(0, "ref_logprobs"), (0, "old_logprobs")] and states(run) == ["asleep"]
    score(run, "old_logprobs")
    assert len(run.ordered(TrainStep)) == 1 and states(run) == ["asleep"]


def test_a_batch_that_is_ready_already_is_trained_before_rollout_goes_on() -> None:
    run = small(TOGETHER)
    run.finish(0, 1, 2, 3)
    assert run.state.training.steps_batched == 1 and states(run) == ["yielding"]
    sleep(run)
    run.train()
    run.publish()
    assert [order.step for order in run.ordered(TrainStep)] == [0, 1] and states(run) == ["asleep"]


def test_the_reference_scores_the_next_batch_while_this_one_is_trained() -> None:
    run = small(REFERENCE_APART, scoring_tasks=("ref_logprobs", "old_logprobs"))
    run.finish(0, 1, 2, 3)
    assert scores(run) == [(0, "ref_logprobs"), (0, "old_logprobs")], "side by side"
    score(run, "old_logprobs")
    assert not run.ordered(TrainStep) and run.state.training.steps_batched == 1
    score(run, "ref_logprobs")
    assert [order.step for order in run.ordered(TrainStep)] == [0]
    assert scores(run)[2:] == [(1, "ref_logprobs")] and run.state.training.steps_batched == 2
    score(run, "ref_logprobs")
    assert len(scores(run)) == 3, "old log-probs need the weights of the step before"
    run.finish(*run.running())
    assert run.state.training.steps_batched == 2, "one batch ahead is as much as anyone can use"
    run.train()
    assert len(scores(run)) == 3, "their pool is free once the weights are published"
    run.publish()
    assert scores(run)[3:] == [(1, "old_logprobs")]


def test_old_log_probs_wait_for_the_training_before_them_and_for_its_pool() -> None:
    apart = (Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)), Pool(tasks=("ref_logprobs",)))
    run = small(apart, scoring_tasks=("ref_logprobs", "old_logprobs"))
    run.finish(0, 1, 2, 3)
    score(run, "ref_logprobs")
    score(run, "old_logprobs")
    assert scores(run)[2:] == [(1, "ref_logprobs")]
    run.train()
    assert scores(run)[3:] == [(1, "old_logprobs")], "not before; but not for the publication either"


def test_a_step_with_another_behind_it_is_not_the_last() -> None:
    run = small(REFERENCE_APART, scoring_tasks=("ref_logprobs",), sync_every=2, max_steps=2)
    run.finish(0, 1, 2, 3)
    score(run, "ref_logprobs")
    assert run.state.training.steps_batched == 2
    run.train()
    assert not run.state.publishing, "the second step is"
    score(run, "ref_logprobs")
    run.train()
    assert run.ordered(PublishWeights)[-1].steps == 2


def test_a_pool_that_a_step_still_needs_does_not_go_back_in_between() -> None:
    pools = (Pool(tasks=("rollout", "train", "old_logprobs"), replicas=(0,)), Pool(tasks=("ref_logprobs",)))
    run = small(pools, scoring_tasks=("ref_logprobs", "old_logprobs"))
    run.finish(0, 1)
    sleep(run)
    score(run, "old_logprobs")
    assert states(run) == ["asleep"] and not run.ordered(TrainStep), "the reference is still being asked"
    score(run, "ref_logprobs")
    assert len(run.ordered(TrainStep)) == 1


def test_a_failed_task_redoes_the_batch_and_the_others_answer_is_an_echo() -> None:
    run = small(REFERENCE_APART, scoring_tasks=("ref_logprobs", "old_logprobs"))
    run.finish(0, 1)
    run.tell(StepFailed(step=0, attempt=1, reason="the scorer died"))
    assert [(order.attempt, order.task) for order in run.ordered(ScoreBatch)[2:]] == [
        (2, "ref_logprobs"), (2, "old_logprobs"),
    ]  # fmt: skip
    echoes = run.state.orders.facts.stale_echoes
    run.tell(BatchScored(step=0, attempt=1, task="old_logprobs"))
    assert run.state.orders.facts.stale_echoes == echoes + 1 and not run.ordered(TrainStep)


def test_the_idle_trainer_lends_its_pool_to_a_replica() -> None:
    run = small(LENT, replicas=2, slots=2)
    assert sorted(run.running_on(1)) and states(run) == ["ready", "ready"]
    lent = list(run.running_on(1))
    mine = list(run.running_on(0))
    run.finish(*mine)
    assert states(run) == ["ready", "yielding"]
    sleep(run, 1)
    assert len(run.ordered(TrainStep)) == 1 and states(run) == ["ready", "asleep"]
    resumed = [order for order in run.ordered(ResumeGroup) if order.group in lent]
    assert resumed and all(order.replica == 0 for order in resumed), "they continue elsewhere, from their prefixes"


def test_training_waits_for_a_starting_replica_only_if_the_replica_has_room() -> None:
    run = small(TWO_TOGETHER, replicas=2, slots=2)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    run.finish(*run.running_on(0))
    assert states(run) == ["ready", "down"], "it takes its GPU before it is up"
    run.tell(ProcessWaits(kind="replica", index=1, life=2, reason="no room"))
    sleep(run, 0)
    assert len(run.ordered(TrainStep)) == 1


def test_training_does_not_wait_for_a_replica_that_has_not_begun_to_start() -> None:
    run = small(TOGETHER)
    run.finish(0, 1)
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    assert len(run.ordered(TrainStep)) == 1 and not run.ordered(StartProcess)


def test_training_does_not_wait_for_a_replica_beyond_its_restart_budget() -> None:
    run = small(TWO_TOGETHER, replicas=2, slots=2, replica_restarts=1)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    run.finish(*run.running_on(0))
    assert states(run) == ["ready", "down"]
    run.tell(ProcessLost(kind="replica", index=1, life=2, reason="it could not be started"))
    sleep(run, 0)
    assert len(run.ordered(TrainStep)) == 1


def test_replicas_sample_while_another_of_their_pool_starts() -> None:
    run = small(TWO_TOGETHER, replicas=2, slots=2)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    run.finish(*run.running_on(0))
    assert states(run) == ["ready", "down"] and run.running_on(0) and not run.ordered(TrainStep)
    run.tell(ProcessUp(kind="replica", index=1, life=2, slots=2, version=0))
    assert states(run) == ["yielding", "yielding"]


def test_a_replica_that_dies_while_its_pool_trains_starts_once_the_pool_is_free() -> None:
    run = small(TOGETHER, replica_restarts=1)
    run.finish(0, 1)
    sleep(run)
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    run.train()
    assert not run.ordered(StartProcess), "the weights have not left the pool"
    run.publish()
    assert run.ordered(StartProcess)[-1].life == 2
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=4, version=1))
    assert states(run) == ["ready"]


def test_a_replica_that_leaves_before_its_pool_is_free_never_starts() -> None:
    run = small(TWO_TOGETHER, replicas=2, slots=2)
    run.finish(*run.running_on(0))
    sleep(run, 0)
    sleep(run, 1)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    run.tell(ReplicasWanted(replicas=1))
    run.tell(ProcessLost(kind="replica", index=1, life=2, reason="it was stopped"))
    run.train()
    run.publish()
    assert not run.ordered(StartProcess)


def test_a_trainer_starts_while_the_replicas_of_its_pool_sleep() -> None:
    run = small(TOGETHER, checkpoint_every=5, keeps_batches=True)
    run.finish(0, 1)
    sleep(run)
    run.train()
    run.publish()
    run.tell(WeightsStaged(**place(run), version=1))
    run.tell(WeightsInstalled(**place(run), version=1))
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason="killed"))
    assert states(run) == ["yielding"] and not run.ordered(StartProcess)
    orders = sleep(run)
    assert [order.redo for order in orders if isinstance(order, StartProcess)] == [(0,)]
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="killed"))
    assert len(run.ordered(StartProcess)) == 1, "the replica starts after the trainer"
    orders = run.tell(ProcessUp(kind="trainer", index=0, life=2))
    assert [order.kind for order in orders if isinstance(order, StartProcess)] == ["replica"]


def test_a_trainer_gets_what_was_ordered_while_it_waited_for_its_pool() -> None:
    run = small(TOGETHER, checkpoint_every=1, keeps_batches=True)
    run.finish(0, 1)
    sleep(run)
    run.train()
    run.publish()
    run.tell(WeightsStaged(**place(run), version=1))
    run.tell(WeightsInstalled(**place(run), version=1))
    run.tell(DrainRequested(reason="maintenance"))
    run.tell(ProcessLost(kind="trainer", index=0, life=1, reason="killed"))
    orders = sleep(run)
    kinds = [type(order) for order in orders if isinstance(order, StartProcess | SaveCheckpoint)]
    assert kinds == [StartProcess, SaveCheckpoint]


def test_a_replica_that_joins_while_its_pool_trains_sleeps() -> None:
    run = small(TWO_TOGETHER, replicas=2, slots=2)
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    run.tell(ProcessWaits(kind="replica", index=1, life=2, reason="no room"))
    run.finish(*run.running_on(0))
    sleep(run, 0)
    assert len(run.ordered(TrainStep)) == 1
    run.tell(ProcessUp(kind="replica", index=1, life=2, slots=2, version=0))
    assert states(run) == ["asleep", "yielding"] and not run.running()
    run.tell(ReplicaPaused(**place(run, 1)))
    run.train()
    run.publish()
    run.tell(WeightsStaged(**place(run, 1), version=1))
    run.tell(WeightsInstalled(**place(run, 1), version=1))
    assert states(run) == ["asleep", "ready"] and run.running()


def test_a_batch_that_passed_its_inspection_waits_until_the_pool_has_room() -> None:
    run = small(TWO_TOGETHER, replicas=2, slots=2, added_states=(GATING,))
    run.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    run.tell(ProcessWaits(kind="replica", index=1, life=2, reason="no room"))
    run.finish(*run.running_on(0))
    sleep(run, 0)
    run.tell(ProcessWaits(kind="replica", index=1, life=2, reason=""))
    run.tell(inspection_answer(run.ordered(InspectStep)[-1], succeed=True))
    assert not run.ordered(TrainStep), "the replica takes its GPU before it is up"
    run.tell(ProcessUp(kind="replica", index=1, life=2, slots=4, version=0))
    assert states(run) == ["asleep", "yielding"] and not run.ordered(TrainStep)
    run.tell(ReplicaPaused(**place(run, 1)))
    assert len(run.ordered(TrainStep)) == 1


def test_a_failed_sleep_is_tried_again_and_a_spent_budget_loses_the_replica() -> None:
    run = small(TOGETHER, infrastructure_attempts=3)
    run.finish(0, 1)
    for tried in (1, 2):
        assert len(run.ordered(PauseReplica)) == tried
        run.tell(SyncFailed(**place(run), version=0, reason="no memory"))
        assert states(run) == ["yielding"] and not run.ordered(TrainStep)
    run.tell(SyncFailed(**place(run), version=0, reason="no memory"))
    assert states(run) == ["down"] and not run.ordered(TrainStep), "its process still has the memory"
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="it was stopped"))
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=4, version=0))
    sleep(run)
    assert len(run.ordered(TrainStep)) == 1


def test_held_out_rows_under_way_are_measured_to_their_end_before_a_replica_sleeps() -> None:
    pools = (Pool(tasks=("rollout", "train"), replicas=(0,)), Pool(tasks=("rollout",), replicas=(1,)))
    run = small(pools, replicas=2, slots=2, validation=ValidationLimits(rows=9, rows_per_slot=1, at_start=True))
    run.finish(*run.running_on(1))
    assert states(run) == ["ready", "ready"] and not run.ordered(TrainStep)
    for chunk in (0, 1):
        assert [index for _, index in run.state.orders.open["rows"]] == [0, 1][chunk:], "none is begun"
        run.tell(
            RowsMeasured(validation=0, chunk=chunk, attempt=1, replica=0, life=1, version=0, measured=1, right=1,
                         reward=1.0)
        )  # fmt: skip
    assert states(run) == ["yielding", "ready"]


def test_a_validation_that_fails_lets_its_replica_go_to_sleep() -> None:
    validation = ValidationLimits(rows=2, rows_per_slot=1, at_start=True)
    run = small(TWO_TOGETHER, replicas=2, slots=2, validation=validation, infrastructure_attempts=1)
    run.finish(*run.running_on(1))
    assert states(run) == ["ready", "yielding"]
    sleep(run, 1)
    run.tell(RowsFailed(validation=0, chunk=0, attempt=1, replica=0, life=1, reason="no luck"))
    assert states(run) == ["yielding", "asleep"], "nothing else will ever say that its rows are measured no more"


def test_replicas_do_not_sleep_for_what_has_to_wait_for_another_step() -> None:
    pools = (
        Pool(tasks=("rollout", "old_logprobs"), replicas=(0,)), Pool(tasks=("ref_logprobs",)), Pool(tasks=("train",)),
    )  # fmt: skip
    run = small(pools, scoring_tasks=("ref_logprobs", "old_logprobs"))
    run.finish(0, 1, 2, 3)
    sleep(run)
    score(run, "ref_logprobs")
    score(run, "old_logprobs")
    assert run.state.training.steps_batched == 2, "the reference scores the next batch"
    assert len(run.ordered(TrainStep)) == 1 and states(run) == ["ready"], "its old log-probs wait for this training"
    run.train()
    assert states(run) == ["yielding"]


def test_replicas_of_pools_are_those_of_the_run() -> None:
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=2, pools=LENT)
    limits.require_replicas(2)
    for replicas in (1, 3):
        with pytest.raises(ConfigError, match="numbered from 0, and each stands in one pool"):
            limits.require_replicas(replicas)


def test_training_may_wait_until_every_replica_has_the_newest_weights() -> None:
    run = small((), replicas=2, train_after_sync=True)
    run.train_on(0, 1, 2, 3)
    assert run.state.training.steps_batched == 2 and len(run.ordered(TrainStep)) == 1
    run.install(0)
    assert len(run.ordered(TrainStep)) == 1
    run.install(1)
    assert [order.step for order in run.ordered(TrainStep)] == [0, 1]


def test_training_does_not_wait_for_a_replica_that_a_validation_holds() -> None:
    run = small((), replicas=2, train_after_sync=True, validation=ValidationLimits(rows=2, at_start=True))
    run.train_on(0, 1, 2, 3)
    assert [*run.state.validations.live[0].replicas] == [0], "by the first validation"
    run.install(1)
    assert [order.step for order in run.ordered(TrainStep)] == [0, 1]


@pytest.mark.parametrize(
    ("pools", "more", "law"),
    [
        ((Pool(tasks=("rollout",), replicas=(0,)),), {}, "train is in no pool"),
        ((Pool(tasks=("train", "dream")),), {}, "is not a task"),
        ((Pool(tasks=("train",)), Pool(tasks=("train",))), {}, "train is in pools.0 already"),
        ((Pool(tasks=("train",), replicas=(0,)),), {}, "replicas stand where rollout"),
        ((Pool(tasks=("rollout", "train"), replicas=(0,)), Pool(tasks=("rollout",), replicas=(0,))), {}, "one pool"),
        (TOGETHER, {"train_after_sync": True}, "sleep during training"),
    ],
)
def test_unlawful_pools_are_refused(pools: tuple[Pool, ...], more: dict[str, bool], law: str) -> None:
    with pytest.raises(ConfigError, match=law):
        Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=2, pools=pools, **more)  # type: ignore[arg-type]


def test_replicas_and_trainer_take_turns_only_where_both_stand() -> None:
    assert TOGETHER[0].shared and LENT[1].shared
    assert not any(pool.shared for pool in REFERENCE_APART)


def test_a_replica_that_only_validates_takes_no_turns_with_the_trainer_beside_it() -> None:
    pools = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train", "validation"), replicas=(1,)))
    run = small(pools, replicas=2, validation=ValidationLimits(rows=2, own_from=1))
    run.finish(0, 1)
    assert run.ordered(TrainStep) and states(run) == ["ready", "ready"]
    run.tell(DrainRequested(reason="maintenance"))
    assert states(run) == ["draining", "draining"], "it does not sleep"
