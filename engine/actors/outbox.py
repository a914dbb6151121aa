"""Sends the events of an actor to the scheduler in batches: events that arrive during a call go with the next one.

So the number of calls per event falls under load, and no event waits for a timer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.actors.failures import failure_reason
from engine.actors.wire import pack_events
from engine.events import Event
from engine.ids import Incarnation, StepId
from engine.runtime.trajectories import MAX_ITEMS

log = logging.getLogger(__name__)


Report = Callable[[int, bytes, list[tuple[StepId, Mapping[str, Any]]]], Awaitable[int]]
"""(sequence, events, trainer's metrics) → the sequence, once the events are recorded."""


class Outbox:
    """Sends an actor's events to the scheduler. Each batch has a number; Ray resends it until it is acknowledged."""

    def __init__(self, report: Report, lost: Callable[[str], None]) -> None:
        """`lost(reason)` is called if an event cannot be sent, because the scheduler is gone or the event cannot be
        packed. Then nothing more is sent."""
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
            log.exception("events cannot be sent to the scheduler")
            self._lost(f"events cannot be sent to the scheduler: {failure_reason(error)}")
            return  # `_task` stays set, so nothing more is sent
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
