"""Cores or GPUs that simulated processes use together. Once they use more than there is, all slow down in proportion.

Used by `simulated_models`. A process tells its share while it works; 0 means that it has hardware of its own.
"""

import asyncio
from collections.abc import Callable

from engine.workers.clock import INSTANT_S


class Hardware:
    """How much each process uses now."""

    def __init__(self) -> None:
        self.used = 0.0
        """By all processes together; 1: everything."""
        self._used: dict[object, float] = {}
        self._watchers: list[Callable[[], None]] = []
        self._changed: asyncio.Event | None = None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change of what is used."""
        self._watchers.append(changed)

    def use(self, process: object, share: float) -> None:
        """Say what a process uses from now on."""
        if self._used.get(process, 0.0) == share:
            return
        self._used[process] = share
        self.used = sum(self._used.values())
        for changed in self._watchers:
            changed()
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    @property
    def slowdown(self) -> float:
        """How many times as long work takes as on hardware that nothing else uses."""
        return max(1.0, self.used)

    async def work(self, process: object, share: float, seconds: float, slower: float = 1.0) -> None:
        """Work that would take `seconds` on hardware that nothing else uses. `slower`: how many times as much as others
        it slows down."""
        if not share:
            await asyncio.sleep(seconds)
            return
        loop = asyncio.get_running_loop()
        self.use(process, share)
        try:
            while seconds > INSTANT_S:
                self._changed = changed = self._changed or asyncio.Event()
                slowdown, began = max(1.0, slower * self.used), loop.time()
                try:
                    async with asyncio.timeout(seconds * slowdown):
                        await changed.wait()
                except TimeoutError:
                    return
                seconds -= (loop.time() - began) / slowdown
        finally:
            self.use(process, 0.0)
