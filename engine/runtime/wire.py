"""Messages between the actors: orders with their prompts as bytes, items gathered into calls, and messages in order.

Events and commands use the record's strict format. Prompts are pickled, as Ray does with every call: they pass only
between processes of one run and are never read from disk. Trajectories are not pickled: `storage.group_codec`.
"""

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from engine.record.codec import AnyCommand, pack, unpacker
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


class GatheredCalls(Generic[Item]):
    """Gathers items and sends them in order, one call at a time. `send(items)` must not raise."""

    def __init__(self, send: Callable[[list[Item]], Awaitable[None]]) -> None:
        self._send = send
        self._items: list[Item] = []
        self._begun = False
        """Whether a call is open, or the timer before it is set."""
        self._earliest = 0.0
        """Time on the loop's clock at which the next call may begin."""
        self._task: asyncio.Task[None] | None = None

    def add(self, item: Item) -> None:
        self._items.append(item)
        self._begin()

    def _begin(self) -> None:
        if self._items and not self._begun:
            self._begun = True
            asyncio.get_running_loop().call_at(self._earliest, self._call_soon)

    def _call_soon(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._call())

    async def _call(self) -> None:
        items, self._items = self._items[:MAX_ITEMS], self._items[MAX_ITEMS:]
        try:
            await self._send(items)
        finally:
            self._begun = False
            self._earliest = asyncio.get_running_loop().time() + GATHER_S
            self._begin()


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
