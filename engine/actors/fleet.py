"""The actors of a run: started, sent orders, watched, started again when they die, ended.

Runs in the scheduler actor. Where the run keeps a record they outlive its process (`lasting.py`): the next takes them
over with `recover`.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from engine.actors.failures import failure_reason, raised
from engine.actors.heartbeat import Pulse
from engine.actors.lasting import Living, lasting
from engine.actors.placement import Place, found_place, place, room_now, shortfall
from engine.actors.plan import Plan, Restore
from engine.actors.replica_link import ReplicaLink, first_up, is_up
from engine.actors.rollout import RolloutActor
from engine.actors.trainer_link import Given, TrainerLink
from engine.actors.wire import Order
from engine.actors.workers import Workers
from engine.commands import Command, DiscardGroups, StartReplica, StopReplica
from engine.events import Event, ReplicaLost, StopRequested
from engine.hosts.reasons import clean
from engine.ids import Incarnation, ReplicaId, StepId
from engine.states.orders import TRAINER, OrderBook
from engine.states.orders import Order as OpenOrder

log = logging.getLogger(__name__)

GOODBYE_S = 5.0
"""How long a generator may take to close."""


class Fleet:
    """The rollout actors, the trainer and the workers of one run."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        deliver: Callable[[Event], None],
        give_up: Callable[[str], None],
        orders: OrderBook,
        gateway: Any = None,
        lived: Mapping[ReplicaId, Incarnation] | None = None,
        living: Living | None = None,
    ) -> None:
        """`orders`: the order book of the run. `lived`: the last life of each replica in an earlier life of the run.
        `living`: actors of an earlier process of the scheduler, for `recover`. `give_up(reason)`
        ends the run."""
        self._plan = plan
        self._gateway = gateway
        self._given = given
        self._deliver = deliver
        self._give_up = give_up
        self._book = orders
        self._links: dict[ReplicaId, ReplicaLink] = {}
        self._ordered: dict[ReplicaId, ReplicaLink] = {}
        self._starting: dict[ReplicaId, asyncio.Task[None]] = {}
        self._late: list[ReplicaId] = []
        self._begun = defaultdict(int, lived or {})
        """The last life of each replica that was begun."""
        self._last = defaultdict(int, lived or {})
        """The last life of each replica that is over, or whose end is not known yet."""
        self._living = living
        self._pulse = Pulse.of(plan)
        self._restarts: Counter[ReplicaId] = Counter()
        self._steps_at_loss: dict[ReplicaId, StepId] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.trainer = TrainerLink(plan, given, orders, deliver, self.spawn, living)
        self._workers = Workers(plan, given, orders, deliver, self.spawn, living)

    async def open(self, restore: Restore | None = None) -> None:
        """Start every actor and wait until each is ready, but for replicas for which the cluster has no room as it is;
        the trainer begins where `restore` says.

        Raises the first thing that goes wrong, but for what befalls a replica once enough others are up: `join` has it
        started again.
        """
        for replica in self._plan.lives():
            self._links[replica] = self._start(replica)
        opening = {
            replica: asyncio.ensure_future(link.actor.bring_up.remote()) for replica, link in self._links.items()
        }
        for opened in opening.values():  # `join` asks those that are late again, and is told the same
            opened.add_done_callback(is_up)
        room = await asyncio.to_thread(room_now, self._plan)
        enough = max(1, min(room, len(opening)))
        try:
            await asyncio.gather(first_up(enough, opening), self.trainer.open(restore), self._workers.open())
        except RayError as error:
            raise raised(error) from None
        self._late = [replica for replica, opened in opening.items() if not is_up(opened)]

    def join(self) -> None:
        """Let every replica report itself to the scheduler, and watch it from now on."""
        for replica in self._late:
            late = self._links.pop(replica)
            self._bring_back(replica, late.incarnation - 1, "it was being started", late)
        for link in self._links.values():
            link.actor.join.remote()
            self.spawn(self._watch(link))
        self.trainer.watch()
        self._workers.watch()
        self._watch_the_others()

    def take_up(self, replicas: Mapping[ReplicaId, tuple[Incarnation, bool, bool]]) -> None:
        """Take hold of the replicas that an earlier process of the scheduler started: orders go to them again.
        `replicas`: as the record shows each, its life, whether it is up and whether it returns."""
        assert self._living is not None
        self._last |= {replica: incarnation for replica, (incarnation, _, _) in replicas.items()}
        for replica, (incarnation, up, _) in replicas.items():
            source = f"rollout-{replica}"
            actor = self._living.actors.get((source, incarnation))
            seen = max(incarnation, (self._living.newest(source) or (0,))[0])
            self._begun[replica] = seen + 1  # one more may have been begun, told that it is up, and ended unseen
            if up and actor is not None and source not in self._living.silent:
                self._links[replica] = self._link(replica, incarnation, actor)

    def recover(self, replicas: Mapping[ReplicaId, tuple[Incarnation, bool, bool]]) -> None:
        """Watch what `take_up` has taken hold of, and the other actors; bring up what was on its way; replace what is
        gone."""
        assert self._living is not None
        for replica, (incarnation, up, returns) in replicas.items():
            link = self._links.get(replica)
            actor = self._living.actors.get((f"rollout-{replica}", incarnation))
            if up and link is not None:  # else `_return` watches it, once it is up
                self.spawn(self._watch(link))
            elif up:
                why = self._living.silent.get(f"rollout-{replica}", "it ended while there was no scheduler")
                self._lose(self._link(replica, incarnation, actor), why)
            else:
                if actor is not None:  # it was to be stopped, and still has what the next life waits for
                    self._link(replica, incarnation, actor).end()
                if returns:
                    self._bring_back(replica, incarnation, "it was being started")
                else:
                    self._end_unwanted(replica, incarnation)
        self._workers.recover()
        self._watch_the_others()

    def _end_unwanted(self, replica: ReplicaId, incarnation: Incarnation) -> None:
        """A life after this one was on its way as it was called off, and nobody was there to end it; or this one was
        to be stopped, and nobody has said that it was."""
        assert self._living is not None
        life, actor = self._living.newest(f"rollout-{replica}") or (0, None)
        if life > incarnation:
            self._last[replica] = life
            self._link(replica, life, actor).end()
        elif self._book.find("stop", replica) is None:
            return
        ended = max(life, incarnation)
        self._deliver(ReplicaLost(replica=replica, incarnation=ended, returns=False, reason="it is not wanted"))

    def _watch_the_others(self) -> None:
        for name, actor in zip(("trajectory store", "weights store"), self._given[2:], strict=True):
            self.spawn(self._watch_one(name, actor))
        if self._gateway is not None:
            self.spawn(self._watch_one("gateway", self._gateway))

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

    def answered(self, event: Event, orders: Sequence[OpenOrder]) -> None:
        """To be told of every event, with the orders that it answers, before what it leads to is carried out."""
        for order in orders:
            if order.owner == TRAINER:
                self.trainer.answered(event, order.command)
            else:
                self._workers.answered(order.owner, event)

    def flush(self) -> int:
        """Send what was ordered, one call per actor; how many calls."""
        calls = len(self._ordered)
        for link in self._ordered.values():
            link.send()
        self._ordered.clear()
        return calls + self.trainer.flush() + self._workers.flush()

    def stop_replica(self, command: StopReplica) -> None:
        """End one life of a replica, say so, and begin the next if one is left and wanted."""
        link = self._links.get(command.replica)
        if command.replica in self._starting and not command.returns:
            self._call_off(command.replica, command.reason)
        elif link is not None and link.incarnation == command.incarnation:
            self._lose(link, command.reason, wanted=command.returns)

    def _call_off(self, replica: ReplicaId, reason: str) -> None:
        """End a life that is on its way. Should it have said that it is up, then nobody listens to that any more."""
        self._starting.pop(replica).cancel()
        self._links.pop(replica, None)
        self._ordered.pop(replica, None)
        life = self._last[replica] = self._begun[replica]
        self._deliver(ReplicaLost(replica=replica, incarnation=life, returns=False, reason=reason))

    def start_replica(self, command: StartReplica) -> None:
        """Begin a life of a replica that is not there."""
        self._restarts[command.replica] = 0
        self._bring_back(command.replica, self._last[command.replica], "it was being started")

    # lives

    def _link(self, replica: ReplicaId, incarnation: Incarnation, actor: Any) -> ReplicaLink:
        """One life of a replica that an earlier process of the scheduler started."""
        assert self._living is not None
        kept = found_place(self._name(replica, incarnation)) if self._plan.rollout_gpus > 1 else Place({})
        return ReplicaLink(replica, incarnation, actor, kept, self._living.first - 1)

    def _name(self, replica: ReplicaId, incarnation: Incarnation) -> str:
        return f"{self._given[0].launch}/rollout-{replica}/{incarnation}"

    def _start(self, replica: ReplicaId) -> ReplicaLink:
        plan, (packed, *handles) = self._plan, self._given
        self._begun[replica] += 1
        incarnation = self._begun[replica]
        placed = place(plan, self._name(replica, incarnation) if packed.lasts else None)
        options = {**placed.options, **lasting(packed, f"rollout-{replica}", incarnation)}
        actor = (
            ray.remote(RolloutActor)
            .options(num_cpus=0, enable_task_events=False, max_concurrency=100_000, **options)
            .remote(packed, replica, incarnation, *handles, self._gateway)
        )
        return ReplicaLink(replica, incarnation, actor, placed)

    async def _watch(self, link: ReplicaLink) -> None:
        reason = await self._pulse.lost(link.actor)
        if not self._closed and self._links.get(link.replica) is link:
            self._lose(link, reason)

    async def _watch_one(self, name: str, actor: Any) -> None:
        """Nothing can take the place of a store, or of the gateway: what it held is gone with it. A store that is full
        holds it still, and the run stops until somebody makes room."""
        try:
            full = f"the {name} takes nothing more: {await actor.alive.remote()}"
        except Exception as error:
            if not self._closed:
                self._give_up(f"the {name} is lost: {failure_reason(error)}")
            return
        if not self._closed:
            self._deliver(StopRequested(reason=clean(full)))

    def _lose(self, link: ReplicaLink, reason: str, wanted: bool = True) -> None:
        log.warning("replica %d is lost (life %d): %s", link.replica, link.incarnation, reason)
        self._links.pop(link.replica, None)
        self._last[link.replica] = link.incarnation
        self._ordered.pop(link.replica, None)
        link.end()
        returns = wanted and self._may_restart(link.replica)
        if returns:
            self._bring_back(link.replica, link.incarnation, reason)
        lost = ReplicaLost(replica=link.replica, incarnation=link.incarnation, returns=returns, reason=reason)
        self._deliver(lost)

    def _may_restart(self, replica: ReplicaId) -> bool:
        """Take one restart from a replica's budget, which is full again whenever a train step was trained since."""
        if self._steps_at_loss.get(replica, -1) < self.trainer.steps:
            self._restarts[replica] = 0
        self._steps_at_loss[replica] = self.trainer.steps
        self._restarts[replica] += 1
        return self._restarts[replica] <= self._plan.replica_restarts

    def _bring_back(
        self, replica: ReplicaId, before: Incarnation, reason: str, link: ReplicaLink | None = None
    ) -> None:
        """Have a life follow the life `before`, unless one does already: `link`, or one that an earlier process of the
        scheduler has begun, or a new one."""
        if replica in self._links or replica in self._starting:
            return
        source = f"rollout-{replica}"
        life, actor = (self._living.newest(source) if self._living is not None else None) or (0, None)
        if link is None and self._living is not None and life > before:
            link = self._link(replica, life, actor)
            if source in self._living.silent:
                link.end()
                link = None
            else:
                self._links[replica] = link  # it may have joined already, and is given orders as soon as that is heard
        self._starting[replica] = self.spawn(self._return(replica, before, reason, link))

    async def _return(
        self, replica: ReplicaId, before: Incarnation, reason: str, link: ReplicaLink | None = None
    ) -> None:
        """Bring up the next life of a replica after the life `before`, with its first weights; the scheduler gives it
        the newest. `link`: that life has begun."""
        try:
            await self._say_if_it_waits(replica)
            link = link or self._start(replica)
            await link.actor.bring_up.remote()
        except asyncio.CancelledError:
            if link is not None:
                link.end()
            raise
        except Exception as error:
            log.exception("replica %d could not be started again", replica)
            story = f"{reason}; it could not be started again: {failure_reason(error)}"
            self._start_over(replica, before, story, link)
            return
        self._starting.pop(replica, None)
        if self._closed:
            link.end()
            return
        self._links[replica] = link
        link.actor.join.remote()
        self.spawn(self._watch(link))

    def _start_over(self, replica: ReplicaId, before: Incarnation, reason: str, link: ReplicaLink | None) -> None:
        """Have another life follow one that ended before it was up: `link`, or none where not even that could be made.
        Of one that an earlier process of the scheduler began, the scheduler may have heard that it joined."""
        heard = link is not None and self._links.get(replica) is link
        if link is not None:
            before = self._last[replica] = link.incarnation
            link.end()
        if heard:
            del self._links[replica]
            self._ordered.pop(replica, None)
        returns = self._may_restart(replica)
        if returns:
            self._starting[replica] = self.spawn(self._return(replica, before, reason))
        else:
            self._starting.pop(replica, None)
        if heard or not returns:
            self._deliver(ReplicaLost(replica=replica, incarnation=before, returns=returns, reason=reason))

    async def _say_if_it_waits(self, replica: ReplicaId) -> None:
        """Ray starts an actor as soon as the cluster has room, be that now or when a node is added."""
        lacking = await asyncio.to_thread(shortfall, self._plan, len(self._links) + 1)
        if lacking:
            log.warning("replica %d waits for a node to be on: %s", replica, lacking)

    def stop_watching(self) -> None:
        """Everything is being taken down: nobody's end is news any more."""
        self._closed = True

    async def close(self) -> None:
        """Let generators give back what they hold, for a while, then kill every actor."""
        self.stop_watching()
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

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            log.error("a task of the fleet failed", exc_info=error)
            self._give_up(f"a task that looks after the actors failed: {failure_reason(error)}")
