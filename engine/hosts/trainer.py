"""Hosts the `Trainer`: scores, trains, publishes and saves checkpoints, one order at a time, in the order of arrival.

Called by `runtime.workers`. The trainer's blocking calls run on a separate thread, so that the event loop stays free.
Must never run two calls at once, or report an incomplete checkpoint.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.commands import Command, DeleteCheckpoint, PublishWeights, SaveCheckpoint, ScoreBatch, TrainStep
from engine.errors import EngineError
from engine.events import (
    BatchScored,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    OrderDone,
    PublishFailed,
    StepFailed,
    StepTrained,
    WeightsPublished,
)
from engine.hosts.checkpoints import checkpoint_path, remove_checkpoint, save_checkpoint
from engine.hosts.figures import Figure, Figures, count_in
from engine.hosts.one_by_one import OneByOne
from engine.hosts.reasons import reason_of
from engine.hosts.trajectories import Trajectories
from engine.hosts.weights import Trained, Weights
from engine.ids import GroupId, StepId
from engine.roles import Batch, Trainer

log = logging.getLogger(__name__)

Report = Callable[[StepId, Mapping[str, Any]], None]


class TrainerHost(OneByOne[Command]):
    """Executes the trainer's commands. `emit` receives events, `report(step, metrics)` the trainer's metrics of a step.

    `checkpoints` is the directory of the `step-N` directories; None: none can be saved. The trainer does the scoring
    tasks in `own_tasks`; separate scorers do those in `scored_apart`. If `hands_over`, they need the weights after
    every train step.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        trajectories: Trajectories,
        weights: Weights,
        emit: Callable[[Event], None],
        report: Report,
        checkpoints: Path | None = None,
        own_tasks: Sequence[str] = (),
        scored_apart: Sequence[str] = (),
        hands_over: bool = False,
    ) -> None:
        super().__init__("trainer", emit)
        self.trainer = trainer
        self._trajectories = trajectories
        self._weights = weights
        self._report = report
        self._checkpoints = checkpoints
        self._own_tasks = own_tasks
        self._scored_apart = scored_apart
        self._hands_over = hands_over
        self._owed: StepId | None = None
        self._handing_over = asyncio.Lock()
        self._figures = Figures()

    async def redo(self, step: StepId, groups: Sequence[GroupId], staleness: Sequence[int], *, reports: bool) -> int:
        """Train a step again with its batch and scores, before any order. `reports`: report its metrics, because they
        were lost. Returns the number of optimizer updates in its metrics. Raises: `EngineError`."""
        try:
            for task in self._own_tasks:
                await self._call(self.trainer.score, await self._batch_to_score(step, groups), task)
            metrics = await self._train_batch(step, groups, staleness)
        except Exception as error:
            raise EngineError(f"train step {step} cannot be trained again: {reason_of(error)}") from error
        if reports:
            self._report(step, metrics)
        return count_in(metrics, "optimizer_steps")

    async def hand_over(self, steps: StepId) -> None:
        """Give scorers the current weights, those after `steps` train steps. Never raises: if it fails, the weights are
        owed, and a scorer that lacks them asks again; if that fails too, so does its attempt."""
        if not self._hands_over:
            return
        self._owed = steps
        try:
            await self.hand_over_again(steps)
        except EngineError as error:
            log.warning("%s; a scorer that needs them asks again", error, exc_info=error)

    async def hand_over_again(self, steps: StepId) -> None:
        """Hand over the weights after `steps` train steps, if they are still owed. Raises: `EngineError`."""
        async with self._handing_over:
            if self._owed != steps:
                return
            try:
                await self._weights.put(Trained(steps), await self._call(self.trainer.weights))
            except Exception as error:
                law = f"the weights after {steps} train steps cannot be handed over: {reason_of(error)}"
                raise EngineError(law) from error
            self._owed = None

    def _key(self, command: Command) -> tuple[object, ...]:
        if isinstance(command, ScoreBatch):
            return ("score", command.step, command.attempt, command.task)
        if isinstance(command, TrainStep):
            return ("train", command.step, command.attempt)
        if isinstance(command, PublishWeights):
            return ("publish", command.version, command.attempt)
        if isinstance(command, SaveCheckpoint):
            return ("save", command.number)
        if isinstance(command, DeleteCheckpoint):
            return ("delete", command.number)
        raise EngineError(f"{type(command).__name__} is not for the trainer")

    async def _answer(self, command: Command) -> Event:
        """Execute one command; returns the event that answers it."""
        if isinstance(command, ScoreBatch):
            return await self._score(command)
        if isinstance(command, TrainStep):
            return await self._train(command)
        if isinstance(command, PublishWeights):
            return await self._publish(command)
        if isinstance(command, SaveCheckpoint):
            return await self._save(command)
        assert isinstance(command, DeleteCheckpoint)  # `_key` has refused every other
        return await self._delete(command)

    async def _score(self, command: ScoreBatch) -> Event:
        try:
            batch = await self._batch_to_score(command.step, command.groups)
            await self._call(self.trainer.score, batch, command.task)
        except Exception as error:
            log.warning("scoring %s of step %d failed", command.task, command.step, exc_info=error)
            reason = f"scoring {command.task}: {reason_of(error)}"
            return StepFailed(step=command.step, attempt=command.attempt, reason=reason)
        return BatchScored(step=command.step, attempt=command.attempt, task=command.task)

    async def _batch_to_score(self, step: StepId, ids: Sequence[GroupId]) -> Batch:
        return Batch(step=step, groups=await self._trajectories.get(ids), staleness=[0] * len(ids))

    async def _train_batch(self, step: StepId, ids: Sequence[GroupId], staleness: Sequence[int]) -> dict[str, Figure]:
        groups = await self._trajectories.get(ids)
        scores = {task: await self._trajectories.scores(step, task, ids) for task in self._scored_apart}
        batch = Batch(step=step, groups=groups, staleness=list(staleness), scores=scores)
        metrics: Mapping[Any, Any] | None = await self._call(self.trainer.train, batch)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise EngineError(f"train() must return a dict of metrics, not {type(metrics).__name__}")
        figures: dict[str, Figure] = await self._call(self._figures.read, metrics) if metrics is not None else {}
        return figures

    async def _train(self, command: TrainStep) -> Event:
        try:
            metrics = await self._train_batch(command.step, command.groups, command.staleness)
        except Exception as error:
            log.warning("train step %d failed", command.step, exc_info=error)
            return StepFailed(step=command.step, attempt=command.attempt, reason=reason_of(error))
        self._report(command.step, metrics)
        await self.hand_over(command.step + 1)
        updates = count_in(metrics, "optimizer_steps")
        return StepTrained(step=command.step, attempt=command.attempt, updates=updates)

    async def _publish(self, command: PublishWeights) -> Event:
        try:
            await self._weights.put(command.version, await self._call(self.trainer.weights))
        except Exception as error:
            log.warning("publishing version %d failed", command.version, exc_info=error)
            return PublishFailed(version=command.version, attempt=command.attempt, reason=reason_of(error))
        return WeightsPublished(version=command.version, attempt=command.attempt)

    async def _save(self, command: SaveCheckpoint) -> Event:
        try:
            if self._checkpoints is None:
                raise EngineError("this run has no directory for checkpoints")
            await self._call(save_checkpoint, self.trainer, self._checkpoints, command.steps)
        except Exception as error:
            log.warning("the checkpoint after %d steps failed", command.steps, exc_info=error)
            return CheckpointFailed(steps=command.steps, reason=reason_of(error))
        return CheckpointSaved(steps=command.steps)

    async def _delete(self, command: DeleteCheckpoint) -> Event:
        """A deletion that fails is logged and acknowledged: the checkpoint stays, and nothing else depends on it."""
        if self._checkpoints is not None:
            path = checkpoint_path(self._checkpoints, command.steps)
            try:
                await self._call(remove_checkpoint, path)
            except OSError as error:
                log.warning("the checkpoint %s cannot be deleted and stays: %s", path, reason_of(error))
        return OrderDone(orders=(command.number,))
