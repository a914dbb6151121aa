"""The trainer actor: a `TrainerHost` with an outbox. Started and watched by `fleet.py`.

Its event loop carries messages; models are loaded and trained on threads.
"""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import ray

from engine.actors.outbox import Outbox
from engine.actors.plan import Restore
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.stores import RemoteTrajectories, RemoteWeights
from engine.actors.wire import InOrder, unpack_orders
from engine.errors import EngineError
from engine.hosts.threads import contained
from engine.hosts.trainer import TrainerHost
from engine.hosts.weights import Trained
from engine.ids import Incarnation, StepId, Version
from engine.roles import Trainer

log = logging.getLogger(__name__)


class TrainerActor:
    """`open`, then `carry_out`: orders that come earlier wait. `alive` is answered only when it cannot go on."""

    def __init__(
        self, plan: PackedPlan, incarnation: Incarnation, scheduler: Any, trajectories: Any, weights: Any
    ) -> None:
        self._plan = plan.unpack()
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._stores = (trajectories, weights)
        self._orders: InOrder[bytes] = InOrder()
        self._early: list[bytes] = []
        self._broken: asyncio.Future[str] | None = None
        self._host: TrainerHost | None = None
        self._opened = asyncio.Event()
        self._weights = RemoteWeights(weights, self._plan.transport)

    async def open(self, restore: Restore | None = None) -> None:
        """Load the trainer, or bring a new one to where a dead one was. Raises whatever the user's factory raises."""
        plan = self._plan
        self._broken = asyncio.get_running_loop().create_future()
        prepare_process("trainer", plan.run_dir, plan.trainer_threads)
        if restore is not None and restore.checkpoint is None and restore.steps:
            weights = await self._weights.get(await self._stores[1].newest.remote())
            restore = replace(restore, weights=weights)
        trainer = await asyncio.to_thread(contained, self._make, restore)
        report = self._scheduler.report.remote
        outbox = Outbox(
            lambda sequence, events, figures: report("trainer", self._incarnation, sequence, events, figures),
            lost=self._break,
        )
        host = TrainerHost(
            trainer=trainer,
            trajectories=RemoteTrajectories(self._stores[0]),
            weights=self._weights,
            emit=outbox.add,
            report=outbox.add_figures,
            checkpoints=None if plan.run_dir is None else plan.run_dir / "checkpoints",
            keep=plan.keep_checkpoints,
            scored_apart=[task for tasks in plan.limits.scorers() for task in tasks],
            hands_over=plan.hands_over,
        )
        if restore is not None and restore.steps:
            await host.hand_over(restore.steps)
        self._host = host
        self._opened.set()
        early, self._early = self._early, []
        for batch in early:
            self._carry(batch)

    @ray.method(num_returns=0)
    async def carry_out(self, sequence: int, orders: bytes) -> None:
        for batch in self._orders.take(sequence, orders):
            self._carry(batch)

    async def hand_over(self, steps: StepId) -> None:
        """Asked for a scorer: the weights after so many steps, should they still be owed."""
        await self._opened.wait()
        assert self._host is not None
        await self._host.hand_over_again(steps)

    async def give(self, version: Version | Trained) -> Any:
        """Asked by the weights store: the weights being published."""
        return self._weights.handed_out(version)

    async def alive(self) -> str:
        """Never answered while all is well; then with the reason. That the actor dies is known by the same call."""
        assert self._broken is not None
        return await self._broken

    def _make(self, restore: Restore | None) -> Trainer:
        trainer = self._plan.make_trainer()
        if restore is not None and restore.steps:
            if self._plan.restore_trainer is None:
                raise EngineError("this trainer cannot be restored")
            self._plan.restore_trainer(trainer, restore)
        return trainer

    def _carry(self, batch: bytes) -> None:
        if self._host is None:
            self._early.append(batch)
            return
        for command, _ in unpack_orders(batch):
            self._host.carry_out(command)

    def _break(self, reason: str) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(reason)
