"""The trainer actor: a `TrainerHost` with an outbox. Started and watched by `supervisor.py`.

Models are loaded and trained on threads.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any

from engine.actors.hosted import HostedActor
from engine.actors.plan import Restore
from engine.actors.process import PackedPlan
from engine.actors.stores import RemoteTrajectories, RemoteWeights
from engine.errors import EngineError
from engine.hosts.threads import contained
from engine.hosts.trainer import TrainerHost
from engine.hosts.turns import taking_turns
from engine.hosts.weights import Trained
from engine.ids import NO_VERSION, Incarnation, StepId, Version
from engine.roles import Trainer

log = logging.getLogger(__name__)


class TrainerActor(HostedActor):
    """See `HostedActor`."""

    def __init__(
        self, plan: PackedPlan, incarnation: Incarnation, scheduler: Any, trajectories: Any, weights: Any
    ) -> None:
        super().__init__(plan, "trainer", incarnation, scheduler)
        self._stores = (trajectories, weights)
        self._host: TrainerHost | None = None
        self._opened = asyncio.Event()
        self._weights = RemoteWeights(weights, self._plan.transport)

    async def open(self, restore: Restore | None = None) -> None:
        """Load the trainer, or bring a new one to where another one was. Raises whatever the user's factory raises."""
        plan = self._plan
        outbox = self._begin(plan.trainer_threads)
        if restore is not None and restore.version != NO_VERSION:
            restore = replace(restore, weights=await self._weights.get(restore.version))
        trainer = await asyncio.to_thread(contained, self._make, restore)
        host = TrainerHost(
            trainer=trainer,
            trajectories=RemoteTrajectories(self._stores[0]),
            weights=self._weights,
            emit=outbox.add,
            report=outbox.add_figures,
            checkpoints=None if plan.run_dir is None else plan.run_dir / "checkpoints",
            own_tasks=[task for task in plan.limits.scoring_tasks if task not in plan.limits.scored_apart],
            scored_apart=plan.limits.scored_apart,
            hands_over=plan.hands_over,
        )
        for redo in () if restore is None else restore.redo:
            await host.redo(redo.step, redo.groups, redo.staleness, reports=redo.reports)
        if restore is not None and restore.reaches:
            await host.hand_over(restore.reaches)
        self._host = host
        self._opened.set()
        self._take_orders(host.carry_out)

    async def hand_over(self, steps: StepId) -> None:
        """Asked for a scorer: the weights after so many steps, should they still be owed."""
        await self._opened.wait()
        assert self._host is not None
        await self._host.hand_over_again(steps)

    async def give(self, version: Version | Trained) -> Any:
        """Asked by the weights store: the weights being published."""
        return self._weights.handed_out(version)

    def _make(self, restore: Restore | None) -> Trainer:
        trainer = self._plan.make_trainer()
        if restore is not None and restore.steps:
            if self._plan.restore_trainer is None:
                raise EngineError("this trainer cannot be restored")
            self._plan.restore_trainer(trainer, restore)
        return taking_turns(trainer) if self._plan.limits.trains_in_turns else trainer
