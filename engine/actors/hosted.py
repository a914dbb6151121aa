"""What the actors of trainer, scorers and added states have in common: orders in, reports out, and one way to be lost.

Base of `trainer.TrainerActor`, `scorer.ScorerActor` and `added.AddedStatesActor`. Its event loop carries messages; what
blocks belongs on a thread.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from engine.actors.outbox import Outbox
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.wire import InOrder, unpack_orders
from engine.ids import Incarnation


class HostedActor:
    """`open`, then `carry_out`: orders that come earlier wait. `alive` is answered only when it cannot go on.

    `open` is the subclass's own: it calls `_begin`, and `_take_orders` once it has a host.
    """

    def __init__(self, plan: PackedPlan, source: str, incarnation: Incarnation, scheduler: Any) -> None:
        self._plan = plan.unpack()
        self._source = source
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._orders: InOrder[bytes] = InOrder()
        self._early: list[bytes] = []
        self._broken: asyncio.Future[str] | None = None
        self._carry_out: Callable[[Any], None] | None = None

    @ray.method(num_returns=0)
    async def carry_out(self, sequence: int, orders: bytes) -> None:
        for batch in self._orders.take(sequence, orders):
            self._carry(batch)

    async def alive(self) -> str:
        """Never answered while all is well; then with the reason. That the actor dies is known by the same call."""
        assert self._broken is not None
        return await self._broken

    def _begin(self, threads: int | None = None) -> Outbox:
        """Make this process ready; what takes its reports."""
        self._broken = asyncio.get_running_loop().create_future()
        prepare_process(self._source, self._plan.run_dir, threads)
        report = self._scheduler.report.remote
        return Outbox(
            lambda sequence, events, figures: report(self._source, self._incarnation, sequence, events, figures),
            lost=self._break,
        )

    def _take_orders(self, carry_out: Callable[[Any], None]) -> None:
        """From now on orders are carried out, first those that came early."""
        self._carry_out = carry_out
        early, self._early = self._early, []
        for batch in early:
            self._carry(batch)

    def _carry(self, batch: bytes) -> None:
        if self._carry_out is None:
            self._early.append(batch)
            return
        for command, _ in unpack_orders(batch):
            self._carry_out(command)

    def _break(self, reason: str) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(reason)
