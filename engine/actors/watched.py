"""Who watches a run, and when they are told that there is something new. Part of the scheduler actor, on its loop."""

import asyncio

STATUS_EVERY_S = 0.2
"""A status goes out at most so often, and only after something happened."""


class Watchers:
    """`number` counts the statuses; who waits for a newer one is woken by `changed`, or some time after `soon`."""

    def __init__(self) -> None:
        self.number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Until the next change."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def soon(self) -> None:
        """Something happened."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STATUS_EVERY_S, self.changed)

    def changed(self) -> None:
        """A newer status is there."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.number += 1
        waiting, self._waiting = self._waiting, []
        for watcher in waiting:
            if not watcher.done():
                watcher.set_result(None)
