"""The scorer actor: a `ScorerHost` with an outbox, for the scoring tasks of one pool. Started and watched through
`scorer_link.py`.

Its event loop carries messages; models are loaded and run on threads.
"""

import asyncio
from typing import Any

import ray

from engine.actors.failures import named
from engine.actors.outbox import Outbox
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.stores import RemoteTrajectories, RemoteWeights
from engine.actors.wire import InOrder, unpack_orders
from engine.commands import ScoreBatch
from engine.errors import ConfigError
from engine.hosts.scorer import ScorerHost
from engine.hosts.threads import contained
from engine.ids import Incarnation, StepId


class ScorerActor:
    """`open`, then `carry_out`: orders that come earlier wait. `alive` is answered only when it cannot go on."""

    def __init__(
        self, plan: PackedPlan, number: int, incarnation: Incarnation, scheduler: Any, trajectories: Any, weights: Any
    ) -> None:
        self._plan = plan.unpack()
        self._source = f"scorer-{number}"
        given = self._plan.scorer_threads
        self._threads = given[number] if number < len(given) else self._plan.trainer_threads
        self._tasks = self._plan.limits.scorers()[number]
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._stores = (trajectories, weights)
        self._orders: InOrder[bytes] = InOrder()
        self._early: list[bytes] = []
        self._broken: asyncio.Future[str] | None = None
        self._host: ScorerHost | None = None

    async def open(self) -> None:
        """Load what scores. Raises whatever the user's factory raises, `ConfigError` where there is none."""
        plan = self._plan
        self._broken = asyncio.get_running_loop().create_future()
        prepare_process(self._source, plan.run_dir, self._threads)
        if plan.make_scorer is None:
            law = f"{', '.join(self._tasks)} have a pool without train, and nothing there can score"
            raise ConfigError("Plan.make_scorer", None, law, "a function that makes a roles.Scorer")
        scorer = await asyncio.to_thread(contained, plan.make_scorer, self._tasks)
        report = self._scheduler.report.remote
        outbox = Outbox(
            lambda sequence, events, figures: report(self._source, self._incarnation, sequence, events, figures),
            lost=self._break,
        )
        trajectories, weights = self._stores
        self._host = ScorerHost(
            scorer=scorer,
            trajectories=RemoteTrajectories(trajectories),
            weights=RemoteWeights(weights, plan.transport),
            emit=outbox.add,
            ask=self._ask,
        )
        early, self._early = self._early, []
        for batch in early:
            self._carry(batch)

    @ray.method(num_returns=0)
    async def carry_out(self, sequence: int, orders: bytes) -> None:
        for batch in self._orders.take(sequence, orders):
            self._carry(batch)

    async def alive(self) -> str:
        """Never answered while all is well; then with the reason. That the actor dies is known by the same call."""
        assert self._broken is not None
        return await self._broken

    async def _ask(self, steps: StepId) -> None:
        with named():
            await self._scheduler.hand_over.remote(steps)

    def _carry(self, batch: bytes) -> None:
        if self._host is None:
            self._early.append(batch)
            return
        for command, _ in unpack_orders(batch):
            assert isinstance(command, ScoreBatch)
            self._host.carry_out(command)

    def _break(self, reason: str) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(reason)
