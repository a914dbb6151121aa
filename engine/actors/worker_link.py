"""A worker as seen from the scheduler: an actor that holds nothing that is not elsewhere too, begun again when it dies.

Used by `fleet.Fleet` for scorers and for the work of added states. A death costs only what the worker was ordered; one
that died too often answers every order by a failure that says so.
"""

import logging
from typing import Unpack

from engine.actors.link import Link, LinkOptions
from engine.actors.wire import Order
from engine.commands import DiscardGroups
from engine.events import BatchScored, Event, StateLeft

log = logging.getLogger(__name__)


class WorkerLink(Link):
    """One worker in all its lives. `what` names it in failures; `restarts` are for deaths without an order carried out
    in between."""

    def __init__(self, *, what: str, restarts: int, **options: Unpack[LinkOptions]) -> None:
        self._what = what
        self._restarts = restarts
        self._deaths = 0
        """Since an order was carried out."""
        super().__init__(**options)

    async def open(self) -> None:
        """Raises what the user's factory raises."""
        await self.actor.bring_up.remote()

    def discard(self, command: DiscardGroups) -> None:
        """What was ordered on these groups is not wanted any more: nothing answers it."""
        if self._gone is None:
            self._orders.append(Order(command))

    def answered(self, event: Event) -> None:
        """To be told of every event that answers an order of the worker."""
        if isinstance(event, BatchScored | StateLeft):
            self._deaths = 0

    async def _replace(self, reason: str) -> None:
        """Answer what the dead worker was ordered, then go on with a new one if one is left."""
        lost = f"{self._what} is lost: {reason}"
        log.warning("%s (life %d)", lost, self._incarnation)
        self._kill()
        lost_orders, self._orders = self._owned(), []
        self._deaths += 1
        if self._deaths > self._restarts:
            self._gone = f"{lost}; it died too often"
        else:
            self._begin()
            self._spawn(self._reopen(self.actor))
        self.fail(lost_orders, lambda command: self._failure(command, self._gone or lost))
