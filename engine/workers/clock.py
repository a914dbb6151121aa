"""The clock of a run, which follows the event loop's clock and may be virtual; and its timers.

Used by the run loop, the executor and the simulation. A `VirtualLoop` runs the same code without waiting.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from engine.commands import CancelTimer, SetTimer
from engine.events import TimerFired
from engine.ids import TimerId


class LoopClock:
    """Counts `before` seconds plus the time since it was created, by the running event loop's clock."""

    def __init__(self, before: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time() - before

    def now(self) -> float:
        return self._loop.time() - self._began


class Timers:
    """`SetTimer` and `CancelTimer` on the running event loop; each timer fires once, as a `TimerFired`."""

    def __init__(self, fire: Callable[[TimerFired], None]) -> None:
        self._fire = fire
        self._set: dict[TimerId, asyncio.TimerHandle] = {}

    def set(self, command: SetTimer) -> None:
        """Start a timer. A repeated order changes nothing."""
        if command.timer not in self._set:
            loop = asyncio.get_running_loop()
            self._set[command.timer] = loop.call_later(max(0.0, command.delay_s), self._over, command.timer)

    def cancel(self, command: CancelTimer) -> None:
        handle = self._set.pop(command.timer, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        for handle in self._set.values():
            handle.cancel()
        self._set.clear()

    def _over(self, timer: TimerId) -> None:
        del self._set[timer]
        self._fire(TimerFired(timer=timer))


class Deadlock(RuntimeError):
    """A `VirtualLoop` has nothing to run and no timer to wait for, so its tasks would wait forever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing is left to run.

    It has no selector, so sockets and other threads cannot wake it; `threads.OneThread` calls blocking functions on the
    loop. `run_until_complete` raises `Deadlock` if its task would wait forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """`BaseEventLoop` calls it when no callback is ready, with the seconds until the next timer."""
        if timeout is None:
            raise Deadlock("every task waits, but no callback is ready and no timer is set")
        if timeout > 0:
            self._now += timeout
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...
