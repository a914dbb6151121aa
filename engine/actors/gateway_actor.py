"""The gateway actor of a run: runs the HTTP server for agents, and runs the agents.

Started by the scheduler actor before the replicas, and ended with the run. Replicas open groups here, and the gateway
asks them for samples. The scheduler discards groups that are no longer needed.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from engine.actors.detached_actors import PackedPlan, end_when_orphaned, hide_gpus, prepare_process
from engine.actors.failures import HeartbeatActor, raised
from engine.errors import EngineError
from engine.gateway.gateway_server import GatewayServer
from engine.ids import GroupId
from engine.rollout.agents.agent_generator import AgentCall, GroupOutcome, OpenGroup
from engine.rollout.backend import SampleResult

log = logging.getLogger(__name__)


class GatewayActor(HeartbeatActor):
    """After `open`, replicas call `open_group` and `cut`, and the scheduler `discard`, until `close`."""

    def __init__(self, plan: PackedPlan, scheduler: Any) -> None:
        hide_gpus()
        end_when_orphaned(plan, scheduler)
        self._plan = plan.unpack()

    async def open(self) -> str:
        """Start listening. Returns the base URL for agents.

        Raises: `ConfigError` if it cannot listen, `EngineError` if the run has no agents. The exceptions of
        the user's code.
        """
        plan = self._plan
        prepare_process("gateway", plan.run_dir)
        if plan.make_gateway is None:
            raise EngineError("the gateway cannot start: this run has no agents")
        parts = await asyncio.to_thread(plan.make_gateway)
        self._server = GatewayServer(parts)
        await self._server.start(parts.host, parts.port)
        log.info("agents are served at %s", self._server.url)
        return self._server.url

    async def open_group(self, work: OpenGroup, replica: Any) -> GroupOutcome:
        """See `gateway.agents.Agents.open`; `replica` is the calling rollout actor."""
        return await self._server.agents.open(work, ReplicaSampler(replica))

    async def cut(self, group: GroupId, attempt: int, how: str) -> None:
        self._server.agents.cut(group, attempt, how)

    async def discard(self, groups: Sequence[GroupId]) -> None:
        self._server.agents.discard(groups)

    async def alive(self) -> str:
        """Returns only on a failure, with the reason. If the actor dies, Ray fails the same call."""
        return await self._server.runner.failed()

    async def close(self) -> None:
        """End every agent and stop listening."""
        await self._server.close()


class ReplicaSampler:
    """Sends the gateway's sampling calls to a rollout actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def sample(self, call: AgentCall) -> SampleResult:
        answer = self._actor.sample.remote(call)
        try:
            result: SampleResult = await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except RayError as error:
            raise raised(error) from None
        return result
