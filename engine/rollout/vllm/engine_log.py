"""Keeps what vLLM's engine and worker processes write to stderr, and finds there why they failed.

`rollout.vllm.vllm_backend` calls it. vLLM's own error says only that an engine process failed; the reason is in that
process's stderr. Must never hide stderr of this process for longer than vLLM takes to start.
"""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import clean

MOST_BYTES = 16 << 20
"""A larger file is renamed at the next start; only the newest renamed one is kept."""
SEARCHED_BYTES = 256 << 10
MOST_CAUSES = 4
LINE = 500
"""Characters of a line in a message."""
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
"""What vLLM writes before each line of a process, and of a log record."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CAUSE = re.compile(
    r"(?:[\w.]*(?:Error|Exception)|Fatal Python error|CUDA error): \S|terminate called|.* died unexpectedly"
)
STDERR = 2
_STARTING = threading.Lock()
"""Held while this process's stderr is a log."""


class EngineLog:
    """The log of one backend's processes. `path`: None to leave their stderr as it is."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._begin = 0

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes that this process starts meanwhile write their stderr to the log, and so does this process. Other
        threads of this process that call it wait."""
        if self.path is None:
            yield
            return
        with _STARTING:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size > MOST_BYTES:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            kept = os.dup(STDERR)
            try:
                self._begin = os.fstat(log).st_size
                os.dup2(log, STDERR)
                yield
            finally:
                os.dup2(kept, STDERR)
                os.close(kept)
                os.close(log)

    def note(self, line: str) -> None:
        """Add a line of the engine's own."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                print(line, file=file)

    def with_causes(self, reason: str) -> str:
        """The reason, and what the processes of this start said about it."""
        if self.path is None:
            return reason
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._begin, size - SEARCHED_BYTES))
                said = causes_in(file.read().decode("utf-8", "replace"))
        except OSError as error:
            said = [str(error)]
        if not said:
            return reason
        return f"{reason}; its processes wrote: {' | '.join(said)} (more in {self.path})"


def causes_in(text: str) -> list[str]:
    """The last distinct errors in a log, oldest first: a first error is the cause of later ones. Without an error, the
    last lines."""
    lines = [_PREFIX.sub("", _COLOR.sub("", line)).strip() for line in text.splitlines()]
    lines = [clean(line)[:LINE] for line in lines if line]
    errors = [line for line in lines if _CAUSE.match(line)]
    return list(dict.fromkeys(errors or lines))[-MOST_CAUSES:]
