"""Samples of groups that the filter dropped: reads the first ones of each train step before they are discarded.

Called in every tick, before the tick's commands are executed. The scheduler decides about a group by
its figures, so nothing but the trajectory store still has its texts. The store executes calls in order, so no discard
waits for a sample. Must never raise.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from engine.errors import reason_of
from engine.ids import GroupId, StepId
from engine.trajectory import TrajectoryGroup
from engine.workers.sample_keeper import SampleKeeper

log = logging.getLogger(__name__)


class FilteredSamples:
    """`read(groups)` asks the trajectory store for groups, ahead of every call that follows."""

    def __init__(
        self, keeper: SampleKeeper, read: Callable[[Sequence[GroupId]], Awaitable[list[TrajectoryGroup]]]
    ) -> None:
        self._keeper = keeper
        self._read = read
        self._step: StepId = -1
        self._room = 0
        """Number of groups of step `_step` that may still be read."""
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, groups: Sequence[GroupId], step: StepId, filter: str) -> None:
        """Keep samples of groups that a filter dropped before the end of train step `step`, while there is room."""
        if step != self._step:
            self._step, self._room = step, self._keeper.filtered_groups
        chosen = groups[: self._room]
        if chosen:
            self._room -= len(chosen)
            task = asyncio.get_running_loop().create_task(self._write(self._read(chosen), chosen, step, filter))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write(
        self, answer: Awaitable[list[TrajectoryGroup]], groups: Sequence[GroupId], step: StepId, filter: str
    ) -> None:
        try:
            read = await answer
        except Exception as error:
            log.warning("there are no samples of the filtered groups %s: %s", list(groups), reason_of(error))
            return
        async with self._turn:  # each write counts those before it
            for group in read:
                await self._keeper.keep_filtered(group, step, filter)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
