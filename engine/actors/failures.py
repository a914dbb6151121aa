"""What went wrong, out of the wrappings that Ray puts around it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayActorError, RayError, RayTaskError

from engine.errors import EngineError, RunFailed
from engine.hosts.reasons import clean, reason_of

DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)")
CLASS, PID = re.compile(r"class_name: (\w+)"), re.compile(r"pid: (\d+)")


def unwrapped(error: BaseException) -> BaseException:
    """The exception that was raised in the first place; a dead actor becomes a `RunFailed` that says so in one line."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError):
        return RunFailed(clean(_death(" ".join(str(error).split()))))
    return error


def _death(story: str) -> str:
    """Ray's page about a dead actor as a line: who, and what is known of how."""
    name, pid, detail = CLASS.search(story), PID.search(story), DETAIL.search(story)
    who = f"{name[1] if name else 'an actor'}{f' (process {pid[1]})' if pid else ''}"
    how = detail[1] if detail else story
    return f"{who} died: {how.rstrip('.')}"


def failure_reason(error: BaseException) -> str:
    """One line for an event."""
    return reason_of(unwrapped(error))


def raised(error: BaseException) -> EngineError:
    """The same as one of the engine's own errors, to be raised in another process."""
    own = unwrapped(error)
    return own if isinstance(own, EngineError) else RunFailed(reason_of(own))


@contextmanager
def named() -> Iterator[None]:
    """Around calls to another actor: what they raise is what was raised there, or says in a line who died."""
    try:
        yield
    except RayError as error:
        raise raised(error) from None
