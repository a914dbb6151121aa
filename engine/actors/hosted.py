"""What the actors of trainer, scorers and added states have in common: orders in, reports out, and one way to be lost.

Base of `trainer.TrainerActor`, `scorer.ScorerActor` and `added.AddedStatesActor`. Its event loop carries messages; what
blocks belongs on a thread.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from engine.actors.lasting import end_when_orphaned
from engine.actors.outbox import Outbox
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.sign import Watched
from engine.actors.wire import InOrder, unpack_orders
from engine.ids import Incarnation


class HostedActor(Watched):
    """`open`, then `carry_out`: orders that come earlier wait. `alive` is answered only when it cannot go on.

    `open` is the subclass's own: it calls `_begin`, and `_take_orders` once it has a host. It is called through
    `bring_up`.
    """

    def __init__(self, plan: PackedPlan, source: str, incarnation: Incarnation, scheduler: Any) -> None:
        self._plan = plan.unpack()
        end_when_orphaned(plan, scheduler)
        self._opening: asyncio.Task[Any] | None = None
        self._source = source
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._orders: InOrder[bytes] = InOrder()
        self._early: list[bytes] = []
        self._broken: asyncio.Future[str] | None = None
        self._carry_out: Callable[[Any], None] | None = None

    async def open(self, *given: Any, **named: Any) -> Any:
        """Load what it hosts. Raises whatever the user's factory raises."""
        raise NotImplementedError

    async def bring_up(self, *given: Any) -> Any:
        """Call `open`, once: returns or raises what that does, whoever asks and how often."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self.open(*given))
        return await asyncio.shield(self._opening)

    async def attach(self, epoch: int) -> None:
        """The scheduler is another process now. Orders of the one before are refused."""
        if self._orders.begin(epoch):
            self._early.clear()

    @ray.method(num_returns=0)
    async def carry_out(self, epoch: int, sequence: int, orders: bytes) -> None:
        await self.attach(epoch)  # Ray may begin this call before that one
        for batch in self._orders.take(epoch, sequence, orders):
            self._carry(batch)

    async def alive(self) -> str:
        """Never answered while all is well; then with the reason. That the actor dies is known by the same call."""
        return await asyncio.shield(self._brokenness())

    def _brokenness(self) -> "asyncio.Future[str]":
        if self._broken is None:
            self._broken = asyncio.get_running_loop().create_future()
        return self._broken

    def _begin(self, threads: int | None = None) -> Outbox:
        """Make this process ready; what takes its reports."""
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
        broken = self._brokenness()
        if not broken.done():
            broken.set_result(reason)
