"""The scorers as seen from the scheduler: one for each pool that scores apart from the trainer, started again when it
dies.

Used by `fleet.Fleet`. A scorer holds nothing that is not elsewhere too, so a death costs only what it was ordered: each
such step an attempt. One that died too often answers every order by a failure that says so.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from engine.actors.failures import failure_reason
from engine.actors.plan import Plan
from engine.actors.scorer import ScorerActor
from engine.actors.trainer_link import Given, answers, failure_of
from engine.actors.wire import Order, pack_orders
from engine.commands import Command, ScoreBatch
from engine.events import Event

log = logging.getLogger(__name__)


class ScorerLink:
    """One scorer in all its lives."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        given: Given,
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.tasks = plan.limits.scorers()[number]
        self._plan = plan
        self._number = number
        self._given = given
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
        packed, *handles = self._given
        self.actor: Any = (
            ray.remote(ScorerActor)
            .options(num_cpus=0, num_gpus=self._plan.scorer_gpus, enable_task_events=False)
            .remote(packed, self._number, self._incarnation, *handles)
        )

    async def open(self) -> None:
        """Raises what the user's factory raises."""
        await self.actor.open.remote()

    def watch(self) -> None:
        self._spawn(self._watch(self.actor))

    def order(self, command: Command) -> None:
        """Keep an order for the end of the drain; where there is no scorer any more, answer it."""
        if self._gone is not None:
            self._deliver(failure_of(command, self._gone))
            return
        self._pending.append(command)
        self._orders.append(Order(command))

    def flush(self) -> int:
        if not self._orders:
            return 0
        self._sequence += 1
        self.actor.carry_out.remote(self._sequence, pack_orders(self._orders))
        self._orders = []
        return 1

    def answered(self, event: Event) -> None:
        """To be told of every event of the scorer, before the scheduler is."""
        self._pending = [command for command in self._pending if not answers(event, command)]

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
        """Answer what the dead scorer was ordered, then go on with a new one if one is left."""
        lost = f"the scorer of {' and '.join(self.tasks)} is lost: {reason}"
        log.warning("%s (life %d)", lost, self._incarnation)
        ray.kill(self.actor)
        pending, self._pending, self._orders = self._pending, [], []
        if self._incarnation > self._plan.scorer_restarts:
            self._gone = f"{lost}; it died too often"
        else:
            self._begin()
            self._spawn(self._reopen(self.actor))
        for command in pending:
            self._deliver(failure_of(command, self._gone or lost))

    async def _reopen(self, actor: Any) -> None:
        try:
            await actor.open.remote()
        except Exception as error:
            if not self._closed:
                self._replace(f"it could not be started again: {failure_reason(error)}")
            return
        await self._watch(actor)


class ScorerLinks:
    """All scorers of a run; none where the trainer scores."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        count = len(plan.limits.scorers())
        self._links = {f"scorer-{n}": ScorerLink(plan, n, given, deliver, spawn) for n in range(count)}
        self._of_task = {task: link for link in self._links.values() for task in link.tasks}

    async def open(self) -> None:
        """Raises what the user's factory raises."""
        await asyncio.gather(*(link.open() for link in self._links.values()))

    def watch(self) -> None:
        for link in self._links.values():
            link.watch()

    def take(self, command: Command) -> bool:
        """Order it of the scorer whose task it is; whether there is one."""
        link = self._of_task.get(command.task) if isinstance(command, ScoreBatch) else None
        if link is not None:
            link.order(command)
        return link is not None

    def flush(self) -> int:
        return sum(link.flush() for link in self._links.values())

    def answered(self, source: str, event: Event) -> None:
        """To be told of every event of a scorer, before the scheduler is."""
        if source in self._links:
            self._links[source].answered(event)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
