"""The trainer as seen from the scheduler: from where a new one goes on when it dies.

Used by `fleet.Fleet`. A new trainer takes over where nothing is lost by it: from the newest checkpoint that is what was
written, or the initial weights, by training the steps since then again from their batches; or from published weights
that hold them all, where no checkpoint was to be gone on from.
Otherwise every order is answered by a failure that says why, and the scheduler ends the run by its own budgets, with
that cause.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Coroutine, Mapping
from pathlib import Path
from typing import Any

import ray

from engine.actors.heartbeat import Pulse
from engine.actors.lasting import Living, lasting
from engine.actors.link import Link
from engine.actors.placement import beside_the_run
from engine.actors.plan import Plan, Redo, Restore
from engine.actors.process import PackedPlan
from engine.actors.trainer import TrainerActor
from engine.commands import Command, PublishWeights, ScoreBatch, TrainStep
from engine.errors import EngineError
from engine.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    PublishFailed,
    StepFailed,
    StepTrained,
    WeightsPublished,
)
from engine.hosts.checkpoints import damaged_of, list_checkpoints, put_aside
from engine.hosts.figures import count_in
from engine.ids import Incarnation, StepId
from engine.states.orders import TRAINER, OrderBook

log = logging.getLogger(__name__)

Given = tuple[PackedPlan, Any, Any, Any]
"""What every child is given: the plan, then the actors of scheduler, trajectory store and weights store."""


class TrainerLink(Link):
    """One trainer in all its lives."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        orders: OrderBook,
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        living: Living | None = None,
    ) -> None:
        self._plan = plan
        self._given = given
        self._steps = 0
        self._steps_published = 0
        self._updates: dict[StepId, int] = {}
        """Optimizer updates in steps that may be trained again."""
        self._updates_before = 0
        """Those in all before."""
        self._trained: dict[StepId, Redo] = {}
        """Steps that no checkpoint contains, and whose batches are in the trajectory store."""
        self._deaths = 0
        """Since a step was trained."""
        self._contained = 0
        """Train steps in the newest checkpoint."""
        super().__init__(
            source="trainer", living=living, pulse=Pulse.of(plan), start=self._actor_of, failure=failure_of,
            owned=lambda: orders.owned(TRAINER), deliver=deliver, spawn=spawn,
        )  # fmt: skip

    def _actor_of(self, incarnation: Incarnation) -> Any:
        packed, *handles = self._given
        options: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}
        options |= {**lasting(packed, "trainer", incarnation), **beside_the_run(self._plan.trainer_gpus)}
        return ray.remote(TrainerActor).options(**options).remote(packed, incarnation, *handles)

    @property
    def steps(self) -> StepId:
        """Train steps done."""
        return self._steps

    async def open(self, restore: Restore | None = None) -> None:
        """`restore`: what an earlier life of the run left. Raises what the user's factory raises."""
        if restore is not None:
            self._take_up(restore)
        self._updates = await self.actor.bring_up.remote(restore)

    def recover(self, done: Restore, updates: Mapping[StepId, int], published: StepId) -> None:
        """Take over the trainer of an earlier scheduler process. `done`: as the record shows it, and with `redo` what
        may be trained again; `updates`: the optimizer's in these steps; `published`: train steps in published
        weights."""
        self._take_up(done)
        self._updates = dict(updates)
        self._steps_published = published
        self.take_over(self._restore())

    def _take_up(self, restore: Restore) -> None:
        self._steps, self._contained, self._updates_before = restore.reaches, restore.steps, restore.optimizer_steps
        self._trained = {redo.step: redo for redo in restore.redo}

    def answered(self, event: Event, command: Command) -> None:
        """To be told of every event that answers an order of the trainer, with that order."""
        if isinstance(event, StepTrained):
            self._steps, self._deaths = event.step + 1, 0
            if self._plan.limits.keeps_batches and isinstance(command, TrainStep):
                self._trained[event.step] = Redo(step=event.step, groups=command.groups, staleness=command.staleness)
        elif isinstance(event, CheckpointSaved):
            self._let_go(event.steps)
        elif isinstance(event, WeightsPublished) and isinstance(command, PublishWeights):
            self._steps_published = command.steps

    async def hand_over(self, steps: StepId) -> None:
        """Have the trainer that there is now hand over weights that it owes to scorers. Raises why it cannot."""
        if self._gone is not None:
            raise EngineError(self._gone)
        await self.actor.hand_over.remote(steps)

    def reported(self, step: StepId, figures: Mapping[str, Any]) -> None:
        """To be told what the trainer says of a step. A repeat changes nothing."""
        if step >= self._contained:
            self._updates[step] = count_in(figures, "optimizer_steps")

    async def _replace(self, reason: str) -> None:
        """Answer what the dead trainer was ordered, then go on with a new one if nothing is lost by it."""
        lost = f"the trainer is lost: {reason}"
        log.warning("%s (life %d)", lost, self._incarnation)
        self._kill()
        newest = await self._given[3].newest.remote()
        damaged = await asyncio.to_thread(damaged_of, [path for _, path in self._beginnings() if path is not None])
        lost_orders, self._orders = self._owned(), []
        for order in lost_orders:
            if isinstance(order.command, PublishWeights) and order.command.version <= newest:
                self._steps_published = order.command.steps
        restore = self._restore(damaged)
        self._deaths += 1
        if restore is None or self._deaths > self._plan.trainer_restarts:
            why = "it died too often"
            if restore is None:
                nothing = "nothing that it trained since the last publication is left"
                why = next(iter(damaged.values()), nothing)
            self._gone = f"{lost}; {why}"
        else:
            for path in damaged:  # else one of the same steps would be taken for written already
                put_aside(path)
            self._begin()
            self._spawn(self._reopen(self.actor, restore))

        def answer(command: Command) -> Event:
            saved = isinstance(command, PublishWeights) and command.version <= newest
            return published(command) if saved else failure_of(command, self._gone or lost)

        self.fail(lost_orders, answer)

    def _let_go(self, steps: StepId) -> None:
        """A checkpoint contains so many steps."""
        self._updates_before, self._contained = self._optimizer_steps(before=steps), max(steps, self._contained)
        self._updates = {step: updates for step, updates in self._updates.items() if step >= steps}
        self._trained = {step: redo for step, redo in self._trained.items() if step >= steps}

    def _beginnings(self) -> list[tuple[StepId, Path | None]]:
        """(train steps, checkpoint; None: the initial weights) after which every step can be trained again, newest
        first."""
        run_dir = self._plan.run_dir if self._plan.restore_trainer is not None else None
        saved = list_checkpoints(run_dir / "checkpoints") if run_dir is not None else []
        there: list[tuple[StepId, Path | None]] = [(0, None), *saved]
        held = [(n, path) for n, path in there if n <= self._steps and self._trained.keys() >= {*range(n, self._steps)}]
        return held[::-1]

    def _restore(self, damaged: Container[Path | None] = ()) -> Restore | None:
        """What a new trainer could go on from without losing a step; None if there is nothing. `damaged`: checkpoints
        that it cannot."""
        beginnings = self._beginnings()
        for steps, checkpoint in beginnings:
            if checkpoint in damaged:
                log.warning("the checkpoint %s is damaged and is passed over", checkpoint)
                continue
            if steps < self._steps:
                log.warning("the next trainer trains steps %d to %d again", steps, self._steps - 1)
            return Restore(
                steps=steps,
                checkpoint=None if checkpoint is None else str(checkpoint),
                redo=tuple(self._trained[step] for step in range(steps, self._steps)),
                optimizer_steps=self._optimizer_steps(before=steps),
            )
        if beginnings or self._steps_published != self._steps or self._plan.restore_trainer is None:
            return None
        log.warning("the next trainer has the weights of step %d, but the optimizer's moments are lost", self._steps)
        return Restore(steps=self._steps, optimizer_steps=self._optimizer_steps(before=self._steps))

    def _optimizer_steps(self, *, before: StepId) -> int:
        return self._updates_before + sum(updates for step, updates in self._updates.items() if step < before)


def published(command: Any) -> Event:
    """For a publication that reached the store though its report did not come."""
    return WeightsPublished(version=command.version, attempt=command.attempt)


def failure_of(command: Any, reason: str) -> Event:
    """The failure of an order to the trainer."""
    if isinstance(command, ScoreBatch | TrainStep):
        return StepFailed(step=command.step, attempt=command.attempt, reason=reason)
    if isinstance(command, PublishWeights):
        return PublishFailed(version=command.version, attempt=command.attempt, reason=reason)
    return CheckpointFailed(steps=command.steps, reason=reason)
