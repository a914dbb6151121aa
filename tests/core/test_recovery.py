"""Runs whose every process ends at once and that continue from their record and their checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvariantViolated, RecordError
from engine.events import ProcessLost, RunResumed, stamp
from engine.policies import PolicySet
from engine.record.frames import Header, Rejected
from engine.record.reader import read
from engine.record.recorder import MemoryRecorder
from engine.record.recovery import recover
from engine.record.replayer import replay
from engine.record.segment_log import Index, store_index
from engine.states.limits import Limits
from engine.states.timeouts import Timeouts
from tests.core.added_states import CHECKING
from tests.core.adversary import Adversary
from tests.core.core_rig import require_same_state
from tests.core.moves import any_limits, any_policies, drawn
from tests.core.scripted import Scripted


def world(prompts: int = 12, slots: int = 4, replicas: int = 1, **figures: object) -> Adversary:
    """B = 2, S = 1, a checkpoint after every second step."""
    bounds = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, "checkpoint_every": 2}
    limits = Limits(**{**bounds, **figures})  # type: ignore[arg-type]
    return Adversary(limits, PolicySet.from_names({}), prompts, slots, replicas=replicas)


def until_trained(made: Adversary, steps: int) -> None:
    """Let things happen until so many steps are trained."""
    while made.state.training.steps_trained < steps:
        assert made.act()


@given(
    limits=drawn(any_limits), names=drawn(any_policies), prompts=st.integers(1, 40), slots=st.integers(1, 4),
    replicas=st.integers(1, 3),
    crashes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3), st.booleans(), st.integers(2, 9)), max_size=4),
    keeps=st.booleans(), together=st.sampled_from([1, 1, 3]), snapshot_every=st.sampled_from([0, 1, 7, 30]),
)  # fmt: skip
def test_wherever_a_run_is_cut_it_ends_as_if_it_had_not_been(
    limits: Limits, names: dict[str, str], prompts: int, slots: int, replicas: int,
    crashes: list[tuple[int, int, bool, int]], keeps: bool, snapshot_every: int, together: int,
) -> None:  # fmt: skip
    """Each prompt ends once in the line of weights that survives, no group is consumed too late, the record replays;
    whether the trajectories survive as well, most of them, or none does."""
    limits = replace(limits, keeps_batches=keeps and limits.checkpoint_every > 0)
    policies = PolicySet.from_names(names)
    made = Adversary(limits, policies, prompts, slots, snapshot_every, together=together, replicas=replicas)
    for actions, replicas_then, kept, gap in crashes:
        for _ in range(actions):
            if made.driver.outcome is not None or not made.act():
                break
        if made.driver.outcome is not None and made.driver.outcome.outcome == "finished":
            break
        made.crash(max(replicas_then, made.least), kept=kept, missing=lambda group, gap=gap: group % gap == 1)
        made.restore_twin()
    outcome = made.complete()
    assert outcome.outcome == "finished", outcome
    report = replay(read(made.recorder))
    assert report.identical and report.events == made.driver.events_handled


def test_what_the_checkpoint_does_not_hold_is_done_again_and_nothing_else() -> None:
    made = world()
    until_trained(made, 3)
    before = dict(made.judge.ledger.books.taken)
    assert made.trainer.saved == [2]
    made.crash(replicas=1)
    (event,) = [e for e in made.history if isinstance(e, RunResumed)]
    assert event.steps == 2
    assert event.consumed == tuple(sorted(group for group, step in before.items() if step == 2))
    state = made.state
    assert state.groups.ledger.consumed == 4 and state.training.steps_trained == state.training.steps_batched == 2
    assert list(state.groups.waiting) == sorted(
        set(range(state.groups.ledger.drawn)) - {g for g, s in before.items() if s < 2}
    )
    assert made.complete().outcome == "finished"
    assert {group: step for group, step in made.judge.ledger.books.taken.items() if step < 2} == {
        group: step for group, step in before.items() if step < 2
    }


def test_without_a_checkpoint_it_begins_with_the_initial_weights_under_a_new_version() -> None:
    made = world(checkpoint_every=0)
    until_trained(made, 2)
    published = made.state.training.latest_version
    made.crash(replicas=1)
    assert made.state.training.steps_trained == 0
    assert made.state.capacity == 4, "places are those of the weights there are, not of those that were"
    assert made.complete().outcome == "finished"
    assert made.judge.ledger.books.steps_in[published + 1] == 0


def test_a_run_that_failed_goes_on_once_its_cause_is_gone() -> None:
    made = world(infrastructure_attempts=1)
    until_trained(made, 2)
    while not (made.state.training.training_step and made.trainer.work):
        assert made.act()
    while made.driver.outcome is None:
        if made.trainer.work:
            made.trainer.do(succeed=False)
        made.act()
    assert made.driver.outcome.outcome == "failed"
    made.crash(replicas=1)
    assert made.complete().outcome == "finished"


def test_a_replica_that_is_not_started_again_is_not_waited_for() -> None:
    made = world(replicas=2)
    until_trained(made, 1)
    made.crash(replicas=1)
    replicas = made.state.replicas.by_id
    assert (replicas[1].process.wanted, replicas[1].process.state) == (False, "gone")
    made.arrive_up(0)
    made.kill(0, final=True)
    while made.sources() and made.driver.outcome is None:
        made.arrive_up(made.sources()[0])
    for _ in range(50):
        if made.driver.outcome is None:
            made.act()
    assert made.driver.outcome is not None and "no replica is left" in made.driver.outcome.reason


def test_budgets_of_groups_under_way_are_not_given_anew() -> None:
    made = world(infrastructure_attempts=3)
    made.draw()
    made.arrive_up(0)
    while not made.running():
        made.arrive_down(0)
    replica, group = made.running()[0]
    replica.fail(group, "infrastructure")
    made.arrive_up(0)
    attempt = made.state.groups.live[group].attempt
    made.crash(replicas=1)
    again = made.state.groups.live[group]
    assert (again.state, again.infrastructure_failures, again.attempt) == ("queued", 1, attempt)


def test_a_resume_from_a_checkpoint_knows_which_groups_hung() -> None:
    run = Scripted(
        train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1, timeouts=Timeouts.every(None, group_s=4.0)
    )
    run.wait(5.0)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=False))
    again = run.state.groups.live[0]
    assert (again.state, again.exceeded) == ("queued", 1)


def test_a_resume_from_a_checkpoint_knows_whose_data_failed() -> None:
    run = Scripted(train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1)
    run.fail(0, cause="data")
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=False))
    assert run.state.groups.live[0].data_failures == 1


@pytest.mark.parametrize(
    ("steps", "consumed", "said"),
    [(9, (), "did not train"), (-1, (), "did not train"), (0, (0, 0), "only a group"), (0, (11,), "only a group"),
     (0, (999,), "only a group"), (0, (-1,), "only a group")],
)  # fmt: skip
def test_what_cannot_have_happened_is_refused(steps: int, consumed: tuple[int, ...], said: str) -> None:
    made = world()
    until_trained(made, 2)
    event = RunResumed(steps=steps, replicas=1, consumed=consumed, released=())
    stamp(event, made.driver.events_handled, made.time)
    with pytest.raises(InvariantViolated, match=said):
        made.scheduler.tick((event,))


def test_an_event_that_was_rejected_does_not_stand_in_the_way() -> None:
    made = world()
    until_trained(made, 1)
    with pytest.raises(InvariantViolated):
        made.driver.deliver(RunResumed(steps=99, replicas=1, consumed=(), released=()))
    assert any(isinstance(frame, Rejected) for frame in read(made.recorder).frames())
    made.crash(replicas=1)
    assert made.complete().outcome == "finished"


def test_a_record_that_this_engine_would_not_have_written_is_not_gone_on_with() -> None:
    made = world()
    until_trained(made, 2)
    other = replace(made.limits, max_concurrent_groups=2)
    forged = MemoryRecorder(Header(run="forged", limits=other.to_plain()))
    forged.frames = made.recorder.frames
    with pytest.raises(RecordError, match="decides differently"):
        recover(read(forged))
    recovered = recover(read(made.recorder))
    assert recovered.events == made.driver.events_handled and recovered.at == made.time
    require_same_state(recovered.scheduler, made.scheduler)


def test_a_replica_lost_before_the_crash_may_come_back_after_it() -> None:
    made = world(replicas=2)
    until_trained(made, 1)
    made.kill(1, final=True)
    while not any(isinstance(event, ProcessLost) for event in made.history):
        made.arrive_up(1001)
    made.crash(replicas=2)
    assert made.state.replicas.by_id[1].process.state == "starting"
    assert made.complete().outcome == "finished"


def busy() -> Adversary:
    """Three steps trained, the last checkpoint after two, a batch formed, a group ready, others running."""
    made = world(keeps_batches=True, prompts=40)
    until_trained(made, 3)
    state = made.state
    while not (state.training.training_step and state.groups.ready):
        for source in made.sources():
            made.arrive_up(source)
        for id in made.addressees():
            made.arrive_down(id)
        for replica in made.syncing():
            replica.sync()
        for replica, group in made.running()[:1]:
            replica.finish(group)
        for worker in made.working() if not state.training.training_step else ():
            worker.do()
        for _ in list(made.draws):
            made.draw()
    return made


def test_nothing_but_what_ran_is_lost_where_the_trajectories_are_kept() -> None:
    """B = 2, S = 1: three steps trained, a batch formed, a group ready, others running; all of it is there again."""
    made = busy()
    state = made.state
    taken, ready = dict(made.judge.ledger.books.taken), list(state.groups.ready)
    step = state.training.training_step
    assert step is not None
    budgets = {group.id: group.infrastructure_failures for group in state.groups.live.values()}
    made.crash(replicas=1, kept=True)
    state = made.state
    assert (
        state.training.steps_trained == 3
        and made.judge.ledger.books.taken == taken
        and list(state.groups.ready) == ready
    )
    again = state.training.training_step
    assert again is not None and (again.groups, again.attempt) == (step.groups, step.attempt + 1)
    assert {group.id: group.infrastructure_failures for group in state.groups.live.values()} == budgets
    assert made.complete().outcome == "finished"


def test_work_of_an_added_state_whose_process_ended_the_run_is_done_after_a_resume() -> None:
    made = world(prompts=2, train_batch_size=1, max_staleness_steps=0, max_concurrent_groups=1, max_steps=2,
                 checkpoint_every=1, added_states=(CHECKING,), worker_restarts=0)  # fmt: skip
    while not made.judged:
        for kind, source in (("down", made.addressees()), ("up", made.sources())):
            for one in source:
                (made.arrive_down if kind == "down" else made.arrive_up)(one)
        if made.draws:
            made.draw()
        for replica, group in made.running():
            replica.sample(group, 10)
            replica.finish(group)
    made.kill_worker("added states")
    assert made.driver.outcome is not None and made.driver.outcome.outcome == "failed"
    made.crash(1, kept=True)
    made.complete(500)
    assert made.state.training.steps_trained == 2


def test_a_batch_is_kept_until_a_checkpoint_contains_its_step() -> None:
    made = world(keeps_batches=True, checkpoint_every=2)
    until_trained(made, 3)
    gone = {group for group, step in made.judge.ledger.books.taken.items() if step < 3} & made.store.discarded
    assert gone == {group for group, step in made.judge.ledger.books.taken.items() if step < 2}
    assert made.state.checkpoints.stored_batches.keys() == {2}


def test_a_ready_group_whose_trajectories_are_gone_begins_again_in_its_place() -> None:
    made = world(slots=3)
    while not made.state.groups.ready:
        assert made.act()
    (lost, *_) = made.state.groups.ready
    before = made.state.groups.live[lost]
    made.crash(replicas=1, kept=True, missing=lambda group: group == lost)
    group = made.state.groups.live[lost]
    assert (group.state, group.deadline, group.tokens) == ("aborted", before.deadline, 0)
    assert made.complete().outcome == "finished"


def test_a_formed_batch_cannot_lose_a_group() -> None:
    made = world()
    until_trained(made, 1)
    while not made.trainer.work:
        assert made.act()
    step = made.state.training.training_step
    assert step is not None
    steps = made.state.training.steps_trained
    event = RunResumed(steps=steps, replicas=1, consumed=(), released=(), kept=True, missing=step.groups[:1])
    stamp(event, made.driver.events_handled, made.time)
    with pytest.raises(InvariantViolated, match="cannot be generated again"):
        made.scheduler.tick((event,))


def test_stragglers_are_waited_for_anew() -> None:
    limits = Limits(train_batch_size=2, max_staleness_steps=0, max_concurrent_groups=2)
    made = Adversary(limits, PolicySet.from_names({"deadline": "drop"}), prompts=4, slots=2)
    made.join(0)
    while not made.timers:
        for source in made.sources():
            made.arrive_up(source)
        for id in made.addressees():
            made.arrive_down(id)
        for replica, group in made.running()[:1] if len(made.running()) == 2 else ():
            replica.finish(group)
        for _ in list(made.draws):
            made.draw()
    (timer,) = made.timers
    made.crash(replicas=1, kept=True)
    (again,) = made.timers
    assert again.name == timer.name and again.timer > timer.timer


def test_what_no_step_needs_is_not_looked_for_in_the_whole_record(tmp_path: Path) -> None:
    """Where there are no checkpoints a snapshot says nothing of what has ended, and the record may be long."""
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)
    made = Adversary(limits, PolicySet.from_names({}), 12, 4, 7)
    made.join(0)
    until_trained(made, 2)
    path = tmp_path / "00000000.seg"
    path.write_bytes(made.recorder.to_bytes())
    store_index(tmp_path, Index([None]))
    recovered = recover(read(tmp_path))
    assert recovered.began_at is not None
    path.unlink()
    assert recovered.batches(2) == []
