"""An actor as seen from the scheduler, through all its lives. What it was ordered and has not answered is in the order
book.

Base of `trainer_link.TrainerLink` and `worker_link.WorkerLink`, which say what follows when it dies.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypedDict

import ray

from engine.actors.failures import failure_reason
from engine.actors.heartbeat import Pulse
from engine.actors.lasting import Living
from engine.actors.wire import Order, pack_orders
from engine.commands import Command
from engine.events import Event
from engine.ids import Incarnation
from engine.states.orders import Order as OpenOrder


class LinkOptions(TypedDict):
    """What every link is given."""

    source: str
    living: Living | None
    pulse: Pulse
    start: Callable[[Incarnation], Any]
    failure: Callable[[Any, str], Event]
    owned: Callable[[], list[OpenOrder]]
    deliver: Callable[[Event], None]
    spawn: Callable[[Coroutine[Any, Any, None]], object]


class Link:
    """`start` makes the actor of a life, `failure` the event of an order that came to nothing; `owned` gives the open
    orders that the actor has. `living`: the actors are there already, and the one called `source` is taken over."""

    def __init__(
        self,
        *,
        source: str,
        living: Living | None,
        pulse: Pulse,
        start: Callable[[Incarnation], Any],
        failure: Callable[[Any, str], Event],
        owned: Callable[[], list[OpenOrder]],
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._start = start
        self._failure = failure
        self._owned = owned
        self._deliver = deliver
        self._spawn = spawn
        self._incarnation = 0
        self._gone: str | None = None
        """Why there is none any more."""
        self._closed = False
        self._orders: list[Order] = []
        self._sequence = 0
        self._pulse = pulse
        self._silent: str | None = None
        """Why there is no actor to take over."""
        self.actor: Any = None
        if living is None:
            self._begin()
            return
        self._sequence = living.first - 1
        self._incarnation, self.actor = living.newest(source) or (0, None)
        self._silent = living.silent.get(
            source, "it ended while there was no scheduler" if self.actor is None else None
        )

    def _begin(self) -> None:
        self._incarnation += 1
        self._sequence = 0
        self._orders = []
        self.actor = self._start(self._incarnation)

    def watch(self) -> None:
        self._spawn(self._watch(self.actor))

    def take_over(self, *given: Any) -> None:
        """Watch the actor of an earlier scheduler process, once it is open; `given`: to one that never was."""
        if self._silent is None:
            self._spawn(self._reopen(self.actor, *given))
        else:
            self._spawn(self._replace(self._silent))

    def order(self, command: Command) -> None:
        """Keep an order for the end of the drain; where there is no actor any more, answer it."""
        if self._gone is not None:
            self._deliver(self._failure(command, self._gone))
            return
        self._orders.append(Order(command))

    def flush(self) -> int:
        if not self._orders or self.actor is None:
            return 0
        self._sequence += 1
        self.actor.carry_out.remote(self._sequence, pack_orders(self._orders))
        self._orders = []
        return 1

    def fail(self, lost: Sequence[OpenOrder], answer: Callable[[Command], Event]) -> None:
        """Answer the orders of a life that is over, as far as they are still open: one answer may end several."""
        for order in lost:
            if order.number in {one.number for one in self._owned()}:
                self._deliver(answer(order.command))

    def close(self) -> None:
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)

    async def _replace(self, reason: str) -> None:
        """Answer what the dead actor was ordered, then go on with a new one if that may be."""
        raise NotImplementedError

    async def _watch(self, actor: Any) -> None:
        reason = await self._pulse.lost(actor)
        if not self._closed:
            await self._replace(reason)

    async def _reopen(self, actor: Any, *given: Any) -> None:
        try:
            await actor.bring_up.remote(*given)
        except Exception as error:
            if not self._closed:
                await self._replace(f"it could not be started again: {failure_reason(error)}")
            return
        await self._watch(actor)
