"""What a run in a terminal must bear: requests to end, from anywhere and at any time, and a reader that leaves.

Used by the command line alone.
"""

import codecs
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

INTERRUPTED = 130
"""Exit code of a command that was interrupted or ended on request."""
PLAIN = dict(zip("▁▂▃▄▅▆▇█░…×━", "_.-=+*%#.~x-", strict=True))
"""What stands for the letters of the views where they cannot be written."""
SENT_TWICE_S = 0.1
"""The same signal again within this time is the same request: `timeout` signals its child, then the child's group."""


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def complain(text: str) -> None:
    with suppress(OSError):  # Nobody may be left to read it.
        print(f"engine: {text}", file=sys.stderr, flush=True)


def to_nowhere(stream: TextIO) -> None:
    """What the stream still holds, and gets, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def in_its_letters(stream: TextIO) -> None:
    """A terminal or file that cannot take bars and boxes gets plain letters for them, in place of an error."""
    if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        codecs.register_error("plain letters", _plain)
        stream.reconfigure(errors="plain letters")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


class Output:
    """Standard output of a run. If its reader closes it, further output is dropped and the run continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            to_nowhere(self._stream)
            complain(f"the output was closed ({error.strerror}); the run continues without it")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Interrupts:
    """Requests to end, from a terminal or from outside, over the whole of a run. To be used in a `with` statement.

    The first raises KeyboardInterrupt, wherever the run is: one that is up then drains, what is only being made ends.
    The second raises again only where a run that drains is waited for, which then stops: anything else is being cleaned
    up by then, or will not hear. The third ends the process, and Ray's processes end with it. Nothing of that takes
    from a run what it can be resumed from.
    """

    def __init__(self) -> None:
        self.count = 0
        self.closing = False
        """Everything is being taken down: nothing is raised any more."""
        self.waiting = False
        self._before: dict[signal.Signals, Any] = {}
        self._last = 0
        self._last_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == self._last and now - self._last_at < SENT_TWICE_S:
            return
        self._last, self._last_at = number, now
        self.count += 1
        if self.count > 2:
            complain("interrupted; ended at once")
            os._exit(INTERRUPTED)
        if not self.closing and (self.count == 1 or self.waiting):
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever an interrupted run raises is the interrupt. Its process ends now, under these handlers."""
        if not self.count:
            for number, before in self._before.items():
                signal.signal(number, before)
        elif error is not None and not isinstance(error, KeyboardInterrupt):
            interrupt = KeyboardInterrupt()
            for note in notes_of(error):
                interrupt.add_note(note)
            raise interrupt from error
