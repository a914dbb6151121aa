"""A fleet whose replicas are handles of a test's own, where Ray would start an actor for each life."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.actors.fleet import Fleet
from engine.actors.lasting import Living
from engine.actors.placement import Place
from engine.actors.plan import Plan
from engine.actors.process import PackedPlan
from engine.actors.replica_link import ReplicaLink
from engine.events import Event
from engine.ids import Incarnation, ReplicaId
from engine.states.orders import OrderBook

Lives = list[tuple[ReplicaId, Incarnation]]


class FleetOfHandles(Fleet):
    """`make` gives the handle of each life that is begun; `started` says which those were."""

    def __init__(
        self,
        plan: Plan,
        deliver: Callable[[Event], None],
        living: Living,
        make: Callable[[int, int], Any],
        orders: OrderBook | None = None,
        **others: Any,
    ) -> None:
        store = SimpleNamespace(alive=SimpleNamespace(remote=asyncio.Event().wait))
        given = (PackedPlan.of(plan), None, store, store)
        super().__init__(plan, given, deliver, pytest.fail, orders or OrderBook(), living=living, **others)
        self.started: Lives = []
        self._make = make

    def _start(self, replica: ReplicaId) -> ReplicaLink:
        self._begun[replica] += 1
        life = self._begun[replica]
        self.started.append((replica, life))
        return ReplicaLink(replica, life, self._make(replica, life), Place({}))


async def nothing() -> None:
    """What closing a generator takes that holds nothing."""


async def settled() -> None:
    """Until everything that waits for nothing has come as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)
