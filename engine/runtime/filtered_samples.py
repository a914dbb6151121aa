"""Samples of groups that the filter dropped: reads the first ones of each train step before they are discarded.

Called by the executor, which discards these groups. The scheduler decides about a group by its figures, so nothing but
the trajectory store still has its texts. Must never fail, or delay a discard until a sample is written.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from engine.errors import reason_of
from engine.ids import GroupId, StepId
from engine.trajectory import TrajectoryGroup
from engine.workers.sample_keeper import SampleKeeper
from engine.workers.threads import on_a_thread

log = logging.getLogger(__name__)


class FilteredSamples:
    """`step()`: the first train step that has not ended. `filter`: name of the filter."""

    def __init__(self, keeper: SampleKeeper, step: Callable[[], StepId], filter: str) -> None:
        self._keeper = keeper
        self._dropped: list[GroupId] = []
        """The groups that the filter dropped and `take` has not returned."""
        self._step = step
        self._filter = filter
        self._counting = asyncio.Lock()
        self._counted: StepId = -1
        self._groups = 0
        """Groups of step `_counted` with samples."""

    def note(self, groups: Sequence[GroupId]) -> None:
        """Note the groups that the filter dropped in a tick."""
        self._dropped += groups

    def take(self) -> list[GroupId]:
        """The groups that the filter dropped since the last call."""
        taken, self._dropped = self._dropped, []
        return taken

    async def keep(
        self,
        groups: Sequence[GroupId],
        read: Callable[[Sequence[GroupId]], Awaitable[list[TrajectoryGroup]]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """Read groups while there is room for the step, and `spawn` the writing of their samples. Never raises."""
        keeper = self._keeper
        try:
            async with self._counting:
                step = self._step()
                if step != self._counted:  # an earlier process may have kept some
                    self._groups, self._counted = await on_a_thread(keeper.count_filtered, step), step
                chosen = groups[: max(0, keeper.filtered_groups - self._groups)]
                self._groups += len(chosen)
            for group in await read(chosen) if chosen else ():
                spawn(keeper.keep_filtered(group, step, self._filter))
        except Exception as error:
            log.warning("there are no samples of the filtered groups %s: %s", list(groups), reason_of(error))
