"""Lets a trainer take turns with replicas on a pool's hardware: it leaves the accelerator whenever it is idle.

`runtime.workers` wraps the trainer in it if `Limits.trains_in_turns`. The scheduler gives rollout the pool
back only after `train` has returned and the published weights are in the weights store.
"""

from typing import Any

from engine.ids import StepId
from engine.roles import Batch, Offloadable, Trainer


def taking_turns(trainer: Trainer) -> Trainer:
    """The wrapped trainer, or the trainer itself if it cannot leave the accelerator."""
    return TakingTurns(trainer, trainer) if isinstance(trainer, Offloadable) else trainer


class TakingTurns:
    """Forwards every call. The trainer is on the accelerator from the first score or training of a step until the step
    is trained. A failed step leaves the accelerator; its retry returns to it."""

    def __init__(self, trainer: Trainer, offloadable: Offloadable) -> None:
        self._trainer = trainer
        self._offloadable = offloadable
        self._loaded = True
        self._leave()

    def score(self, batch: Batch, task: str) -> None:
        self._come_back()
        try:
            self._trainer.score(batch, task)
        except BaseException:
            self._leave()
            raise

    def train(self, batch: Batch) -> Any:
        self._come_back()
        try:
            return self._trainer.train(batch)
        finally:
            self._leave()

    def weights(self) -> Any:
        return self._trainer.weights()

    def save(self, directory: str, step: StepId) -> None:
        self._trainer.save(directory, step)

    def _come_back(self) -> None:
        if not self._loaded:
            self._offloadable.onload()
            self._loaded = True

    def _leave(self) -> None:
        if self._loaded:
            self._offloadable.offload()
            self._loaded = False
