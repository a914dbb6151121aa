"""The workers of a run: a scorer for each pool that scores apart from the trainer, and one for added states.

Used by `fleet.Fleet`; each is a `WorkerLink`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import ray

from engine.actors.added import SOURCE, AddedStatesActor
from engine.actors.heartbeat import Pulse
from engine.actors.lasting import Living, lasting
from engine.actors.plan import Plan
from engine.actors.scorer import ScorerActor
from engine.actors.trainer_link import Given, failure_of
from engine.actors.worker_link import WorkerLink
from engine.commands import Command, DiscardGroups, EnterState, ScoreBatch
from engine.events import Event, StateFailed
from engine.ids import Incarnation
from engine.states.orders import Order, OrderBook, Owner, stage_owner


class Workers:
    """All workers of a run; none where the trainer scores and no state is added."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        orders: OrderBook,
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        living: Living | None = None,
    ) -> None:
        self._links: dict[str, WorkerLink] = {}
        self._of_task: dict[str, WorkerLink] = {}
        self._of_owner: dict[Owner, WorkerLink] = {}
        shared: dict[str, Any] = {"restarts": plan.worker_restarts, "deliver": deliver, "spawn": spawn}
        shared |= {"living": living, "pulse": Pulse.of(plan)}
        for number, tasks in enumerate(plan.limits.scorers()):
            link = self._links[f"scorer-{number}"] = WorkerLink(
                source=f"scorer-{number}",
                what=f"the scorer of {' and '.join(tasks)}",
                start=partial(_scorer, plan, given, number),
                failure=failure_of,
                owned=partial(_owned, orders, owners := [orders.scorer(task) for task in tasks]),
                **shared,
            )
            self._of_task.update(dict.fromkeys(tasks, link))
            self._of_owner.update(dict.fromkeys(owners, link))
        if plan.limits.added_states:
            owners = [stage_owner(state.name) for state in plan.limits.added_states]
            link = self._links[SOURCE] = WorkerLink(
                source=SOURCE,
                what="the process of the added states",
                start=partial(_added_states, given),
                failure=_state_failed,
                owned=partial(_owned, orders, owners),
                **shared,
            )
            self._of_owner.update(dict.fromkeys(owners, link))

    async def open(self) -> None:
        """Raises what the user's factories raise."""
        await asyncio.gather(*(link.open() for link in self._links.values()))

    def watch(self) -> None:
        for link in self._links.values():
            link.watch()

    def recover(self) -> None:
        """Take over the workers of an earlier scheduler process."""
        for link in self._links.values():
            link.take_over()

    def take(self, command: Command) -> bool:
        """Order it of the worker that it is for; whether there is one."""
        if isinstance(command, EnterState):
            link = self._links.get(SOURCE)
        else:
            link = self._of_task.get(command.task) if isinstance(command, ScoreBatch) else None
        if link is not None:
            link.order(command)
        return link is not None

    def discard(self, command: DiscardGroups) -> None:
        """End what the added states do on groups that are forgotten now."""
        link = self._links.get(SOURCE)
        if link is not None:
            link.discard(command)

    def flush(self) -> int:
        return sum(link.flush() for link in self._links.values())

    def answered(self, owner: Owner, event: Event) -> None:
        """To be told of every event that answers an order of a worker."""
        if owner in self._of_owner:
            self._of_owner[owner].answered(event)

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def _scorer(plan: Plan, given: Given, number: int, incarnation: Incarnation) -> Any:
    packed, *handles = given
    options = {"num_cpus": 0, "num_gpus": plan.scorer_gpus, "enable_task_events": False}
    options |= lasting(packed, f"scorer-{number}", incarnation)
    return ray.remote(ScorerActor).options(**options).remote(packed, number, incarnation, *handles)


def _added_states(given: Given, incarnation: Incarnation) -> Any:
    packed, scheduler, trajectories, _ = given
    options = {"num_cpus": 0, "enable_task_events": False, "max_concurrency": 100_000}
    options |= lasting(packed, SOURCE, incarnation)
    return ray.remote(AddedStatesActor).options(**options).remote(packed, incarnation, scheduler, trajectories)


def _owned(orders: OrderBook, owners: Sequence[Owner]) -> list[Order]:
    return [order for owner in owners for order in orders.owned(owner)]


def _state_failed(command: EnterState, reason: str) -> Event:
    return StateFailed(
        group=command.group, attempt=command.attempt, state=command.state, cause="infrastructure", reason=reason
    )
