"""The loop of a run: takes the arrived events as one tick, asks the scheduler, records the tick, and only then executes
its commands.

The same code runs on Ray, in one process, in simulation and in benchmarks. `post` gathers the events of one turn of an
event loop. This module contains no policies and no state machines. It must never execute a command before its tick is
written.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.commands import Command, FinishRun
from engine.events import CheckpointSaved, Event, RunResumed, SchedulerRecovered, stamp
from engine.protocols.user_code import end_if_forked
from engine.record.codec import CodecError
from engine.record.frames import Tick
from engine.record.recorder import RecordWriter
from engine.record.snapshots import snapshot
from engine.scheduling.scheduler import ALONE, Scheduler

# -- what the driver needs ---------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The clock of a run."""

    def now(self) -> float:
        """Seconds since the run began. Must never decrease."""


class Executor(Protocol):
    """Executes commands."""

    def execute(self, commands: Sequence[Command]) -> None:
        """Start the commands of a tick in order, and return at once. Their results arrive later as events."""


# -- the driver --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

NEVER = float("inf")
REASON_LENGTH = 1000
"""Maximum number of characters of an error in the record."""
MOST_EVENTS = 64
"""Maximum number of events in a tick."""
MARKS = frozenset((CheckpointSaved, RunResumed, SchedulerRecovered))
"""After such an event a snapshot follows: a resume or a failover begins there."""


class _Sender(NamedTuple):
    """A caller that waits until its events are handled."""

    end: int
    """Number of events in this process up to the last event of the sender."""
    last: Callable[[], None]
    done: "asyncio.Future[None]"


class Driver:
    """One inbox, and the loop around it: take the events of a tick, decide, record, execute, acknowledge.

    The executor may call `deliver` while it carries out commands; these events wait in the inbox. After `FinishRun`,
    which `outcome` holds, or an exception, which `failure` holds, the run is over: later events are dropped.
    """

    executor: Executor

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        recorder: RecordWriter,
        executor: Executor | None = None,
        observe: Callable[[Tick], None] | None = None,
        events_before: int = 0,
        snapshot_every: int = 0,
        fail: Callable[[Exception], None] | None = None,
    ) -> None:
        """`executor`: None if it is set before the first event. `events_before`: number of events that earlier
        processes of the run handled. `snapshot_every`: most events between two snapshots of the state; 0: no snapshots.
        `fail`: receives the exception that stops the driver; without it, `deliver` raises the exception."""
        self.scheduler = scheduler
        self.clock = clock
        self.recorder = recorder
        if executor is not None:
            self.executor = executor
        self.observe = observe
        self.events_handled = events_before
        self.outcome: FinishRun | None = None
        self.failure: Exception | None = None
        self.rejected = False
        """Whether the scheduler could not handle the last tick, and the record says so."""
        self.snapshot_every = snapshot_every
        self.tick_size: Callable[[], int] | None = None
        """Returns the maximum number of events in the next tick; None: `MOST_EVENTS`."""
        self.held = False
        """Whether events wait in the inbox."""
        self._next_snapshot: float = events_before + snapshot_every if snapshot_every else NEVER
        self._fail = fail
        self._inbox: deque[Event] = deque()
        self._added = 0
        """Number of events that were ever added to the inbox."""
        self._senders: deque[_Sender] = deque()
        """Callers that wait until their events have been handled."""
        self._handling = False
        self._turn_comes = False
        self._process = os.getpid()

    @property
    def is_over(self) -> bool:
        return self.outcome is not None or self.failure is not None

    @property
    def waiting(self) -> int:
        """Number of events in the inbox. May be read from any thread."""
        return len(self._inbox)

    # the inbox

    def post(self, *events: Event) -> None:
        """Handle events in the next turn of the event loop, together with all events posted until then."""
        if not self.is_over:
            loop = None if self._turn_comes else asyncio.get_running_loop()
            self._add(events)
            if loop is not None:
                self._turn_comes = True
                loop.call_soon(self._take_turn)

    def deliver(self, *events: Event) -> None:
        """Handle the whole inbox now, with these events last, unless it is held. A nested call only adds events.

        Raises: the exception that stops the driver, unless `fail` receives it.
        """
        if self.failure is not None:
            if self._fail is None:
                raise self.failure
            return
        if not self.is_over:
            self._add(events)
        while self._inbox and not self._handling and not self.held and not self.is_over:
            self._tick()

    async def handled(self, events: Sequence[Event], last: Callable[[], None]) -> None:
        """Post events; return once they are recorded and their commands executed, or the run is over. `last` is called
        before the tick that takes the last of them."""
        self.post(*events)
        if not self.is_over:
            sender = _Sender(self._added, last, asyncio.get_running_loop().create_future())
            self._senders.append(sender)
            await sender.done

    def recover(self, orders: Sequence[Command]) -> None:
        """Execute the open orders of an earlier process of the run, then handle `SchedulerRecovered`. Call it first.

        No tick runs in between, even if an order delivers events: a worker takes an order for a repeat if it has one
        with a higher number, so a new order would make it drop the open ones.
        """
        handling, self._handling = self._handling, True
        self._add((SchedulerRecovered(),))
        try:
            self.executor.execute(orders)
        finally:
            self._handling = handling
        self.deliver()

    def withdraw(self) -> list[Event]:
        """Take all events out of the inbox."""
        events = list(self._inbox)
        self._inbox.clear()
        self._added -= len(events)
        return events

    def _add(self, events: Sequence[Event]) -> None:
        self._inbox.extend(events)
        self._added += len(events)

    def _take_turn(self) -> None:
        """Run one tick. The next tick runs in the next turn of the loop."""
        self._turn_comes = False
        if self._inbox and not self.held and not self.is_over:
            self._tick()
            if self._inbox:
                self.post()

    # a tick

    def _tick(self) -> None:
        """Take the events of a tick out of the inbox and decide, record, execute; then acknowledge them."""
        if self._fail is not None:  # a run must not continue in a forked child; a session may
            end_if_forked(self._process)
        count = self._count()
        end = self._added - len(self._inbox) + count
        for sender in self._senders:
            if sender.end > end:
                break
            sender.last()
        events = [self._inbox.popleft() for _ in range(count)]
        self._handling = True
        try:
            commands = self._decide(events)
            self.recorder.flush()
            self.executor.execute(commands)
        except Exception as error:
            self.failure = self.failure or error
        finally:
            self._handling = False
        while self._senders and (self.is_over or self._senders[0].end <= end):
            sender = self._senders.popleft()
            if not sender.done.done():
                sender.done.set_result(None)
        if self.failure is not None:
            if self._fail is None:
                raise self.failure
            self._fail(self.failure)

    def _count(self) -> int:
        """Number of events in the next tick. Some events get a tick of their own."""
        if type(self._inbox[0]) in ALONE:
            return 1
        most = min(MOST_EVENTS if self.tick_size is None else self.tick_size(), len(self._inbox))
        for count, event in enumerate(self._inbox):
            if count == most or type(event) in ALONE:
                return count
        return most

    def _decide(self, events: Sequence[Event]) -> tuple[Command, ...]:
        """Decide and record a tick. Returns its commands.

        Raises: the exception of `Scheduler.tick`, after recording the tick as rejected.
        """
        at = self.clock.now()
        for id, event in enumerate(events, start=self.events_handled):
            stamp(event, id, at)
        try:
            commands = self.scheduler.tick(events)
        except Exception as error:  # recorded as rejected, then raised: the run stops and can be resumed
            reason = f"{self.scheduler.doing}: {type(error).__name__}: {error}"[:REASON_LENGTH]
            self.recorder.reject(self.scheduler.events, reason)
            self.recorder.flush()
            self.rejected = True
            raise
        events = tuple(self.scheduler.events)
        if not events:
            return ()  # the run had ended before
        self.events_handled += len(events)
        tick = self.recorder.write(events, commands)
        if self.observe is not None:
            self.observe(tick)
        if commands and isinstance(commands[-1], FinishRun):
            self.outcome = commands[-1]
        if self._is_snapshot_due(events):
            self._write_snapshot()
        return commands

    def _is_snapshot_due(self, events: Sequence[Event]) -> bool:
        if self._next_snapshot == NEVER:
            return False
        if self.outcome is not None:  # a run that fails may have no room for one
            return self.outcome.word in ("finished", "drained")
        return self.events_handled >= self._next_snapshot or not MARKS.isdisjoint(map(type, events))

    def _write_snapshot(self) -> None:
        """Record a snapshot. If the state cannot be encoded, log a warning and take no more snapshots: they only speed
        up recovery, so the run continues. The cost and the interval to the next snapshot grow with the open groups."""
        try:
            self.recorder.snapshot(snapshot(self.scheduler))
        except CodecError as error:
            log.warning("snapshots are off from now on, so a resume replays all later events: %s", error)
            self._next_snapshot = NEVER
            return
        self._next_snapshot = self.events_handled + max(self.snapshot_every, len(self.scheduler.state.groups.live))
