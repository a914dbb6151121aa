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
        self._kept: dict[Version | Trained, Any] = {}
        self.newest: Version = 0
        """The newest published version; 0 if there is none."""

    def put(self, version: Version | Trained, weights: Any) -> None:
        """Store a version. Raises: `EngineError` if a newer version was already published."""
        if isinstance(version, Trained):
            self._kept = {known: kept for known, kept in self._kept.items() if not isinstance(known, Trained)}
        elif version < self.newest:
            raise EngineError(f"version {version} cannot be published after version {self.newest}", version=version)
        else:
            self.newest = version
        self._kept[version] = weights

    def get(self, version: Version | Trained) -> Any:
        """See `Weights.get`."""
        if version not in self._kept:
            held = ", ".join(map(_named, self._kept)) or "none"
            raise EngineError(f"the weights store does not hold {_named(version)}; it holds {held}")
        return self._kept[version]

    def retire(self, version: Version) -> None:
        """Delete a version, if it exists."""
        self._kept.pop(version, None)


def _named(version: Version | Trained) -> str:
    if isinstance(version, Trained):
        return f"the weights after {version.steps} train steps"
    return f"version {version}"
