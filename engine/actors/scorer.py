"""The scorer actor: a `ScorerHost` with an outbox, for the scoring tasks of one pool. Started and watched through
`workers.py`.

Models are loaded and run on threads.
"""

import asyncio
from typing import Any

from engine.actors.hosted import HostedActor
from engine.actors.process import PackedPlan
from engine.actors.sign import awaited
from engine.actors.stores import RemoteTrajectories, RemoteWeights
from engine.hosts.scorer import ScorerHost
from engine.hosts.threads import contained
from engine.ids import Incarnation, StepId
from engine.states.process import TRAINER


class ScorerActor(HostedActor):
    """See `HostedActor`; its orders are `ScoreBatch`."""

    def __init__(
        self, plan: PackedPlan, number: int, incarnation: Incarnation, scheduler: Any, trajectories: Any, weights: Any
    ) -> None:
        super().__init__(plan, f"scorer-{number}", incarnation, scheduler)
        given = self._plan.scorer_threads
        self._threads = given[number] if number < len(given) else self._plan.trainer_threads
        self._tasks = self._plan.limits.scorers()[number]
        self._stores = (trajectories, weights)

    async def open(self) -> None:
        """Load what scores. Raises whatever the user's factory raises."""
        plan, outbox = self._plan, self._begin(self._threads)
        assert plan.make_scorer is not None  # `start` has refused a plan without
        scorer = await asyncio.to_thread(contained, plan.make_scorer, self._tasks)
        trajectories, weights = self._stores
        host = ScorerHost(
            scorer=scorer,
            trajectories=RemoteTrajectories(trajectories),
            weights=RemoteWeights(weights, plan.transport),
            emit=outbox.add,
            ask=self._ask,
        )
        self._take_orders(host.carry_out)

    async def _ask(self, steps: StepId) -> None:
        with awaited(TRAINER):
            await self._scheduler.hand_over.remote(steps)
