"""Handles signals and closed output during a run in a terminal.

Only the command line uses it.
"""

import codecs
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from engine.errors import visible

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""Exit code of a command that was interrupted or ended on request."""
PLAIN = dict(zip("▁▂▃▄▅▆▇█░…×━", "_.-=+*%#.~x-", strict=True))
"""ASCII replacements for the symbols of the views, for outputs that cannot encode them."""
SENT_TWICE_S = 0.1
"""A repeat of a signal within this many seconds is ignored: `timeout` signals its child, then the child's group."""


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def complain(text: str) -> None:
    with suppress(OSError):  # the reader may have closed it
        print(f"engine: {visible(text)}", file=sys.stderr, flush=True)


class VisibleFormatter(logging.Formatter):
    """Formats log lines for a terminal, which must not interpret text of a model in them."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def discard_output(stream: TextIO) -> None:
    """Discard the buffered and all further output of a stream."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def page_console(*, stderr: bool = False) -> "Console":
    """A console for what a command shows. If the reader has closed the pipe, it raises `BrokenPipeError`, as `print`
    does; rich itself would end the process with exit code 1."""
    from rich.console import Console

    class PageConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PageConsole(highlight=False, stderr=stderr)


def use_plain_letters(stream: TextIO) -> None:
    """Make a stream whose encoding is not UTF write ASCII replacements for symbols, instead of raising."""
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
            discard_output(self._stream)
            complain(f"the output was closed ({error.strerror}); the run continues without it")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP during a run. A context manager.

    The first signal raises `KeyboardInterrupt`: a run that is up drains, and preparations end. The second raises it
    again only while the caller waits for a draining run, which then stops; otherwise cleanup is already in progress.
    The third ends this process, and Ray's processes end with it. In every case the run can be resumed.
    """

    def __init__(self) -> None:
        self.count = 0
        self.closing = False
        """Cleanup is in progress, so signals raise nothing."""
        self.waiting = False
        """The caller waits for a draining run, so the second signal raises."""
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
            complain("interrupted three times; this process ends at once")
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
        """After an interrupt, raise `KeyboardInterrupt` in place of any other exception. Keep these handlers until the
        process ends after an interrupt, and after a run: Ray takes seconds to close. Otherwise restore the earlier
        ones."""
        if not self.count and not self.closing:
            for number, before in self._before.items():
                signal.signal(number, before)
        elif self.count and error is not None and not isinstance(error, KeyboardInterrupt):
            interrupt = KeyboardInterrupt()
            for note in notes_of(error):
                interrupt.add_note(note)
            raise interrupt from error
