"""What the scheduler actor tells the process that launched the run."""

import asyncio
from dataclasses import dataclass

from engine.errors import RunFailed
from engine.metrics.status import Status


class BeginAgain(RunFailed):
    """The run cannot go on where it is; it can begin again from its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A status on its way to whoever shows the run. `last`: nothing follows it. `relaunch`: why the run is to be
    started again from its record, if it is."""

    number: int
    status: Status
    last: bool
    relaunch: str = ""
    told: bool = False
    """Somebody has told the run to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls between the actors so far, for benchmarks."""

    reports: int
    calls: int
    events: int
    decisions_s: tuple[float, ...]
    """Of the newest slices of reports: from the report's arrival until what they led to was recorded and sent."""


STATUS_EVERY_S = 0.2
"""A status goes out at most so often, and only after something happened."""


class News:
    """Numbers what there is to tell, and wakes those who wait for newer."""

    def __init__(self) -> None:
        self.number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._watchers: list[asyncio.Future[None]] = []

    def happened(self) -> None:
        """Something did: it is told soon, with what follows until then."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STATUS_EVERY_S, self.changed)

    def changed(self) -> None:
        """A newer status is there now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.number += 1
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def next(self) -> None:
        """Return once there is newer."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(changed)
        await changed
