"""Base class of workers that carry out orders one at a time, in the order of arrival. Blocking calls run on one thread.

Used by `trainer.py` and `scorer.py`. It must never run two calls at once, or carry out a repeated order again.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from engine.commands import Command
from engine.events import Event
from engine.workers.progress_reports import SerialProgress, each_minute
from engine.workers.threads import OneThread
from engine.workers.worker_tasks import WorkerTasks

REMEMBERED_ORDERS = 1024
"""Number of newest orders that are remembered to detect repeats. Far fewer are open at once."""

Orders = TypeVar("Orders", bound=Command)


class OrderQueue(Generic[Orders]):
    """A subclass defines `_key`, which tells a repeat from a new order, and `_answer`, which carries out an order.
    `emit` receives events; `broken(reason)` is called if an order cannot be answered; `name` is the thread's name.
    `progress` learns which order is carried out."""

    def __init__(
        self,
        name: str,
        emit: Callable[[Event], None],
        broken: Callable[[str], None],
        progress: SerialProgress | None = None,
    ) -> None:
        self._emit = emit
        self._progress = progress or SerialProgress(each_minute, emit)
        self._tasks = WorkerTasks(f"the {name}", broken)
        self._thread = OneThread(name)
        self._seen: dict[tuple[object, ...], None] = {}
        """Keys of the newest orders, oldest first."""
        self._orders: asyncio.Queue[Orders] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None

    def _key(self, command: Orders) -> tuple[object, ...]:
        raise NotImplementedError

    async def _answer(self, command: Orders) -> Event | None:
        """Carry out one order. Returns the event that answers it; None if this process must be replaced instead."""
        raise NotImplementedError

    def carry_out(self, command: Orders) -> None:
        """Queue an order and return at once; a repeat changes nothing."""
        key = self._key(command)
        if key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > REMEMBERED_ORDERS:
            del self._seen[next(iter(self._seen))]
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
            self._progress.begin(type(command), getattr(command, "number", -1))
            event = await self._answer(command)
            self._progress.end()
            if event is not None:
                self._emit(event)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a blocking call on the thread."""
        return await self._thread.call(function, *arguments)
