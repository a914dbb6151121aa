"""Answers orders that only had to arrive: all that were carried out in one turn of the event loop by one `OrderDone`.

Used by `ReplicaHost` and by the executors. It must never answer an order that was not carried out.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engine.events import OrderDone


class DoneOrders:
    """`emit` takes the events."""

    def __init__(self, emit: Callable[[OrderDone], None]) -> None:
        self._emit = emit
        self._numbers: list[int] = []

    def add(self, *numbers: int) -> None:
        """These orders were carried out."""
        if not self._numbers:
            asyncio.get_running_loop().call_soon(self._send)
        self._numbers += numbers

    async def add_after(self, work: Callable[[], Awaitable[object]], numbers: Sequence[int]) -> None:
        """These orders are carried out once `work()` has returned. Raises what it raises; they stay open then."""
        await work()
        self.add(*numbers)

    def _send(self) -> None:
        numbers, self._numbers = self._numbers, []
        self._emit(OrderDone(orders=tuple(numbers)))
