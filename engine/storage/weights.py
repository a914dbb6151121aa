"""The weights store: published versions until the scheduler retires them and, for scorers, the newest trained weights.

`runtime.local` has it in its process. `actors` runs it in a separate actor, so that published weights survive the
trainer.
"""

from typing import Any, NamedTuple, Protocol

from engine.errors import EngineError
from engine.ids import StepId, Version


class Trained(NamedTuple):
    """The weights after a number of train steps, published or not. New ones replace the earlier ones."""

    steps: StepId


class Weights(Protocol):
    """The interface of a weights store for the workers."""

    async def put(self, version: Version | Trained, weights: Any) -> None:
        """Store a version. When it returns, the caller may change its own copy."""

    async def get(self, version: Version | Trained) -> Any:
        """The weights of a version, read-only. Raises: `EngineError` if it was retired or never published."""


class WeightsStore:
    """Published versions by number, and the newest trained weights."""

    def __init__(self) -> None:
        self._kept: dict[Version, Any] = {}
        self._newest: Version = 0
        self._trained: tuple[Trained, Any] | None = None

    @property
    def newest(self) -> Version:
        """The newest published version; 0 if there is none."""
        return self._newest

    def put(self, version: Version | Trained, weights: Any) -> None:
        """Store a version. Raises: `EngineError` if a newer version was already published."""
        if isinstance(version, Trained):
            self._trained = (version, weights)
            return
        if version < self._newest:
            raise EngineError(f"version {version} cannot be published after version {self._newest}", version=version)
        self._newest = version
        self._kept[version] = weights

    def get(self, version: Version | Trained) -> Any:
        """See `Weights.get`."""
        if isinstance(version, Trained):
            return self._after(version)
        if version not in self._kept:
            held = ", ".join(map(str, self._kept)) or "none"
            raise EngineError(f"the weights store does not hold version {version}; it holds {held}", version=version)
        return self._kept[version]

    def retire(self, version: Version) -> None:
        """Delete a version, if it exists."""
        self._kept.pop(version, None)

    def _after(self, wanted: Trained) -> Any:
        if self._trained is None or self._trained[0] != wanted:
            held = "none" if self._trained is None else f"those after {self._trained[0].steps}"
            raise EngineError(f"the weights after {wanted.steps} train steps are not in the store; it holds {held}")
        return self._trained[1]
