"""`Delivery`: the events of a turn of the event loop are decided one by one, and recorded and carried out together."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import pytest

from engine.commands import Command
from engine.errors import EngineError
from engine.events import Event, RunStarted, StopRequested, TimerFired
from engine.record import Header, MemoryRecorder, read
from engine.record.replayer import replay
from engine.runtime.driver import SLICE, Delivery, Driver
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits

LIMITS = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)


class Recorder(MemoryRecorder):
    """Notes how many frames each flush hands over."""

    def __init__(self, header: Header) -> None:
        super().__init__(header)
        self.flushed: list[int] = []

    def flush(self) -> None:
        self.flushed.append(len(self.frames))


class Scene:
    """A driver with its delivery. The executor notes how many frames were flushed when it got commands."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(LIMITS)
        self.recorder = Recorder(Header(run="delivery", limits=LIMITS.to_plain()))
        self.driver = Driver(self.scheduler, self, self.recorder, self)
        self.failures: list[Exception] = []
        self.delivery = Delivery(self.driver, self.failures.append)
        self.executed: list[int] = []
        self.on_execute: Callable[[Sequence[Command]], None] = lambda commands: None

    def now(self) -> float:
        return 0.0

    def execute(self, commands: Sequence[Command]) -> None:
        self.executed.append(self.recorder.flushed[-1])
        self.on_execute(commands)

    @property
    def events(self) -> list[Event]:
        return [frame.event for frame in read(self.recorder).frames()]


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
async def test_events_of_one_turn_share_a_flush_and_each_has_its_own_frame(scene: Scene) -> None:
    scene.delivery.deliver(RunStarted(replicas=1))
    for event in timers(3):
        scene.delivery.post(event)
    assert (scene.recorder.flushed, scene.driver.waiting) == ([1], 3)
    await asyncio.sleep(0)
    assert (scene.recorder.flushed, scene.executed) == ([1, 4], [1, 4])
    assert numbers(scene) == [0, 1, 2]
    assert replay(read(scene.recorder)).divergence is None


@played
async def test_an_event_that_is_delivered_comes_after_the_posted_ones_and_is_done_at_once(scene: Scene) -> None:
    scene.delivery.post(*timers(2))
    scene.delivery.deliver(*timers(1, first=2))
    assert numbers(scene) == [0, 1, 2] and scene.driver.waiting == 0
    await asyncio.sleep(0)
    assert scene.recorder.flushed == [3], "the turn has nothing left to do"


@played
async def test_a_large_report_is_handled_in_slices_and_its_sender_hears_of_the_last(scene: Scene) -> None:
    calls: list[int] = []
    small = asyncio.ensure_future(scene.delivery.handled(timers(1), lambda: calls.append(scene.driver.events_handled)))
    large = asyncio.ensure_future(
        scene.delivery.handled(timers(2 * SLICE, first=1), lambda: calls.append(scene.driver.events_handled))
    )
    await small
    assert not large.done()
    await large
    assert scene.recorder.flushed == [SLICE, 2 * SLICE, 2 * SLICE + 1]
    assert calls == [0, 2 * SLICE], "before the turn that handles the last event of each"
    assert numbers(scene) == list(range(2 * SLICE + 1))


@played
async def test_what_the_executor_reports_waits_until_it_has_all_commands(scene: Scene) -> None:
    begun: list[int] = []

    def execute(commands: Sequence[Command]) -> None:
        if not begun:
            begun.append(0)
            scene.delivery.deliver(*timers(1, first=9))
            assert scene.driver.events_handled == 2, "not yet"

    scene.on_execute = execute
    scene.delivery.post(*timers(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert numbers(scene) == [0, 1, 9]


@played
async def test_after_a_failure_no_event_is_handled_and_no_sender_hangs(scene: Scene) -> None:
    def fail(commands: Sequence[Command]) -> None:
        raise EngineError("the disk is full")

    scene.on_execute = fail
    await scene.delivery.handled(timers(1), lambda: None)
    await scene.delivery.handled(timers(1, first=1), lambda: None)
    scene.delivery.deliver(StopRequested(reason="enough"))
    assert [str(error) for error in scene.failures] == ["the disk is full"]
    assert numbers(scene) == [0] and scene.driver.outcome is None
