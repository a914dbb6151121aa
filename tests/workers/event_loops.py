"""Tests that are coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop, and fail if it hangs."""
    return wraps(test)(lambda **given: asyncio.run(asyncio.wait_for(test(**given), 120)))
