"""The trainer as seen from the scheduler: what it was ordered and has not answered, and what follows when it dies.

Used by `fleet.Fleet`. A new trainer takes over where nothing is lost by it: before the first step, from a checkpoint
of exactly the steps trained, or from published weights that hold them all. Otherwise every order is answered by a
failure that says why, and the scheduler ends the run by its own budgets, with that cause.
"""

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import ray

from engine.actors.heartbeat import Pulse
from engine.actors.lasting import Living, lasting
from engine.actors.link import Link
from engine.actors.placement import beside_the_run
from engine.actors.plan import Plan, Restore
from engine.actors.process import PackedPlan
from engine.actors.trainer import TrainerActor
from engine.commands import Command, PublishWeights, SaveCheckpoint, ScoreBatch, TrainStep
from engine.errors import EngineError
from engine.events import (
    BatchScored,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    PublishFailed,
    StepFailed,
    StepTrained,
    WeightsPublished,
)
from engine.hosts.checkpoints import list_checkpoints
from engine.ids import Incarnation, StepId

log = logging.getLogger(__name__)

Given = tuple[PackedPlan, Any, Any, Any]
"""What every child is given: the plan, then the actors of scheduler, trajectory store and weights store."""


class TrainerLink(Link):
    """One trainer in all its lives."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        living: Living | None = None,
    ) -> None:
        self._plan = plan
        self._given = given
        self._steps = 0
        self._steps_published = 0
        self._optimizer_steps = 0
        self._reported = -1
        super().__init__(
            source="trainer", living=living, pulse=Pulse.of(plan), start=self._actor_of, failure=failure_of,
            deliver=deliver, spawn=spawn,
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
            self._steps, self._optimizer_steps = restore.steps, restore.optimizer_steps
            self._reported = restore.steps - 1
        await self.actor.bring_up.remote(restore)

    def recover(self, done: Restore, published: StepId) -> None:
        """Take over the trainer of an earlier scheduler process. `done`: train steps and optimizer updates, as the
        record shows; `published`: train steps in published weights."""
        self._steps, self._steps_published, self._optimizer_steps = done.steps, published, done.optimizer_steps
        self._reported = done.steps - 1
        self.take_over(self._restore())

    def answered(self, event: Event) -> None:
        """To be told of every event of the trainer, before the scheduler is."""
        for command in self._pending:
            if answers(event, command):
                self._pending.remove(command)
                break
        else:
            return
        if isinstance(event, StepTrained):
            self._steps = event.step + 1
        elif isinstance(event, WeightsPublished) and isinstance(command, PublishWeights):
            self._steps_published = command.steps

    async def hand_over(self, steps: StepId) -> None:
        """Have the trainer that there is now hand over weights that it owes to scorers. Raises why it cannot."""
        if self._gone is not None:
            raise EngineError(self._gone)
        await self.actor.hand_over.remote(steps)

    def reported(self, step: StepId, figures: Mapping[str, Any]) -> None:
        """To be told what the trainer says of a step. A repeat changes nothing."""
        if step > self._reported:
            self._reported = step
            self._optimizer_steps += int(figures.get("optimizer_steps", 0))

    async def _replace(self, reason: str) -> None:
        """Answer what the dead trainer was ordered, then go on with a new one if nothing is lost by it."""
        log.warning("the trainer is lost (life %d): %s", self._incarnation, reason)
        self._kill()
        newest = await self._given[3].newest.remote()
        pending, self._pending, self._orders = self._pending, [], []
        for command in pending:
            if isinstance(command, PublishWeights) and command.version <= newest:
                self._steps_published = command.steps
        restore = self._restore()
        if restore is None or self._incarnation > self._plan.trainer_restarts:
            why = (
                "nothing that it trained since the last publication is left" if restore is None else "it died too often"
            )
            self._gone = f"the trainer is lost: {reason}; {why}"
        else:
            self._begin()
            self._spawn(self._reopen(self.actor, restore))
        for command in pending:
            saved = isinstance(command, PublishWeights) and command.version <= newest
            self._deliver(published(command) if saved else failure_of(command, f"the trainer is lost: {reason}"))

    def _restore(self) -> Restore | None:
        """What a new trainer could go on from without losing a step; None if there is nothing."""
        if self._steps == 0:
            return Restore(steps=0)
        if self._plan.restore_trainer is None:
            return None
        saved = list_checkpoints(self._plan.run_dir / "checkpoints") if self._plan.run_dir is not None else []
        for steps, path in saved:
            if steps == self._steps:
                return Restore(steps=steps, checkpoint=str(path))
        if self._steps_published != self._steps:
            return None
        log.warning("the next trainer has the weights of step %d, but the optimizer's moments are lost", self._steps)
        return Restore(steps=self._steps, optimizer_steps=self._optimizer_steps)


def answers(event: Event, command: Command) -> bool:
    """Whether an event is what an order to the trainer was waiting for."""
    if isinstance(command, ScoreBatch | TrainStep):
        if isinstance(event, BatchScored):
            return isinstance(command, ScoreBatch) and (event.step, event.attempt, event.task) == (
                command.step,
                command.attempt,
                command.task,
            )
        if isinstance(event, StepTrained) and not isinstance(command, TrainStep):
            return False
        return isinstance(event, StepTrained | StepFailed) and (event.step, event.attempt) == (
            command.step,
            command.attempt,
        )
    if isinstance(command, PublishWeights):
        return isinstance(event, WeightsPublished | PublishFailed) and event.attempt == command.attempt
    if isinstance(command, SaveCheckpoint):
        return isinstance(event, CheckpointSaved | CheckpointFailed) and event.steps == command.steps
    return False


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
