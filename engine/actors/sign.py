"""Answers heartbeats in every actor except the scheduler: with its process id, and the process it waits for.

The answer comes from the event loop, so computation on a thread does not delay it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from engine.actors.failures import named
from engine.hosts.waits import Waits
from engine.runtime.port import Sign

WAITS = Waits()
"""The open calls of this process, which is one actor."""


class Watched:
    """Base class of actors that answer heartbeats."""

    async def beat(self) -> Sign:
        """Answer a heartbeat, at once unless the event loop is blocked."""
        return Sign(os.getpid(), WAITS.oldest)


@contextmanager
def awaited(process: str) -> Iterator[None]:
    """Context manager around calls to another actor: heartbeats then report that this process waits for `process`.
    Exceptions are converted as by `named`."""
    with WAITS.on(process), named():
        yield
