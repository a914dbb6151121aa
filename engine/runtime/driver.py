"""Passes events to the scheduler: stamps each event, lets the scheduler decide, records both, then executes commands.

The same code runs on Ray, in one process, in simulation and in benchmarks. It contains no policies and no state
machines. It must never execute a command before its frame is written.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.commands import Command, FinishRun
from engine.events import Event, stamp
from engine.record.frames import encode_snapshot
from engine.record.msgpack_values import CodecError
from engine.record.snapshots import Books, snapshot
from engine.scheduling.scheduler import Scheduler

# -- what the driver needs ---------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The clock of a run."""

    def now(self) -> float:
        """Seconds since the run began. Must never decrease."""


class Recorder(Protocol):
    """Writes the record of a run."""

    def write(self, event: Event, commands: Sequence[Command], state_hash: int) -> None:
        """Append one frame. It must be in the record before any of its commands is executed."""

    def reject(self, event: Event, reason: str) -> None:
        """Append one frame of an event that the scheduler could not handle."""

    def snapshot(self, payloads: Sequence[bytes]) -> None:
        """Append a snapshot of the state after the newest event, as `record.frames.encode_snapshot` returned it."""

    def flush(self) -> None:
        """Hand every frame written so far to the operating system."""

    def close(self) -> None: ...


class Executor(Protocol):
    """Executes commands."""

    def execute(self, commands: Sequence[Command]) -> None:
        """Start commands in order, and return at once. Their results arrive later as events."""


# -- the driver --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

NEVER = float("inf")
REASON_LENGTH = 1000
"""Maximum number of characters of an error in the record."""


class Driver:
    """Feeds events to a scheduler one at a time.

    The executor may call `deliver` while it carries out commands; these events wait in the inbox. The driver handles no
    more events after `FinishRun`, which `outcome` holds, or after an event raised an exception, which `failure` holds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        recorder: Recorder,
        executor: Executor,
        observe: Callable[[Event, tuple[Command, ...]], None] | None = None,
        events_before: int = 0,
        snapshot_every: int = 0,
        books: Books | None = None,
    ) -> None:
        """`events_before`: number of events that earlier processes of the run handled. `snapshot_every`: number of
        events between two snapshots of the state and of `books`; 0: no snapshots."""
        self.scheduler = scheduler
        self.clock = clock
        self.recorder = recorder
        self.executor = executor
        self.observe = observe
        self.events_handled = events_before
        self.outcome: FinishRun | None = None
        self.failure: Exception | None = None
        self.snapshot_every = snapshot_every
        self.books = books
        self._next_snapshot: float = events_before + snapshot_every if snapshot_every else NEVER
        self._inbox: deque[Event] = deque()
        self._draining = False

    @property
    def waiting(self) -> int:
        """Number of events in the inbox. May be read from any thread."""
        return len(self._inbox)

    def deliver(self, *events: Event) -> None:
        """Add events to the inbox, then handle the whole inbox. A nested call only adds events.

        Raises: the exception of `Scheduler.handle`, after recording the event as rejected and executing the commands of
        the events before it. Every later call raises it again, because the state may be inconsistent.
        """
        if self.failure is not None:
            raise self.failure
        self._inbox.extend(events)
        if self._draining:
            return
        self._draining = True
        try:
            while self._inbox:
                self.executor.execute(self._handle_waiting())
                if self.failure is not None:
                    raise self.failure
        finally:
            self._draining = False

    def _handle_waiting(self) -> list[Command]:
        """Handle the events that are in the inbox now. Returns their commands, whose frames are flushed."""
        commands: list[Command] = []
        for _ in range(len(self._inbox)):
            event = self._inbox.popleft()
            if self.outcome is not None:
                continue
            stamp(event, self.events_handled, self.clock.now())
            try:
                answer = self.scheduler.handle(event)
            except Exception as error:  # recorded as rejected, then raised: the run stops and can be resumed
                self.failure = error
                self.recorder.reject(event, f"{type(error).__name__}: {error}"[:REASON_LENGTH])
                break
            self.events_handled += 1
            self.recorder.write(event, answer, self.scheduler.state_hash)
            if self.observe is not None:
                self.observe(event, answer)
            commands.extend(answer)
            if answer and isinstance(answer[-1], FinishRun):
                self.outcome = answer[-1]
            elif self.events_handled >= self._next_snapshot:
                self._write_snapshot()
        self.recorder.flush()
        return commands

    def _write_snapshot(self) -> None:
        """Record a snapshot. If the state cannot be encoded, log a warning and take no more snapshots: they only speed
        up recovery, so the run continues. The cost and the interval to the next snapshot grow with the open groups."""
        try:
            payloads = encode_snapshot(self.events_handled, snapshot(self.scheduler, self.books))
        except CodecError as error:
            log.warning("snapshots are off from now on, so a resume replays all later events: %s", error)
            self._next_snapshot = NEVER
            return
        self.recorder.snapshot(payloads)
        self._next_snapshot = self.events_handled + max(self.snapshot_every, len(self.scheduler.state.groups))
