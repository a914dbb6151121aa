"""The driver's inbox: the events of a turn of the event loop are one tick."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import pytest

from engine.commands import Command
from engine.errors import EngineError
from engine.events import Event, ProcessLost, RunStarted, SchedulerRecovered, StopRequested, TimerFired
from engine.protocols.user_code import EXIT_FORKED
from engine.record import Header, MemoryRecorder, read
from engine.record.replayer import replay
from engine.runtime.driver import MOST_EVENTS, Driver
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.states.process import REPLICA

LIMITS = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)


class Recorder(MemoryRecorder):
    """Notes how many ticks each flush hands over."""

    def __init__(self, header: Header) -> None:
        super().__init__(header)
        self.flushed: list[int] = []

    def flush(self) -> None:
        self.flushed.append(len(self.frames))


class Scene:
    """A driver whose executor notes how many ticks were flushed when it got commands."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(LIMITS)
        self.recorder = Recorder(Header(run="delivery", limits=LIMITS.to_plain()))
        self.failures: list[Exception] = []
        self.driver = Driver(self.scheduler, self, self.recorder, self, fail=self.failures.append)
        self.executed: list[int] = []
        self.on_execute: Callable[[Sequence[Command]], None] = lambda commands: None

    def now(self) -> float:
        return 0.0

    def execute(self, commands: Sequence[Command]) -> None:
        self.executed.append(self.recorder.flushed[-1])
        self.on_execute(commands)

    @property
    def events(self) -> list[Event]:
        return [event for tick in read(self.recorder).frames() for event in tick.events]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    return wraps(test)(lambda **given: asyncio.run(asyncio.wait_for(test(**given), 60)))


def timers(count: int, first: int = 0) -> list[Event]:
    return [TimerFired(timer=100_000 + first + number) for number in range(count)]


def numbers(scene: Scene) -> list[int]:
    return [event.timer - 100_000 for event in scene.events if isinstance(event, TimerFired)]


@played
async def test_events_of_one_turn_are_one_tick(scene: Scene) -> None:
    scene.driver.deliver(RunStarted(replicas=1))
    for event in timers(3):
        scene.driver.post(event)
    assert (scene.recorder.flushed, scene.driver.waiting) == ([1], 3)
    await asyncio.sleep(0)
    assert (scene.recorder.flushed, scene.executed) == ([1, 2], [1, 2])
    assert numbers(scene) == [0, 1, 2]
    assert replay(read(scene.recorder)).divergence is None


@played
async def test_an_event_posted_outside_the_loop_does_not_stop_later_ones(scene: Scene) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        await asyncio.to_thread(scene.driver.post, *timers(1))
    scene.driver.post(*timers(1, first=1))
    await asyncio.sleep(0)
    assert numbers(scene) == [1]


@played
async def test_an_event_that_is_delivered_comes_after_the_posted_ones_and_is_done_at_once(scene: Scene) -> None:
    scene.driver.post(*timers(2))
    scene.driver.deliver(*timers(1, first=2))
    assert numbers(scene) == [0, 1, 2] and scene.driver.waiting == 0
    await asyncio.sleep(0)
    assert scene.recorder.flushed == [1], "the turn has nothing left to do"


@played
async def test_a_large_report_takes_several_ticks_and_its_sender_hears_of_the_last(scene: Scene) -> None:
    calls: list[int] = []
    small = asyncio.ensure_future(scene.driver.handled(timers(1), lambda: calls.append(scene.driver.events_handled)))
    large = asyncio.ensure_future(
        scene.driver.handled(timers(2 * MOST_EVENTS, first=1), lambda: calls.append(scene.driver.events_handled))
    )
    await small
    assert not large.done()
    await large
    assert scene.recorder.flushed == [1, 2, 3]
    assert calls == [0, 2 * MOST_EVENTS], "before the tick that takes the last event of each"
    assert numbers(scene) == list(range(2 * MOST_EVENTS + 1))


@played
async def test_a_forked_child_handles_no_event(scene: Scene) -> None:
    if not (child := os.fork()):
        try:
            scene.driver.deliver(RunStarted(replicas=1))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_FORKED


@played
async def test_what_the_executor_reports_waits_until_it_has_all_commands(scene: Scene) -> None:
    begun: list[int] = []

    def execute(commands: Sequence[Command]) -> None:
        if not begun:
            begun.append(0)
            scene.driver.deliver(*timers(1, first=9))
            assert scene.driver.events_handled == 2, "not yet"

    scene.on_execute = execute
    scene.driver.post(*timers(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert numbers(scene) == [0, 1, 9]


def test_after_a_failover_no_new_order_is_sent_before_the_open_ones(scene: Scene) -> None:
    """Workers tell a repeated order by its number, so they would drop an open one after a newer one."""
    scene.driver.deliver(RunStarted(replicas=1))
    left = scene.scheduler.state.orders.reissued(0.0)
    sent: list[Command] = []

    def execute(commands: Sequence[Command]) -> None:
        if not sent:
            scene.driver.deliver(ProcessLost(kind=REPLICA, index=0, life=1, reason="it ended"))
        sent.extend(commands)

    scene.on_execute = execute
    scene.driver.recover(left)
    assert [type(event) for event in scene.events] == [RunStarted, SchedulerRecovered, ProcessLost]
    new = sent[len(left) :]
    assert left and new and sent[: len(left)] == left and not any(command in left for command in new)


@played
async def test_after_a_failure_no_event_is_handled_and_no_sender_hangs(scene: Scene) -> None:
    def fail(commands: Sequence[Command]) -> None:
        raise EngineError("the disk is full")

    scene.on_execute = fail
    await scene.driver.handled(timers(1), lambda: None)
    await scene.driver.handled(timers(1, first=1), lambda: None)
    scene.driver.deliver(StopRequested(reason="enough"))
    assert [str(error) for error in scene.failures] == ["the disk is full"]
    assert numbers(scene) == [0] and scene.driver.outcome is None
