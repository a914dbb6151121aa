"""The actors that run workers: each has a `workers.worker.Worker` and an outbox, in its own process.

Created by `ray_processes.RayProcesses`. The event loop handles messages; the worker loads and computes on threads.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from engine.actors.detached_actors import PackedPlan, end_when_orphaned, hide_gpus, let_blocks_grow, prepare_process
from engine.actors.failures import HeartbeatActor, awaited, failure_reason
from engine.actors.placement import trainer_takes
from engine.actors.rank_hosts import RankNodes
from engine.actors.store_actors import RemoteWeights, remote_trajectories
from engine.actors.transports import transport_of, wire_of
from engine.errors import EngineError
from engine.events import (
    CacheMeasured,
    CallsMeasured,
    Event,
    OrderDone,
    OrderProgressed,
    PrefixStored,
    WeightsStaged,
)
from engine.ids import GroupId, LifeNumber, ReplicaId, StepId, Version
from engine.record.codec import pack
from engine.rollout.agents.agent_generator import AgentCall, AgentGenerator, GroupOutcome, OpenGroup
from engine.rollout.backend import SampleResult
from engine.rollout.sent_weights import Turn, WeightsCall
from engine.runtime.garbage_collection import freeze_objects, rare_collection
from engine.runtime.process_port import source_of
from engine.runtime.wire import WAIT_S, GatheredCalls, InOrder, Message, unpack_orders
from engine.states.process import GATEWAY, TRAINER
from engine.storage.weights import Trained
from engine.training.shared_weights import Manifest
from engine.workers.added_states import StateWorker
from engine.workers.plan import Plan, Restore, Rollout
from engine.workers.replica import ReplicaWorker
from engine.workers.scorer import ScorerWorker
from engine.workers.threads import contained
from engine.workers.trainer import TrainerWorker
from engine.workers.worker import Peers, Worker

# -- the client of the gateway actor, without its HTTP server ----------------------------------------------------------


log = logging.getLogger(__name__)


class GatewayLink:
    """The gateway, for the actor of a replica. If the gateway is dead, calls never return: the run ends because of the
    gateway, so failures of groups must not be reported first."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._replica = ray.get_runtime_context().current_actor

    async def open(self, work: OpenGroup) -> GroupOutcome:
        outcome: GroupOutcome = await _await_gateway(self._gateway.open_group.remote(work, self._replica))
        return outcome

    async def cut(self, group: GroupId, attempt: int, how: str) -> None:
        await _await_gateway(self._gateway.cut.remote(group, attempt, how))


async def _await_gateway(call: Any) -> Any:
    with awaited(GATEWAY):
        try:
            return await call
        except RayActorError:
            log.warning("the gateway has died; this call waits for the end of the run")
            return await asyncio.Event().wait()


# -- the outbox --------------------------------------------------------------------------------------------------------


Figures = list[tuple[StepId, Mapping[str, Any]]]
"""The trainer's metrics of steps."""
Batch = tuple[str, LifeNumber, int, bytes, Figures]
"""(source, life, sequence, events, figures), as one argument: Ray packs each argument by itself."""
Report = Callable[[int, bytes, Figures], Awaitable[None]]
"""(sequence, events, figures): returns once the events are recorded."""


FIGURE_WAIT_S = 0.1
"""Seconds that an event may wait for others if hardly anything follows from it."""
WAITS_S: Mapping[type[Event], float] = {
    **dict.fromkeys((OrderProgressed, PrefixStored, WeightsStaged), WAIT_S),
    **dict.fromkeys((OrderDone, CallsMeasured, CacheMeasured), FIGURE_WAIT_S),
}
"""How long events that nobody waits for may wait for others, by class."""


class Outbox:
    """Sends an actor's events to the scheduler. Each batch has a number; Ray resends it until it is acknowledged."""

    def __init__(self, report: Report, lost: Callable[[str], None]) -> None:
        """`lost(reason)` is called if an event cannot be sent, because the scheduler is gone or the event cannot be
        packed. Then nothing more is sent."""
        self._report = report
        self._lost = lost
        self._sequence = 0
        self._calls: GatheredCalls[Event] = GatheredCalls(self._send)
        self._figures: Figures = []
        self._failed = False

    def add(self, event: Event) -> None:
        self._calls.add(event, WAITS_S.get(type(event), 0.0))

    def add_figures(self, step: StepId, figures: Mapping[str, Any]) -> None:
        """Send the trainer's metrics with the next event, before it."""
        self._figures.append((step, figures))

    async def _send(self, events: Sequence[Event]) -> None:
        if self._failed:
            return
        figures, self._figures = self._figures, []
        self._sequence += 1
        try:
            await self._report(self._sequence, pack(events), figures)
        except Exception as error:
            self._failed = True
            log.exception("events cannot be sent to the scheduler")
            self._lost(f"events cannot be sent to the scheduler: {failure_reason(error)}")


class Inbox:
    """The scheduler's side of all outboxes: handles each batch once. It remembers the answer to the newest batch of
    each process, for batches that Ray resends."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[LifeNumber, int, asyncio.Task[list[Message]]]] = {}

    async def answer(
        self,
        source: str,
        life: LifeNumber,
        sequence: int,
        handle: Callable[[], Coroutine[Any, Any, list[Message]]],
    ) -> list[Message]:
        """The answer of `handle()` to a batch. The first batch of an outbox is always handled: if an actor died while
        there was no scheduler, its successor has the same name and counts from 1 again. Handling an event twice changes
        nothing."""
        known = self._newest.get(source)
        if known is None or known[0] != life or sequence == 1 or sequence > known[1]:
            known = (life, sequence, asyncio.get_running_loop().create_task(handle()))
            self._newest[source] = known
        return await asyncio.shield(known[2])


# -- the actors --------------------------------------------------------------------------------------------------------


class WorkerActor(HeartbeatActor):
    """Call `bring_up`, then `carry_out`; earlier orders wait. `alive` returns only once the worker has failed."""

    worker_class: type[Worker]

    def __init__(
        self,
        plan: PackedPlan,
        index: int,
        life: LifeNumber,
        scheduler: Any,
        trajectories: Any,
        weights: Any,
        gateway: Any = None,
    ) -> None:
        self._prepare_gpus(plan)
        self._plan = self._unpacked(plan)
        end_when_orphaned(plan, scheduler)
        self._source = source_of(self.worker_class.kind, index)
        self._life = life
        self._scheduler = scheduler
        self._gateway = gateway
        self._loading: asyncio.Task[None] | None = None
        self._orders: InOrder[bytes] = InOrder()
        reader = index if self.worker_class is ReplicaWorker else None
        self._weights = RemoteWeights(weights, transport_of(self._plan), reader, wire_of(self._plan))
        outbox = Outbox(self._send, lost=lambda reason: self.worker.break_down(reason))
        peers = Peers(
            trajectories=remote_trajectories(trajectories),
            weights=self._weights,
            emit=outbox.add,
            report=outbox.add_figures,
            ask_trainer=self._ask_trainer,
        )
        self.worker: Worker = self.worker_class(self._plan, index, life, peers)

    def _prepare_gpus(self, plan: PackedPlan) -> None:
        """Before torch is imported."""
        hide_gpus()

    def _unpacked(self, plan: PackedPlan) -> Plan:
        return plan.unpack()

    async def bring_up(self, restore: Restore | None = None) -> None:
        """Load the worker. Repeated calls share one load and its result."""
        if self._loading is None:
            prepare_process(self._source, self._plan.run_dir, self.worker.threads)
            self._loading = asyncio.ensure_future(self._load(restore))
        await asyncio.shield(self._loading)

    async def _load(self, restore: Restore | None) -> None:
        with rare_collection():
            await self.worker.open(restore)
            await self._open_more()
            freeze_objects()

    async def _open_more(self) -> None:
        """Load what this kind of process needs beside its worker."""

    async def _send(self, sequence: int, events: bytes, figures: Figures) -> None:
        """Report a batch of events. The answer has the orders that follow from it, for this process."""
        batch: Batch = (self._source, self._life, sequence, events, figures)
        for message in await self._scheduler.report.remote(batch):
            await self.carry_out(*message)

    async def _ask_trainer(self, steps: StepId) -> None:
        with awaited(TRAINER):
            await self._scheduler.hand_over.remote(steps)

    async def attach(self, epoch: int) -> None:
        """Accept a restarted scheduler, and refuse the orders of earlier ones."""
        if self._orders.begin(epoch):
            self.worker.forget_early()

    @ray.method(num_returns=0)
    async def carry_out(self, epoch: int, sequence: int, orders: bytes) -> None:
        await self.attach(epoch)  # Ray may run this call before `attach`
        for batch in self._orders.take(epoch, sequence, orders):
            for command, prompt in unpack_orders(batch):
                self.worker.carry_out(command, prompt)

    async def alive(self) -> str:
        """Returns only on a failure, with the reason. If the actor dies, Ray fails the same call."""
        return await self.worker.breakdown()

    async def close(self) -> None:
        """Cancel everything, and close the worker."""
        await self.worker.close()


def agent_generators(rollout: Rollout) -> list[AgentGenerator]:
    """The generators of a replica that run agents, each once: its evaluator is usually its generator."""
    distinct = {id(generator): generator for generator in (rollout.generator, rollout.evaluator)}
    return [generator for generator in distinct.values() if isinstance(generator, AgentGenerator)]


class RolloutActor(WorkerActor):
    """Runs a replica, and also handles the calls of agents."""

    worker_class = ReplicaWorker
    worker: ReplicaWorker

    async def bring_up(self, restore: Restore | None = None) -> None:
        await super().bring_up(restore)
        rollout = self.worker.rollout
        assert rollout is not None  # it is open
        for agents in agent_generators(rollout):
            agents.connect(GatewayLink(self._gateway))

    async def join(self) -> None:
        """Report that the replica is up, with the initial weights; once."""
        self.worker.join()

    async def sample(self, call: AgentCall) -> SampleResult:
        """Answer an agent's call, from the gateway. Validation rows have negative groups. Raises: `EngineError` if the
        replica runs no agents, and the exceptions of `AgentGenerator.sample`."""
        rollout = self.worker.rollout
        agents = None if rollout is None else rollout.evaluator if call.group < 0 else rollout.generator
        if not isinstance(agents, AgentGenerator):
            raise EngineError(f"{self._source} cannot sample for an agent, because its generator has no agents")
        return await agents.sample(call)


class TrainerActor(WorkerActor):
    """Runs the trainer, and also hands out weights."""

    worker_class = TrainerWorker
    worker: TrainerWorker

    def _prepare_gpus(self, plan: PackedPlan) -> None:
        let_blocks_grow()
        if not plan.trainer_shares:
            hide_gpus()

    def _unpacked(self, plan: PackedPlan) -> Plan:
        """The plan, with the nodes of the ranks if there are several. This node is the first."""
        unpacked = super()._unpacked(plan)
        if unpacked.gpus.trainer_nodes == 1:
            return unpacked
        self._nodes = RankNodes(plan, unpacked.gpus.trainer_nodes, trainer_takes(unpacked))
        return replace(unpacked, make_trainer=partial(unpacked.make_trainer, nodes=self._nodes))

    async def _open_more(self) -> None:
        await self._weights.prepare_to_send()

    async def dump_stacks(self) -> None:
        """Make the processes on the trainer's other nodes write their stacks, also while the trainer's thread hangs."""
        await asyncio.gather(*(self._nodes.dump_stacks()))

    async def hand_over(self, steps: StepId) -> None:
        """Called for a scorer: hand over the weights after `steps` train steps, if they are still owed."""
        await self.worker.hand_over(steps)

    async def give(self, version: Version | Trained, apart: bool) -> Any:
        """Called by the weights store: the weights being published. See `Transport.hand_out`."""
        return self._weights.handed_out(version, apart)

    async def manifest(self, version: Version) -> Manifest:
        """Called by a replica: what this process can send it. See `Senders.manifest`."""
        return self._weights.manifest_to_send(version)

    async def turn(self, reader: ReplicaId, turn: Turn, replica: Any) -> WeightsCall | None:
        """Called by a replica: one turn of a transfer to its engine. See `SentByTrainer.exchange`."""
        return await self._weights.turn(reader, turn, replica)


class ScorerActor(WorkerActor):
    worker_class = ScorerWorker

    def _prepare_gpus(self, plan: PackedPlan) -> None:
        let_blocks_grow()
        hide_gpus()


class AddedStatesActor(WorkerActor):
    worker_class = StateWorker

    async def _load(self, restore: Restore | None) -> None:
        from engine.config import load_extensions_of  # late: only this process needs it

        await asyncio.to_thread(contained, load_extensions_of, self._plan.config)
        await super()._load(restore)


ACTORS = {actor.worker_class.kind: actor for actor in (RolloutActor, TrainerActor, ScorerActor, AddedStatesActor)}
"""By kind of process. Separate classes, so that Ray and `ps` show the kind."""
