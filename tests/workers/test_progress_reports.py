"""Progress is reported no more often than time limits need."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from engine.commands import PublishWeights, TrainStep
from engine.events import OrderProgressed
from engine.workers.clock import VirtualLoop
from engine.workers.progress_reports import ProgressReports, SerialProgress


def play(scene: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    loop.run_until_complete(scene)
    loop.close()


def test_what_progresses_all_the_time_is_reported_once_in_each_interval() -> None:
    async def scene() -> None:
        reported: list[tuple[float, str]] = []
        now = asyncio.get_running_loop().time
        reports = ProgressReports[str](10.0, lambda item: reported.append((now(), item)))
        for _ in range(36):
            reports.note("first")
            if now() >= 20.0:
                reports.note("second")
            await asyncio.sleep(1.0)
        await asyncio.sleep(100.0)
        at = [10.0, 20.0, 30.0, 40.0]
        assert [when for when, item in reported if item == "first"] == at
        assert [when for when, item in reported if item == "second"] == at[2:]

    play(scene())


def test_only_an_open_order_is_reported_in_the_interval_of_its_kind() -> None:
    async def scene() -> None:
        events: list[OrderProgressed] = []
        progress = SerialProgress(lambda order: 10.0 if order is TrainStep else 40.0, events.append)
        progress.note()
        progress.begin(TrainStep, 3)
        progress.note()
        await asyncio.sleep(11.0)
        assert events == [OrderProgressed(order=3)]
        progress.note()
        progress.begin(PublishWeights, 4)
        progress.note()
        await asyncio.sleep(30.0)
        assert events == [OrderProgressed(order=3)], "step 3 has ended, and weights have a longer limit"
        await asyncio.sleep(20.0)
        assert events[1:] == [OrderProgressed(order=4)]
        progress.note()
        progress.end()
        await asyncio.sleep(100.0)
        assert len(events) == 2

    play(scene())
