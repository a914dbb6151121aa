"""Failures of actors: how a lost actor is noticed, and what Ray's exceptions say about it.

An actor is lost when it reports so, when Ray reports its death, or when it misses heartbeats. Decides nothing.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from engine.errors import EngineError, RunFailed, clean, reason_of
from engine.runtime.process_port import ProcessEnd, Sign
from engine.runtime.trajectory_service import Waits
from engine.workers.plan import Plan

# -- lost actors -------------------------------------------------------------------------------------------------------


PATIENCE_S = 30.0
"""Seconds to wait for an answer if heartbeats are off."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A heartbeat every `every_s` seconds, none if 0. An actor that does not answer for `every_s * missed` is lost."""

    every_s: float
    missed: int

    @classmethod
    def of(cls, plan: Plan) -> "Pulse":
        return cls(plan.liveness.heartbeat_s, plan.liveness.missed_beats)

    async def lost(self, actor: Any) -> "ProcessEnd":
        """Return once the actor is lost."""
        ended = asyncio.ensure_future(wait_for_end(actor))
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
                    return ProcessEnd(f"no sign of life for {self.limit_s:g} s", silent=True)
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
    """Wait for the actor's answer to a heartbeat. Returns None if the actor is dead."""
    with contextlib.suppress(RayError):
        sign: Sign = await actor.beat.remote()
        return sign
    return None


async def wait_for_end(actor: Any) -> ProcessEnd:
    """Return once the actor has reported a failure or has died."""
    try:
        return ProcessEnd(await actor.alive.remote(), self_reported=True)
    except Exception as error:
        return ProcessEnd(failure_reason(error))


# -- answers to heartbeats ---------------------------------------------------------------------------------------------


WAITS = Waits()
"""The open calls of this process, which is one actor."""


class HeartbeatActor:
    """Base class of actors that answer heartbeats."""

    async def beat(self) -> Sign:
        """Answer a heartbeat, at once unless the event loop is blocked."""
        return Sign(os.getpid(), WAITS.oldest)


@contextmanager
def awaited(process: str) -> Iterator[None]:
    """Context manager around calls to another actor: heartbeats then report that this process waits for `process`.
    Exceptions are converted as by `named`."""
    with WAITS.on(process), named():
        yield


# -- Ray's exceptions --------------------------------------------------------------------------------------------------


DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")
NEVER_RAN = re.compile(r"its node has died.*The actor never ran", re.DOTALL)
CLASS, PID = re.compile(r"class_name: (\w+)"), re.compile(r"pid: (\d+)")


def unwrapped(error: BaseException) -> BaseException:
    """The original exception; for a dead actor a `RunFailed` with one line."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError):
        return RunFailed(clean(_death(" ".join(str(error).split()))))
    return error


def never_ran(error: BaseException) -> bool:
    """Whether Ray placed an actor on a dead node before it noticed the death. The caller may create the actor again."""
    return isinstance(error, RayActorError) and NEVER_RAN.search(str(error)) is not None


def _death(story: str) -> str:
    """Shorten Ray's message about a dead actor to one line: the actor, and why it died."""
    name, pid, detail = CLASS.search(story), PID.search(story), DETAIL.search(story)
    who = f"{name[1] if name else 'an actor'}{f' (process {pid[1]})' if pid else ''}"
    how = detail[1] if detail else story
    return f"{who} died: {how.rstrip('.')}"


def failure_reason(error: BaseException) -> str:
    """The original exception as the reason in an event."""
    return reason_of(unwrapped(error))


def raised(error: BaseException) -> EngineError:
    """The original exception as an `EngineError`, which can be raised in another process."""
    own = unwrapped(error)
    return own if isinstance(own, EngineError) else RunFailed(reason_of(own))


@contextmanager
def named() -> Iterator[None]:
    """Context manager around calls to another actor: turns Ray's exceptions into those of `raised`."""
    try:
        yield
    except RayError as error:
        raise raised(error) from None
