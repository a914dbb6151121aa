"""Base class of workers that carry out orders one at a time, in the order of arrival. Blocking calls run on one thread.

Used by `trainer.py` and `scorer.py`. It must never run two calls at once, or carry out a repeated order again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.commands import (
    Command,
    DeleteCheckpoint,
    PublishWeights,
    SaveCheckpoint,
    ScoreBatch,
    StartProcess,
    TrainStep,
)
from engine.events import Event, OrderProgressed
from engine.ids import LifeNumber
from engine.workers.plan import Plan, Restore
from engine.workers.threads import OneThread, from_any_thread
from engine.workers.worker import Peers, Worker

QueuedOrder = ScoreBatch | TrainStep | PublishWeights | SaveCheckpoint | DeleteCheckpoint


class OrderQueue(Worker):
    """A subclass sets `_handlers`: the function that carries out an order of each class, and returns the event that
    answers it."""

    _handlers: Mapping[type[Any], Callable[[Any], Awaitable[Event]]]
    note_progress: Callable[[], None]
    """The current order has progressed. Call it on any thread, as often as you like."""
    _order = -1
    """The number of the order that is carried out; -1: none."""
    _order_class: type[Command] = Command

    def __init__(self, plan: Plan, index: int, life: LifeNumber, peers: Peers) -> None:
        super().__init__(plan, index, life, peers)
        self._thread = OneThread(self.kind)
        self._newest = -1
        """Number of the newest order; a repeat has no higher one. The orders of a life arrive in ascending order of
        their numbers: the executor sends them in the order of the book, and `wire.InOrder` restores it."""
        self._orders: asyncio.Queue[QueuedOrder] = asyncio.Queue()
        self._working = False

    async def _open(self, restore: Restore | None) -> None:
        self.note_progress = from_any_thread(self._take_progress)
        self._order, self._order_class = -1 if restore is None else restore.order, StartProcess
        try:
            await self._load(restore)
        finally:
            self._order = -1  # also of a start that fails or is given up

    async def _load(self, restore: Restore | None) -> None:
        raise NotImplementedError

    def _take_progress(self) -> None:
        if self._order >= 0:
            self.reports.within(self.progress_every_s(self._order_class), self._report_progress, self._order)

    def _report_progress(self, order: int) -> None:
        if order == self._order:
            self.peers.emit(OrderProgressed(order=order))

    async def _answer(self, command: QueuedOrder) -> Event | None:
        """Carry out one order. Returns the event that answers it; None if this process must be replaced instead."""
        return await self._handlers[type(command)](command)

    def _queue(self, command: QueuedOrder) -> None:
        if command.number <= self._newest:
            return
        self._newest = command.number
        self._orders.put_nowait(command)
        if not self._working:
            self._working = True
            self.spawn(self._work())

    def abandon(self) -> None:
        """The present call hangs: `close` does not wait for it, because a thread cannot be killed."""
        super().abandon()
        self._thread.abandon()

    async def _close(self) -> None:
        """Return when the present call has ended. Queued orders are dropped."""
        await super()._close()
        await self._thread.close()

    async def _work(self) -> None:
        while True:
            command = await self._orders.get()
            self._order, self._order_class = command.number, type(command)
            event = await self._answer(command)
            self._order = -1
            if event is not None:
                self.peers.emit(event)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a blocking call on the thread."""
        return await self._thread.call(function, *arguments)
