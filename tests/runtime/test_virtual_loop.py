"""The virtual event loop, and calls that run on the loop instead of a thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from engine.workers.clock import Deadlock, LoopClock, VirtualLoop
from engine.workers.threads import OneThread, on_a_thread

Value = TypeVar("Value")


def play(story: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(story())
    finally:
        loop.close()


def test_a_virtual_day_passes_in_no_time_and_in_order() -> None:
    async def story() -> tuple[list[str], float]:
        clock, seen = LoopClock(before=5.0), []

        async def nap(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(name)

        await asyncio.gather(nap("week", 7 * 86400.0), nap("day", 86400.0), nap("moment", 1e-9))
        return seen, clock.now()

    assert play(story) == (["moment", "day", "week"], 5.0 + 7 * 86400.0)


def test_a_virtual_loop_that_can_only_wait_says_so() -> None:
    async def story() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="no callback is ready"):
        play(story)


def test_blocking_calls_run_on_a_virtual_loop_itself() -> None:
    async def story() -> list[threading.Thread]:
        thread = OneThread("never started")
        seen = [await thread.call(threading.current_thread), await on_a_thread(threading.current_thread)]
        await thread.close()
        return seen

    assert play(story) == [threading.current_thread()] * 2


def test_a_coroutine_function_runs_on_the_loop_and_never_beside_a_blocking_call() -> None:
    """On a real loop, where blocking calls have a thread of their own."""
    entered, leave, seen = threading.Event(), threading.Event(), []

    def blocking() -> threading.Thread:
        entered.set()
        leave.wait()
        seen.append("blocking")
        return threading.current_thread()

    async def coroutine() -> threading.Thread:
        seen.append("coroutine")
        return threading.current_thread()

    async def story() -> list[threading.Thread]:
        thread = OneThread("user code")
        first = asyncio.ensure_future(thread.call(blocking))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait)
        second = asyncio.ensure_future(thread.call(coroutine))
        await asyncio.sleep(0)
        leave.set()
        return [await first, await second]

    first, second = asyncio.run(story())
    assert seen == ["blocking", "coroutine"]
    assert second is threading.current_thread() is not first


def test_a_coroutine_waits_for_a_blocking_call_that_its_caller_gave_up() -> None:
    entered, leave, seen = threading.Event(), threading.Event(), []

    def blocking() -> None:
        entered.set()
        leave.wait()
        seen.append("blocking")

    async def coroutine() -> None:
        seen.append("coroutine")

    async def story() -> None:
        thread = OneThread("user code")
        given_up = asyncio.ensure_future(thread.call(blocking))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait)
        given_up.cancel()
        later = asyncio.ensure_future(thread.call(coroutine))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == []
        leave.set()
        await later
        await thread.close()

    asyncio.run(story())
    assert seen == ["blocking", "coroutine"]


def test_timers_of_one_virtual_instant_fire_in_the_order_they_were_set() -> None:
    async def story() -> list[int]:
        loop, seen = asyncio.get_running_loop(), []
        timers = [loop.call_at(when, seen.append, number) for number, when in enumerate((2.0, 1.0, 2.0, 1.0, 2.0, 1.5))]
        timers[5].cancel()
        await asyncio.sleep(1.0)
        assert (loop.time(), seen) == (1.0, [1, 3])
        await asyncio.sleep(1.0)
        assert loop.time() == 2.0
        return seen

    assert play(story) == [1, 3, 0, 2, 4]
