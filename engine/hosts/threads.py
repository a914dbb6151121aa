"""Runs a user's blocking call on a thread, so that any exception it raises reaches the event loop.

Used by `hosts.trainer` and the actors. A future cannot carry every exception: with `StopIteration` it never completes,
and `CancelledError` cancels the waiting task.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import ParamSpec, TypeVar

from engine.errors import describe_error

P = ParamSpec("P")
Value = TypeVar("Value")


def contained(function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
    """Call `function(...)` on a thread. An attempt to end the process counts as a failure.

    Raises: its exception, or a `RuntimeError` that names it if a future cannot carry it.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
            raise
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise RuntimeError(f"{name} raised {describe_error(error)}") from error
