"""How it is known that an actor is lost: it says so itself, Ray says that it died, or it gives no sign of life.

Used by whoever watches an actor: `fleet` and `link`. The first two need no polls: a call that is answered at the end
only. A process that hangs (stopped, swapping, its event loop blocked) answers nothing for ever, so it is asked for a
sign of life now and then; work on its threads, however long, does not keep an event loop from giving one.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from engine.actors.failures import failure_reason
from engine.actors.plan import Plan


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life is asked for every `every_s`, never if 0; an actor that gives none for `missed` times as long is
    lost."""

    every_s: float
    missed: int

    @classmethod
    def of(cls, plan: Plan) -> "Pulse":
        return cls(plan.heartbeat_s, plan.missed_beats)

    async def lost(self, actor: Any) -> str:
        """Returns when the actor is lost, with the reason."""
        ended = asyncio.ensure_future(_ended(actor))
        try:
            while self.every_s:
                await asyncio.wait([ended], timeout=self.every_s)
                if ended.done():
                    break
                beat = asyncio.ensure_future(_beat(actor))
                await asyncio.wait([beat, ended], timeout=self.limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not beat.done():
                    beat.cancel()
                if not beat.done() and not ended.done():
                    return f"no sign of life for {self.limit_s:g} s"
            return await ended
        finally:
            ended.cancel()

    @property
    def limit_s(self) -> float:
        return self.every_s * self.missed


async def _beat(actor: Any) -> None:
    with contextlib.suppress(RayError):  # it is dead then, which `_ended` tells
        await actor.beat.remote()


async def _ended(actor: Any) -> str:
    try:
        reason: str = await actor.alive.remote()
    except Exception as error:
        reason = failure_reason(error)
    return reason
