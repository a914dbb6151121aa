"""The rollout actor: one replica in one of its lives, a `ReplicaHost` with an outbox.

Started, watched and ended by `supervisor.py`. Its event loop carries messages; models are loaded on a thread.
"""

import asyncio
from typing import Any

import ray

from engine.actors.gateway_link import GatewayLink
from engine.actors.lasting import end_when_orphaned
from engine.actors.outbox import Outbox
from engine.actors.plan import Rollout
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.sign import Watched
from engine.actors.stores import RemoteTrajectories, RemoteWeights
from engine.actors.wire import InOrder, unpack_orders
from engine.errors import ConfigError, EngineError
from engine.hosts.measuring import HeldOut
from engine.hosts.replica import ReplicaHost
from engine.hosts.threads import contained
from engine.ids import Incarnation, ReplicaId
from engine.rollout.agent import AgentCall, AgentGenerator
from engine.rollout.backend import SampleResult


class RolloutActor(Watched):
    """`bring_up`, then `join`; from then on `carry_out`. `alive` is answered only when the replica cannot go on."""

    def __init__(
        self,
        plan: PackedPlan,
        replica: ReplicaId,
        incarnation: Incarnation,
        scheduler: Any,
        trajectories: Any,
        weights: Any,
        gateway: Any = None,
    ) -> None:
        self._plan = plan.unpack()
        end_when_orphaned(plan, scheduler)
        self._opening: asyncio.Task[None] | None = None
        self._joined = False
        self._replica = replica
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._stores = (trajectories, weights)
        self._gateway = gateway
        self._orders: InOrder[bytes] = InOrder()
        self._broken: asyncio.Future[str] | None = None
        self._host: ReplicaHost | None = None
        self._rollout: Rollout | None = None

    async def bring_up(self) -> None:
        """Load what generates, once, whoever asks and how often. Raises whatever the user's factory raises."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        await asyncio.shield(self._opening)

    async def attach(self, epoch: int) -> None:
        """The scheduler is another process now. Orders of the one before are refused."""
        self._orders.begin(epoch)

    async def _open(self) -> None:
        plan, source = self._plan, f"rollout-{self._replica}"
        prepare_process(source, plan.run_dir, plan.rollout_threads)
        self._rollout = await asyncio.to_thread(contained, plan.make_rollout, self._replica)
        for agents in (self._rollout.generator, self._rollout.evaluator):
            if isinstance(agents, AgentGenerator):
                agents.connect(GatewayLink(self._gateway))
        report = self._scheduler.report.remote
        outbox = Outbox(
            lambda sequence, events, figures: report(source, self._incarnation, sequence, events, figures),
            lost=self._break,
        )
        trajectories, weights = self._stores
        self._host = ReplicaHost(
            replica=self._replica,
            incarnation=self._incarnation,
            generator=self._rollout.generator,
            samples=plan.samples,
            trajectories=RemoteTrajectories(trajectories),
            weights=RemoteWeights(weights, plan.transport, self._replica),
            emit=outbox.add,
            broken=self._break,
            prefix_every_tokens=plan.prefix_every_tokens,
            held_out=self._held_out(self._rollout),
            rewarded=plan.rewarded,
            progress_every_s=plan.limits.timeouts.progress_every_s,
        )

    def _held_out(self, rollout: Rollout) -> HeldOut | None:
        """What this replica may be asked to measure. Raises: `ConfigError` where it could not."""
        prompts, evaluator = self._plan.held_out, rollout.evaluator
        if self._plan.limits.validation is None:
            return None
        if evaluator is None:
            law = "validation needs an evaluator, and the plan's rollouts have none"
            raise ConfigError("limits.validation", f"{len(prompts)} rows", law, "add one, or use None")
        return HeldOut(prompts=prompts, evaluator=evaluator)

    async def join(self) -> None:
        """Tell the scheduler that the replica is up, with the initial weights; once."""
        hosted = self._hosted()
        if not self._joined:
            self._joined = True
            hosted.join(self._plan.slots)

    @ray.method(num_returns=0)
    async def carry_out(self, epoch: int, sequence: int, orders: bytes) -> None:
        for batch in self._orders.take(epoch, sequence, orders):
            for command, prompt in unpack_orders(batch):
                self._hosted().carry_out(command, prompt)

    async def sample(self, call: AgentCall) -> SampleResult:
        """A call of an agent, from the gateway. Held-out prompts have groups below 0."""
        rollout = self._rollout
        agents = None if rollout is None else rollout.evaluator if call.group < 0 else rollout.generator
        if not isinstance(agents, AgentGenerator):
            raise EngineError(f"replica {self._replica} has no agents")
        return await agents.sample(call)

    async def alive(self) -> str:
        """Never answered while all is well; then with the reason. That the actor dies is known by the same call."""
        return await asyncio.shield(self._brokenness())

    def _brokenness(self) -> "asyncio.Future[str]":
        if self._broken is None:
            self._broken = asyncio.get_running_loop().create_future()
        return self._broken

    async def close(self) -> None:
        """End what runs and give back what the generator holds."""
        if self._host is not None:
            await self._host.close()

    def _hosted(self) -> ReplicaHost:
        if self._host is None:
            raise EngineError(f"replica {self._replica} is not open")
        return self._host

    def _break(self, reason: str) -> None:
        broken = self._brokenness()
        if not broken.done():
            broken.set_result(reason)
