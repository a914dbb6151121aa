"""Detects lost actors: the actor reports it, Ray reports its death, or it misses heartbeats.

Used by `processes.py`, `survived.py` and `scheduler_watch.py`. The first two need no polling: an open call returns once
the actor ends. A hung process (stopped, swapping, its event loop blocked) answers no call, so every process gets
heartbeats. Long work on its threads does not delay its answers.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from engine.actors.failures import failure_reason
from engine.runtime.plan import Plan
from engine.runtime.port import Ended, Sign

PATIENCE_S = 30.0
"""Seconds to wait for an answer if heartbeats are off."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A heartbeat every `every_s` seconds, none if 0. An actor that does not answer for `every_s * missed` is lost."""

    every_s: float
    missed: int

    @classmethod
    def of(cls, plan: Plan) -> "Pulse":
        return cls(plan.heartbeat_s, plan.missed_beats)

    async def lost(self, actor: Any) -> "Ended":
        """Return once the actor is lost."""
        ended = asyncio.ensure_future(_ended(actor))
        try:
            while self.every_s:
                beat = asyncio.ensure_future(sign_of(actor))
                await asyncio.wait([beat, ended], timeout=self.limit_s, return_when=asyncio.FIRST_COMPLETED)
                if beat.done():
                    await asyncio.wait([ended], timeout=self.every_s)
                else:
                    beat.cancel()
                if ended.done():
                    break
                if not beat.done():
                    return Ended(f"no sign of life for {self.limit_s:g} s", silent=True)
            return await ended
        finally:
            ended.cancel()

    @property
    def limit_s(self) -> float:
        return self.every_s * self.missed

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a call that a process answers at once; never 0."""
        return self.limit_s or PATIENCE_S


async def sign_of(actor: Any) -> Sign | None:
    """Return once the actor answers; None: it is dead."""
    with contextlib.suppress(RayError):
        sign: Sign = await actor.beat.remote()
        return sign
    return None


async def _ended(actor: Any) -> Ended:
    try:
        return Ended(await actor.alive.remote(), told=True)
    except Exception as error:
        return Ended(failure_reason(error))
