"""How it is known that an actor is lost: it says so itself, Ray says that it died, or it gives no sign of life.

Used by `processes.py`, `survived.py` and `scheduler_watch.py`. The first two need no polls: a call that is answered
at the end only. A process that hangs (stopped, swapping, its event loop blocked) never answers, so each process gets
heartbeats at intervals. Long work on its threads does not keep its event loop from answering.
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
"""For an answer, where no heartbeat says otherwise."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life is asked for every `every_s`, never if 0; an actor that gives none for `missed` times as long is
    lost."""

    every_s: float
    missed: int

    @classmethod
    def of(cls, plan: Plan) -> "Pulse":
        return cls(plan.heartbeat_s, plan.missed_beats)

    async def lost(self, actor: Any) -> "Ended":
        """Returns when the actor is lost."""
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
        """How long an answer is waited for that a process gives at once; never 0."""
        return self.limit_s or PATIENCE_S


async def sign_of(actor: Any) -> Sign | None:
    """Returns when the actor gives a sign of life; None: it is dead."""
    with contextlib.suppress(RayError):
        sign: Sign = await actor.beat.remote()
        return sign
    return None


async def _ended(actor: Any) -> Ended:
    try:
        return Ended(await actor.alive.remote(), told=True)
    except Exception as error:
        return Ended(failure_reason(error))
