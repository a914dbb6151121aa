"""The watchdog: whom it asks when an order is overdue, and what it reports. On a virtual clock."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.commands import EnterState
from engine.events import BatchScored, Event, OrderOverdue, ProcessLost, ProcessUp, StateLeft
from engine.record.frames import Tick
from engine.runtime.process_port import Sign
from engine.runtime.watchdog import Watchdog
from engine.states.limits import Pool
from engine.states.process import Process
from engine.states.timeouts import Timeouts
from engine.workers.clock import VirtualLoop
from tests.core.added_states import CHECKING
from tests.core.scripted import Scripted

APART = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))
NEVER = "never"
"""A process that hangs gives no sign of life."""


class Watched:
    """A run with a scorer that does not answer its order. `waits`: whom each process says that it waits for."""

    def __init__(self, waits: dict[str, str], more: Mapping[str, Any] = {}, **timeouts: Any) -> None:
        """`more`: limits of the run."""
        self.waits, self.asked = waits, list[str]()
        self.reports: list[OrderOverdue] = []
        self.loop = VirtualLoop()
        self.run = Scripted(
            train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, scoring_tasks=("old_logprobs",),
            timeouts=Timeouts.every(None, **{"score_s": 50.0, "cut_s": 7.0, **timeouts}), pools=APART,
            **more,
        )  # fmt: skip
        self.later: Callable[[], None] = lambda: None
        """What happens a second after the scorer got its order."""
        self.while_asked: Callable[[], None] = lambda: None
        self.tasks: set[asyncio.Task[None]] = set()

    def after(self, seconds: float) -> list[OrderOverdue]:
        """The reports in so many seconds after the scorer got its order."""
        self.loop.run_until_complete(self._after(seconds))
        return self.reports

    async def _after(self, seconds: float) -> None:
        self.dog = Watchdog(self.run.state, self.now, self.probe, self.deliver, self.spawn)
        self.run.clock = self.run.state.facts.now
        self.deliver(*(self.run.generated(group) for group in (0, 1)))
        await asyncio.sleep(1.0)
        self.later()
        await asyncio.sleep(seconds - 1.0)
        self.dog.close()

    def now(self) -> float:
        return self.run.clock + self.loop.time()

    def deliver(self, *events: Event) -> None:
        for event in events:
            self.reports += [event] if isinstance(event, OrderOverdue) else []
            before = self.run.clock
            commands = self.run.tell(event, at=self.now())
            self.run.clock = before
            self.dog.observe(Tick(0, (event,), tuple(commands)))

    def spawn(self, work: Any) -> None:
        self.tasks.add(self.loop.create_task(work))

    async def probe(self, process: Process) -> Sign | None:
        self.asked.append(process.id)
        self.while_asked()
        waits_for = self.waits.get(process.id, "")
        if waits_for == NEVER:
            await asyncio.get_running_loop().create_future()
        return Sign(os.getpid(), waits_for)


@pytest.mark.parametrize(
    ("waits", "chain", "answered", "at"),
    [
        ({}, ("scorer 0",), True, 50.0),
        ({"scorer 0": NEVER}, ("scorer 0",), False, 57.0),
        ({"scorer 0": "trainer", "trainer": NEVER}, ("scorer 0", "trainer"), False, 57.0),
        ({"scorer 0": "trainer"}, ("scorer 0", "trainer"), True, 50.0),
        ({"scorer 0": "trainer", "trainer": "scorer 0"}, ("scorer 0", "trainer", "scorer 0"), True, 50.0),
        ({"scorer 0": "nobody"}, ("scorer 0",), True, 50.0),
    ],
)
def test_it_asks_who_waits_for_whom_and_reports_the_whole_chain(
    waits: dict[str, str], chain: tuple[str, ...], answered: bool, at: float
) -> None:
    watched = Watched(waits)
    (report,) = watched.after(60.0)
    assert (report.chain, report.answered, report.setting) == (chain, answered, "timeouts.score_s")
    assert (report.took_s, report.limit_s) == (pytest.approx(50.0), 50.0)
    assert watched.asked == list(dict.fromkeys(chain))


def test_a_process_that_is_not_up_is_named_and_not_asked() -> None:
    watched = Watched({"scorer 0": "trainer"})
    lost = ProcessLost(kind="trainer", index=0, life=1, reason="killed")
    watched.while_asked = lambda: watched.deliver(lost) if not watched.reports and len(watched.asked) == 1 else None
    assert watched.after(60.0)[0].chain == ("scorer 0", "trainer") and watched.asked == ["scorer 0"]


@pytest.mark.parametrize(("kind", "id"), [("scorer", "scorer 0"), ("trainer", "trainer")])
def test_a_process_that_ends_while_it_is_asked_is_not_reported(kind: str, id: str) -> None:
    """Otherwise its next life would be stopped for the silence of this one."""
    watched = Watched({"scorer 0": "trainer", "trainer": NEVER, id: NEVER})

    def die() -> None:
        if watched.asked[-1] == id:
            watched.deliver(ProcessLost(kind=kind, index=0, life=1, reason="killed"))
            watched.deliver(ProcessUp(kind=kind, index=0, life=2))
            watched.while_asked = lambda: None

    watched.while_asked = die
    assert watched.after(99.0) == []


def test_an_order_that_is_answered_while_its_process_is_asked_is_not_reported() -> None:
    watched = Watched({"scorer 0": NEVER})
    answer = BatchScored(step=0, task="old_logprobs", attempt=1)
    watched.while_asked = lambda: watched.deliver(answer)
    assert watched.after(99.0) == []


def test_all_overdue_orders_of_a_process_that_goes_on_are_reported() -> None:
    """Otherwise each but the first would have its full time again."""
    watched = Watched({}, {"added_states": (replace(CHECKING, concurrency=3),)}, state_s=50.0)

    def answer_another() -> None:
        watched.deliver(watched.run.generated(2))
        order = watched.run.ordered(EnterState)[-1]
        figures = {"state": "checking", "trainable": 2, "reward_mean": 0.5, "reward_spread": 1.0}
        watched.deliver(StateLeft(group=2, attempt=order.attempt, **figures))

    watched.later = answer_another
    first, second = watched.after(60.0)
    assert first.order != second.order and watched.asked == ["added states"]
    assert [group.infrastructure_failures for group in map(watched.run.state.groups.live.get, (0, 1))] == [1, 1]
