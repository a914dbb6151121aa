"""Unwraps Ray's exceptions: finds the original error, or describes the death of an actor in one line.

Used for every call to an actor.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayActorError, RayError, RayTaskError

from engine.errors import EngineError, RunFailed
from engine.hosts.reasons import clean, reason_of

DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")
CLASS, PID = re.compile(r"class_name: (\w+)"), re.compile(r"pid: (\d+)")


def unwrapped(error: BaseException) -> BaseException:
    """The original exception; for a dead actor a `RunFailed` with one line."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError):
        return RunFailed(clean(_death(" ".join(str(error).split()))))
    return error


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
