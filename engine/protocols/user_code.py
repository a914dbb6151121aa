"""Awaits a user's coroutine and turns anything it raises into an exception that fails one attempt.

Called by the workers that run generators and added states, by the runners of a user's programs, and by rewards.
`workers.threads.contained` does the same for blocking calls. It must never turn the engine's own cancellation into a
failure.
"""

import asyncio
import inspect
import os
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

from engine.errors import type_and_message

FORKED = b"a process that user code forked came back to the engine and is ended; end it with os._exit in that code\n"
EXIT_FORKED = 70

P = ParamSpec("P")
Value = TypeVar("Value")


async def awaited(function: Callable[P, Awaitable[Value]], *args: P.args, **kwargs: P.kwargs) -> Value:
    """`await function(...)`. `asyncio.CancelledError` propagates if this task was cancelled.

    Raises: any `Exception` of the function, unchanged. `RuntimeError` with the names of the function and the exception
    if it raises `SystemExit`, `KeyboardInterrupt`, `GeneratorExit` or, without a cancellation, `CancelledError`: these
    would end the process or the event loop, or silently end this task.
    """
    process = os.getpid()
    try:
        return await function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if _is_ours(error):
            raise
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise RuntimeError(f"{name} raised {type_and_message(error)}") from error
    finally:
        end_if_forked(process)


def end_if_forked(process: int) -> None:
    """End this process if it is not the given one, but a child that user code forked from it. If such a child came back
    to the engine, it would run it a second time, on the same files, without its threads."""
    if os.getpid() != process:
        os.write(2, FORKED)
        os._exit(EXIT_FORKED)


def _is_ours(error: BaseException) -> bool:
    """Whether the engine caused the exception: this task was cancelled, or the event loop closes the coroutine."""
    try:
        task: asyncio.Task[Any] | None = asyncio.current_task()
    except RuntimeError:
        return True
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def stack_of(thread: Thread) -> str:
    """The stack of a thread, as in a traceback, for the log when user code does not return."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "it has ended" if frame is None else "".join(traceback.format_stack(frame)).rstrip()


MOST_HANGING = 64
"""Number of hanging calls at which a process is replaced. Each occupies a thread, which Python cannot end."""


class HangingCalls:
    """Counts the hanging calls of a process."""

    def __init__(self) -> None:
        self._count = 0
        self._lost = asyncio.Event()
        self.story = ""
        """Why the process is to be replaced; empty before."""

    def add(self, what: str, timeout_s: float) -> None:
        """Count a call of `what` that has exceeded its time limit."""
        self._count += 1
        if self._count >= MOST_HANGING and not self.story:
            self.story = f"{MOST_HANGING} calls of {what} took longer than {timeout_s:g} s and have not returned"
            self._lost.set()

    def remove(self) -> None:
        self._count -= 1

    async def failed(self) -> str:
        """Wait until `MOST_HANGING` calls hang and return this as the reason."""
        await self._lost.wait()
        return self.story


class RunningCalls:
    """The user's functions that this process is calling, in a file that is left if one of them ends the process."""

    SIZE = 1000

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        """Number of calls by function."""
        self._file = -1
        self._lock = Lock()

    def write_to(self, file: Path) -> None:
        """Note the calls in this file from now on."""
        with suppress(OSError):
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Context manager around a call of a function."""
        with self._lock:
            self._running[name] += 1
            if self._running[name] == 1:
                self._write()
        try:
            yield
        finally:
            with self._lock:
                self._running[name] -= 1
                if not self._running[name]:
                    del self._running[name]
                    self._write()

    def _write(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                os.pwrite(self._file, ", ".join(self._running).encode()[: self.SIZE].ljust(self.SIZE), 0)


CALLS = RunningCalls()


def calls_in(file: Path) -> str:
    """The functions that a process was calling when it ended; empty if there were none or the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")[: RunningCalls.SIZE].strip()
    except OSError:
        return ""


def calls_of(task: asyncio.Task[Any]) -> str:
    """The coroutines of a suspended task, outermost first."""
    calls: list[str] = []
    coroutine: Any = task.get_coro()
    while inspect.iscoroutine(coroutine):
        calls.append(coroutine.__qualname__)
        coroutine = coroutine.cr_await
    return " → ".join(calls)
