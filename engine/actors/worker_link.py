"""A worker as seen from the scheduler: an actor that holds nothing that is not elsewhere too, begun again when it dies.

Used by `fleet.Fleet` for scorers and for the work of added states. A death costs only what the worker was ordered; one
that died too often answers every order by a failure that says so.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from engine.actors.failures import failure_reason
from engine.actors.wire import Order, pack_orders
from engine.commands import Command, DiscardGroups, EnterState
from engine.events import Event
from engine.ids import Incarnation

log = logging.getLogger(__name__)


class WorkerLink:
    """One worker in all its lives. `what` names it in failures; `start` makes the actor of a life; `answers` says
    whether an event is what an order waited for, `failure` makes the event of an order that came to nothing."""

    def __init__(
        self,
        *,
        what: str,
        start: Callable[[Incarnation], Any],
        restarts: int,
        answers: Callable[[Event, Command], bool],
        failure: Callable[[Any, str], Event],
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._what = what
        self._start = start
        self._restarts = restarts
        self._answers = answers
        self._failure = failure
        self._deliver = deliver
        self._spawn = spawn
        self._incarnation = 0
        self._gone: str | None = None
        self._closed = False
        self._pending: list[Command] = []
        self._begin()

    def _begin(self) -> None:
        self._incarnation += 1
        self._sequence = 0
        self._orders: list[Order] = []
        self.actor = self._start(self._incarnation)

    async def open(self) -> None:
        """Raises what the user's factory raises."""
        await self.actor.open.remote()

    def watch(self) -> None:
        self._spawn(self._watch(self.actor))

    def order(self, command: Command) -> None:
        """Keep an order for the end of the drain; where there is no worker any more, answer it."""
        if self._gone is not None:
            self._deliver(self._failure(command, self._gone))
            return
        self._pending.append(command)
        self._orders.append(Order(command))

    def discard(self, command: DiscardGroups) -> None:
        """What was ordered on these groups is not wanted any more: nothing answers it."""
        forgotten = set(command.groups)
        kept = [order for order in self._pending if not (isinstance(order, EnterState) and order.group in forgotten)]
        if len(kept) < len(self._pending):
            self._pending = kept
            self._orders.append(Order(command))

    def flush(self) -> int:
        if not self._orders:
            return 0
        self._sequence += 1
        self.actor.carry_out.remote(self._sequence, pack_orders(self._orders))
        self._orders = []
        return 1

    def answered(self, event: Event) -> None:
        """To be told of every event of the worker, before the scheduler is."""
        self._pending = [command for command in self._pending if not self._answers(event, command)]

    def close(self) -> None:
        self._closed = True
        ray.kill(self.actor)

    async def _watch(self, actor: Any) -> None:
        try:
            reason = await actor.alive.remote()
        except Exception as error:
            reason = failure_reason(error)
        if not self._closed:
            self._replace(reason)

    def _replace(self, reason: str) -> None:
        """Answer what the dead worker was ordered, then go on with a new one if one is left."""
        lost = f"{self._what} is lost: {reason}"
        log.warning("%s (life %d)", lost, self._incarnation)
        ray.kill(self.actor)
        pending, self._pending, self._orders = self._pending, [], []
        if self._incarnation > self._restarts:
            self._gone = f"{lost}; it died too often"
        else:
            self._begin()
            self._spawn(self._reopen(self.actor))
        for command in pending:
            self._deliver(self._failure(command, self._gone or lost))

    async def _reopen(self, actor: Any) -> None:
        try:
            await actor.open.remote()
        except Exception as error:
            if not self._closed:
                self._replace(f"it could not be started again: {failure_reason(error)}")
            return
        await self._watch(actor)
