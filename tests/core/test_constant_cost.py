"""An event costs the same however many replicas there are: no walk over the fleet, and no more starts than so many."""

from collections.abc import Iterator
from heapq import heappop
from typing import Any, NoReturn

import pytest

from engine.commands import DrawPrompts, SetTimer, StartGroup
from engine.events import ProcessUp, PromptsDrawn, RunStarted, TimerFired, stamp
from engine.policies import PolicySet
from engine.scheduler import Scheduler
from engine.scheduling.rollout import MOST_DRAWN, MOST_STARTS
from engine.simulation.world import Faults, Setting, World
from engine.states.invariants import check_all
from engine.states.limits import Limits, Pool
from engine.states.timeouts import Timeouts

ROUGH = Faults(lose=0.1, duplicate=0.1, die=0.01, fail_group=0.03, fail_sync=0.1, fail_trainer=0.05)
REPLICAS = 6
TAKES_TURNS = (
    Pool(tasks=("rollout",), replicas=(0, 1, 2)),
    Pool(tasks=("rollout", "train", "old_logprobs"), replicas=(3, 4, 5)),
)


class Unwalkable(dict[int, Any]):
    """Replicas by id that may be looked up, and not walked over."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise AssertionError("an event walks over every replica")

    def __iter__(self) -> Iterator[int]:
        self._refuse()

    keys = values = items = _refuse  # type: ignore[assignment]


@pytest.mark.parametrize("sync", ["together", "rolling"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"timeouts": Timeouts(group_s=60.0), "straggler_factor": 1.1},
        {"train_after_sync": True, "sync_mode": "abort"},
        {"pools": TAKES_TURNS, "scoring_tasks": ("old_logprobs",)},
    ],
    ids=["plain", "timed", "train after sync", "pools in turns"],
)
def test_no_event_walks_over_the_replicas(sync: str, more: dict[str, Any]) -> None:
    figures = Limits(
        train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=12, infrastructure_attempts=9,
        **more,
    )  # fmt: skip
    setting = Setting(limits=figures, replicas=REPLICAS, slots=2, prompts=100, seed=3, faults=ROUGH)
    world = World(setting, PolicySet.from_names({"sync": sync, "dispatch": "newest-weights"}), check=False)
    while not world.scheduler.state.started:  # the first event starts every replica
        world.time, _, action = heappop(world._agenda)
        action()
    fleet = world.scheduler.state.fleet
    fleet.replicas = Unwalkable(fleet.replicas)
    assert world.run().outcome == "finished"


class Run:
    """A scheduler that is told of events one after another."""

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
        commands = self.scheduler.handle(event)
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
    assert run.scheduler.state.live.fill_timer is None


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
    assert (starts(answer), run.scheduler.state.ledger.parked) == (MOST_STARTS, 1)
    answer = run.handle(TimerFired(timer=timer.timer))
    assert (starts(answer), run.scheduler.state.ledger.parked) == (1, 0)
