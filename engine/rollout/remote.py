"""What backends whose engine is another process have in common: the version in force, and how the engine's end is told.

Base of `VllmBackend` and `OpenAIBackend`. It reaches no engine itself.
"""

import asyncio

from engine.errors import ConfigError, EngineError
from engine.ids import Version

PAUSE_MODES = ("keep", "abort", "wait")


class RemoteEngine:
    """Part of a `RolloutBackend`."""

    def __init__(self) -> None:
        self._version: Version = 0
        self._sampled = 0
        self._paused = self._frozen = False
        self._resumes = 0
        """Counted, so that a pause that waits knows when it was called off."""
        self._reason = ""
        """Why nothing can be sampled any more, once that is so."""
        self._over: asyncio.Future[str] | None = None

    def tokens_sampled(self) -> int:
        return self._sampled

    async def failed(self) -> str:
        """Return once nothing can be sampled any more, with the reason; never while all is well, nor for `close`."""
        return await asyncio.shield(self._end())

    def _end(self) -> "asyncio.Future[str]":
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def _ends(self, reason: str) -> bool:
        """Tell whoever awaits `failed`, the first time; whether this was it."""
        if self._reason:
            return False
        self._reason = reason
        self._end().set_result(reason)
        return True

    def _check_open(self) -> None:
        if self._reason:
            raise EngineError(self._reason)

    def _check_mode(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise ConfigError("rollout.sync_mode", mode, f"must be one of {', '.join(PAUSE_MODES)}")

    def _check_install(self, version: Version, staged: bool) -> None:
        if not staged:
            raise EngineError(f"version {version} cannot be installed: it is not staged", version=version)
        if version < self._version:
            raise EngineError(f"version {version} is older than the installed version {self._version}", version=version)
        if not self._frozen:
            raise EngineError(f"version {version} cannot be installed while tokens are sampled", version=version)
