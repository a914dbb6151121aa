"""Whether a replica's generator sleeps: its memory given back while another task of its pool uses the hardware.

Used by `replica.ReplicaHost`, one order about weights at a time. It must never take a generator for asleep that failed
to fall asleep, nor for awake that failed to wake.
"""

from engine.roles import Generator, Sleeper
from engine.user_code import awaited


class Sleeping:
    """A generator that is no `roles.Sleeper` sleeps too: it is paused, and keeps its memory."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.asleep = False

    async def begin(self) -> None:
        """Of a generator that is paused with nothing running. Raises what it raises; then it is awake."""
        if not self.asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.sleep)
        self.asleep = True

    async def end(self) -> None:
        """Still paused, with its memory. Raises what the generator raises; then it sleeps on."""
        if self.asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.wake)
        self.asleep = False
