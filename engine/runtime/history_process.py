"""The process that reads a run's record while the run goes, so that `engine explain` finds most of it read.

`run_parts` wakes it. It fills `RUN/history-cache` as `engine explain` would, one stretch at a time, and only in
processor time that no other process wants; `cli.keep_history` is its code. Must never fail the run or delay its end.
"""

import logging
import os
import subprocess
import sys
from contextlib import suppress

from engine.errors import reason_of
from engine.ids import EventId
from engine.record import Recorder
from engine.record.snapshots import STRETCH_EVENTS

log = logging.getLogger(__name__)

CLOSE_S = 1.0
"""Seconds that a killed process may take to end."""


class HistoryProcess:
    """The process of one run. It starts when the record has a stretch to read, and is killed by `close`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._read: EventId = 0
        """The snapshot up to which the process is to read."""
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = False

    def wake(self) -> None:
        """Have it read, if there is a new stretch. Called in each tick: the snapshots of earlier ticks are flushed."""
        newest = self._recorder.newest_snapshot
        if self._failed or newest - self._read < STRETCH_EVENTS:
            return
        self._read = newest
        try:
            if self._process is None:
                self._process = self._started()
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
        except OSError as error:
            self._failed = True
            log.warning("the record cannot be read while the run goes: %s", self._end() or reason_of(error))

    def close(self) -> None:
        """Kill the process. What it has not read is read by the next command that needs it."""
        self._end()

    def _end(self) -> str:
        """Returns the last line that the process wrote."""
        process, self._process = self._process, None
        if process is None:
            return ""
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            lines = process.communicate(timeout=CLOSE_S)[1].decode(errors="replace").splitlines()
            return lines[-1] if lines else ""
        return ""

    def _started(self) -> "subprocess.Popen[bytes]":
        run, code = self._recorder.directory.parent, [sys.executable, "-m", "engine.cli.keep_history"]
        path = os.pathsep.join([os.getcwd(), *(part for part in sys.path if part)])
        return subprocess.Popen(
            [*code, str(run), str(STRETCH_EVENTS), str(os.getpid())], bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
