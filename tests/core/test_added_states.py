"""Added states, worked out by hand: who enters, how many are worked on, failures, drops, the end of a run, a resume."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine import policies
from engine.commands import AbortGroup, DiscardGroups, EnterState, FinishRun, TrainStep, TruncateGroup
from engine.errors import ConfigError, PolicyError
from engine.events import DrainRequested, ProcessLost, ReplicaPaused, RunResumed, StateFailed, StateLeft
from engine.policies import state_registry
from engine.states.group import GROUP, Group, group_table
from engine.states.laws import check_all
from engine.states.limits import AddedState, Limits
from engine.states.view import view_group
from tests.core.added_states import CHECKING
from tests.core.scripted import Scripted


class All:
    def enters(self, view: Any, group: Any) -> bool:
        return True


policies.add_state(
    machine="group", state="fetching-all", phase="waiting", between=("queued", "generating"), policy=All, concurrency=2
)
(FETCHING_ALL,) = policies.added_states(("fetching-all",))


@pytest.fixture
def own() -> Iterator[None]:
    """States that a test adds are known to that test alone."""
    before = dict(state_registry._ADDED)
    yield
    state_registry._ADDED.clear()
    state_registry._ADDED.update(before)


def add(state: str, enters: Any, concurrency: int = 1) -> AddedState:
    policies.add_state(
        machine="group", state=state, phase="parked", between=("generated", "batched"),
        policy=type("Own", (), {"enters": enters}), concurrency=concurrency,
    )  # fmt: skip
    return AddedState(name=state, concurrency=concurrency)


def checked(*states: AddedState, **others: Any) -> Scripted:
    """B = 2, S = 1, K = 4; every group is checked, one at a time."""
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4}
    return Scripted(**{**figures, "added_states": states or (CHECKING,), **others})


def leave(run: Scripted, group: int, *, spread: float = 1.0, reward: float = 0.5, attempt: int | None = None) -> None:
    order = [c for c in run.ordered(EnterState) if c.group == group][-1]
    run.tell(
        StateLeft(
            group=group, attempt=order.attempt if attempt is None else attempt, state=order.state, trainable=2,
            reward_mean=reward, reward_spread=spread,
        )
    )  # fmt: skip


def fail(run: Scripted, group: int, cause: str = "data") -> None:
    order = [c for c in run.ordered(EnterState) if c.group == group][-1]
    run.tell(StateFailed(group=group, attempt=order.attempt, state=order.state, cause=cause, reason="no judge"))


def orders(run: Scripted) -> list[tuple[int, int]]:
    return [(c.group, c.attempt) for c in run.ordered(EnterState)]


def test_groups_leave_their_slots_and_are_worked_on_first_come_first_served() -> None:
    run = checked()
    run.finish(2, 0, 1)
    assert orders(run) == [(2, 2)]
    assert run.running() == [3], "they keep their places: nobody is admitted in their stead"
    assert run.view.phase_counts()["parked"] == 3
    assert not run.ordered(TrainStep)
    leave(run, 2)
    assert orders(run) == [(2, 2), (0, 2)]
    assert run.view.ready == 1
    leave(run, 0)
    assert run.ordered(TrainStep)[0].groups == (2, 0)


def test_a_state_works_on_as_many_groups_as_its_concurrency() -> None:
    run = checked(AddedState(name="checking", concurrency=3))
    run.finish(0, 1, 2, 3)
    assert [group for group, _ in orders(run)] == [0, 1, 2]
    leave(run, 1)
    assert [group for group, _ in orders(run)] == [0, 1, 2, 3]


def test_only_groups_that_its_policy_admits_enter_a_state_and_states_form_a_sequence(own: None) -> None:
    odd = add("odd", lambda self, view, group: group.id % 2 == 1)
    rewarded = add("rewarded", lambda self, view, group: group.reward_mean > 0.6)
    run = checked(odd, rewarded)
    run.finish(0)
    assert run.view.ready == 1, "neither wants it: its reward is 0.5"
    run.finish(1)
    leave(run, 1, reward=0.9)
    assert [(c.group, c.state) for c in run.ordered(EnterState)] == [(1, "odd"), (1, "rewarded")]
    leave(run, 1)
    assert run.ordered(TrainStep)[0].groups == (0, 1)


def test_the_filter_sees_what_the_last_state_made_of_a_group() -> None:
    run = checked(policies={"filter": "zero-variance"})
    run.finish(0, spread=1.0)
    assert run.state.groups.live[0].state == "checking"
    leave(run, 0, spread=0.0)
    assert run.view.group(0) is None
    assert run.running() == [1, 2, 3, 4], "its place is free again"


def test_a_group_is_completed_once_with_the_reward_of_its_last_state() -> None:
    run = checked(policies={"filter": "zero-variance"})
    run.finish(0, 1)
    assert not run.state.completed, "one is worked on, the other waits for that"
    leave(run, 0, reward=0.9)
    assert run.state.completed == {0: 0.9}
    leave(run, 0, reward=0.1)
    assert not run.state.completed


def test_a_failure_costs_an_attempt_of_its_budget_and_the_work_is_ordered_again() -> None:
    run = checked(data_attempts=2, infrastructure_attempts=3)
    run.finish(0, 1)
    fail(run, 0)
    assert orders(run) == [(0, 2), (1, 2)], "it waits behind the other"
    group = run.view.group(0)
    assert group is not None and (group.tokens, group.data_failures) == (10, 1)
    leave(run, 1)
    assert orders(run)[-1] == (0, 3)
    fail(run, 0, "infrastructure")
    fail(run, 0)
    assert run.view.group(0) is None
    assert run.state.ending.failed_in_a_row == 1
    assert run.state.ending.last_failure == "no judge"


def test_an_answer_to_an_order_already_over_changes_nothing() -> None:
    run = checked()
    run.finish(0)
    for wrong in (1, 3):
        leave(run, 0, attempt=wrong)
    run.tell(StateLeft(group=0, attempt=2, state="weighing", trainable=2, reward_mean=0.0, reward_spread=0.0))
    assert run.state.orders.facts.stale_echoes == 3
    assert run.state.groups.live[0].state == "checking"
    leave(run, 0)
    leave(run, 0)
    assert run.state.orders.facts.stale_echoes == 4


def test_a_lost_replica_takes_nothing_from_groups_whose_tokens_are_there() -> None:
    run = checked()
    run.finish(0)
    run.tell(ProcessLost(kind="replica", index=0, life=1, reason="x"))
    group = run.view.group(0)
    assert group is not None and (group.state, group.infrastructure_failures) == ("checking", 0)
    leave(run, 0)
    assert run.view.ready == 1


def straggler_in_a_state(decision: str) -> Scripted:
    """Groups 0 and 4 are ready for step 1, which waits for 1: it is due by then, and is being checked."""
    run = checked(AddedState(name="checking", concurrency=1), policies={"deadline": decision})
    for group in (2, 3):
        run.finish(group)
        leave(run, group)
    run.train()
    run.publish()
    run.install()
    for group in (0, 4):
        run.finish(group)
        leave(run, group)
    run.finish(1, 5)
    assert orders(run)[-1] == (1, 2) and len(run.ordered(TrainStep)) == 1
    run.fire()
    return run


def test_a_straggler_in_a_state_is_dropped_and_the_next_group_worked_on() -> None:
    run = straggler_in_a_state("drop")
    assert run.ordered(TrainStep)[1].groups == (0, 4)
    assert (1,) in [order.groups for order in run.ordered(DiscardGroups)]
    assert orders(run)[-1] == (5, 2)


def test_a_straggler_in_a_state_has_nothing_that_could_be_truncated() -> None:
    run = straggler_in_a_state("truncate")
    assert len(run.ordered(TrainStep)) == 1
    assert not run.state.groups.live[1].truncate and not run.ordered(TruncateGroup)
    leave(run, 1)
    assert run.ordered(TrainStep)[1].groups == (0, 1)


def test_dropping_needs_no_order_but_that_its_trajectories_go() -> None:
    """B = 2, S = 0, x = 0.5: three start; the third is judged when the batch is full."""
    run = checked(AddedState(name="checking", concurrency=3), max_staleness_steps=0, max_concurrent_groups=3,
                  over_sample=0.5)  # fmt: skip
    run.finish(0, 1, 2)
    leave(run, 0)
    leave(run, 1)
    assert run.ordered(TrainStep)[0].groups == (0, 1)
    assert run.ordered(DiscardGroups)[-1].groups == (2,)
    assert not run.ordered(AbortGroup)
    assert run.state.groups.state_queues.out == 0
    leave(run, 2)
    assert run.state.orders.facts.stale_echoes == 1


def test_groups_in_states_are_let_go_at_the_end_of_the_run() -> None:
    run = checked(AddedState(name="checking", concurrency=3), max_steps=1, over_sample=1.0)
    run.finish(0, 1, 2)
    leave(run, 0)
    leave(run, 1)
    run.train()
    run.publish()
    assert run.ordered(FinishRun)[0].outcome == "finished"
    assert run.view.phase_counts()["released"] > 0


def test_a_resumed_run_generates_groups_again_that_were_in_states() -> None:
    run = checked()
    run.finish(0, 1)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=()))
    assert run.state.groups.state_queues.groups_at("generated") == 0
    group = run.view.group(0)
    assert group is not None and group.state == "queued"


def test_a_state_policy_in_error_is_named(own: None) -> None:
    broken = add("broken", lambda self, view, group: 1 // 0)
    run = checked(broken)
    with pytest.raises(PolicyError, match="the policy of state broken raised ZeroDivisionError"):
        run.finish(0)


# before generation


def fetched(**others: Any) -> Scripted:
    """B = 2, S = 1, K = 4; every group is fetched before it starts, two at a time."""
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4}
    return Scripted(**{**figures, "added_states": (FETCHING_ALL,), **others})


def test_groups_before_generation_hold_no_place_and_start_in_the_order_of_the_draws() -> None:
    run = fetched()
    assert orders(run) == [(0, 1), (1, 1)]
    assert run.running() == [] and run.view.held == 0
    assert run.view.waiting == run.state.groups.ledger.drawn
    leave(run, 1)
    assert orders(run)[-1] == (2, 1) and run.running() == [1]
    group = run.view.group(1)
    assert group is not None and (group.state, group.attempt) == ("generating", 2)
    for prepared in (0, 2, 3, 5, 4):
        leave(run, prepared)
    assert run.running() == [0, 1, 2, 3]
    assert [*run.state.groups.waiting] == [4, 5]
    check_all(run.state)


def test_policies_see_the_fields_that_a_state_before_generation_has_changed() -> None:
    run = fetched()
    order = run.ordered(EnterState)[-1]
    known = '{"source": "", "fields": {"level": 2}}'
    run.tell(
        StateLeft(group=order.group, attempt=order.attempt, state=order.state, trainable=0, reward_mean=0.0,
                  reward_spread=0.0, described=known)
    )  # fmt: skip
    group = run.view.group(order.group)
    assert group is not None and group.fields == {"level": 2}


def test_a_group_that_cannot_be_prepared_fails_without_a_place() -> None:
    run = fetched(data_attempts=2)
    fail(run, 0)
    assert orders(run)[-1] == (2, 1), "it waits behind the others"
    leave(run, 1)
    for group in (2, 3):
        leave(run, group)
    while run.view.group(0) is not None:
        waiting = [c.group for c in run.ordered(EnterState) if run.state.orders.find("state", c.group)]
        fail(run, 0) if 0 in waiting else leave(run, waiting[0])
    assert run.view.phase_counts()["released"] == 1 and run.state.ending.last_failure == "no judge"
    check_all(run.state)


def test_a_run_that_branches_prepares_its_groups_again() -> None:
    run = fetched()
    leave(run, 0)
    run.finish(0)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=()))
    assert {group.state for group in run.view.groups()} == {"fetching-all"}
    assert not any(group.prepared for group in run.state.groups.live.values())
    check_all(run.state)


def test_groups_whose_prompts_were_lost_are_prepared_again_unless_they_had_begun() -> None:
    run = fetched(keeps_batches=True, checkpoint_every=1)
    leave(run, 0)
    leave(run, 1)
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True, missing=(0, 1)))
    assert run.view.group(0) is None and run.view.group(1) is None, "both had begun"
    assert (0, 1) in [order.groups for order in run.ordered(DiscardGroups)]
    check_all(run.state)


# what is checked when a state is added


def a_policy(**methods: Any) -> type:
    return type("Own", (), {"enters": lambda self, view, group: True, **methods})


async def no_group(self: Any) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"machine": "pool"}, "machine is 'pool', but must be group or step: only prompt groups"),
        ({"machine": "step"}, "lies before the training, or before replicas get the weights; use"),
        ({"phase": "ready"}, "a train step may take a ready group.*; use parked"),
        ({"phase": "running"}, "law 2 would count a slot that this group no longer has"),
        ({"phase": "waiting"}, "law 4 would not count"),
        ({"phase": "idle"}, "is not a phase"),
        ({"between": ("batched", "consumed")}, "lies before a group's generation, or between its last token and"),
        ({"between": ("queued", "generating")}, "a parked group holds a place.*; use waiting"),
        ({"state": "Judging!"}, "must be a word"),
        ({"state": "aborted"}, "is already a state or trigger"),
        ({"state": "resume"}, "is already a state or trigger"),
        ({"state": "prepare"}, "is already a state or trigger"),
        ({"state": "checking"}, "is already a state or trigger"),
        ({"phase": None}, "phase is not set: a state of groups has a phase; use parked"),
        ({"policy": object}, "must be a class with a method enters"),
        ({"policy": 7}, "must be a class with a method enters"),
        (
            {"policy": a_policy(enters=lambda self, group: True)},
            r"its enters\(\) cannot be called .*; define def enters",
        ),
        ({"policy": a_policy(work=lambda self, group: group)}, r"is not a coroutine function; define async def work\("),
        ({"policy": a_policy(work=no_group)}, r"its work\(\) cannot be called .*; define async def work\(self, group"),
        ({"concurrency": 0}, "scheduler.states.fresh.concurrency is 0, but must be at least 1"),
        ({"api": 2}, "needs a policy API version"),
    ],
)
def test_a_state_that_breaks_a_law_is_refused(own: None, wrong: dict[str, Any], says: str) -> None:
    lawful: dict[str, Any] = {
        "machine": "group", "state": "fresh", "phase": "parked", "between": ("generated", "batched"),
        "policy": a_policy(), "concurrency": 1,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=says):
        policies.add_state(**{**lawful, **wrong})
    assert "fresh" not in policies.state_names()
    policies.add_state(**lawful)


def test_what_a_policy_sees_of_a_group_cannot_be_changed() -> None:
    seen = view_group(Group(id=0))
    for values in (seen.fields, seen.rewards):
        with pytest.raises(TypeError, match="does not support item assignment"):
            values["calls"] = 1  # type: ignore[index]


def test_one_table_serves_the_same_states_and_the_plain_one_none() -> None:
    assert group_table() is GROUP
    table = group_table(("judging", "checking"))
    assert table is group_table(("judging", "checking")) is not group_table(("checking", "judging"))
    assert table.states[: len(GROUP.states)] == GROUP.states
    assert table.target("judging", "checking") == "checking"
    assert table.target("checking", "judging") is None
    assert table.target("generating", "judging") == "judging"


def test_a_state_that_nobody_added_is_refused_with_the_nearest_name() -> None:
    figures = {"train_batch_size": 1, "max_staleness_steps": 0, "max_concurrent_groups": 1}
    with pytest.raises(ConfigError, match=r"'weihing' is not a registered state; .*; did you mean weighing"):
        Scripted(**figures, added_states=(AddedState(name="weihing", concurrency=1),))
    with pytest.raises(ConfigError, match="names a state twice"):
        Limits(**figures, added_states=(CHECKING, CHECKING))  # type: ignore[arg-type]


@pytest.mark.parametrize("concurrency", [0, 1.5, True])
def test_a_state_works_on_a_whole_number_of_groups(concurrency: Any) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.states\.judged\.concurrency"):
        AddedState(name="judged", concurrency=concurrency)


def test_a_drain_waits_for_the_work_that_added_states_have_begun() -> None:
    run = checked()
    run.finish(0, 1)
    run.tell(DrainRequested(reason="a user asked"))
    run.abort(*run.running())
    run.tell(ReplicaPaused(**run.state.replicas.by_id[0].address()))
    assert run.state.ending.outcome is None, "group 0 is being checked"
    leave(run, 0)
    assert run.state.ending.outcome is not None and run.state.ending.outcome.outcome == "stopped"
    assert len(run.ordered(EnterState)) == 1, "group 1 is checked after the resume"
