"""The weights store: published versions, from their publication until the scheduler retires them.

Held in process by `local` and in an actor of its own by `actors` (there it holds references into the Ray object
store), so that published weights outlive the trainer.
"""

from typing import Any, Protocol

from engine.errors import EngineError
from engine.ids import Version


class Weights(Protocol):
    """A weights store as the hosts use it, wherever it is."""

    async def put(self, version: Version, weights: Any) -> None:
        """Keep a version; returns once it is kept and the caller may change its own copy."""

    async def get(self, version: Version) -> Any:
        """The weights of a version, not to be changed. Raises `EngineError` when it was retired or never published."""


class WeightsStore:
    """Published versions by number."""

    def __init__(self) -> None:
        self._kept: dict[Version, Any] = {}
        self._newest: Version = 0

    @property
    def newest(self) -> Version:
        """The newest version ever put; 0 before the first."""
        return self._newest

    def put(self, version: Version, weights: Any) -> None:
        """Raises: `EngineError` for a version older than one already published."""
        if version < self._newest:
            raise EngineError(f"version {version} cannot be published after version {self._newest}", version=version)
        self._newest = version
        self._kept[version] = weights

    def get(self, version: Version) -> Any:
        """Raises: `EngineError`."""
        if version not in self._kept:
            held = ", ".join(map(str, self._kept)) or "none"
            raise EngineError(f"the weights store does not hold version {version}; it holds {held}", version=version)
        return self._kept[version]

    def retire(self, version: Version) -> None:
        """Drop a version; one that is not here is ignored."""
        self._kept.pop(version, None)
