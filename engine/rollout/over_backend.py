"""What every built-in generator hands on as it is: weights to its backend, and the news that either has failed.

Base of `ModelGenerator`, `AgentGenerator` and `ProgramGenerator`, which differ in how a group comes about.
"""

from typing import Any

from engine.ids import Version
from engine.roles import Sleeper
from engine.rollout.backend import RolloutBackend
from engine.rollout.scoring import Scorer, first_failure


class OverBackend:
    """Part of a `roles.Generator`, and all of a `roles.Fallible` and a `roles.Sleeper`."""

    def __init__(self, backend: RolloutBackend, scorer: Scorer) -> None:
        self._backend = backend
        self._scorer = scorer

    async def stage(self, version: Version, weights: Any) -> None:
        await self._backend.stage(version, weights)

    async def install(self, version: Version) -> None:
        await self._backend.install(version)

    async def sleep(self) -> None:
        """See `roles.Sleeper`: as far as the backend can."""
        if isinstance(self._backend, Sleeper):
            await self._backend.sleep()

    async def wake(self) -> None:
        if isinstance(self._backend, Sleeper):
            await self._backend.wake()

    async def close(self) -> None:
        await self._backend.close()

    async def failed(self) -> str:
        """See `roles.Fallible`: the backend can sample no more, or too many rewards are stuck."""
        return await first_failure(self._backend.failed(), self._scorer.failed())

    def tokens_sampled(self) -> int:
        """Tokens sampled since the start, for metrics."""
        return self._backend.tokens_sampled()
