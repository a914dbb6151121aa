"""The worker of a `Scorer`: scores batches in the order of arrival, on hardware separate from the trainer's.

Called by `runtime.worker`. Must never score old log-probs with other weights than those that the step starts from,
nor report a batch before its scores are in the trajectory store.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from engine.commands import ScoreBatch
from engine.errors import EngineError, reason_of
from engine.events import BatchScored, Event, StepFailed
from engine.ids import StepId
from engine.protocols import Batch, Scorer
from engine.storage.trajectories import Trajectories, checked_scores
from engine.storage.weights import Trained, Weights
from engine.workers.order_queue import OrderQueue
from engine.workers.plan import OF_TRAINED_WEIGHTS
from engine.workers.progress_reports import SerialProgress

log = logging.getLogger(__name__)


async def end_of_scoring(command: ScoreBatch, score: Awaitable[None]) -> Event:
    """Wait until the batch is scored. Returns the event that reports its end."""
    try:
        await score
    except Exception as error:
        log.warning("scoring %s of step %d failed", command.task, command.step, exc_info=error)
        reason = f"scoring {command.task}: {reason_of(error)}"
        return StepFailed(step=command.step, attempt=command.attempt, reason=reason)
    return BatchScored(step=command.step, attempt=command.attempt, task=command.task)


class ScorerWorker(OrderQueue[ScoreBatch]):
    """Executes `ScoreBatch` orders for the tasks of one pool. `emit` receives events.

    `broken(reason)` is called if an order cannot be answered. `ask(steps)` makes the trainer hand over the weights
    after `steps` train steps, if it still owes them; it raises if the trainer cannot.
    """

    def __init__(
        self,
        *,
        scorer: Scorer,
        trajectories: Trajectories,
        weights: Weights,
        emit: Callable[[Event], None],
        broken: Callable[[str], None],
        ask: Callable[[StepId], Awaitable[None]],
        progress: SerialProgress,
    ) -> None:
        super().__init__("scorer", emit, broken, progress)
        self._scorer = scorer
        self._trajectories = trajectories
        self._weights = weights
        self._ask = ask
        self._loaded: StepId = 0
        self._handlers = {ScoreBatch: self._score_batch}

    async def _score_batch(self, command: ScoreBatch) -> Event:
        return await end_of_scoring(command, self._score(command))

    async def _score(self, command: ScoreBatch) -> None:
        if command.task in OF_TRAINED_WEIGHTS and command.step != self._loaded:
            weights = await self._trained(command.step)
            self._loaded = -1  # a load that fails halfway leaves unusable weights
            await self._call(self._scorer.load, weights)
            self._loaded = command.step
            self._progress.note()
        groups = await self._trajectories.get(command.groups)
        batch = Batch(step=command.step, groups=groups, staleness=[0] * len(groups))
        scores = checked_scores(groups, await self._call(self._scorer.score, batch, command.task))
        await self._trajectories.put_scores(command.step, command.task, command.groups, scores)

    async def _trained(self, steps: StepId) -> Any:
        """The weights after `steps` train steps. If they are missing, it asks the trainer for them, so that a retry of
        the step does not fail for the same reason."""
        try:
            return await self._weights.get(Trained(steps))
        except EngineError:
            await self._ask(steps)
        return await self._weights.get(Trained(steps))
