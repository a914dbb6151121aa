"""The actors of a run: started, sent orders, watched without polls, started again when they die, ended.

Runs in the scheduler actor, whose children they are: when its process goes, Ray ends theirs. A death is known by a
call to `alive` that Ray answers with an error.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from engine.actors.failures import failure_reason, raised
from engine.actors.placement import Place, place, shortfall
from engine.actors.plan import Plan, Restore
from engine.actors.rollout import RolloutActor
from engine.actors.trainer_link import Given, TrainerLink
from engine.actors.wire import Order, pack_orders
from engine.actors.workers import Workers
from engine.commands import Command, DiscardGroups
from engine.errors import EngineError
from engine.events import Event, ReplicaLost
from engine.ids import Incarnation, ReplicaId

log = logging.getLogger(__name__)

GOODBYE_S = 5.0
"""How long a generator may take to close."""


class ReplicaLink:
    """One life of a replica as seen from here: its actor, and the orders that wait for the end of the drain."""

    __slots__ = ("_place", "actor", "incarnation", "orders", "replica", "sequence")

    def __init__(self, replica: ReplicaId, incarnation: Incarnation, actor: Any, place: Place) -> None:
        self.replica = replica
        self.incarnation = incarnation
        self.actor = actor
        self._place = place
        self.orders: list[Order] = []
        self.sequence = 0

    def send(self) -> None:
        self.sequence += 1
        self.actor.carry_out.remote(self.sequence, pack_orders(self.orders))
        self.orders = []

    def end(self) -> None:
        """Kill the actor and give back what was set aside for it."""
        ray.kill(self.actor)
        self._place.free()


class Fleet:
    """The rollout actors, the trainer and the workers of one run."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        deliver: Callable[[Event], None],
        give_up: Callable[[str], None],
        gateway: Any = None,
        lived: Mapping[ReplicaId, Incarnation] | None = None,
    ) -> None:
        """`lived`: the last life of each replica in an earlier life of the run. `give_up` ends the run, for the reason
        it is told."""
        self._plan = plan
        self._gateway = gateway
        self._given = given
        self._deliver = deliver
        self._give_up = give_up
        self._links: dict[ReplicaId, ReplicaLink] = {}
        self._ordered: dict[ReplicaId, ReplicaLink] = {}
        self._lived = lived or {}
        self._restarts = dict.fromkeys(plan.lives(), 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.trainer = TrainerLink(plan, given, deliver, self.spawn)
        self._workers = Workers(plan, given, deliver, self.spawn)

    async def open(self, restore: Restore | None = None) -> None:
        """Start every actor and wait until each is ready; the trainer begins where `restore` says.

        Raises the first thing that goes wrong.
        """
        for replica in self._plan.lives():
            self._links[replica] = self._start(replica, self._lived.get(replica, 0) + 1)
        try:
            await asyncio.gather(
                *(link.actor.open.remote() for link in self._links.values()),
                self.trainer.open(restore),
                self._workers.open(),
            )
        except RayError as error:
            raise raised(error) from None

    def join(self) -> None:
        """Let every replica report itself to the scheduler, and watch it from now on."""
        for link in self._links.values():
            link.actor.join.remote()
            self.spawn(self._watch(link))
        self.trainer.watch()
        self._workers.watch()
        for name, store in zip(("trajectory", "weights"), self._given[2:], strict=True):
            self.spawn(self._watch_store(name, store))

    # orders

    def order_replica(self, order: Order) -> None:
        """Keep an order for the end of the drain. One for a life that is over is for nobody: its loss was reported."""
        command: Any = order.command
        link = self._links.get(command.replica)
        if link is not None and link.incarnation == command.incarnation:
            link.orders.append(order)
            self._ordered[command.replica] = link

    def order_trainer(self, command: Command) -> None:
        """Whatever the trainer does, or a worker where there is one for it."""
        if not self._workers.take(command):
            self.trainer.order(command)

    def discard(self, command: DiscardGroups) -> None:
        """End what is done on groups that are forgotten now."""
        self._workers.discard(command)

    def answered(self, source: str, event: Event) -> None:
        """To be told of every event of an actor, before the scheduler is."""
        if source == "trainer":
            self.trainer.answered(event)
        else:
            self._workers.answered(source, event)

    def flush(self) -> int:
        """Send what was ordered, one call per actor; how many calls."""
        calls = len(self._ordered)
        for link in self._ordered.values():
            link.send()
        self._ordered.clear()
        return calls + self.trainer.flush() + self._workers.flush()

    def stop_replica(self, replica: ReplicaId, incarnation: Incarnation, reason: str) -> None:
        """End one life of a replica, say so, and begin the next if one is left."""
        link = self._links.get(replica)
        if link is not None and link.incarnation == incarnation:
            self._lose(link, reason)

    # lives

    def _start(self, replica: ReplicaId, incarnation: Incarnation) -> ReplicaLink:
        plan, (packed, *handles) = self._plan, self._given
        placed = place(plan)
        actor = (
            ray.remote(RolloutActor)
            .options(num_cpus=0, enable_task_events=False, max_concurrency=100_000, **placed.options)
            .remote(packed, replica, incarnation, *handles, self._gateway)
        )
        return ReplicaLink(replica, incarnation, actor, placed)

    async def _watch(self, link: ReplicaLink) -> None:
        try:
            reason = await link.actor.alive.remote()
        except Exception as error:
            reason = failure_reason(error)
        if not self._closed and self._links.get(link.replica) is link:
            self._lose(link, reason)

    async def _watch_store(self, name: str, store: Any) -> None:
        """Nothing can take the place of a store: what it held is gone with it."""
        try:
            story = f"the {name} store takes nothing more: {await store.alive.remote()}"
        except Exception as error:
            story = f"the {name} store is lost: {failure_reason(error)}"
        if not self._closed:
            self._give_up(story)

    def _lose(self, link: ReplicaLink, reason: str) -> None:
        log.warning("replica %d is lost (life %d): %s", link.replica, link.incarnation, reason)
        del self._links[link.replica]
        self._ordered.pop(link.replica, None)
        link.end()
        returns = self._restarts[link.replica] < self._plan.replica_restarts
        if returns:
            self._restarts[link.replica] += 1
            self.spawn(self._return(link, reason))
        lost = ReplicaLost(replica=link.replica, incarnation=link.incarnation, returns=returns, reason=reason)
        self._deliver(lost)

    async def _return(self, before: ReplicaLink, reason: str) -> None:
        """Bring up the next life of a replica, with its first weights; the scheduler gives it the newest."""
        link: ReplicaLink | None = None
        try:
            lacking = await asyncio.to_thread(shortfall, self._plan, len(self._links) + 1)
            if lacking:
                raise EngineError(lacking)
            link = self._start(before.replica, before.incarnation + 1)
            await link.actor.open.remote()
        except asyncio.CancelledError:
            if link is not None:
                link.end()
            raise
        except Exception as error:
            log.exception("replica %d could not be started again", before.replica)
            if link is not None:
                link.end()
            story = f"{reason}; it could not be started again: {failure_reason(error)}"
            again = self._restarts[before.replica] < self._plan.replica_restarts
            if again:
                self._restarts[before.replica] += 1
                self.spawn(self._return(before, story))
            else:
                self._deliver(
                    ReplicaLost(replica=before.replica, incarnation=before.incarnation, returns=False, reason=story)
                )
            return
        if self._closed:
            link.end()
            return
        self._links[before.replica] = link
        link.actor.join.remote()
        self.spawn(self._watch(link))

    async def close(self) -> None:
        """Let generators give back what they hold, for a while, then kill every actor."""
        self._closed = True
        closing = [asyncio.ensure_future(link.actor.close.remote()) for link in self._links.values()]
        if closing:
            await asyncio.wait(closing, timeout=GOODBYE_S)
        for end in closing:
            end.cancel()
        for link in self._links.values():
            link.end()
        self.trainer.close()
        self._workers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            log.error("a task of the fleet failed", exc_info=error)
            self._give_up(f"a task that looks after the actors failed: {failure_reason(error)}")
