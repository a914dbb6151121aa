"""How it is known that an actor is lost: it says so itself, Ray says that it died, or it gives no sign of life.

Used by whoever watches an actor: `fleet` and `link`. The first two need no polls: a call that is answered at the end
only. A process that hangs (stopped, swapping, its event loop blocked) answers nothing for ever, so it is asked for a
sign of life now and then; work on its threads, however long, does not keep an event loop from giving one.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

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
        waits = [asyncio.ensure_future(_ended(actor))]
        if self.every_s:
            waits.append(asyncio.ensure_future(self._silence(actor)))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next(wait for wait in waits if wait in done).result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _silence(self, actor: Any) -> str:
        limit_s = self.every_s * self.missed
        while True:
            beat = asyncio.ensure_future(actor.beat.remote())
            done, _ = await asyncio.wait([beat], timeout=limit_s)
            if not done:
                beat.cancel()
                return f"no sign of life for {limit_s:g} s"
            if beat.exception() is not None:
                return await _ended(actor)
            await asyncio.sleep(self.every_s)


async def _ended(actor: Any) -> str:
    try:
        reason: str = await actor.alive.remote()
    except Exception as error:
        reason = failure_reason(error)
    return reason
