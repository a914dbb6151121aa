"""Awaits a user's coroutine: whatever it raises comes back as an exception that costs one attempt.

Called by the hosts of generators and added states and by what runs a user's programs. `hosts.threads.contained` does
the same for blocking calls. It must never turn our own cancellation into a failure.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from engine.errors import describe_error

P = ParamSpec("P")
Value = TypeVar("Value")


async def awaited(function: Callable[P, Awaitable[Value]], *args: P.args, **kwargs: P.kwargs) -> Value:
    """`await function(...)`. `asyncio.CancelledError` passes if this task was cancelled.

    Raises: what it raises, and `RuntimeError` naming it in place of what would end the process, the event loop or, in
    silence, this task: `SystemExit`, `KeyboardInterrupt`, `GeneratorExit`, a `CancelledError` of its own.
    """
    try:
        return await function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if _is_ours(error):
            raise
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise RuntimeError(f"{name} raised {describe_error(error)}") from error


def _is_ours(error: BaseException) -> bool:
    """Whether it comes from outside: this task was cancelled, or its coroutine is closed with the event loop."""
    try:
        task: asyncio.Task[Any] | None = asyncio.current_task()
    except RuntimeError:
        return True
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
