"""A user's blocking call on a thread: whatever it raises must come back to the event loop.

Called by `hosts.trainer` and by the actors that make what the user's factories make. A future cannot carry every
exception: one with `StopIteration` is never done, one with `CancelledError` cancels whoever waits for it.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import ParamSpec, TypeVar

from engine.errors import describe_error

P = ParamSpec("P")
Value = TypeVar("Value")


def contained(function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
    """`function(...)`, to be called on a thread. One that wants to end the process has only failed.

    Raises: what it raises, and `RuntimeError` naming it in place of what a future cannot carry.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
            raise
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise RuntimeError(f"{name} raised {describe_error(error)}") from error
