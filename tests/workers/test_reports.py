"""A worker reports progress, calls, cache and acknowledgments together, and only as often as it must."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from worker_bench import Bench, plan_of

from engine.commands import PublishWeights, TrainStep
from engine.events import Event, OrderProgressed, StepTrained, WeightsPublished
from engine.protocols import Batch
from engine.runtime.local import SimpleTrainer
from engine.states.timeouts import Timeouts
from engine.workers.clock import VirtualLoop
from engine.workers.reports import Reports
from engine.workers.trainer import TrainerWorker


def play(scene: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    loop.run_until_complete(scene)
    loop.close()


def test_what_happens_all_the_time_is_reported_once_in_each_interval() -> None:
    async def scene() -> None:
        reported: list[tuple[float, str]] = []
        now, reports = asyncio.get_running_loop().time, Reports(lambda event: None)

        def report(item: str) -> None:
            reported.append((now(), item))

        for _ in range(36):
            reports.within(10.0, report, "first")
            if now() >= 20.0:
                reports.within(10.0, report, "second")
            await asyncio.sleep(1.0)
        await asyncio.sleep(100.0)
        at = [10.0, 20.0, 30.0, 40.0]
        assert [when for when, item in reported if item == "first"] == at
        assert [when for when, item in reported if item == "second"] == at[2:]

    play(scene())


def test_reports_that_are_due_soon_are_made_together_and_none_after_the_end() -> None:
    async def scene() -> None:
        reported: list[tuple[float, str]] = []
        now, reports = asyncio.get_running_loop().time, Reports(lambda event: None)

        def report(item: str) -> None:
            reported.append((now(), item))

        for within, item in ((5.3, "soon after"), (5.0, "first"), (9.0, "later"), (20.0, "never")):
            reports.within(within, report, item)
        await asyncio.sleep(10.0)
        reports.close()
        reports.within(1.0, report, "closed")
        await asyncio.sleep(60.0)
        assert reported == [(5.0, "soon after"), (5.0, "first"), (9.0, "later")]

    play(scene())


def test_progress_is_of_the_order_under_way_in_the_interval_of_its_kind() -> None:
    class Slow(SimpleTrainer):
        def watch_progress(self, progressed: Callable[[], None]) -> None:
            self.progressed = progressed

        async def _work(self) -> None:
            for _ in range(25):
                self.progressed()
                await asyncio.sleep(1.0)

        async def train(self, batch: Batch) -> dict[str, float]:  # type: ignore[override]
            await self._work()
            return {}

        weights = _work

    async def scene() -> None:
        timeouts = Timeouts.every(None, train_s=100.0, publish_s=300.0)
        bench = await Bench(TrainerWorker, plan_of(trainer=Slow(), limits={"timeouts": timeouts})).open()
        bench.worker.carry_out(TrainStep(step=0, attempt=1, groups=(), staleness=(), number=3, cause=0))
        bench.worker.carry_out(PublishWeights(version=1, attempt=1, steps=1, number=4, cause=0))
        await asyncio.sleep(500.0)
        progressed: list[Event] = [OrderProgressed(order=3)] * 2
        assert bench.events == [
            *progressed, StepTrained(step=0, attempt=1), WeightsPublished(version=1, attempt=1)
        ], "weights have a longer limit"  # fmt: skip
        await bench.worker.close()

    play(scene())
