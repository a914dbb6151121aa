"""Passes events to the scheduler: stamps each event, lets the scheduler decide, records both, then executes commands.

The same code runs on Ray, in one process, in simulation and in benchmarks. On an event loop, `Delivery` gathers the
events of a turn of the loop. This module contains no policies and no state machines. It must never execute a command
before its frame is written.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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

    keeps: bool
    """Whether it keeps frames. Otherwise it gets 0 as the state hash, which takes time to compute."""

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
        """Start the commands of some events in order, and return at once. Their results arrive later as events."""


# -- the driver --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

NEVER = float("inf")
REASON_LENGTH = 1000
"""Maximum number of characters of an error in the record."""
SLICE = 64
"""Maximum number of events of a turn of the event loop. Their commands are sent before later events are handled."""


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
        self.slice = SLICE
        """Maximum number of events that are handled together."""
        self.held = False
        """Whether events wait in the inbox."""
        self._inbox: deque[Event] = deque()
        self._handling = False

    @property
    def waiting(self) -> int:
        """Number of events in the inbox. May be read from any thread."""
        return len(self._inbox)

    def post(self, *events: Event) -> None:
        """Add events to the inbox."""
        self._inbox.extend(events)

    def deliver(self, *events: Event) -> None:
        """Add events to the inbox, then handle the whole inbox, unless it is held. A nested call only adds events.
        Raises: as `handle`."""
        self.post(*events)
        while self._inbox and not self._handling and not self.held:
            self.handle()

    def withdraw(self) -> list[Event]:
        """Take all events out of the inbox."""
        events = list(self._inbox)
        self._inbox.clear()
        return events

    def handle(self) -> None:
        """Handle the next `slice` events of the inbox: decide about each, record all, then execute their commands.

        Raises: the exception of `Scheduler.handle`, after recording the event as rejected and executing the commands of
        the events before it. Every later call raises it again, because the state may be inconsistent.
        """
        if self.failure is not None:
            raise self.failure
        self._handling = True
        try:
            commands = self._decide(min(self.slice, len(self._inbox)))
            self.recorder.flush()
            self.executor.execute(commands)
        finally:
            self._handling = False
        if self.failure is not None:
            raise self.failure

    def _decide(self, count: int) -> list[Command]:
        """The commands of the first events in the inbox, and their frames in the record."""
        commands: list[Command] = []
        for _ in range(count):
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
            self.recorder.write(event, answer, self.scheduler.state_hash if self.recorder.keeps else 0)
            if self.observe is not None:
                self.observe(event, answer)
            commands.extend(answer)
            if answer and isinstance(answer[-1], FinishRun):
                self.outcome = answer[-1]
            elif self.events_handled >= self._next_snapshot:
                self._write_snapshot()
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


# -- delivery on an event loop -----------------------------------------------------------------------------------------


class Delivery:
    """Lets a driver handle the events of one turn of the event loop together: they share a write of the record and a
    message to each process. Each event is decided and recorded by itself, in the order of arrival."""

    def __init__(self, driver: Driver, fail: Callable[[Exception], None]) -> None:
        """`fail`: receives an exception of the driver. Then no more events are handled."""
        self._driver = driver
        self._fail = fail
        self._failed = False
        self._turn_comes = False
        self._added = 0
        """Number of events so far."""
        self._senders: deque[_Sender] = deque()
        """Who waits until their events have been handled."""

    def post(self, *events: Event) -> None:
        """Handle events in the next turn of the loop, with all that are posted until then."""
        if self._failed:
            return
        self._added += len(events)
        self._driver.post(*events)
        if not self._turn_comes:
            self._turn_comes = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def deliver(self, *events: Event) -> None:
        """Handle events now, after those that were posted before. Their commands are executed before it returns."""
        if not self._failed:
            self._added += len(events)
            self._attempt(self._driver.deliver, *events)

    async def handled(self, events: Sequence[Event], last: Callable[[], None]) -> None:
        """Post events; return once they are recorded and their commands executed, or the run has failed. `last` is
        called before the turn that handles the last of them."""
        self.post(*events)
        if not self._failed:
            sender = _Sender(self._added, last, asyncio.get_running_loop().create_future())
            self._senders.append(sender)
            await sender.done

    def _take_turn(self) -> None:
        if self._driver.held:
            self._turn_comes = False
            return
        waiting = self._driver.waiting
        if not self._failed and waiting:
            end = self._added - waiting + min(waiting, self._driver.slice)
            for sender in self._senders:
                if sender.end > end:
                    break
                sender.last()
            self._attempt(self._driver.handle)
        self._turn_comes = self._driver.waiting > 0 and not self._failed
        if self._turn_comes:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _attempt(self, handle: Callable[..., None], *given: Any) -> None:
        try:
            handle(*given)
        except Exception as error:
            self._failed = True
            self._fail(error)
        handled = self._added - self._driver.waiting
        while self._senders and (self._failed or self._senders[0].end <= handled):
            sender = self._senders.popleft()
            if not sender.done.done():
                sender.done.set_result(None)


class _Sender(NamedTuple):
    """Events that somebody waits for."""

    end: int
    """Number of events of the run's process up to the last of them."""
    last: Callable[[], None]
    done: "asyncio.Future[None]"
