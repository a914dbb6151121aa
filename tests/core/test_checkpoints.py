"""Which checkpoints are deleted, when, and what is known of those that are left."""

from typing import Any

import pytest

from engine.commands import DeleteCheckpoint, FinishRun, SaveCheckpoint, TrainStep
from engine.control.requests import after_resuming
from engine.errors import ConfigError
from engine.events import (
    CheckpointDamaged,
    CheckpointSaved,
    DrainRequested,
    OrderDone,
    ReplicaPaused,
    RunResumed,
    SettingChanged,
)
from engine.metrics.waits import waits
from engine.states.checkpoints import Checkpoints
from tests.core.core_rig import state_of
from tests.core.scripted import Scripted
from tests.core.test_recovery import until_trained, world


def run_of(**limits: Any) -> Scripted:
    """B = 2, S = 1, a checkpoint after every step."""
    bounds = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, "checkpoint_every": 1}
    return Scripted(**{**bounds, **limits})


def save(run: Scripted, count: int = 1, deletes: bool = True) -> None:
    """Train so many steps and save a checkpoint after each. `deletes`: deletions are answered at once."""
    for _ in range(count):
        run.train_on(*run.running()[:2])
        run.install()
        new = run.tell(CheckpointSaved(steps=run.state.training.steps_trained))
        if deletes:
            answer(run, *(order for order in new if isinstance(order, DeleteCheckpoint)))


def answer(run: Scripted, *orders: DeleteCheckpoint) -> None:
    for order in orders:
        run.tell(OrderDone(orders=(order.number,)))


def deleted(run: Scripted) -> list[int]:
    return [order.steps for order in run.ordered(DeleteCheckpoint)]


def resumed(run: Scripted, steps: int | None = None) -> None:
    """New processes: with all there was, or from an older checkpoint."""
    if steps is None:
        run.tell(RunResumed(steps=run.state.training.steps_trained, replicas=1, consumed=(), released=(), kept=True))
        return
    again = (order for order in run.ordered(TrainStep) if steps <= order.step < run.state.training.steps_trained)
    consumed = tuple(group for order in again for group in order.groups)
    run.tell(RunResumed(steps=steps, replicas=1, consumed=consumed, released=()))


# which


def test_those_beyond_the_newest_are_deleted_as_a_newer_one_is_saved() -> None:
    run = run_of()
    save(run, 2)
    assert deleted(run) == []
    save(run, 3)
    assert deleted(run) == [1, 2, 3]
    assert run.state.checkpoints.steps == [4, 5]


@pytest.mark.parametrize(
    ("every", "gone", "left"), [(2, [1, 3], [2, 4, 5]), (3, [1, 2, 4], [3, 5]), (1, [], [1, 2, 3, 4, 5])]
)
def test_multiples_of_keep_checkpoints_every_stay_for_good(every: int, gone: list[int], left: list[int]) -> None:
    run = run_of(keep_checkpoints=1, keep_checkpoints_every=every)
    save(run, 5)
    assert deleted(run) == gone
    assert run.state.checkpoints.steps == left


def test_a_deletion_is_ordered_once_and_the_checkpoint_is_there_until_it_is_done() -> None:
    run = run_of(keep_checkpoints=1)
    save(run, 3, deletes=False)
    assert deleted(run) == [1, 2]
    assert run.state.checkpoints.steps == [1, 2, 3]
    before = state_of(run.scheduler)
    answer(run, *run.ordered(DeleteCheckpoint))
    assert run.state.checkpoints.steps == [3]
    assert state_of(run.scheduler) != before


def test_a_checkpoint_reported_twice_as_saved_counts_once() -> None:
    run = run_of()
    save(run, 2)
    run.tell(CheckpointSaved(steps=2))  # an echo
    assert run.state.checkpoints.steps == [1, 2] and run.state.orders.facts.stale_echoes == 1


def test_engine_waits_names_a_deletion_in_progress() -> None:
    run = run_of(keep_checkpoints=1)
    save(run, 2, deletes=False)
    (wait,) = [wait for wait in waits(run.state) if wait.by == "the trainer"]
    assert (wait.doing, wait.ends) == ("deleting the checkpoint after 1 train step", "OrderDone or ProcessLost")


# the end of a run


def test_a_run_ends_once_its_checkpoints_are_deleted() -> None:
    run = run_of(keep_checkpoints=1, max_steps=2)
    save(run, 2, deletes=False)
    assert not run.ordered(FinishRun)
    answer(run, *run.ordered(DeleteCheckpoint))
    assert run.ordered(FinishRun)[-1].outcome == "finished"


def test_a_drain_ends_once_its_checkpoints_are_deleted() -> None:
    run = run_of(keep_checkpoints=1)
    save(run, 2, deletes=False)
    run.tell(DrainRequested(reason="maintenance"))
    run.abort(*run.running())
    attempt = run.state.replicas.by_id[0].sync_attempt
    run.tell(ReplicaPaused(replica=0, life=1, attempt=attempt))
    assert not run.ordered(FinishRun)
    answer(run, *run.ordered(DeleteCheckpoint))
    assert run.ordered(FinishRun)[-1].outcome == "stopped"


# resumed


def test_what_was_not_deleted_is_ordered_again_after_a_resume() -> None:
    run = run_of(keep_checkpoints=1)
    save(run, 2, deletes=False)
    resumed(run)
    assert deleted(run) == [1, 1]
    first, again = run.ordered(DeleteCheckpoint)
    answer(run, first)
    assert run.state.checkpoints.steps == [1, 2], "the answer of a process that ended"
    answer(run, again)
    assert run.state.checkpoints.steps == [2]


@pytest.mark.parametrize(("steps", "left"), [(2, [1, 2]), (0, [])])
def test_a_branch_forgets_later_checkpoints_and_keeps_those_up_to_it(steps: int, left: list[int]) -> None:
    run = run_of(keep_checkpoints=4)
    save(run, 4)
    resumed(run, steps)
    assert run.state.checkpoints.steps == left
    assert deleted(run) == []


def test_a_branch_forgets_what_was_released_from_its_checkpoint_on() -> None:
    known = Checkpoints(tracks=True)
    for steps in range(4):
        known.release(10 + steps, steps)
    known.branch(2)
    assert known.released == {0: [10], 1: [11]}


def test_a_branch_to_a_checkpoint_whose_report_was_lost_knows_that_it_is_there() -> None:
    run = run_of(keep_checkpoints=1)
    save(run)
    run.finish(*run.running()[:2])
    run.train()
    resumed(run, steps=2)
    assert run.state.checkpoints.steps == [1, 2]
    assert deleted(run) == [1]


# settings


def test_fewer_to_keep_are_deleted_at_once_and_more_from_then_on() -> None:
    run = run_of(keep_checkpoints=4)
    save(run, 4)
    answer(
        run,
        *(
            o
            for o in run.tell(SettingChanged(setting="trainer.keep_checkpoints", value="2"))
            if isinstance(o, DeleteCheckpoint)
        ),
    )
    assert deleted(run) == [1, 2]
    run.tell(SettingChanged(setting="trainer.keep_checkpoints", value="3"))
    save(run)
    assert run.state.checkpoints.steps == [3, 4, 5]
    run.tell(SettingChanged(setting="trainer.keep_checkpoints_every", value="3"))
    save(run, 2)
    assert run.state.checkpoints.steps == [3, 5, 6, 7]


def test_a_resumed_run_keeps_as_many_checkpoints_as_its_new_setting_says() -> None:
    run = run_of(keep_checkpoints=3)
    save(run, 3)
    events = after_resuming(run.scheduler, [("trainer.keep_checkpoints", "1")], replicas=1)
    assert events == (SettingChanged(setting="trainer.keep_checkpoints", value="1"),)
    resumed(run)
    assert deleted(run) == []
    run.tell(events[0])
    assert deleted(run) == [1, 2]


def test_a_value_out_of_bounds_is_no_setting() -> None:
    run = run_of()
    for value in ("0", "1001", "many"):
        with pytest.raises(ConfigError, match=r"trainer\.keep_checkpoints"):
            after_resuming(run.scheduler, [("trainer.keep_checkpoints", value)], replicas=1)


# damaged


def test_a_damaged_checkpoint_is_forgotten_and_an_older_one_kept_in_its_place() -> None:
    run = run_of()
    save(run, 2)
    run.tell(CheckpointDamaged(steps=2, reason="model: is not what was written"))
    assert run.state.checkpoints.steps == [1] and run.state.checkpoints.newest == 1
    save(run)
    assert run.state.checkpoints.steps == [1, 3] and deleted(run) == []


def test_one_that_was_to_be_deleted_stays_where_a_newer_one_is_damaged() -> None:
    run = run_of(keep_checkpoints=1)
    save(run, 2, deletes=False)
    run.tell(CheckpointDamaged(steps=2, reason="model: is not what was written"))
    assert not run.state.orders.open["delete"]
    assert run.state.checkpoints.steps == [1]


def test_a_damaged_one_that_was_to_be_deleted_is_deleted_by_nobody() -> None:
    run = run_of(keep_checkpoints=1)
    save(run, 3, deletes=False)
    run.tell(CheckpointDamaged(steps=1, reason="model: is missing"))
    assert [*run.state.orders.open["delete"]] == [2]
    assert run.state.checkpoints.steps == [2, 3]


def test_damage_to_a_checkpoint_that_nobody_knows_changes_nothing() -> None:
    run = run_of()
    save(run, 2)
    run.tell(CheckpointDamaged(steps=7, reason="model: is missing"))
    assert run.state.checkpoints.steps == [1, 2] and run.state.orders.facts.stale_echoes == 0


def test_the_last_checkpoint_is_written_again_if_it_is_damaged_before_the_run_ends() -> None:
    run = run_of(keep_checkpoints=1, max_steps=2)
    save(run, 2, deletes=False)
    run.tell(CheckpointDamaged(steps=2, reason="model: is missing"))
    assert [order.steps for order in run.ordered(SaveCheckpoint)] == [1, 2, 2]
    assert not run.ordered(FinishRun)


def test_damage_to_newer_checkpoints_does_not_bring_back_what_was_forgotten() -> None:
    run = run_of(keep_checkpoints=3)
    save(run, 3)
    for steps in (3, 2):
        run.tell(CheckpointDamaged(steps=steps, reason="model: is missing"))
    assert (run.state.checkpoints.floor, run.state.checkpoints.newest) == (2, 1), "what is forgotten stays so"
    save(run)
    assert (run.state.checkpoints.floor, run.state.checkpoints.newest) == (2, 4)


# records


def test_what_is_on_the_disk_is_what_the_state_says_after_crashes() -> None:
    made = world(prompts=40, keep_checkpoints=1, keep_checkpoints_every=4, keeps_batches=True)
    for trained, kept in ((5, True), (9, False), (14, True)):
        until_trained(made, trained)
        made.crash(replicas=1, kept=kept)
    assert made.complete().outcome == "finished"
    assert made.scheduler.state.checkpoints.steps == sorted(made.trainer.saved) == [4, 8, 12, 16, 20]


# what the state need not know any more


def test_a_long_run_keeps_no_figures_of_versions_and_steps_that_nothing_refers_to() -> None:
    run = run_of(keep_checkpoints=2, keep_checkpoints_every=10)
    save(run, 40)
    state = run.state
    assert state.checkpoints.steps == [10, 20, 30, 39, 40], "and 38 was there as 40 was saved"
    assert list(state.training.updates_in) == [0, 10, 20, 30, 38, 39, 40], "a trainer may begin at any of them"
    assert 40 in state.training.steps_in and len(state.training.steps_in) <= 4
    assert all(
        group.admitted_version in state.training.steps_in for group in state.groups.live.values() if group.attempt
    )
    resumed(run, 39)
    assert state.training.updates_in[39] == run.state.training.updates_in[30] == 0


def test_without_checkpoints_only_the_newest_updates_are_known() -> None:
    run = run_of(checkpoint_every=0)
    for _ in range(5):
        run.train_on(*run.running()[:2])
        run.install()
    assert list(run.state.training.updates_in) == [0, 5]


def test_the_version_of_a_replica_that_lags_behind_stays_known() -> None:
    run = run_of(replicas=2, max_staleness_steps=3, max_concurrent_groups=8)
    for step in range(8):
        mine = [group for group in run.running() if run.replica_of(group) == 0]
        run.train_on(*mine[:2])
        for replica in (0, 1) if step == 0 else (0,):
            run.install(replica)
    assert run.state.replicas.by_id[1].version == 1
    assert 1 in run.state.training.steps_in and 3 not in run.state.training.steps_in
