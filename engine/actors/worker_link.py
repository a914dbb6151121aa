"""A worker as seen from the scheduler: an actor that holds nothing that is not elsewhere too, begun again when it dies.

Used by `fleet.Fleet` for scorers and for the work of added states. A death costs only what the worker was ordered; one
that died too often answers every order by a failure that says so.
"""

import logging
from collections.abc import Callable
from typing import Unpack

from engine.actors.link import Link, LinkOptions
from engine.actors.wire import Order
from engine.commands import Command, DiscardGroups, EnterState
from engine.events import BatchScored, Event, StateLeft

log = logging.getLogger(__name__)


class WorkerLink(Link):
    """One worker in all its lives. `what` names it in failures; `answers` says whether an event is what an order waited
    for; `restarts` are for deaths without an order carried out in between."""

    def __init__(
        self, *, what: str, restarts: int, answers: Callable[[Event, Command], bool], **options: Unpack[LinkOptions]
    ) -> None:
        self._what = what
        self._restarts = restarts
        self._answers = answers
        self._deaths = 0
        """Since an order was carried out."""
        super().__init__(**options)

    async def open(self) -> None:
        """Raises what the user's factory raises."""
        await self.actor.bring_up.remote()

    def discard(self, command: DiscardGroups) -> None:
        """What was ordered on these groups is not wanted any more: nothing answers it."""
        forgotten = set(command.groups)
        kept = [order for order in self._pending if not (isinstance(order, EnterState) and order.group in forgotten)]
        if len(kept) < len(self._pending):
            self._pending = kept
            self._orders.append(Order(command))

    def answered(self, event: Event) -> None:
        """To be told of every event of the worker, before the scheduler is."""
        kept = [command for command in self._pending if not self._answers(event, command)]
        if len(kept) < len(self._pending) and isinstance(event, BatchScored | StateLeft):
            self._deaths = 0
        self._pending = kept

    async def _replace(self, reason: str) -> None:
        """Answer what the dead worker was ordered, then go on with a new one if one is left."""
        lost = f"{self._what} is lost: {reason}"
        log.warning("%s (life %d)", lost, self._incarnation)
        self._kill()
        pending, self._pending, self._orders = self._pending, [], []
        self._deaths += 1
        if self._deaths > self._restarts:
            self._gone = f"{lost}; it died too often"
        else:
            self._begin()
            self._spawn(self._reopen(self.actor))
        for command in pending:
            self._deliver(self._failure(command, self._gone or lost))
