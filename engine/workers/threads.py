"""Runs a user's blocking calls on threads, so that any exception they raise reaches the event loop.

Used by the workers and the executor. A future cannot carry every exception: with `StopIteration` it never
completes, and `CancelledError` cancels the waiting task. The threads are daemons: a call that never returns must not
keep the process from ending. Coroutine functions run on the event loop instead; so does everything on a `VirtualLoop`.
"""

import asyncio
import inspect
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from engine.errors import describe_error
from engine.protocols.user_code import awaited, end_if_forked
from engine.workers.clock import VirtualLoop

P = ParamSpec("P")
Value = TypeVar("Value")


def contained(function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
    """Call `function(...)` on this thread. An attempt to end the process counts as a failure.

    Raises: its exception, or a `RuntimeError` that names it if a future cannot carry it.
    """
    process = os.getpid()
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
            raise
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise RuntimeError(f"{name} raised {describe_error(error)}") from error
    finally:
        end_if_forked(process)


class CallHangs(Exception):
    """A call on a thread has not returned in time."""


class OneThread:
    """A thread for calls that must not overlap; they run in the order of arrival. It starts with the first call that
    needs it. Use `run` where no function can be a coroutine function, otherwise `call` throughout."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = asyncio.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result of `function`: `contained` on the thread, or `awaited` if it is a coroutine function. If the
        caller is canceled, a call that has begun on the thread continues."""
        async with self._turn:
            if inspect.iscoroutinefunction(function):
                if self._thread is not None:
                    await self.run(_nothing)  # a call that its caller abandoned may still run there
                return await awaited(function, *args, **kwargs)
            return await self.run(function, *args, **kwargs)

    async def run(self, function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
        """The result of a plain function, `contained` on the thread."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            return contained(function, *args, **kwargs)
        done: asyncio.Future[Value] = loop.create_future()

        def work() -> None:
            try:
                value = contained(function, *args, **kwargs)
            except Exception as error:
                settle(_fail, error)
            else:
                settle(_succeed, value)

        def settle(how: Callable[..., None], outcome: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nothing awaits the outcome
                loop.call_soon_threadsafe(how, done, outcome)

        self._put(work)
        return await done

    def wait_for(self, limit_s: float | None, function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
        """The result of `function`, `contained` on the thread; the caller's thread waits. Raises: `CallHangs` after
        `limit_s`."""
        done: Future[Value] = Future()

        def work() -> None:
            try:
                done.set_result(contained(function, *args, **kwargs))
            except Exception as error:
                done.set_exception(error)

        self._put(work)
        if not wait([done], limit_s).done:
            raise CallHangs
        return done.result()

    def _put(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(work)

    async def close(self) -> None:
        """Return once all earlier calls have ended."""
        if self._thread is not None:
            await self.run(_nothing)
            self.abandon()

    def abandon(self) -> None:
        """Let the thread end after its queued calls, without waiting for it."""
        self._turn = asyncio.Lock()
        self._calls.put(None)
        self._calls, self._thread = queue.SimpleQueue(), None


def _work(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (work := calls.get()) is not None:
        work()


async def on_a_thread(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """`OneThread.call` on a new thread."""
    name = getattr(function, "__name__", type(function).__name__)
    thread = OneThread(name)
    try:
        return await thread.call(function, *args, **kwargs)
    finally:
        thread.abandon()


def from_any_thread(function: Callable[..., None]) -> Callable[..., None]:
    """A function that user code may call on any thread. It runs on this event loop: at once if it is called
    there, otherwise soon, and not at all once the loop is closed."""
    loop, home = asyncio.get_running_loop(), threading.get_ident()

    def call(*given: Any) -> None:
        if threading.get_ident() == home:
            function(*given)
            return
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(function, *given)

    return call


def _nothing() -> None: ...


def _succeed(done: "asyncio.Future[Value]", value: Value) -> None:
    if not done.done():
        done.set_result(value)


def _fail(done: "asyncio.Future[Value]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
