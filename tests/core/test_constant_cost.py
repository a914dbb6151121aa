"""What a tick may cost: no visit to all replicas if only groups changed, and no more starts than `MOST_STARTS`."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine.commands import DrawPrompts, SetTimer, StartGroup, StartProcess
from engine.events import (
    ProcessLost,
    ProcessUp,
    PromptsDrawn,
    ReplicasWanted,
    RunStarted,
    TimerFired,
    stamp,
)
from engine.policies import PolicySet
from engine.runtime.driver import Tick
from engine.scheduling.groups import MOST_DRAWN
from engine.scheduling.scheduler import GROUP_EVENTS, Scheduler
from engine.scheduling.timers import MOST_STARTS
from engine.simulation.world import Faults, Setting, World
from engine.states.laws import check_all
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.states.orders import FILL
from engine.states.timeouts import Timeouts
from tests.core.scripted import Scripted

ROUGH = Faults(lose=0.1, duplicate=0.1, die=0.01, fail_group=0.03, fail_sync=0.1, fail_trainer=0.05)
REPLICAS = 6
MOST_WALKS = 12
TAKES_TURNS = (
    Pool(tasks=("rollout",), replicas=(0, 1, 2)),
    Pool(tasks=("rollout", "train", "old_logprobs"), replicas=(3, 4, 5)),
)


class Counted(dict[int, Any]):
    """Replicas by id that count how often something visits all of them."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return super().__iter__()

    def values(self) -> Any:
        self.walks += 1
        return super().values()


@pytest.mark.parametrize("sync", ["together", "rolling"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"timeouts": Timeouts(group_s=60.0)},
        {"train_after_sync": True, "sync_mode": "abort"},
        {"pools": TAKES_TURNS, "scoring_tasks": ("old_logprobs",)},
        {"straggler_factor": 1.01},
    ],
    ids=["plain", "timed", "train after sync", "pools in turns", "stragglers"],
)
def test_a_tick_visits_all_replicas_only_if_something_but_a_group_changed(sync: str, more: dict[str, Any]) -> None:
    """And then at most a constant number of times."""
    figures = Limits(
        train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=12, infrastructure_attempts=9,
        **more,
    )  # fmt: skip
    setting = Setting(limits=figures, replicas=REPLICAS, slots=2, prompts=100, seed=3, faults=ROUGH)
    world = World(setting, PolicySet.from_names({"sync": sync, "dispatch": "newest-weights"}), check=False)
    state = world.scheduler.state
    others: list[str] = []
    """Changes of state of anything but a group in the present tick."""
    quiet: list[int] = []
    """The walks of each tick in which only groups changed."""
    busy: list[int] = []

    def count(tick: Tick) -> None:
        indexes: Any = (state.replicas.by_id, state.replicas._open)
        about_groups = all(isinstance(event, GROUP_EVENTS) for event in tick.events)
        is_quiet = about_groups and not others and state.groups.ledger.running  # without one, it looks for any progress
        (quiet if is_quiet else busy).append(sum(index.walks for index in indexes))
        for index in indexes:
            index.walks = 0
        others.clear()

    def begin() -> None:
        state.replicas.by_id, state.replicas._open = Counted(state.replicas.by_id), Counted(state.replicas._open)
        state.observe(lambda machine, record, source, trigger: others.append(machine) if machine != "group" else None)
        world.driver.observe = count

    world.after(0.01, begin)  # the first event starts every replica
    assert world.run().outcome == "finished"
    assert len(quiet) > 100 and not sum(quiet)
    assert 0 < max(busy) <= MOST_WALKS


def count_calls(run: Scripted, event: Any) -> int:
    """Calls of Python functions that the scheduler makes to handle an event."""
    count = 0

    def note(frame: Any, kind: str, argument: Any) -> None:
        nonlocal count
        count += kind == "call"

    stamp(event, run.events, run.clock)
    sys.setprofile(note)
    try:
        run.scheduler.tick((event,))
    finally:
        sys.setprofile(None)
    return count


def test_strict_order_behind_a_hanging_group_costs_the_same_however_many_are_ready() -> None:
    costs = []
    for ready in (10, 100):
        figures = {"train_batch_size": 2, "max_staleness_steps": 60, "max_concurrent_groups": 120}
        run = Scripted(slots=120, policies={"batching": "strict-order"}, **figures)
        run.finish(*range(1, 1 + ready))
        costs.append(count_calls(run, run.generated(1 + ready)))
    assert costs[0] == costs[1]


class Run:
    """A scheduler that gets events one after another."""

    def __init__(self, groups: int) -> None:
        limits = Limits(train_batch_size=groups, max_staleness_steps=0, max_concurrent_groups=groups)
        self.scheduler = Scheduler(limits)
        self.events = 0
        (self.asked,) = [order for order in self.handle(RunStarted(replicas=1)) if isinstance(order, DrawPrompts)]
        self.handle(ProcessUp(kind="replica", index=0, incarnation=1, slots=groups, version=0))

    def draw(self, count: int) -> tuple[Any, ...]:
        """The source gives so many prompts, and has no more."""
        return self.handle(PromptsDrawn(first=0, count=count, exhausted=True, number=self.asked.number))

    def handle(self, event: Any) -> tuple[Any, ...]:
        stamp(event, self.events, float(self.events))
        self.events += 1
        commands = self.scheduler.tick((event,))
        check_all(self.scheduler.state)
        return commands


def starts(commands: tuple[Any, ...]) -> int:
    return sum(isinstance(command, StartGroup) for command in commands)


def timers(commands: tuple[Any, ...]) -> list[SetTimer]:
    return [command for command in commands if isinstance(command, SetTimer)]


def test_one_event_starts_so_many_groups_and_a_timer_that_fires_at_once_the_rest() -> None:
    groups = 2 * MOST_STARTS + 40
    run = Run(groups)
    answer = run.draw(groups)
    (timer,) = timers(answer)
    assert (starts(answer), timer.delay_s) == (MOST_STARTS, 0.0)
    answer = run.handle(TimerFired(timer=timer.timer))
    (timer,) = timers(answer)
    assert starts(answer) == MOST_STARTS
    answer = run.handle(TimerFired(timer=timer.timer))
    assert (starts(answer), timers(answer)) == (40, [])
    assert not run.scheduler.state.timer_is_set(FILL)


def test_a_run_below_the_bound_needs_no_timer() -> None:
    run = Run(MOST_STARTS)
    answer = run.draw(MOST_STARTS)
    assert (starts(answer), timers(answer)) == (MOST_STARTS, [])


def test_only_so_many_prompts_are_asked_for_at_once() -> None:
    run = Run(3 * MOST_DRAWN)
    assert run.asked.count == MOST_DRAWN


def test_what_one_event_leaves_is_resumed_by_the_next() -> None:
    """All groups of a replica that is lost wait for another one, and are started again there in slices."""
    groups = MOST_STARTS + 1
    run = Run(groups)
    (timer,) = timers(run.draw(groups))
    run.handle(TimerFired(timer=timer.timer))
    run.handle(ProcessUp(kind="replica", index=1, incarnation=1, slots=groups, version=0))
    answer = run.handle(ProcessUp(kind="replica", index=0, incarnation=2, slots=groups, version=0))
    (timer,) = timers(answer)
    assert (starts(answer), run.scheduler.state.groups.ledger.parked) == (MOST_STARTS, 1)
    answer = run.handle(TimerFired(timer=timer.timer))
    assert (starts(answer), run.scheduler.state.groups.ledger.parked) == (1, 0)


def begun(replicas: int) -> tuple[Run, list[int], SetTimer]:
    """A run that has begun, the replicas that the first event ordered to start, and the timer for the others."""
    run = Run.__new__(Run)
    limits = Limits(train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, timeouts=Timeouts.every(None))
    run.scheduler, run.events = Scheduler(limits), 0
    answer = run.handle(RunStarted(replicas=replicas))
    (timer,) = timers(answer)
    return run, launched(answer), timer


def launched(commands: tuple[Any, ...]) -> list[int]:
    return [command.index for command in commands if isinstance(command, StartProcess)]


def test_a_run_starts_so_many_replicas_in_one_event_and_the_rest_at_once_after_it() -> None:
    replicas = 2 * MOST_STARTS + 3
    run, first, timer = begun(replicas)
    assert (first, timer.delay_s) == (list(range(MOST_STARTS)), 0.0)
    answer = run.handle(TimerFired(timer=timer.timer))
    (timer,) = timers(answer)
    assert launched(answer) == list(range(MOST_STARTS, 2 * MOST_STARTS))
    answer = run.handle(TimerFired(timer=timer.timer))
    assert (launched(answer), timers(answer)) == ([replicas - 3, replicas - 2, replicas - 1], [])


def test_replicas_that_were_not_started_yet_are_not_lost() -> None:
    run, first, timer = begun(MOST_STARTS + 1)
    for index in first:
        run.handle(ProcessLost(kind="replica", index=index, incarnation=1, reason="no room", final=True))
    assert not run.scheduler.state.ending.none_left
    assert launched(run.handle(TimerFired(timer=timer.timer))) == [MOST_STARTS]
    run.handle(ProcessLost(kind="replica", index=MOST_STARTS, incarnation=1, reason="no room", final=True))
    assert run.scheduler.state.ending.none_left


def test_replicas_for_validations_that_were_not_started_yet_leave_none_to_generate() -> None:
    validation = ValidationLimits(rows=4, every=1, replicas=MOST_STARTS, own_from=2)
    run = Run.__new__(Run)
    limits = Limits(train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, validation=validation)
    run.scheduler, run.events = Scheduler(limits), 0
    run.handle(RunStarted(replicas=MOST_STARTS + 2))
    for index in (0, 1):
        run.handle(ProcessLost(kind="replica", index=index, incarnation=1, reason="no room", final=True))
    assert run.scheduler.state.ending.none_left


def test_a_changed_number_of_replicas_holds_for_those_that_were_not_started_yet() -> None:
    for wanted in (MOST_STARTS - 1, MOST_STARTS + 2):
        run, first, timer = begun(MOST_STARTS + 10)
        answer = run.handle(ReplicasWanted(replicas=wanted))
        assert launched(answer) == [id for id in range(wanted) if id not in first]
        assert launched(run.handle(TimerFired(timer=timer.timer))) == []


def test_more_replicas_that_are_wanted_start_in_slices_and_those_that_are_up_stay() -> None:
    run = Run(4)
    answer = run.handle(ReplicasWanted(replicas=2 * MOST_STARTS))
    (timer,) = timers(answer)
    assert (launched(answer), timer.delay_s) == (list(range(1, MOST_STARTS + 1)), 0.0)
    run.handle(ProcessLost(kind="replica", index=2, incarnation=1, reason="no room", final=True))
    answer = run.handle(TimerFired(timer=timer.timer))
    assert (launched(answer), timers(answer)) == (list(range(MOST_STARTS + 1, 2 * MOST_STARTS)), [])
