"""What the actors say to each other: batches of events and orders as bytes, and calls put back into their order.

Events and commands travel in the record's own strict form, so that what cannot be recorded fails at its sender.
The lists around them are pickled, as Ray does with every call: they pass only between processes of one run and are
never read from disk. Trajectories are not: `hosts.packed`.
"""

import pickle
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.commands import Command
from engine.events import Event
from engine.schedule.codec import command_from, event_from, plain_command, plain_event
from engine.trajectory import Prompt

Item = TypeVar("Item")


class Order(NamedTuple):
    """A command on its way to an actor, and the prompt that a generator needs to carry it out."""

    command: Command
    prompt: Prompt | None = None


def pack_events(events: Sequence[Event]) -> bytes:
    return pickle.dumps([plain_event(event) for event in events], 5)


def unpack_events(data: bytes) -> list[Event]:
    return [event_from(_listed(plain), -1, 0.0) for plain in pickle.loads(data)]


def pack_orders(orders: Sequence[Order]) -> bytes:
    return pickle.dumps([(c.cause, plain_command(c), _plain_prompt(prompt)) for c, prompt in orders], 5)


def unpack_orders(data: bytes) -> list[Order]:
    return [
        Order(
            command_from(_listed(plain), cause),
            None if prompt is None else Prompt(row=prompt[0], text=prompt[1], fields=prompt[2]),
        )
        for cause, plain, prompt in pickle.loads(data)
    ]


def _plain_prompt(prompt: Prompt | None) -> tuple[object, ...] | None:
    return None if prompt is None else (prompt.row, prompt.text, dict(prompt.fields))


def _listed(plain: Sequence[object]) -> list[object]:
    """As the codec reads it from bytes: arrays are lists."""
    return [list(value) if isinstance(value, tuple) else value for value in plain]


class InOrder(Generic[Item]):
    """Calls to an asynchronous actor may begin in any order; numbered from 1 in each epoch by their sender, they come
    out in theirs. An epoch ends when a call of a higher one comes."""

    def __init__(self) -> None:
        self._epoch = -1
        self._next = 1
        self._early: dict[int, Item] = {}

    def begin(self, epoch: int) -> bool:
        """Drop the calls of earlier epochs that wait, and refuse those that still come. False: the epoch has begun
        before."""
        if epoch <= self._epoch:
            return False
        self._epoch, self._next = epoch, 1
        self._early.clear()
        return True

    def take(self, epoch: int, sequence: int, item: Item) -> list[Item]:
        """What can be carried out now. A number that was taken before brings nothing, nor does an earlier epoch."""
        self.begin(epoch)
        if epoch < self._epoch or sequence < self._next:
            return []
        self._early[sequence] = item
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready
