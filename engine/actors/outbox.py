"""Leaves an actor in batches: whatever comes up while one call is under way goes with the next.

So calls per item fall as load rises, and an item never waits for a timer. Used for events to the scheduler and for
trajectories to their store.
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
"""Of one call."""


class Batcher(Generic[Item]):
    """Sends items in order, one call at a time. `put` returns once the call that took the item has been answered."""

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[object]]) -> None:
        self._send = send
        self._waiting: list[tuple[Item, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, item: Item) -> None:
        """Raises what the call raised."""
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
"""(sequence, events, what the trainer says of steps) → the sequence, once the events are recorded."""


class Outbox:
    """An actor's way to the scheduler. Each batch has a number; Ray sends it again until it is acknowledged."""

    def __init__(self, report: Report, lost: Callable[[str], None]) -> None:
        """`lost(reason)` is called when an event cannot be told: the scheduler is gone, or what it holds cannot be
        sent. Nothing is sent any more then."""
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
        """Goes with the next event, before it."""
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
    """The other end of every outbox: which batches were taken in."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, Incarnation], int] = {}

    def takes(self, source: str, incarnation: Incarnation, sequence: int) -> bool:
        """Whether a batch is to be handled: not one that was, which Ray has sent again. The first of an outbox always
        is: where an actor died while there was no scheduler to see it, the next bears its name and counts from 1 again,
        and an event that is handled twice changes nothing."""
        key = (source, incarnation)
        if 1 < sequence <= self._taken.get(key, 0):
            return False
        self._taken[key] = sequence
        return True
