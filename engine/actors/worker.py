"""The actors that host workers: each has a `runtime.workers.Worker` and an outbox, in its own process.

Created by `processes.RayProcesses`. The event loop handles messages; the worker loads and computes on threads.
"""

import asyncio
from typing import Any

import ray

from engine.actors.gateway_link import GatewayLink
from engine.actors.lasting import end_when_orphaned
from engine.actors.outbox import Outbox
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.sign import Watched, awaited
from engine.actors.stores import RemoteWeights, remote_trajectories
from engine.actors.transports import transport_of
from engine.actors.wire import InOrder, unpack_orders
from engine.errors import EngineError
from engine.hosts.weights import Trained
from engine.ids import Incarnation, ReplicaId, StepId, Version
from engine.rollout.agent import AgentCall, AgentGenerator
from engine.rollout.backend import SampleResult
from engine.runtime.plan import Restore
from engine.runtime.port import source_of
from engine.runtime.workers import WORKERS, Peers, ReplicaWorker, TrainerWorker, Worker
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER


class WorkerActor(Watched):
    """Call `bring_up`, then `carry_out`; earlier orders wait. `alive` returns only once the worker has failed."""

    kind: str

    def __init__(
        self,
        plan: PackedPlan,
        index: int,
        incarnation: Incarnation,
        scheduler: Any,
        trajectories: Any,
        weights: Any,
        gateway: Any = None,
    ) -> None:
        self._plan = plan.unpack()
        end_when_orphaned(plan, scheduler)
        self.worker: Worker = WORKERS[self.kind](self._plan, index, incarnation)
        self._source = source_of(self.kind, index)
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._gateway = gateway
        self._prepared = False
        self._orders: InOrder[bytes] = InOrder()
        self._broken: asyncio.Future[str] | None = None
        self._trajectories = remote_trajectories(trajectories)
        self._weights = RemoteWeights(weights, transport_of(self._plan), self._reader(index))

    def _reader(self, index: int) -> ReplicaId | None:
        """The replica that fetches weights, if it is one."""
        return None

    async def bring_up(self, restore: Restore | None = None) -> None:
        """Load the hosted role. Repeated calls share one load and its result."""
        if not self._prepared:
            self._prepared = True
            prepare_process(self._source, self._plan.run_dir, self.worker.threads)
        await self.worker.open(self._peers(), restore)

    def _peers(self) -> Peers:
        report = self._scheduler.report.remote
        outbox = Outbox(
            lambda sequence, events, figures: report(self._source, self._incarnation, sequence, events, figures),
            lost=self._break,
        )
        return Peers(
            trajectories=self._trajectories,
            weights=self._weights,
            emit=outbox.add,
            report=outbox.add_figures,
            broken=self._break,
            ask_trainer=self._ask_trainer,
        )

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
        return await asyncio.shield(self._brokenness())

    async def close(self) -> None:
        """Cancel everything, and close the hosted role."""
        await self.worker.close()

    def _brokenness(self) -> "asyncio.Future[str]":
        if self._broken is None:
            self._broken = asyncio.get_running_loop().create_future()
        return self._broken

    def _break(self, reason: str) -> None:
        broken = self._brokenness()
        if not broken.done():
            broken.set_result(reason)


class RolloutActor(WorkerActor):
    """Hosts a replica, and also handles the calls of agents."""

    kind = REPLICA
    worker: ReplicaWorker

    def _reader(self, index: int) -> ReplicaId:
        return index

    async def bring_up(self, restore: Restore | None = None) -> None:
        await super().bring_up(restore)
        rollout = self.worker.rollout
        assert rollout is not None  # it is open
        for agents in (rollout.generator, rollout.evaluator):
            if isinstance(agents, AgentGenerator):
                agents.connect(GatewayLink(self._gateway))

    async def join(self) -> None:
        """Report that the replica is up, with the initial weights; once."""
        self.worker.join()

    async def sample(self, call: AgentCall) -> SampleResult:
        """Answer an agent's call, from the gateway. Held-out prompts have negative groups."""
        rollout = self.worker.rollout
        agents = None if rollout is None else rollout.evaluator if call.group < 0 else rollout.generator
        if not isinstance(agents, AgentGenerator):
            raise EngineError(f"{self._source} has no agents")
        return await agents.sample(call)


class TrainerActor(WorkerActor):
    """Hosts the trainer, and also hands out weights."""

    kind = TRAINER
    worker: TrainerWorker

    async def hand_over(self, steps: StepId) -> None:
        """Called for a scorer: hand over the weights after `steps` train steps, if they are still owed."""
        await self.worker.hand_over(steps)

    async def give(self, version: Version | Trained) -> Any:
        """Called by the weights store: the weights being published."""
        return self._weights.handed_out(version)


class ScorerActor(WorkerActor):
    kind = SCORER


class AddedStatesActor(WorkerActor):
    kind = ADDED_STATES


ACTORS = {actor.kind: actor for actor in (RolloutActor, TrainerActor, ScorerActor, AddedStatesActor)}
"""By kind of process. Separate classes, so that Ray and `ps` show the kind."""
