"""When calls of the user's functions are reported, on a virtual clock."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from worker_bench import Bench, plan_of

from engine.protocols import CallFigures
from engine.workers.call_reports import CallReports
from engine.workers.clock import VirtualLoop
from engine.workers.replica import ReplicaWorker
from tests.workers.virtual_minute import for_a_minute

NONE = CallFigures(
    function="reward slow", at_once=4, setting="reward.concurrency", groups=0, queued=0, calls=0, seconds=0.0,
    running_s=0.0,
)  # fmt: skip


class Reward:
    """A source of figures that the test changes."""

    def __init__(self) -> None:
        self.figures = NONE
        self._changed: Callable[[], None] = lambda: None

    def call_figures(self) -> Sequence[CallFigures]:
        return [self.figures]

    def watch_calls(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def set(self, **figures: float) -> None:
        self.figures = replace(self.figures, **figures)  # type: ignore[arg-type]
        self._changed()


class Timed(Bench):
    """A replica; the time, groups, queued, calls, seconds and held seconds of its reports."""

    def __init__(self) -> None:
        super().__init__(ReplicaWorker, plan_of())
        self.rows = list[tuple[float, ...]]()

    def take(self, event: Any) -> None:
        now = asyncio.get_running_loop().time()
        self.rows.append((now, event.groups, event.queued, event.calls, event.seconds, event.held_s))


def reported(scene: Callable[[Reward, Reward, Timed], object]) -> list[tuple[float, ...]]:
    """The reports in a minute. `scene` begins at 0 s."""
    made = list[Timed]()

    def begin(loop: VirtualLoop) -> None:
        one, other, bench = Reward(), Reward(), Timed()
        CallReports(bench.worker, [one, object(), other])
        made.append(bench)
        scene(one, other, bench)

    for_a_minute(begin)
    return made[0].rows


def test_a_wait_is_reported_after_a_second_then_more_and_more_rarely() -> None:
    rows = reported(lambda reward, other, bench: reward.set(groups=2, queued=3))
    assert [at for at, *_ in rows] == [1.0, 3.0, 7.0, 15.0, 25.0, 35.0, 45.0, 55.0]


def test_the_end_of_a_wait_is_reported_and_then_nothing() -> None:
    def scene(reward: Reward, other: Reward, bench: Timed) -> None:
        reward.set(groups=2, queued=3)
        asyncio.get_running_loop().call_later(2.0, lambda: reward.set(groups=0, queued=0, calls=5, seconds=10.0))

    assert reported(scene) == [(1.0, 2, 3, 0, 0.0, 0.0), (3.0, 0, 0, 5, 10.0, 0.0)]


def test_sources_with_one_function_are_reported_as_one_with_what_is_new() -> None:
    def scene(reward: Reward, other: Reward, bench: Timed) -> None:
        reward.set(groups=2, calls=1, seconds=2.0, held_s=0.5)
        other.set(groups=1, queued=1, calls=3, seconds=1.0, held_s=0.25)
        asyncio.get_running_loop().call_later(2.0, lambda: reward.set(groups=0, calls=2, seconds=5.0, held_s=2.5))

    assert reported(scene)[:2] == [(1.0, 3, 1, 4, 3.0, 0.75), (3.0, 1, 1, 1, 3.0, 2.0)]


def test_nothing_is_reported_without_calls_or_after_the_end() -> None:
    def scene(reward: Reward, other: Reward, bench: Timed) -> None:
        reward.set(groups=2)
        bench.worker.reports.close()
        reward.set(groups=1)

    assert reported(lambda reward, other, bench: reward.set()) == reported(scene) == []


def test_figures_that_are_no_numbers_end_the_reports_of_their_source(caplog: pytest.LogCaptureFixture) -> None:
    def scene(reward: Reward, other: Reward, bench: Timed) -> None:
        reward.set(groups=2.5)
        other.set(groups=1)

    assert reported(scene) == []
    assert "replica 0 no longer reports its calls" in caplog.text
    assert "CallsMeasured.groups cannot be recorded: Expected `int`, got `float`" in caplog.text
