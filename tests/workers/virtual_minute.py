"""A minute on a virtual clock, for tests of what workers report now and then."""

import asyncio
from collections.abc import Callable

from engine.workers.clock import VirtualLoop


def for_a_minute(begin: Callable[[VirtualLoop], object]) -> None:
    """Call `begin` at 0 s, and run what it starts until 60 s."""
    loop = VirtualLoop()

    async def play() -> None:
        begin(loop)
        await asyncio.sleep(60.0)

    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
