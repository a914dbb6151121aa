"""Wakes the observers of a run when its status changes. Part of `session.py`, on the event loop of the driver."""

import asyncio

STATUS_EVERY_S = 0.2
"""Minimum seconds between two statuses. One is sent only after an event."""


class Watchers:
    """`number` counts the statuses. `changed` wakes the observers at once, `soon` after a short delay."""

    def __init__(self) -> None:
        self.number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait for the next change."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def soon(self) -> None:
        """Something happened: wake the observers soon."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STATUS_EVERY_S, self.changed)

    def changed(self) -> None:
        """There is a new status: wake the observers now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.number += 1
        waiting, self._waiting = self._waiting, []
        for watcher in waiting:
            if not watcher.done():
                watcher.set_result(None)
