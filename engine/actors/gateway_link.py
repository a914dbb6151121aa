"""The client of the gateway actor, for replicas. Must never import the gateway's HTTP server."""

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayActorError

from engine.actors.sign import awaited
from engine.ids import GroupId
from engine.rollout.agent import GroupOutcome, OpenGroup
from engine.states.process import GATEWAY

log = logging.getLogger(__name__)


class GatewayLink:
    """The gateway, for the actor of a replica. If the gateway is dead, calls never return: the run ends because of the
    gateway, so failures of groups must not be reported first."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._replica = ray.get_runtime_context().current_actor

    async def open(self, work: OpenGroup) -> GroupOutcome:
        outcome: GroupOutcome = await _answered(self._gateway.open_group.remote(work, self._replica))
        return outcome

    async def cut(self, group: GroupId, attempt: int, how: str) -> None:
        await _answered(self._gateway.cut.remote(group, attempt, how))


async def _answered(call: Any) -> Any:
    with awaited(GATEWAY):
        try:
            return await call
        except RayActorError:
            log.warning("the gateway has died: waiting for the end of the run")
            return await asyncio.Event().wait()
