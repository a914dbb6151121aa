"""Calls an environment's methods and tools, with a time limit: coroutines on the event loop, others on a thread.

`rollout.agents.environment_program` has one `EpisodeCalls` per episode. All plain calls of an episode run on one
thread, because some libraries accept calls only from the thread that created an object. It must never block the event
loop, and never let a call that hangs keep the process from ending.
"""

import asyncio
import contextlib
import inspect
import logging
import queue
from collections.abc import Callable
from threading import Thread
from typing import Any

from engine.errors import describe_error
from engine.user_code import awaited, stack_of

log = logging.getLogger(__name__)

MOST_HANGING = 64
"""Number of hanging calls at which a process is replaced. Each occupies a thread, which Python cannot end."""


class CallTimeout(TimeoutError):
    """A call took longer than its limit."""


class HangingCalls:
    """Counts the hanging calls of a process."""

    def __init__(self) -> None:
        self._count = 0
        self._lost = asyncio.Event()

    def add(self) -> None:
        self._count += 1
        if self._count >= MOST_HANGING:
            self._lost.set()

    def remove(self) -> None:
        self._count -= 1

    async def failed(self) -> str:
        """Wait until `MOST_HANGING` calls hang and return this as the reason."""
        await self._lost.wait()
        return f"{MOST_HANGING} calls of environments hang"


class EpisodeCalls:
    """The calls of one episode, each of at most `timeout_s` seconds."""

    def __init__(self, timeout_s: float, hanging: HangingCalls) -> None:
        self._timeout_s = timeout_s
        self._hanging = hanging
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: Thread | None = None

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`, and await its result if that is a coroutine.

        Raises: its exception; `CallTimeout`; `RuntimeError` if it tried to end the process.
        """
        if inspect.iscoroutinefunction(function):
            return await self._awaited(function, *args, **kwargs)
        value = await self._on_thread(function, *args, **kwargs)
        return await self._awaited(_identity, value) if inspect.isawaitable(value) else value

    def end(self) -> None:
        """End the thread after its remaining calls."""
        self._work.put(None)
        self._work, self._thread = queue.SimpleQueue(), None

    async def _awaited(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(awaited(function, *args, **kwargs))
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise self._too_long(function)
        return task.result()

    async def _on_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        hangs = False

        def work() -> None:
            result: tuple[Any, BaseException | None]
            try:
                result = function(*args, **kwargs), None
            except BaseException as error:  # `SystemExit` also fails only this call
                result = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(returned, result)

        def returned(result: tuple[Any, BaseException | None]) -> None:
            if hangs:
                self._hanging.remove()
            elif not outcome.done():
                outcome.set_result(result)

        if self._thread is None:
            self._thread = Thread(target=_run, args=(self._work,), name="episode", daemon=True)
            self._thread.start()
        thread = self._thread
        self._work.put(work)
        await asyncio.wait([outcome], timeout=self._timeout_s)
        if not outcome.done():
            hangs = True
            self._hanging.add()
            log.warning("%s hangs; it is in\n%s", _name_of(function), stack_of(thread))
            self.end()
            raise self._too_long(function)
        value, error = outcome.result()
        if error is None:
            return value
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        raise RuntimeError(f"{_name_of(function)} raised {describe_error(error)}") from error

    def _too_long(self, function: Callable[..., Any]) -> CallTimeout:
        return CallTimeout(f"{_name_of(function)} took longer than {self._timeout_s:g} s")


async def _identity(value: Any) -> Any:
    return await value


def _run(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := work.get()) is not None:
        task()


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
