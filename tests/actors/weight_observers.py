"""A trainer and replicas that write down the weights they publish and install, for tests to compare."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.workers.plan import Rollout

sys.path.append(str(Path(__file__).parent.parent))


def write_digest(path: Path, weights: Mapping[str, Any]) -> None:
    from reference_sync import digest  # it imports torch, which a scheduler that reads this module must not have

    path.write_text(digest(weights))


class WatchedTrainer:
    """Passes every call on; writes what each publication holds, the first as version 1."""

    def __init__(self, trainer: Any, directory: Path) -> None:
        self._trainer = trainer
        self._directory = directory
        self._version = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def weights(self) -> dict[str, Any]:
        weights: dict[str, Any] = self._trainer.weights()
        self._version += 1
        write_digest(self._directory / f"published-{self._version}", weights)
        return weights


class WatchedGenerator:
    """Passes every call on; writes what the sampled model holds after each install."""

    def __init__(self, generator: Any, directory: Path, replica: int) -> None:
        self._generator = generator
        self._directory = directory
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def install(self, version: int) -> None:
        await self._generator.install(version)
        model = self._generator._backend._model.model
        write_digest(self._directory / f"installed-{version}-{self._replica}", model.state_dict())


def watched_trainer(make: Callable[[], Any], directory: Path) -> WatchedTrainer:
    return WatchedTrainer(make(), directory)


def watched_rollout(make: Callable[[int], Rollout], directory: Path, replica: int) -> Rollout:
    rollout = make(replica)
    return Rollout(generator=WatchedGenerator(rollout.generator, directory, replica), evaluator=rollout.evaluator)
