"""Awaits a user's coroutine and turns anything it raises into an exception that fails one attempt.

Called by the workers that run generators and added states, by the runners of a user's programs, and by rewards.
`workers.threads.contained` does the same for blocking calls. It must never turn the engine's own cancellation into a
failure.
"""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from engine.errors import describe_error

P = ParamSpec("P")
Value = TypeVar("Value")


async def awaited(function: Callable[P, Awaitable[Value]], *args: P.args, **kwargs: P.kwargs) -> Value:
    """`await function(...)`. `asyncio.CancelledError` propagates if this task was cancelled.

    Raises: any `Exception` of the function, unchanged. `RuntimeError` with the names of the function and the exception
    if it raises `SystemExit`, `KeyboardInterrupt`, `GeneratorExit` or, without a cancellation, `CancelledError`: these
    would end the process or the event loop, or silently end this task.
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
    """Whether the engine caused the exception: this task was cancelled, or the event loop closes the coroutine."""
    try:
        task: asyncio.Task[Any] | None = asyncio.current_task()
    except RuntimeError:
        return True
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def stack_of(thread: Thread) -> str:
    """The stack of a thread, as in a traceback, for the log when user code does not return."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "it has ended" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
