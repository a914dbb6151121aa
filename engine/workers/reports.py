"""What a worker reports beside the answers to its orders, and when: with one timer, so that the reports go together.

Used by every worker, and by the executor for the stores. A call through Ray takes a millisecond of processor time,
however many events it has: what is due a little later is reported now, with the rest. Must never report anything once
it is closed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.events import Event, OrderDone

TOGETHER_S = 0.5
"""Reports that are due within so many seconds are made together."""
NEVER = float("inf")


class Reports:
    """`emit` receives the events."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._due: dict[tuple[Callable[..., None], tuple[Any, ...]], float] = {}
        """The time of each report on the loop's clock."""
        self._done: list[int] = []
        """Orders that are done and not acknowledged."""
        self._timer: asyncio.Handle | None = None
        self._next = NEVER
        """The time of the timer."""
        self._closed = False

    def within(self, seconds: float, report: Callable[..., None], *about: Any) -> None:
        """Call `report(*about)` once within this many seconds, unless that is due already: then it comes no earlier.
        Call it on the event loop."""
        key = (report, about)
        if not self._closed and key not in self._due:
            self._due[key] = asyncio.get_running_loop().time() + seconds
            self._set(self._due[key])

    def done(self, *numbers: int) -> None:
        """Acknowledge executed orders, in this turn of the loop."""
        self._done += numbers
        self.within(0.0, self._acknowledge)

    async def done_after(self, work: Callable[[], Awaitable[object]], numbers: Sequence[int]) -> None:
        """Acknowledge orders once `work()` has returned. If it raises, this raises the same and they stay open."""
        await work()
        self.done(*numbers)

    def close(self) -> None:
        self._closed = True
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, at: float) -> None:
        if at >= self._next:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._next = at
        self._timer = loop.call_at(at, self._report) if at > loop.time() else loop.call_soon(self._report)

    def _report(self) -> None:
        self._next = NEVER
        soon = asyncio.get_running_loop().time() + TOGETHER_S
        for key in [key for key, at in self._due.items() if at <= soon]:
            del self._due[key]
            report, about = key
            report(*about)
        if self._due:
            self._set(min(self._due.values()))

    def _acknowledge(self) -> None:
        numbers, self._done = self._done, []
        self._emit(OrderDone(orders=tuple(numbers)))
