"""The calls to other processes that are still open. A probe asks for the oldest one."""

from collections.abc import Iterator
from contextlib import contextmanager


class Waits:
    """The open calls of one process."""

    def __init__(self) -> None:
        self._calls: dict[object, str] = {}

    @contextmanager
    def on(self, process: str) -> Iterator[None]:
        """Context manager around a call to a process, given by name."""
        call = object()
        self._calls[call] = process
        try:
            yield
        finally:
            del self._calls[call]

    @property
    def oldest(self) -> str:
        """The process that has not answered for longest; empty if no call is open."""
        return next(iter(self._calls.values()), "")
