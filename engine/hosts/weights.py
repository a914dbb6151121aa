"""The weights store: published versions, from their publication until the scheduler retires them; and for scorers, what
was trained last.

Held in process by `local` and in an actor of its own by `actors` (there it holds references into the Ray object
store), so that published weights outlive the trainer.
"""

from typing import Any, NamedTuple, Protocol

from engine.errors import EngineError
from engine.ids import StepId, Version


class Trained(NamedTuple):
    """The weights after so many train steps, published or not. The newest take the place of those before."""

    steps: StepId


class Weights(Protocol):
    """A weights store as the hosts use it, wherever it is."""

    async def put(self, version: Version | Trained, weights: Any) -> None:
        """Keep a version; returns once it is kept and the caller may change its own copy."""

    async def get(self, version: Version | Trained) -> Any:
        """The weights of a version, not to be changed. Raises `EngineError` when it was retired or never published."""


class WeightsStore:
    """Published versions by number, and what was trained last."""

    def __init__(self) -> None:
        self._kept: dict[Version, Any] = {}
        self._newest: Version = 0
        self._trained: tuple[Trained, Any] | None = None

    @property
    def newest(self) -> Version:
        """The newest version ever put; 0 before the first."""
        return self._newest

    def put(self, version: Version | Trained, weights: Any) -> None:
        """Raises: `EngineError` for a version older than one already published."""
        if isinstance(version, Trained):
            self._trained = (version, weights)
            return
        if version < self._newest:
            raise EngineError(f"version {version} cannot be published after version {self._newest}", version=version)
        self._newest = version
        self._kept[version] = weights

    def get(self, version: Version | Trained) -> Any:
        """Raises: `EngineError`."""
        if isinstance(version, Trained):
            return self._after(version)
        if version not in self._kept:
            held = ", ".join(map(str, self._kept)) or "none"
            raise EngineError(f"the weights store does not hold version {version}; it holds {held}", version=version)
        return self._kept[version]

    def retire(self, version: Version) -> None:
        """Drop a version; one that is not here is ignored."""
        self._kept.pop(version, None)

    def _after(self, wanted: Trained) -> Any:
        if self._trained is None or self._trained[0] != wanted:
            held = "none" if self._trained is None else f"those after {self._trained[0].steps}"
            raise EngineError(f"the weights after {wanted.steps} train steps are not in the store; it holds {held}")
        return self._trained[1]
