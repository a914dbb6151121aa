"""Messages between the actors: orders with their prompts as bytes, items gathered into calls, and messages in order.

Events and commands use the record's strict format. Prompts are pickled, as Ray does with every call: they pass only
between processes of one run and are never read from disk. Trajectories are not pickled: `storage.group_codec`.
"""

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Generic, TypeVar

from engine.commands import AnyCommand
from engine.record.codec import pack, unpacker
from engine.runtime.process_port import SentOrder
from engine.trajectory import Prompt

Item = TypeVar("Item")


def pack_orders(orders: Sequence[SentOrder]) -> bytes:
    """A batch of orders as bytes, with their prompts."""
    return pickle.dumps(
        (pack([order.command for order in orders]), [_plain_prompt(order.prompt) for order in orders]), 5
    )


def unpack_orders(data: bytes) -> list[SentOrder]:
    """The inverse of `pack_orders`."""
    commands, prompts = pickle.loads(data)
    return [
        SentOrder(
            command,
            None if prompt is None else Prompt(row=prompt[0], text=prompt[1], fields=prompt[2], source=prompt[3]),
        )
        for command, prompt in zip(_commands(commands), prompts, strict=True)
    ]


_commands = unpacker(list[AnyCommand])


def _plain_prompt(prompt: Prompt | None) -> tuple[object, ...] | None:
    return None if prompt is None else (prompt.row, prompt.text, dict(prompt.fields), prompt.source)


Message = tuple[int, int, bytes]
"""(epoch, number, orders): one message to a process."""


MAX_ITEMS = 4096
"""Maximum number of items of one call."""
GATHER_S = 0.002
"""Minimum seconds between the end of a call and the next call, in which items gather. A call through Ray takes a
millisecond of processor time, however many items it has."""

WAIT_S = 0.01
"""Seconds that an item which nobody waits for may wait for others."""


class GatheredCalls(Generic[Item]):
    """Gathers items and sends them in order, one call at a time, with `send(items)`."""

    def __init__(self, send: Callable[[list[Item]], Awaitable[None]]) -> None:
        self._send = send
        self._items: list[tuple[Item, asyncio.Future[None]]] = []
        self._due = inf
        """Time on the loop's clock at which an item wants to be sent."""
        self._earliest = 0.0
        """Time at which the next call may begin."""
        self._timer: asyncio.TimerHandle | None = None
        self._set_for = inf
        """Time for which the timer is set."""
        self._task: asyncio.Task[None] | None = None
        """The open call."""

    def add(self, item: Item, wait_s: float = 0.0) -> "asyncio.Future[None]":
        """Send an item with the next call, which begins within `wait_s` if none is open. The future completes as that
        call does."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._items.append((item, done))
        self._due = min(self._due, loop.time() + wait_s)
        self._begin()
        return done

    def _begin(self) -> None:
        if self._task is not None or not self._items:
            return
        at = max(self._earliest, self._due)
        if at < self._set_for:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._set_for = asyncio.get_running_loop().call_at(at, self._call_soon), at

    def _call_soon(self) -> None:
        self._timer, self._set_for = None, inf
        self._task = asyncio.get_running_loop().create_task(self._call())

    async def _call(self) -> None:
        taken, self._items = self._items[:MAX_ITEMS], self._items[MAX_ITEMS:]
        self._due = 0.0 if self._items else inf
        error: Exception | None = None
        try:
            await self._send([item for item, _ in taken])
        except Exception as raised:
            error = raised
        finally:
            self._task = None
            self._earliest = asyncio.get_running_loop().time() + GATHER_S
            self._begin()
        for _, done in taken:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)


class InOrder(Generic[Item]):
    """Restores the order of numbered calls to an asynchronous actor, which may start in any order. Each sender numbers
    its calls from 1 in each epoch. A call of a higher epoch ends the current one."""

    def __init__(self) -> None:
        self._epoch = -1
        self._next = 1
        self._early: dict[int, Item] = {}

    def begin(self, epoch: int) -> bool:
        """Begin an epoch: drop waiting calls of earlier epochs, and refuse further ones. Returns False if it or a later
        epoch has already begun."""
        if epoch <= self._epoch:
            return False
        self._epoch, self._next = epoch, 1
        self._early.clear()
        return True

    def take(self, epoch: int, sequence: int, item: Item) -> list[Item]:
        """The calls that can be executed now; none for repeated calls and calls of earlier epochs."""
        self.begin(epoch)
        if epoch < self._epoch or sequence < self._next:
            return []
        self._early[sequence] = item
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready
