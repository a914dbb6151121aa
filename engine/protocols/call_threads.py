"""Daemon threads for calls of user code. A thread that has returned from a call is kept for the next one.

Used by rewards. A call that hangs keeps its thread, and other calls get others: a hanging call must never delay another
call, or the end of the process.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from engine.protocols.user_code import end_if_forked

Value = TypeVar("Value")
_Call = tuple[Callable[[], Any], Callable[[Any], object]]
IDLE_S = 10.0
"""Seconds after which a thread without a call ends."""


class CallThreads:
    """The threads for one purpose, in this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_CallThread] = []
        os.register_at_fork(after_in_child=self._idle.clear)  # a child has none of these threads

    def run(self, call: Callable[[], Value], returned: Callable[[Value], object]) -> Thread:
        """Run `call` and then `returned` with its result on an idle thread, or else on a new one. They must not raise.
        Returns the thread at once. Raises: `RuntimeError` if no thread can be started."""
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _CallThread(self._name, self._idle)
            thread.start()
        thread.calls.put((call, returned))
        return thread


class _CallThread(Thread):
    """`idle`: the threads that wait for a call."""

    def __init__(self, name: str, idle: "list[_CallThread]") -> None:
        super().__init__(name=name, daemon=True)
        self.calls: SimpleQueue[_Call] = SimpleQueue()
        self._idle = idle

    def run(self) -> None:
        process = os.getpid()
        while (work := self._next()) is not None:
            call, returned = work
            value = call()
            end_if_forked(process)
            self._idle.append(self)  # before anyone who waits for the value needs a thread
            returned(value)
            del work, call, returned, value  # they refer to a group

    def _next(self) -> "_Call | None":
        with suppress(Empty):
            return self.calls.get(timeout=IDLE_S)
        with suppress(ValueError):
            self._idle.remove(self)
            return None
        return self.calls.get()  # it was chosen meanwhile
