"""The tasks of one worker. A task that raises breaks its worker, so that no order stays open unnoticed.

Used by every worker. An order's own code turns expected failures into events; an unexpected exception arrives
here, and the process is replaced. It must never report anything once the worker is closed.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from engine.errors import reason_of
from engine.protocols.user_code import calls_of

log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds that a canceled task gets to end. User code may ignore its cancellation."""


async def end_tasks(tasks: Collection[asyncio.Task[Any]], whose: str) -> set[asyncio.Task[Any]]:
    """Cancel tasks and wait for their ends. Returns those that ignore it, which are named in the log."""
    for task in tasks:
        task.cancel()
    ended, stubborn = await asyncio.wait(tasks, timeout=END_S) if tasks else (set(), set())
    for task in ended:
        if not task.cancelled():
            task.exception()  # retrieved, otherwise asyncio warns
    for task in stubborn:
        log.warning("a task of %s ignores its cancellation and is left behind: %s", whose, calls_of(task))
    return stubborn


class WorkerTasks:
    """`broken(reason)` is called if a task raises, or is canceled by other code than its worker, such as a user's."""

    def __init__(self, who: str, broken: Callable[[str], None]) -> None:
        self._who = who
        self._broken = broken
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._on_end)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel a task whose end nobody needs to know."""
        task.remove_done_callback(self._on_end)
        task.add_done_callback(self._running.discard)
        task.cancel()

    async def close(self) -> None:
        """Call `end_tasks` for all tasks, without reports."""
        self._closed = True
        await end_tasks([*self._running], self._who)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = asyncio.CancelledError("canceled by other code") if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            log.error("a task of %s failed", self._who, exc_info=error)
            self._broken(f"a task of its worker failed: {reason_of(error)}")
