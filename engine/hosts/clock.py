"""The clock and the timers of an executor: seconds since the run began, and one `TimerFired` for each `SetTimer`."""

import asyncio
import time
from collections.abc import Callable

from engine.commands import CancelTimer, SetTimer
from engine.events import TimerFired
from engine.ids import TimerId


class WallClock:
    """A monotonic clock: `before` seconds plus the time since it was created."""

    def __init__(self, before: float = 0.0) -> None:
        self._began = time.monotonic() - before

    def now(self) -> float:
        return time.monotonic() - self._began


class Timers:
    """`SetTimer` and `CancelTimer` on the running event loop; each timer fires once, as a `TimerFired`."""

    def __init__(self, fire: Callable[[TimerFired], None]) -> None:
        self._fire = fire
        self._set: dict[TimerId, asyncio.TimerHandle] = {}

    def set(self, command: SetTimer) -> None:
        """A repeated order changes nothing."""
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
