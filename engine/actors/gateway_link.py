"""The gateway as a replica sees it: apart from the gateway itself, whose HTTP server a replica need not load."""

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
    """From inside a replica's actor. Where the gateway is dead the run ends: nothing is said of groups then, so that
    their failures do not tell another story first."""

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
            log.warning("the gateway is gone: waiting for the end of the run")
            return await asyncio.Event().wait()
