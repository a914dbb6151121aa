"""When a replica says that orders which only had to arrive were carried out."""

import asyncio

from event_loops import played
from test_measurement import Answering, measure, news, stage
from test_replica_worker import WHO, Stage
from token_generator import TokenGenerator

from engine.commands import AbortGroup, PauseReplica, ResumeReplica, StopMeasuring
from engine.events import RowsMeasured
from engine.workers.reports import Reports


@played
async def test_orders_that_are_carried_out_at_once_are_answered_by_one_event() -> None:
    events = []
    reports = Reports(events.append)
    reports.done(3)
    reports.done(4, 9)
    assert not events
    await asyncio.sleep(0)
    reports.done(5)
    await asyncio.sleep(0)
    assert [event.orders for event in events] == [(3, 4, 9), (5,)]


@played
async def test_what_raises_is_not_answered() -> None:
    events = []
    reports = Reports(events.append)

    async def gone() -> None:
        raise ConnectionError("the store is gone")

    (error,) = await asyncio.gather(reports.done_after(gone, [3]), return_exceptions=True)
    await asyncio.sleep(0)
    assert isinstance(error, ConnectionError) and events == []


@played
async def test_groups_that_are_ended_are_answered_together_and_so_is_one_that_is_over() -> None:
    on = await Stage(TokenGenerator(length=3)).open()
    on.start(0)
    on.start(1)
    await on.settle()
    for group, number in ((0, 11), (1, 12), (7, 13)):
        on.worker.carry_out(AbortGroup(group=group, attempt=1, number=number, **WHO))
    assert on.done == []
    await on.settle()
    assert sorted(number for orders in on.done for number in orders) == [11, 12, 13] and len(on.done) <= 2
    on.start(1, attempt=2)
    on.worker.carry_out(AbortGroup(group=1, attempt=1, number=12, **WHO))
    await on.settle()
    assert on.done[-1] == (12,) and on.worker.running == 1, "a repeat ends no later attempt, and is answered"


@played
async def test_an_order_to_resume_is_answered_after_earlier_orders_and_so_is_a_repeat() -> None:
    on = await Stage(TokenGenerator(length=3)).open()
    on.start(0)
    await on.settle()
    on.worker.carry_out(PauseReplica(version=1, mode="wait", attempt=1, **WHO))
    resume = ResumeReplica(attempt=1, number=5, **WHO)
    on.worker.carry_out(resume)
    on.worker.carry_out(resume)
    await on.settle()
    assert on.done == [], "a group runs yet, so it is not even paused"
    on.generator.tick(3)
    await on.settle()
    assert {number for orders in on.done for number in orders} == {5}
    on.worker.carry_out(resume)
    await on.settle()
    assert on.done[-1] == (5,) and len(on.done) >= 2


@played
async def test_one_that_cannot_resume_is_broken_and_does_not_answer() -> None:
    class Stuck(TokenGenerator):
        async def resume(self) -> None:
            raise RuntimeError("no memory")

    on = await Stage(Stuck(length=3)).open()
    resume = ResumeReplica(attempt=1, number=5, **WHO)
    on.worker.carry_out(resume)
    on.worker.carry_out(resume)
    await on.settle()
    reason = on.worker.broken
    assert reason.startswith("resuming failed: RuntimeError: no memory (") and on.done == []


@played
async def test_an_order_to_stop_measuring_is_answered_and_its_repeat_stops_nothing_newer() -> None:
    """A scheduler that takes over orders again what is open, oldest first: the stop, then the rows after it."""
    on = await stage(Answering())
    stop = StopMeasuring(validation=2, number=219, **WHO)
    on.worker.carry_out(measure())
    await on.settle()
    on.worker.carry_out(stop)
    await on.settle()
    assert on.done == [(219,)] and on.worker._measuring._running == {}
    on.worker.carry_out(measure(attempt=2))
    await on.settle()
    on.worker.carry_out(stop)
    on.worker.carry_out(measure(attempt=2))
    await on.settle()
    assert on.done == [(219,), (219,)]
    on.generator.let.set()
    await on.settle()
    assert [event.attempt for event in news(on, RowsMeasured)] == [2]


@played
async def test_a_host_that_is_closed_answers_nothing() -> None:
    on = await Stage(TokenGenerator(length=3)).open()
    on.start(0)
    await on.settle()
    on.worker.carry_out(AbortGroup(group=0, attempt=1, number=1, **WHO))
    await on.worker.close()
    await on.settle()
    assert on.done == []
