"""Base class of workers that carry out orders one at a time, in the order of arrival. Blocking calls run on one thread.

Used by `trainer.py` and `scorer.py`. It must never run two calls at once, or carry out a repeated order again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.commands import DeleteCheckpoint, PublishWeights, SaveCheckpoint, ScoreBatch, TrainStep
from engine.events import Event
from engine.ids import Incarnation
from engine.workers.plan import Plan
from engine.workers.progress_reports import SerialProgress
from engine.workers.threads import OneThread
from engine.workers.worker import Peers, Worker

QueuedOrder = ScoreBatch | TrainStep | PublishWeights | SaveCheckpoint | DeleteCheckpoint


class OrderQueue(Worker):
    """A subclass sets `_handlers`: the function that carries out an order of each class, and returns the event that
    answers it."""

    _handlers: Mapping[type[Any], Callable[[Any], Awaitable[Event]]]
    _progress: SerialProgress
    """Learns which order is carried out. Set when the worker opens."""

    def __init__(self, plan: Plan, index: int, incarnation: Incarnation, peers: Peers) -> None:
        super().__init__(plan, index, incarnation, peers)
        self._thread = OneThread(self.kind)
        self._newest = -1
        """Number of the newest order; a repeat has no higher one. The orders of a life arrive in ascending order of
        their numbers: the executor sends them in the order of the book, and `wire.InOrder` restores it."""
        self._orders: asyncio.Queue[QueuedOrder] = asyncio.Queue()
        self._working = False

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
        if self._opened:
            self._progress.end()
        await super()._close()
        await self._thread.close()

    async def _work(self) -> None:
        while True:
            command = await self._orders.get()
            self._progress.begin(type(command), command.number)
            event = await self._answer(command)
            self._progress.end()
            if event is not None:
                self.peers.emit(event)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a blocking call on the thread."""
        return await self._thread.call(function, *arguments)
