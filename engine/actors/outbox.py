"""Sends items from an actor in batches: items that arrive during a call go with the next one.

So the number of calls per item falls under load, and no item waits for a timer. Used for events to the scheduler and
for trajectories to their store.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from engine.actors.failures import failure_reason
from engine.actors.wire import pack_events
from engine.events import Event
from engine.ids import Incarnation, StepId

log = logging.getLogger(__name__)

Item = TypeVar("Item")
MAX_ITEMS = 4096
"""Maximum number of items of one call."""


class Batcher(Generic[Item]):
    """Sends items in order, one call at a time. `put` returns when the call with the item was answered."""

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[object]]) -> None:
        self._send = send
        self._waiting: list[tuple[Item, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, item: Item) -> None:
        """Send an item. Raises the exception of the call."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())
        await done

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_ITEMS], self._waiting[MAX_ITEMS:]
            error: Exception | None = None
            try:
                await self._send([item for item, _ in batch])
            except Exception as raised:
                error = raised
            for _, done in batch:
                if done.done():
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
        self._task = None


Report = Callable[[int, bytes, list[tuple[StepId, Mapping[str, Any]]]], Awaitable[int]]
"""(sequence, events, trainer's metrics) → the sequence, once the events are recorded."""


class Outbox:
    """Sends an actor's events to the scheduler. Each batch has a number; Ray resends it until it is acknowledged."""

    def __init__(self, report: Report, lost: Callable[[str], None]) -> None:
        """`lost(reason)` is called if an event cannot be sent: the scheduler is gone, or the event cannot be packed.
        Nothing more is sent then."""
        self._report = report
        self._lost = lost
        self._sequence = 0
        self._events: list[Event] = []
        self._figures: list[tuple[StepId, Mapping[str, Any]]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, event: Event) -> None:
        self._events.append(event)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    def add_figures(self, step: StepId, figures: Mapping[str, Any]) -> None:
        """Send the trainer's metrics with the next event, before it."""
        self._figures.append((step, figures))

    async def _drain(self) -> None:
        try:
            while self._events:
                events, self._events = self._events[:MAX_ITEMS], self._events[MAX_ITEMS:]
                figures, self._figures = self._figures, []
                self._sequence += 1
                await self._report(self._sequence, pack_events(events), figures)
        except Exception as error:
            log.exception("the scheduler cannot be told of events")
            self._lost(f"the scheduler cannot be told of events: {failure_reason(error)}")
            return  # `_task` stays: nothing is sent any more
        self._task = None


class Inbox:
    """The scheduler's side of all outboxes: remembers which batches it has received."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, Incarnation], int] = {}

    def takes(self, source: str, incarnation: Incarnation, sequence: int) -> bool:
        """Whether to handle a batch. False for a batch that Ray resent. The first batch of an outbox is always handled:
        if an actor died while there was no scheduler, its successor has the same name and counts from 1 again. Handling
        an event twice changes nothing."""
        key = (source, incarnation)
        if 1 < sequence <= self._taken.get(key, 0):
            return False
        self._taken[key] = sequence
        return True
