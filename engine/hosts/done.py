"""Acknowledges orders: one `OrderDone` answers all orders that were executed in one turn of the event loop.

Used by `ReplicaHost` and by the executors. It must never answer an order that was not executed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engine.events import OrderDone


class DoneOrders:
    """Batches acknowledgments. `emit` receives the events."""

    def __init__(self, emit: Callable[[OrderDone], None]) -> None:
        self._emit = emit
        self._numbers: list[int] = []

    def add(self, *numbers: int) -> None:
        """Acknowledge executed orders."""
        if not self._numbers:
            asyncio.get_running_loop().call_soon(self._send)
        self._numbers += numbers

    async def add_after(self, work: Callable[[], Awaitable[object]], numbers: Sequence[int]) -> None:
        """Acknowledge orders once `work()` has returned. If it raises, this raises the same and they stay open."""
        await work()
        self.add(*numbers)

    def _send(self) -> None:
        numbers, self._numbers = self._numbers, []
        self._emit(OrderDone(orders=tuple(numbers)))
