"""Reports that open orders progress, which restarts their time limits. Reports only as often as the limits need.

Used by the workers of replicas, of the trainer and of scorers. It must never report an order that has ended.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.commands import Command
from engine.events import OrderProgressed
from engine.workers.threads import from_any_thread

Item = TypeVar("Item")
Interval = Callable[[type[Command]], float]
"""Seconds between two reports of progress, by the class of the order."""


class ProgressReports(Generic[Item]):
    """Calls `report` for each item that has progressed since the last report, at most once in `every_s` seconds."""

    def __init__(self, every_s: float, report: Callable[[Item], None]) -> None:
        self._every_s = every_s
        self._report = report
        self._progressed: dict[Item, None] = {}
        self._next: asyncio.TimerHandle | None = None

    def note(self, item: Item) -> None:
        """An item has progressed. Call it on the event loop."""
        self._progressed[item] = None
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._every_s, self._send)

    def _send(self) -> None:
        self._next = None
        progressed, self._progressed = self._progressed, {}
        for item in progressed:
            self._report(item)


class SerialProgress:
    """The progress of a process that carries out one order at a time."""

    def __init__(self, every_s: Interval, emit: Callable[[OrderProgressed], None]) -> None:
        self._every_s = every_s
        self._emit = emit
        self._order = -1
        self._kind: type[Command] = Command
        self._reports: dict[type[Command], ProgressReports[int]] = {}
        self.note = from_any_thread(self._note)
        """The current order has progressed. Call it on any thread, as often as you like."""

    def begin(self, kind: type[Command], order: int) -> None:
        """The process works on an order from now on. `kind`: its class; `order`: its number, or -1 to report no
        progress."""
        self._kind, self._order = kind, order

    def end(self) -> None:
        """The process works on no order."""
        self._order = -1

    def _note(self) -> None:
        if self._order < 0:
            return
        if self._kind not in self._reports:
            self._reports[self._kind] = ProgressReports(self._every_s(self._kind), self._report)
        self._reports[self._kind].note(self._order)

    def _report(self, order: int) -> None:
        if order == self._order:
            self._emit(OrderProgressed(order=order))
