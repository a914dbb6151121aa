"""One life of a replica as seen from the scheduler, and whether it is up. Used by `fleet.Fleet`."""

import asyncio
from collections.abc import Mapping
from typing import Any

import ray

from engine.actors.placement import Place
from engine.actors.wire import Order, pack_orders
from engine.ids import Incarnation, ReplicaId


class ReplicaLink:
    """An actor, and the orders that wait for the end of the drain."""

    __slots__ = ("_place", "actor", "incarnation", "orders", "replica", "sequence")

    def __init__(
        self, replica: ReplicaId, incarnation: Incarnation, actor: Any, place: Place, sequence: int = 0
    ) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.actor = actor
        self._place = place
        self.orders: list[Order] = []
        self.sequence = sequence

    def send(self) -> None:
        self.sequence += 1
        self.actor.carry_out.remote(self.sequence, pack_orders(self.orders))
        self.orders = []

    def end(self) -> None:
        """Kill the actor and give back what was set aside for it."""
        if self.actor is not None:
            ray.kill(self.actor)
        self._place.free()


async def first_up(enough: int, opening: Mapping[ReplicaId, "asyncio.Future[None]"]) -> None:
    """Returns when so many replicas are open. Raises what one of them raises before."""
    for count, opened in enumerate(asyncio.as_completed(opening.values()), 1):
        await opened
        if count >= enough:
            return


def is_up(opened: "asyncio.Future[None]") -> bool:
    """Looks at the failure, too: else asyncio says that nobody did."""
    return opened.done() and not opened.cancelled() and opened.exception() is None
