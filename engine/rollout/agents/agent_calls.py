"""Measures how long agents, rollouts and environments work between the model's answers.

The generators of multi-turn rollouts use it. One *call* is the time that one rollout spends outside of the model: from
its start, or from an answer, until its next request, or its end. A group waits for its agents while none of its
rollouts samples: its slot is taken, and the model has nothing to do.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from engine.protocols import SLOTS, CallFigures


def _nobody() -> None:
    """The default of `AgentCalls.changed`."""


class GroupCalls:
    """One group whose rollouts run. `rollouts`: their number."""

    def __init__(self, rollouts: int, changed: Callable[[], None]) -> None:
        self.rollouts = rollouts
        self._sampling = 0
        self._changed = changed
        self._since = asyncio.get_running_loop().time()

    @property
    def waits_since(self) -> float | None:
        """Since when none of its rollouts has sampled, by the event loop's clock; None: at least one samples."""
        return None if self._sampling else self._since

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """A rollout of the group waits for the model."""
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1
            if not self._sampling:
                self._since = asyncio.get_running_loop().time()
                self._changed()


class AgentCalls:
    """The calls of one agent, rollout or environment on one replica. `function`: its name in messages."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._groups: dict[GroupCalls, None] = {}
        self._ended, self._ended_s, self._held_s = 0, 0.0, 0.0
        self.changed: Callable[[], None] = _nobody
        """Called when a group begins to wait, and when a call ends."""

    @contextlib.contextmanager
    def group(self, rollouts: int) -> Iterator[GroupCalls]:
        """Register a group while its rollouts run."""
        group = GroupCalls(rollouts, lambda: self.changed())
        self._groups[group] = None
        self.changed()
        try:
            yield group
        finally:
            del self._groups[group]

    def count(self, seconds: float, *, held: bool = False) -> None:
        """A call ended. `held`: it awaited nothing."""
        self._ended += 1
        self._ended_s += seconds
        self._held_s += seconds if held else 0.0
        self.changed()

    def figures(self) -> CallFigures:
        """See `protocols.MeasuresCalls`."""
        waiting = [since for group in self._groups if (since := group.waits_since) is not None]
        now = asyncio.get_running_loop().time()
        return CallFigures(
            function=self._function, at_once=max(1, sum(group.rollouts for group in self._groups)), setting=SLOTS,
            groups=len(waiting), queued=0, calls=self._ended, seconds=self._ended_s,
            running_s=now - min(waiting, default=now), held_s=self._held_s,
        )  # fmt: skip
