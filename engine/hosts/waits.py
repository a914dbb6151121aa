"""Calls to other processes that are not answered yet. A probe asks for the oldest."""

from collections.abc import Iterator
from contextlib import contextmanager


class Waits:
    """The open calls of one process."""

    def __init__(self) -> None:
        self._calls: dict[object, str] = {}

    @contextmanager
    def on(self, process: str) -> Iterator[None]:
        """Around a call to a process, given by its name."""
        call = object()
        self._calls[call] = process
        try:
            yield
        finally:
            del self._calls[call]

    @property
    def oldest(self) -> str:
        """The process whose answer is outstanding longest; empty: none is."""
        return next(iter(self._calls.values()), "")
