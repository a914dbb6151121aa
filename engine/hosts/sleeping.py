"""Puts a replica's generator to sleep: it frees its memory while another task of the pool uses the hardware.

Used by `replica.ReplicaHost`, for one weights order at a time. It must not count a generator as asleep if `sleep`
failed, nor as awake if `wake` failed.
"""

from engine.roles import Generator, Sleeper
from engine.user_code import awaited


class Sleeping:
    """A generator that is no `roles.Sleeper` is paused, and keeps its memory."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.asleep = False

    async def begin(self) -> None:
        """Put a paused generator with no running requests to sleep. Raises its exception; then it counts as awake."""
        if not self.asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.sleep)
        self.asleep = True

    async def end(self) -> None:
        """Wake a generator, which stays paused. Raises its exception; then it counts as asleep."""
        if self.asleep and isinstance(self._generator, Sleeper):
            await awaited(self._generator.wake)
        self.asleep = False
