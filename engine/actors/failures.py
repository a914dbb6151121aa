"""What went wrong, out of the wrappings that Ray puts around it."""

from ray.exceptions import RayActorError, RayTaskError

from engine.errors import EngineError, RunFailed
from engine.hosts.reasons import clean, reason_of


def unwrapped(error: BaseException) -> BaseException:
    """The exception that was raised in the first place; a dead actor becomes a `RunFailed` that says so in one line."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError):
        return RunFailed(clean(f"a process of the run died: {' '.join(str(error).split())}"))
    return error


def failure_reason(error: BaseException) -> str:
    """One line for an event."""
    return reason_of(unwrapped(error))


def raised(error: BaseException) -> EngineError:
    """The same as one of the engine's own errors, to be raised in another process."""
    own = unwrapped(error)
    return own if isinstance(own, EngineError) else RunFailed(reason_of(own))
