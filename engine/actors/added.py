"""The actor of added states: an `AddedStatesHost` with an outbox. Started and watched through `workers.py`.

The user's coroutines run on its event loop, all that the scheduler has ordered at once.
"""

import asyncio
from typing import Any

import ray

from engine.actors.outbox import Outbox
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.stores import RemoteTrajectories
from engine.actors.wire import InOrder, unpack_orders
from engine.commands import DiscardGroups, EnterState
from engine.config import load_extensions_of
from engine.hosts.added import AddedStatesHost, Work, unchanged
from engine.hosts.threads import contained
from engine.ids import Incarnation
from engine.policies.added import work_of
from engine.states.limits import REWARDING

SOURCE = "states"


class AddedStatesActor:
    """`open`, then `carry_out`: orders that come earlier wait. `alive` is answered only when it cannot go on."""

    def __init__(self, plan: PackedPlan, incarnation: Incarnation, scheduler: Any, trajectories: Any) -> None:
        self._plan = plan.unpack()
        self._incarnation = incarnation
        self._scheduler = scheduler
        self._trajectories = trajectories
        self._orders: InOrder[bytes] = InOrder()
        self._early: list[bytes] = []
        self._broken: asyncio.Future[str] | None = None
        self._host: AddedStatesHost | None = None

    async def open(self) -> None:
        """Import and make what does the work. Raises whatever the user's own code raises."""
        plan = self._plan
        self._broken = asyncio.get_running_loop().create_future()
        prepare_process(SOURCE, plan.run_dir)
        works = await asyncio.to_thread(contained, self._works)
        report = self._scheduler.report.remote
        outbox = Outbox(
            lambda sequence, events, figures: report(SOURCE, self._incarnation, sequence, events, figures),
            lost=self._break,
        )
        self._host = AddedStatesHost(
            works=works,
            trajectories=RemoteTrajectories(self._trajectories),
            emit=outbox.add,
            timeout_s=plan.state_timeout_s,
            untimed=(REWARDING,),
            broken=self._break,
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

    def _works(self) -> dict[str, Work]:
        plan = self._plan
        load_extensions_of(plan.config)
        own = {state.name: work_of(state.name) for state in plan.limits.added_states}
        made = {name: plan.make_work(name) for name, work in own.items() if work is None and plan.make_work is not None}
        return {name: work or made.get(name, unchanged) for name, work in own.items()}

    def _carry(self, batch: bytes) -> None:
        if self._host is None:
            self._early.append(batch)
            return
        for command, _ in unpack_orders(batch):
            if isinstance(command, DiscardGroups):
                self._host.discard(command.groups)
            else:
                assert isinstance(command, EnterState)
                self._host.carry_out(command)

    def _break(self, reason: str) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(reason)
