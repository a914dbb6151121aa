"""The actor of added states: an `AddedStatesHost` with an outbox. Started and watched through `workers.py`.

The user's coroutines run on its event loop, all that the scheduler has ordered at once.
"""

import asyncio
from typing import Any

from engine.actors.hosted import HostedActor
from engine.actors.process import PackedPlan
from engine.actors.stores import RemoteTrajectories
from engine.commands import DiscardGroups, EnterState
from engine.config import load_extensions_of
from engine.hosts.added import AddedStatesHost, Work, unchanged
from engine.hosts.threads import contained
from engine.ids import Incarnation
from engine.policies.added import work_of
from engine.states.limits import REWARDING

SOURCE = "states"


class AddedStatesActor(HostedActor):
    """See `HostedActor`; its orders are `EnterState`, and `DiscardGroups` of groups that it works on."""

    def __init__(self, plan: PackedPlan, incarnation: Incarnation, scheduler: Any, trajectories: Any) -> None:
        super().__init__(plan, SOURCE, incarnation, scheduler)
        self._trajectories = trajectories
        self._host: AddedStatesHost | None = None

    async def open(self) -> None:
        """Import and make what does the work. Raises whatever the user's own code raises."""
        outbox = self._begin()
        works = await asyncio.to_thread(contained, self._works)
        self._host = AddedStatesHost(
            works=works,
            trajectories=RemoteTrajectories(self._trajectories),
            emit=outbox.add,
            timeout_s=self._plan.state_timeout_s,
            untimed=(REWARDING,),
            broken=self._break,
        )
        self._take_orders(self._order)

    def _works(self) -> dict[str, Work]:
        plan = self._plan
        load_extensions_of(plan.config)
        own = {state.name: work_of(state.name) for state in plan.limits.added_states}
        made = {name: plan.make_work(name) for name, work in own.items() if work is None and plan.make_work is not None}
        return {name: work or made.get(name, unchanged) for name, work in own.items()}

    def _order(self, command: EnterState | DiscardGroups) -> None:
        assert self._host is not None
        if isinstance(command, DiscardGroups):
            self._host.discard(command.groups)
        else:
            self._host.carry_out(command)
