"""The base class of workers. There is one class for each kind of process, made from the plan and the process's peers.

A process makes the class of its kind, calls `open`, then `carry_out`. The workers run on an event loop; blocking calls
run on threads. An order's own code turns expected failures into events; an unexpected exception breaks the worker, so
that no order stays open unnoticed, and its process is replaced. A worker must never depend on where it runs, nor report
anything once it is closed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.commands import Command
from engine.errors import EngineError, reason_of
from engine.events import Event
from engine.ids import LifeNumber, StepId
from engine.protocols.user_code import calls_of
from engine.states.orders import RELATIONS
from engine.states.process import name_of
from engine.storage.trajectories import Trajectories
from engine.storage.weights import Weights
from engine.trajectory import Prompt
from engine.workers.plan import Plan, Restore
from engine.workers.reports import Reports

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The stores of a worker, and whom it reports to."""

    trajectories: Trajectories
    weights: Weights
    emit: Callable[[Event], None]
    """Reports an event to the scheduler."""
    report: Callable[[StepId, Mapping[str, Any]], None]
    """Reports the trainer's metrics of a step, before its next event."""
    ask_trainer: Callable[[StepId], Awaitable[None]]
    """Makes the trainer hand over the weights after this number of train steps. Raises the reason if it cannot."""


class Worker:
    """The worker of one life of a process. Orders that arrive before it is open wait."""

    kind: ClassVar[str]
    _starts: Mapping[type[Command], Callable[..., None]]
    """The method that starts a command and returns at once, by its class. It also gets the prompt that was sent with
    the command."""

    def __init__(self, plan: Plan, index: int, life: LifeNumber, peers: Peers) -> None:
        self.plan = plan
        self.index = index
        self.life = life
        self.peers = peers
        self.name = name_of(self.kind, index)
        self.reports = Reports(peers.emit)
        self.broken = ""
        """Why it cannot continue; empty while it can."""
        self._breakdown = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._opened = False
        self._settled = asyncio.Event()
        """It is open, or closes without having opened."""
        self._closed = False
        self._abandoned = False
        self._early: list[tuple[Command, Prompt | None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def threads(self) -> int | None:
        """CPU threads for numerical libraries; 0: one for each core; None: unchanged."""
        return None

    async def open(self, restore: Restore | None = None) -> None:
        """Load what the worker runs. Repeated calls share one load and its result. Raises what the user's factory
        raises."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open_once(restore))
        await asyncio.shield(self._opening)

    async def _open_once(self, restore: Restore | None) -> None:
        await self._open(restore)
        self._opened = True
        self._settled.set()
        early, self._early = self._early, []
        for command, prompt in early:
            self.carry_out(command, prompt)

    async def _open(self, restore: Restore | None) -> None:
        raise NotImplementedError

    def carry_out(self, command: Command, prompt: Prompt | None = None) -> None:
        """Start a command and return at once. `prompt` is required for commands that start or resume a group. Repeats
        and commands for another life change nothing. Never raises: a worker that cannot start a command is broken."""
        if not self._opened:
            self._early.append((command, prompt))
            return
        if self._closed or getattr(command, "life", self.life) != self.life:
            return
        try:
            start = self._starts.get(type(command))
            if start is None:
                raise EngineError(f"the {self.name} cannot execute {type(command).__name__}")
            start(command) if prompt is None else start(command, prompt)
        except Exception as error:
            log.exception("%s cannot be started", type(command).__name__)
            self.break_down(f"its worker cannot start {type(command).__name__}: {reason_of(error)}")

    def forget_early(self) -> None:
        """Drop the waiting orders: a restarted scheduler reissues them."""
        self._early.clear()

    # the end

    def break_down(self, reason: str) -> None:
        """The worker cannot continue, so its process must be replaced. Only the first reason counts."""
        self.broken = self.broken or reason
        self._breakdown.set()

    async def breakdown(self) -> str:
        """Return once the worker is broken, with the reason."""
        await self._breakdown.wait()
        return self.broken

    def abandon(self) -> None:
        """A call into the user's code hangs: `close` does not wait for it."""
        self._abandoned = True

    async def close(self) -> None:
        """Cancel everything, without reports, and close what the worker runs. Waits for a load in progress, so that the
        objects that it creates are closed, too."""
        self._closed = True
        self.reports.close()
        self._settled.set()
        if self._opening is not None and not self._opening.done():
            if self._abandoned:
                self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        await end_tasks([*self._tasks], self.name)

    # tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of the worker's work. It breaks the worker if it raises, or is canceled by other code than the
        worker, such as a user's."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        """Cancel a task whose end nobody needs to know."""
        task.remove_done_callback(self._on_end)
        task.add_done_callback(self._tasks.discard)
        task.cancel()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError("canceled by other code") if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            log.error("a task of %s failed", self.name, exc_info=error)
            self.break_down(f"a task of its worker failed: {reason_of(error)}")

    # progress

    def progress_every_s(self, order: type[Command]) -> float:
        """Seconds between two reports of progress on orders of this class."""
        return self.plan.limits.timeouts.progress_every_s(RELATIONS[order].limit)
