"""The watchdog: finds overdue orders, asks who waits for whom, and reports both as one event.

It runs on the event loop of the run, on a real or a virtual clock, and sleeps until an order can be overdue. The core
decides what follows (`scheduling/time_limits.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from engine.events import Event
from engine.record.frames import Tick
from engine.runtime.order_times import NEVER, OrderTimes, OverdueOrder
from engine.runtime.process_port import Sign
from engine.states.orders import RELATIONS
from engine.states.process import Process
from engine.states.state import State


class Watchdog:
    """Call `observe` after each tick, and `close` at the end."""

    def __init__(
        self,
        state: State,
        now: Callable[[], float],
        probe: Callable[[Process], Awaitable[Sign | None]],
        deliver: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`probe`: asks a process what it waits for; never returns if the process hangs, None if it has ended.
        `deliver`: handles an event at once. `spawn`: starts a task whose failure ends the run."""
        self.times = OrderTimes(state)
        self._state = state
        self._now = now
        self._probe = probe
        self._deliver = deliver
        self._spawn = spawn
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = NEVER
        self._asked: dict[str, dict[int, OverdueOrder]] = {}
        """The overdue orders, by number, of each owner that is being asked."""

    def observe(self, tick: Tick) -> None:
        """The scheduler has handled a tick."""
        self.times.note(tick.events, tick.commands, tick.at)
        self._sleep()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = -NEVER

    def _sleep(self) -> None:
        """Wake up when there may be an overdue order."""
        if self.times.look_at >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = self.times.look_at
        delay_s = max(0.0, self._wakes_at - self._now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer, self._wakes_at = None, NEVER
        now = self._now()
        if now < self.times.look_at:  # what was given before has ended
            self._sleep()
            return
        for one in self.times.overdue(now):
            owner = self._state.process_of(one.order.owner)
            if owner is None or not RELATIONS[type(one.order.command)].blames_process:
                self._report(one)
            elif owner.id in self._asked:
                self._asked[owner.id].setdefault(one.order.number, one)
            else:
                self._asked[owner.id] = {one.order.number: one}
                self._spawn(self._follow(owner))
        self._sleep()

    async def _follow(self, owner: Process) -> None:
        """Ask the owner of overdue orders what it waits for, then that process, and so on; then report. If one of
        them ends meanwhile, the orders have their full time with the next life."""
        chain, process = [owner.id], owner
        try:
            while True:
                life, sign = process.life, await self._sign_of(process)
                if process.life != life:
                    return
                awaited = None if sign is None else self._state.processes.get(sign.waits_for)
                if awaited is None:
                    break
                chain.append(awaited.id)
                if awaited.state != "up" or awaited.id in chain[:-1]:
                    break
                process = awaited
            state = owner.state
            for one in [*self._asked[owner.id].values()]:
                if owner.state == state:  # once it is stopped, its other orders end with it
                    self._report(one, tuple(chain), sign is not None)
        finally:
            for one in self._asked.pop(owner.id).values():
                self.times.mark(one.order, self._now())
            self._sleep()

    async def _sign_of(self, process: Process) -> Sign | None:
        """What a process waits for; None: it does not answer within `timeouts.cut_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._state.limits.timeouts.cut_s):
                sign = await self._probe(process)
                if sign is None:
                    await asyncio.get_running_loop().create_future()  # it has ended: its loss is reported soon
                return sign
        return None

    def _report(self, one: OverdueOrder, chain: tuple[str, ...] = (), answered: bool = True) -> None:
        if one.order.number in self._state.orders.by_number:
            self._deliver(one.event(chain, answered))
