"""The laws that are checked after every event find each kind of broken book: a check that cannot fail is none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from engine.commands import ScoreBatch
from engine.errors import InvariantViolated
from engine.events import SettingChanged
from engine.states.group import Group
from engine.states.laws import check_all, check_batch, check_pools, check_tick
from engine.states.ledger import PARKED, READY, RUNNING, WAITING
from engine.states.limits import Pool
from engine.states.state import State
from tests.core.added_states import CHECKING
from tests.core.scripted import Scripted


def at_work() -> State:
    """Two replicas: 0 runs group 0, 1 runs group 1; group 2 is ready."""
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=3, replicas=2)
    run.finish(2)
    check_all(run.state)
    return run.state


def lose_a_group(state: State) -> None:
    state.groups.ledger.count[RUNNING] -= 1


def count_below_zero(state: State) -> None:
    state.groups.ledger.count[PARKED] -= 1
    state.groups.ledger.count[READY] += 1


def run_too_many(state: State) -> None:
    state.groups.ledger.count[RUNNING] += 4
    state.groups.ledger.drawn += 4


def owe_a_passed_step(state: State) -> None:
    state.training.next_step(state.training.steps_batched + 2, state.facts.now)


def owe_too_many(state: State) -> None:
    state.groups.deadlines.surplus -= 9


def move_a_phase(state: State) -> None:
    state.groups.ledger.count[RUNNING] -= 1
    state.groups.ledger.count[WAITING] += 1


def repeat_an_attempt(state: State) -> None:
    state.groups.live[next(iter(state.orders.open["group"]))].attempt += 1


def end_too_many_trajectories(state: State) -> None:
    group = state.groups.live[next(iter(state.orders.open["group"]))]
    state.groups.finish_trajectories(group, 1 + state.replicas.by_id[0].samples)


def take_a_seat(state: State) -> None:
    state.orders.withdraw("group", next(iter(state.orders.open["group"])))


def move(group: Group) -> None:
    group.deadline += 1


def move_a_deadline(state: State) -> None:
    move(next(group for group in state.groups.live.values() if group.state == "generating"))


def run_ahead(state: State) -> None:
    state.replicas.by_id[0].version += 1


def run_behind(state: State) -> None:
    state.groups.live[next(iter(state.orders.open["group"]))].newest_version = 1


def forget_ready(state: State) -> None:
    state.groups.ready.clear()


def park_a_running_group(state: State) -> None:
    state.groups.parked[next(iter(state.orders.open["group"]))] = None


def forget_what_finishes(state: State) -> None:
    state.groups.live[next(iter(state.orders.open["group"]))].finished = 1


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (lose_a_group, "law 1: a group was lost or counted twice"),
        (count_below_zero, "law 1: a group was lost or counted twice"),
        (run_too_many, "law 2: more groups run than allowed"),
        (owe_a_passed_step, "law 4: a group is left behind"),
        (owe_too_many, "law 4: more groups are due"),
        (move_a_phase, "law 1: books and records differ"),
        (repeat_an_attempt, "law 10: an attempt runs that its group does not know"),
        (end_too_many_trajectories, "law 2: more trajectories ended than were running"),
        (take_a_seat, "law 1: a running group has no seat"),
        (move_a_deadline, "law 4: a deadline was moved"),
        (run_ahead, "law 6: a replica is ahead"),
        (run_behind, "law 3: a group runs on a replica older than its tokens"),
        (forget_ready, "law 1: the ready list"),
        (park_a_running_group, "law 7: the list of parked groups"),
        (forget_what_finishes, "law 2: the list of groups that finish"),
    ],
)
def test_a_broken_book_is_named_by_its_law(broken: Callable[[State], None], law: str) -> None:
    state = at_work()
    broken(state)
    with pytest.raises(InvariantViolated, match=law):
        check_all(state)


def test_an_added_state_works_on_as_many_groups_as_it_may() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=3, added_states=(CHECKING,))
    run.finish(0)
    queue = run.state.groups.state_queues.by_name["checking"]
    assert queue.working == queue.concurrency == 1
    queue.concurrency = 0
    with pytest.raises(InvariantViolated, match="law 2: a state works on more than it may"):
        check_all(run.state)


def test_a_pool_is_leased_only_to_what_is_in_progress() -> None:
    pools = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",)))
    run = Scripted(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=2, scoring_tasks=("ref_logprobs",), pools=pools
    )
    run.finish(0)
    run.finish(1)
    lease = run.state.pools.of("ref_logprobs")
    assert lease.task == "ref_logprobs"
    again = structs.replace(run.ordered(ScoreBatch)[0], step=1)
    run.state.orders.add(again)
    with pytest.raises(InvariantViolated, match="a pool has several tasks at once"):
        check_pools(run.state)
    run.state.orders.withdraw("score", (1, "ref_logprobs"))
    check_all(run.state)
    lease.task = "old_logprobs"
    with pytest.raises(InvariantViolated, match="a pool is leased to a task that is not in progress"):
        check_all(run.state)


def test_groups_beyond_a_lowered_bound_may_run_on_but_are_not_replaced() -> None:
    run = Scripted(train_batch_size=1, max_staleness_steps=3, max_concurrent_groups=4)
    run.tell(SettingChanged(setting="scheduler.max_concurrent_groups", value="2"))
    assert len(run.running()) == 4
    run.finish(0)
    assert run.running() == [1, 2, 3]
    run.state.limits = replace(run.state.limits, max_concurrent_groups=1)
    with pytest.raises(InvariantViolated, match="law 2"):
        check_all(run.state)


def test_a_deadline_may_be_as_late_as_the_loosest_bound_of_the_run_and_no_later() -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=3)
    run.tell(SettingChanged(setting="scheduler.max_staleness_steps", value="1"))
    run.tell(SettingChanged(setting="scheduler.max_staleness_steps", value="2"))
    check_all(run.state)
    move(run.state.groups.live[0])
    with pytest.raises(InvariantViolated, match="law 4: a deadline was moved"):
        check_all(run.state)


def test_as_many_groups_as_allowed_may_run_and_no_more() -> None:
    state = at_work()
    count = state.limits.max_concurrent_groups - state.groups.ledger.running
    state.groups.ledger.count[RUNNING] += count
    state.groups.ledger.drawn += count
    check_tick(state)
    state.groups.ledger.count[RUNNING] += 1
    state.groups.ledger.drawn += 1
    with pytest.raises(InvariantViolated, match="law 2"):
        check_tick(state)


@pytest.mark.parametrize(
    ("staleness", "groups", "law"),
    [((0, 2), (0, 1), "staler than allowed"), ((0, -1), (0, 1), "staler"), ((0, 0), (1, 1), "in a batch twice")],
)
def test_a_batch_that_breaks_a_law_is_not_formed(staleness: tuple[int, ...], groups: tuple[int, ...], law: str) -> None:
    state = at_work()
    check_batch(state, 0, (0, 1), (0, 1))
    with pytest.raises(InvariantViolated, match=law):
        check_batch(state, 0, staleness, groups)
