"""The clock of a run, which follows the event loop's clock and may be virtual; and its timers.

Used by the run loop, the executor and the simulation. A `VirtualLoop` runs the same code without waiting.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVarTuple, Unpack

from engine.commands import CancelTimer, SetTimer
from engine.events import TimerFired
from engine.ids import TimerId

Arguments = TypeVarTuple("Arguments")


class LoopClock:
    """Counts `before` seconds plus the time since it was created, by the running event loop's clock."""

    def __init__(self, before: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time() - before

    def now(self) -> float:
        return self._loop.time() - self._began


class Timers:
    """`SetTimer` and `CancelTimer` on the running event loop; each timer fires once, as a `TimerFired`."""

    def __init__(self, fire: Callable[[TimerFired], None]) -> None:
        self._fire = fire
        self._set: dict[TimerId, asyncio.TimerHandle] = {}

    def set(self, command: SetTimer) -> None:
        """Start a timer. A repeated order changes nothing."""
        if command.timer not in self._set:
            loop = asyncio.get_running_loop()
            self._set[command.timer] = loop.call_later(max(0.0, command.delay_s), self._over, command.timer)

    def cancel(self, command: CancelTimer) -> None:
        handle = self._set.pop(command.timer, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        for handle in self._set.values():
            handle.cancel()
        self._set.clear()

    def _over(self, timer: TimerId) -> None:
        del self._set[timer]
        self._fire(TimerFired(timer=timer))


INSTANT_S = 1e-9
"""Timers of a `VirtualLoop` that are this close together fire at the same time: sums of seconds are rounded."""


class Deadlock(RuntimeError):
    """A `VirtualLoop` has nothing to run and no timer to wait for, so its tasks would wait forever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing is left to run.

    It has no selector, so sockets and other threads cannot wake it; `threads.OneThread` calls blocking functions on the
    loop. `run_until_complete` raises `Deadlock` if its task would wait forever.
    """

    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self
        self._timers: dict[float, list[asyncio.TimerHandle]] = {}
        """By time, in the order in which they were set."""
        self._times: list[float] = []
        """The heap of these times."""

    def time(self) -> float:
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call `callback(*args)` at a time; callbacks of the same time in the order of these calls."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        same_time = self._timers.get(when)
        if same_time is None:
            self._timers[when] = [timer]
            heappush(self._times, when)
        else:
            same_time.append(timer)
        return timer

    def select(self, timeout: float | None) -> list[Any]:
        """`BaseEventLoop` calls it in every turn, with None if no callback is ready. Makes ready what is due."""
        timers, times = self._timers, self._times
        if timeout is None:
            while times and all(timer.cancelled() for timer in timers[times[0]]):
                del timers[heappop(times)]
            if not times:
                raise Deadlock("every task waits, but no callback is ready and no timer is set")
            self._now = max(self._now, times[0])
        while times and times[0] < self._now + INSTANT_S:
            self._ready.extend(timers.pop(heappop(times)))
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...
