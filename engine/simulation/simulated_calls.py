"""The calls of a user's reward functions, agents and environments in a simulated replica: they take time, and are
reported as those of a real one. Used by `simulated_models`.
"""

import asyncio
from collections.abc import Callable, Sequence

from engine.protocols import SLOTS, CallFigures

REWARD, AGENT = "reward", "agent"


class SimCalls:
    """Calls of rewards, of which some run at once; the others wait in the order in which they come."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._free = asyncio.Semaphore(at_once)
        self._running: dict[int, float] = {}
        """When each running call began."""
        self._groups = self._waiting = self._ended = 0
        self._ended_s = 0.0
        self.changed: Callable[[], None] = lambda: None

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    async def judge(self, calls: Sequence[float]) -> None:
        """Make the calls for a group, which take these seconds."""
        if not calls:
            return
        self._groups += 1
        self.changed()
        try:
            await asyncio.gather(*map(self._call, calls))
        finally:
            self._groups -= 1

    async def _call(self, seconds: float) -> None:
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        me = id(asyncio.current_task())
        self._running[me] = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(seconds)
        finally:
            del self._running[me]
            self._free.release()
        self._ended, self._ended_s = self._ended + 1, self._ended_s + seconds
        self.changed()

    def figures(self, agents: int) -> list[CallFigures]:
        """`agents`: groups that wait for agents or environments."""
        found = []
        if self._groups or self._ended:
            oldest = min(self._running.values(), default=None)
            now = asyncio.get_running_loop().time()
            found.append(CallFigures(
                function=REWARD, at_once=self._at_once, setting="reward.concurrency", groups=self._groups,
                queued=self._waiting, calls=self._ended, seconds=self._ended_s,
                running_s=0.0 if oldest is None else now - oldest,
            ))  # fmt: skip
        if agents:
            found.append(CallFigures(
                function=AGENT, at_once=max(1, agents), setting=SLOTS, groups=agents, queued=0, calls=0, seconds=0.0,
                running_s=0.0,
            ))  # fmt: skip
        return found
