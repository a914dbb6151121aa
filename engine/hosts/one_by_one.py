"""Orders carried out one at a time, in the order in which they came, their blocking calls on one thread.

What the hosts of trainers and scorers have in common: `trainer.py` and `scorer.py`. It must never run two calls at
once, or carry out a repeated order again.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from engine.commands import Command
from engine.events import Event
from engine.hosts.threads import contained

REMEMBERED_ORDERS = 1024
"""So many orders are kept in mind, the newest, so that a repeat is known as one; far fewer wait for their answer."""

Orders = TypeVar("Orders", bound=Command)


class OneByOne(Generic[Orders]):
    """A host says what tells a repeat from a new order, `_key`, and how an order ends, `_answer`. `emit` takes events;
    `name` is the thread's."""

    def __init__(self, name: str, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._seen: dict[tuple[object, ...], None] = {}
        """Keys of the newest orders; a dict for its order."""
        self._orders: asyncio.Queue[Orders] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._abandoned = False

    def _key(self, command: Orders) -> tuple[object, ...]:
        raise NotImplementedError

    async def _answer(self, command: Orders) -> Event:
        """Carry out one order; the event that says how it ended."""
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
            self._worker = asyncio.get_running_loop().create_task(self._work())

    def abandon(self) -> None:
        """The call that runs hangs: `close` does not wait for it. A thread cannot be killed."""
        self._abandoned = True

    async def close(self) -> None:
        """End when the call that runs has returned; nothing queued is begun, nothing is reported any more."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown, wait=not self._abandoned, cancel_futures=True)

    async def _work(self) -> None:
        while True:
            command = await self._orders.get()
            self._emit(await self._answer(command))

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a blocking call on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, contained, function, *arguments)
