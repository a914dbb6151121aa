"""The sign of life of every actor but the scheduler: its process id, and which process it waits for.

It is given on the event loop, so computation on a thread does not delay it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from engine.actors.failures import named
from engine.hosts.waits import Waits
from engine.runtime.port import Sign

WAITS = Waits()
"""Of this process, which is one actor."""


class Watched:
    """An actor that gives signs of life."""

    async def beat(self) -> Sign:
        """Answered at once by an event loop that is free."""
        return Sign(os.getpid(), WAITS.oldest)


@contextmanager
def awaited(process: str) -> Iterator[None]:
    """Around calls to another actor, by the name of its process: a sign of life names it, and what the calls raise is
    as `named` says."""
    with WAITS.on(process), named():
        yield
