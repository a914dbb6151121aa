"""How the actor of each kind of process is made and named. Used by `supervisor.Supervisor` alone."""

from collections.abc import Callable
from typing import Any

import ray

from engine.actors.added import SOURCE as STATES
from engine.actors.added import AddedStatesActor
from engine.actors.lasting import lasting
from engine.actors.placement import Place, beside_the_run, place
from engine.actors.plan import Plan
from engine.actors.process import PackedPlan
from engine.actors.rollout import RolloutActor
from engine.actors.scorer import ScorerActor
from engine.actors.trainer import TrainerActor
from engine.ids import Incarnation
from engine.states.process import (
    ADDED_STATES,
    GATEWAY,
    REPLICA,
    SCORER,
    TRAINER,
    TRAJECTORY_STORE,
    WEIGHTS_STORE,
)

Given = tuple[PackedPlan, Any, Any, Any]
"""What every actor is given: the plan, then the actors of scheduler, trajectory store and weights store."""
SINGLE = {
    TRAINER: "trainer",
    ADDED_STATES: STATES,
    TRAJECTORY_STORE: "trajectories",
    WEIGHTS_STORE: "weights",
    GATEWAY: "gateway",
}
KEPT = (TRAJECTORY_STORE, WEIGHTS_STORE, GATEWAY)
"""Kinds that the scheduler actor starts and ends itself."""
NUMBERED = {REPLICA: "rollout", SCORER: "scorer"}


def source_of(kind: str, index: int) -> str:
    """The name of a process in its reports, logs and actor."""
    return f"{NUMBERED[kind]}-{index}" if kind in NUMBERED else SINGLE[kind]


class Births:
    """Makes actors. Returns at once: an actor waits by itself for the resources it needs."""

    def __init__(self, plan: Plan, given: Given, gateway: Any) -> None:
        self._plan = plan
        self._given = given
        self._gateway = gateway
        self._makes: dict[str, Callable[[int, Incarnation], tuple[Any, Place]]] = {
            REPLICA: self._replica,
            TRAINER: self._trainer,
            SCORER: self._scorer,
            ADDED_STATES: self._added_states,
        }

    def make(self, kind: str, index: int, incarnation: Incarnation) -> tuple[Any, Place]:
        """The actor of one life, and what was set aside for it. Raises whatever Ray says of its options."""
        return self._makes[kind](index, incarnation)

    def name(self, source: str, incarnation: Incarnation) -> str:
        """Of the actor of a life, and of what was set aside for it."""
        return f"{self._given[0].launch}/{source}/{incarnation}"

    def _options(self, kind: str, index: int, incarnation: Incarnation, **options: Any) -> dict[str, Any]:
        named = lasting(self._given[0], source_of(kind, index), incarnation)
        return {"num_cpus": 0, "enable_task_events": False, **options, **named}

    def _replica(self, index: int, incarnation: Incarnation) -> tuple[Any, Place]:
        packed, *handles = self._given
        placed = place(self._plan, self.name(source_of(REPLICA, index), incarnation) if packed.lasts else None)
        options = self._options(REPLICA, index, incarnation, max_concurrency=100_000, **placed.options)
        try:
            made = ray.remote(RolloutActor).options(**options)
            return made.remote(packed, index, incarnation, *handles, self._gateway), placed
        except BaseException:
            placed.free()
            raise

    def _trainer(self, index: int, incarnation: Incarnation) -> tuple[Any, Place]:
        packed, *handles = self._given
        options = self._options(TRAINER, index, incarnation, **beside_the_run(self._plan.trainer_gpus))
        return ray.remote(TrainerActor).options(**options).remote(packed, incarnation, *handles), Place({})

    def _scorer(self, index: int, incarnation: Incarnation) -> tuple[Any, Place]:
        packed, *handles = self._given
        options = self._options(SCORER, index, incarnation, num_gpus=self._plan.scorer_gpus)
        return ray.remote(ScorerActor).options(**options).remote(packed, index, incarnation, *handles), Place({})

    def _added_states(self, index: int, incarnation: Incarnation) -> tuple[Any, Place]:
        packed, scheduler, trajectories, _ = self._given
        options = self._options(ADDED_STATES, index, incarnation, max_concurrency=100_000)
        return ray.remote(AddedStatesActor).options(**options).remote(
            packed, incarnation, scheduler, trajectories
        ), Place({})
