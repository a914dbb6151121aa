"""The worker of a `Scorer`: scores batches in the order of arrival, on hardware separate from the trainer's.

Must never score old log-probs with other weights than those that the step starts from,
nor report a batch before its scores are in the trajectory store.
"""

import logging
from collections.abc import Awaitable
from typing import Any

from engine.commands import ScoreBatch
from engine.errors import EngineError, reason_of
from engine.events import BatchScored, Event, StepFailed
from engine.ids import LifeNumber, StepId
from engine.protocols import Batch, ReportsProgress
from engine.states.process import SCORER
from engine.storage.trajectories import checked_scores
from engine.storage.weights import Trained
from engine.workers.order_queue import OrderQueue
from engine.workers.plan import OF_TRAINED_WEIGHTS, Plan, Restore
from engine.workers.threads import on_a_thread
from engine.workers.worker import Peers

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


class ScorerWorker(OrderQueue):
    """The worker of the scorer of one pool's tasks. Its orders are `ScoreBatch`."""

    kind = SCORER
    _loaded: StepId = 0

    def __init__(self, plan: Plan, index: int, life: LifeNumber, peers: Peers) -> None:
        super().__init__(plan, index, life, peers)
        self._handlers = {ScoreBatch: self._score_batch}
        self._starts = dict.fromkeys(self._handlers, self._queue)

    @property
    def threads(self) -> int:
        given = self.plan.threads.scorers
        return given[self.index] if self.index < len(given) else self.plan.threads.trainer

    async def _load(self, restore: Restore | None) -> None:
        make, tasks = self.plan.make_scorer, self.plan.limits.scorers()[self.index]
        assert make is not None  # `Plan.require_scorers` has checked it
        self._scorer = scorer = await on_a_thread(make, tasks)
        if isinstance(scorer, ReportsProgress):
            scorer.watch_progress(self.note_progress)

    async def _score_batch(self, command: ScoreBatch) -> Event:
        return await end_of_scoring(command, self._score(command))

    async def _score(self, command: ScoreBatch) -> None:
        if command.task in OF_TRAINED_WEIGHTS and command.step != self._loaded:
            weights = await self._trained(command.step)
            self._loaded = -1  # a load that fails halfway leaves unusable weights
            await self._call(self._scorer.load, weights)
            self._loaded = command.step
            self.note_progress()
        groups = await self.peers.trajectories.get(command.groups)
        batch = Batch(step=command.step, groups=groups, staleness=[0] * len(groups))
        scores = checked_scores(groups, await self._call(self._scorer.score, batch, command.task))
        await self.peers.trajectories.put_scores(command.step, command.task, command.groups, scores)

    async def _trained(self, steps: StepId) -> Any:
        """The weights after `steps` train steps. If they are missing, it asks the trainer for them, so that a retry of
        the step does not fail for the same reason."""
        try:
            return await self.peers.weights.get(Trained(steps))
        except EngineError:
            await self.peers.ask_trainer(steps)
        return await self.peers.weights.get(Trained(steps))
