"""Base class of workers that carry out orders one at a time, in the order of arrival. Blocking calls run on one thread.

Used by `trainer.py` and `scorer.py`. It must never run two calls at once, or carry out a repeated order again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from engine.commands import DeleteCheckpoint, PublishWeights, SaveCheckpoint, ScoreBatch, TrainStep
from engine.errors import EngineError
from engine.events import Event
from engine.workers.progress_reports import SerialProgress
from engine.workers.threads import OneThread
from engine.workers.worker_tasks import WorkerTasks

QueuedOrder = ScoreBatch | TrainStep | PublishWeights | SaveCheckpoint | DeleteCheckpoint
Orders = TypeVar("Orders", bound=QueuedOrder)


class OrderQueue(Generic[Orders]):
    """`emit` receives events; `broken(reason)` is called if an order cannot be answered; `name` is the thread's name.
    `progress` learns which order is carried out.

    A subclass sets `_handlers`: the function that carries out an order of each class, and returns the event that
    answers it.
    """

    _handlers: Mapping[type[Any], Callable[[Any], Awaitable[Event]]]

    def __init__(
        self, name: str, emit: Callable[[Event], None], broken: Callable[[str], None], progress: SerialProgress
    ) -> None:
        self._name = name
        self._emit = emit
        self._progress = progress
        self._tasks = WorkerTasks(f"the {name}", broken)
        self._thread = OneThread(name)
        self._newest = -1
        """Number of the newest order; a repeat has no higher one. The orders of an incarnation arrive in ascending
        order of their numbers: the supervisor sends them in the order of the book, and `wire.InOrder` restores it."""
        self._orders: asyncio.Queue[Orders] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None

    async def _answer(self, command: Orders) -> Event | None:
        """Carry out one order. Returns the event that answers it; None if this process must be replaced instead."""
        return await self._handlers[type(command)](command)

    def carry_out(self, command: Orders) -> None:
        """Queue an order and return at once; a repeat changes nothing. Raises: `EngineError` for another kind of
        order."""
        if type(command) not in self._handlers:
            raise EngineError(f"the {self._name} cannot execute {type(command).__name__}")
        if command.number <= self._newest:
            return
        self._newest = command.number
        self._orders.put_nowait(command)
        if self._worker is None:
            self._worker = self._tasks.spawn(self._work())

    def abandon(self) -> None:
        """The present call hangs: `close` does not wait for it, because a thread cannot be killed."""
        self._thread.abandon()

    async def close(self) -> None:
        """Return when the present call has ended. Queued orders are dropped, and nothing more is reported."""
        self._progress.end()
        await self._tasks.close()
        await self._thread.close()

    async def _work(self) -> None:
        while True:
            command = await self._orders.get()
            self._progress.begin(type(command), command.number)
            event = await self._answer(command)
            self._progress.end()
            if event is not None:
                self._emit(event)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a blocking call on the thread."""
        return await self._thread.call(function, *arguments)
