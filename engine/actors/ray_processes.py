"""Implements the runtime's process port over Ray: each process is an actor.

Created by the scheduler actor. Ray starts an actor once its resources are free. An actor is lost if it reports so, if
Ray reports its death, or if it misses heartbeats.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from engine.actors.detached_actors import PackedPlan, RunningActors, calls_file, detached_options
from engine.actors.failures import Pulse, never_ran, raised, sign_of
from engine.actors.placement import (
    ActorPlacement,
    found_place,
    in_group,
    place,
    room_now,
    shortfall,
    trainer_shortfall,
    trainer_takes,
)
from engine.actors.worker_actor import ACTORS
from engine.errors import clean
from engine.ids import NO_VERSION, GroupId, LifeNumber, StepId, Version
from engine.protocols.user_code import calls_in
from engine.runtime.process_port import SERVICES, Found, Key, Life, ProcessEnd, SentOrder, Sign, key_of, source_of
from engine.runtime.stacks import dump_stacks, stacks_file, writes_to
from engine.runtime.trajectory_service import unpacked
from engine.runtime.wire import Message, pack_orders
from engine.states.process import ADDED_STATES, GATEWAY, REPLICA, SCORER, TRAINER, TRAJECTORY_STORE, WEIGHTS_STORE
from engine.storage.group_codec import plain_prompt
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.plan import Plan, Restore

log = logging.getLogger(__name__)

STORE_PATIENCE = 4
"""Factor on the heartbeat limit of the stores. The weights store copies whole models on the event loop that answers
heartbeats."""
OWN_PROCESS = "if a reward ends its process, name it in reward.functions with processes: 1, which protects the replica"
STACKS_S = 15.0
"""Seconds that the trainer's other nodes have to write their stacks."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that a generator, the gateway or the trajectory store gets to close."""


class RayProcess(Life):
    """One life of an actor. `epoch`: that of the sending scheduler process; actors refuse orders of lower
    ones."""

    def __init__(
        self,
        key: Key,
        life: LifeNumber,
        actor: Any,
        pulse: Pulse,
        plan: Plan,
        epoch: int,
        placed: ActorPlacement,
        create: Callable[[], Any] | None = None,
    ) -> None:
        """`create`: creates the actor again; None if an earlier scheduler process created it."""
        super().__init__(*key, life)
        self.actor = actor
        self._create = create
        """None once the actor has run."""
        self._early: list[Message] = []
        """Messages sent before the actor has run: if it is created again, the new one gets them."""
        self._source = source_of(*key)
        self._pulse = pulse
        self._run_dir = plan.run_dir
        self._apart = plan.gpus.trainer_nodes > 1
        self._epoch = epoch
        self._place = placed
        self._sequence = 0
        self._held: list[Message] | None = None
        """Messages for the answer to its report; None while there is no such report."""
        self._pid = 0
        """Its process id; 0 until its first sign of life."""

    async def bring_up(self, restore: Restore | None) -> None:
        """Wait until the actor runs. Ray notices a dead node late. If it has placed the actor there, create it again,
        which uses up no attempt."""
        while True:
            try:
                await self.actor.bring_up.remote(*((restore,) if self.kind == TRAINER else ()))
                self._create = None
                self._early.clear()
                return
            except RayError as error:
                if self._create is None or not never_ran(error):
                    raise raised(error) from error
                log.warning("%s is placed again: the node that Ray had chosen for it has died", self._source)
                self.actor = self._create()
                for message in self._early:
                    self.actor.carry_out.remote(*message)

    def join(self) -> None:
        self.actor.join.remote()

    def send(self, orders: Sequence[SentOrder]) -> None:
        self._sequence += 1
        message = (self._epoch, self._sequence, pack_orders(orders))
        if self._create is not None:
            self._early.append(message)
        if self._held is None:
            self.actor.carry_out.remote(*message)
        else:
            self._held.append(message)

    def hold(self) -> None:
        """Keep the following messages for the answer to its report, which saves a call."""
        self._held = []

    def held(self) -> list[Message]:
        """The messages since `hold`. Later ones are sent at once."""
        held, self._held = self._held or [], None
        return held

    async def probe(self) -> Sign | None:
        sign = await sign_of(self.actor)
        self._pid = self._pid if sign is None else sign.pid
        return sign

    async def lost(self) -> ProcessEnd:
        learning = asyncio.ensure_future(self.probe())
        try:
            ended = await self._pulse.lost(self.actor)
        finally:
            learning.cancel()
        if ended.silent or ended.self_reported or self._run_dir is None:
            return ended
        calls = await asyncio.to_thread(calls_in, calls_file(self._run_dir, self._source))
        return replace(ended, reason=f"{ended.reason}; it was calling {calls}; {OWN_PROCESS}") if calls else ended

    async def stacks(self) -> str:
        """Works only for a process on this node, and for the trainer's ranks on any node."""
        if self._run_dir is None or not self._pid:
            return ""
        if self.kind == TRAINER and self._apart:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self.actor.dump_stacks.remote(), STACKS_S)
        file = stacks_file(self._run_dir, self._source)
        if not await asyncio.to_thread(writes_to, self._pid, file):
            return ""
        return await asyncio.to_thread(dump_stacks, self._pid, file)

    async def hand_over(self, steps: StepId) -> None:
        await self.actor.hand_over.remote(steps)

    async def close(self) -> None:
        """Closes only generators; other actors need no close."""
        if self.kind == REPLICA:
            await self.actor.close.remote()

    def kill(self, *, hung: bool = False) -> None:
        """Kill the actor and free its placement group."""
        self._create = None
        if self.actor is not None:
            ray.kill(self.actor)
        self._place.free()


class RayProcesses:
    """Makes actors. Each gets the plan and the actors of the scheduler, the stores and the gateway."""

    def __init__(
        self,
        plan: Plan,
        packed: PackedPlan,
        scheduler: Any,
        trajectories: Any,
        weights: Any,
        gateway: Any = None,
        epoch: int = 0,
        trainer_group: Any = None,
    ) -> None:
        """`trainer_group`: of `placement.reserve_trainer`."""
        self._plan = plan
        self._trainer_group = trainer_group
        self._packed = packed
        self._given = (scheduler, trajectories, weights)
        self._kept = {TRAJECTORY_STORE: trajectories, WEIGHTS_STORE: weights, GATEWAY: gateway}
        self._epoch = epoch
        self._pulse = Pulse.of(plan)
        self._reporting: dict[tuple[str, LifeNumber], RayProcess] = {}
        """Lives by source."""
        self._patient = Pulse(plan.liveness.heartbeat_s, plan.liveness.missed_beats * STORE_PATIENCE)
        self.goodbye_s = CLOSE_TIMEOUT_S
        self.look_again_s = self._pulse.every_s or None

    def make(self, kind: str, index: int, life: LifeNumber) -> RayProcess:
        source, placed = source_of(kind, index), ActorPlacement({})
        if kind == REPLICA:
            name = self._name(source, life) if self._packed.detached else None
            placed = place(self._plan, index, self._trainer_group, name)
        options: dict[str, Any] = {
            REPLICA: {"max_concurrency": 100_000, **placed.options},
            TRAINER: in_group(self._trainer_group, trainer_takes(self._plan)),
            SCORER: {"num_gpus": self._plan.gpus.scorer_gpus},
            ADDED_STATES: {"max_concurrency": 100_000},
        }[kind]
        named = detached_options(self._packed, source, life)
        made = ray.remote(ACTORS[kind]).options(num_cpus=0, enable_task_events=False, **options, **named)

        def create() -> Any:
            return made.remote(self._packed, index, life, *self._given, self._kept[GATEWAY])

        try:
            actor = create()
        except BaseException:
            placed.free()
            raise
        process = self._reporting[source, life] = self._process((kind, index), life, actor, placed, create)
        return process

    def reporting(self, source: str, life: LifeNumber) -> RayProcess | None:
        """The life that sends a report; None if it is unknown to this scheduler."""
        return self._reporting.get((source, life))

    def last(self, kind: str, index: int) -> bool:
        return False

    def check(self, prompt: Prompt) -> None:
        plain_prompt(prompt)

    def services(self) -> Mapping[str, Life]:
        return {kind: self._process((kind, 0), 0, actor) for kind, actor in self._kept.items() if actor is not None}

    async def room(self) -> int:
        return await asyncio.to_thread(room_now, self._plan)

    async def lacking(self, kind: str, replicas: int) -> str | None:
        if kind == TRAINER:
            waits = self._plan.gpus.trainer_gpus > 0 or self._plan.gpus.trainer_nodes > 1
            return clean(await asyncio.to_thread(trainer_shortfall, self._plan)) if waits else None
        if not self._plan.gpus.replica_gpus:
            return None
        return clean(await asyncio.to_thread(shortfall, self._plan, replicas))

    async def published(self) -> Version:
        try:
            newest: int = await asyncio.wait_for(self._kept[WEIGHTS_STORE].newest.remote(), self._pulse.patience_s)
            return newest
        except (RayError, TimeoutError):
            return NO_VERSION

    def found(self, living: RunningActors) -> Found:
        """The processes that a restarted scheduler has taken over, with their placement groups."""
        several = self._plan.gpus.replica_gpus > 1
        known = {}
        for (source, life), actor in living.actors.items():
            placed = found_place(self._name(source, life)) if several else None
            known[source, life] = self._process(key_of(source), life, actor, placed)
        self._reporting.update(known)
        return Found(processes=known, silent=living.silent)

    def _process(
        self,
        key: Key,
        life: LifeNumber,
        actor: Any,
        placed: ActorPlacement | None = None,
        create: Callable[[], Any] | None = None,
    ) -> RayProcess:
        pulse = self._patient if key[0] in SERVICES else self._pulse
        return RayProcess(key, life, actor, pulse, self._plan, self._epoch, placed or ActorPlacement({}), create)

    def _name(self, source: str, life: LifeNumber) -> str:
        """The name of a life's actor and placement group."""
        return f"{self._packed.launch}/{source}/{life}"


class RayStores:
    """The actors of the stores and the gateway, for the executor."""

    def __init__(self, trajectories: Any, weights: Any, gateway: Any = None) -> None:
        self._trajectories = trajectories
        self._weights = weights
        self._gateway = gateway

    def read(self, groups: Sequence[GroupId]) -> Awaitable[list[TrajectoryGroup]]:
        return unpacked(self._trajectories.get.remote([*groups]))

    def discard(self, groups: Sequence[GroupId]) -> Any:
        return self._trajectories.discard.remote(groups)

    def retire(self, version: Version) -> Any:
        return self._weights.retire.remote(version)

    def cut_agents(self, groups: Sequence[GroupId]) -> bool:
        if self._gateway is None:
            return False
        self._gateway.discard.remote(groups)
        return True
