"""`Session`: the scheduler inside a user's own training loop. The session returns orders; the loop answers them.

    with Session(limits, directory="runs/mine") as session:
        orders = session.begin()
        orders[0].answer(ProcessUp, slots=8, samples=4)
        orders = session.next_orders()

Called by users; docs/SESSION.md is the reference. It waits only in `next_orders`, starts no thread and reads only the
clock that it receives. It writes the record of a run, so `engine replay` and `engine waits` can read it. It belongs to
the thread that calls `begin` and refuses all others: two threads would corrupt its state and record. Only answers may
come from any thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.commands import CancelTimer, Command, FinishRun, SetTimer
from engine.config import Config, load_config
from engine.control.requests import MOST_REPLICAS, changes, check_replicas
from engine.errors import ConfigError, PolicyError, RecordNotBegun, RunFinished, reason_of
from engine.events import Event, RunResumed, RunStarted, TimerFired
from engine.ids import StepId
from engine.metrics.waits import waits
from engine.policies import PolicySet
from engine.record import Header, MemoryRecorder, Record, Recorder, Recovered, read, recover
from engine.record.files import RecordLock, make_run_directory
from engine.record.frames import Tick
from engine.record.segment_log import has_segments
from engine.runtime.driver import MOST_EVENTS, Driver
from engine.runtime.local.arguments import check_arguments
from engine.runtime.local.session_orders import IllegalEvent, SessionOrder, check_answer, checked_event
from engine.runtime.order_times import NEVER, OrderTimes
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.settings import MAX_STEPS, how_to_train_more
from engine.states.limits import Limits
from engine.states.orders import Order
from engine.states.view import View
from engine.version import __version__

SNAPSHOT_EVERY = 12_500
Orders = tuple[SessionOrder, ...]


class _Clock:
    """Seconds since the run began. `before`: seconds in the record that it continues."""

    def __init__(self, clock: Callable[[], float], before: float = 0.0) -> None:
        self._clock = clock
        self._zero = self._read() - before
        self._newest = before

    def now(self) -> float:
        self._newest = max(self._newest, self._read() - self._zero)
        return self._newest

    def _read(self) -> float:
        seconds = self._clock()
        if type(seconds) is bool or not isinstance(seconds, int | float) or not isfinite(seconds):
            raise ConfigError("clock()", seconds, "must be a finite number of seconds")
        return seconds


class _Commands(list[Command]):
    """Collects the commands of ticks, instead of executing them."""

    def execute(self, commands: Sequence[Command]) -> None:
        self.extend(commands)


class Session:
    """One run that the caller executes. `begin` first, then answer the orders, and execute those of `next_orders`,
    until `outcome` is set."""

    def __init__(
        self,
        settings: Limits | Config | str | Path,
        *,
        directory: str | Path | None = None,
        replicas: int | None = None,
        policies: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        """`settings`: the limits, or a configuration or its file, of which the sections about scheduling are used.
        `directory`: for the record; must not have one yet; None: the record stays in memory. `replicas`: number to
        start, with ids from 0; None: as many as the configuration has, else 1. `policies`: names by decision.
        `clock`: seconds, from any zero, never decreasing. `snapshot_every`: events between two snapshots in the record;
        0: none.

        Raises: `ConfigError` for settings or a directory that cannot be used, `RecordError` if it cannot be written.
        """
        _check(directory=directory, replicas=replicas, policies=policies, clock=clock, snapshot_every=snapshot_every)
        config = load_config(settings) if isinstance(settings, str | Path) else settings
        limits: Any = config.limits if isinstance(config, Config) else config
        if replicas is None:
            replicas = config.rollout.replicas if isinstance(config, Config) else 1
        if policies is None:
            policies = config.policies().names if isinstance(config, Config) else {}
        if not isinstance(limits, Limits):
            law = "must be engine.Limits, a configuration or the path of its file"
            raise ConfigError("settings", type(limits).__name__, law, "for example Limits(train_batch_size=8, ...)")
        check_arguments({"limits": limits})
        limits = _for_one_process(limits)
        limits.require_replicas(replicas)
        chosen = PolicySet.from_names(policies)
        self.directory = None if directory is None else Path(directory)
        run = "session" if self.directory is None else self.directory.resolve().name
        header = Header(run=run, limits=limits.to_plain(), policies=dict(chosen.names), code=__version__)
        ticks = _Clock(clock)
        self._recorder: Recorder | MemoryRecorder
        if self.directory is None:
            self._recorder = MemoryRecorder(header)
        else:
            _require_no_record(self.directory)
            make_run_directory(self.directory)
            self._recorder = Recorder(self.directory / "schedule", header)
        first = RunStarted(replicas=replicas + len(limits.validators()))
        self._prepare(Scheduler(limits, chosen), first, (), ticks, 0, snapshot_every)

    @classmethod
    def resume(
        cls,
        directory: str | Path,
        *,
        steps: StepId | None = None,
        replicas: int | None = None,
        max_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> Self:
        """The session that continues the record in a directory. Before `begin`, load the weights after `self.steps`
        train steps: those of the newest checkpoint that was reported as saved, or the initial ones for 0.

        `steps`: an older checkpoint, or 0. `replicas`: None: as many as before. `max_steps`: a new number, which may
        extend a finished run.
        Raises: `ConfigError` for arguments that cannot be used, `RunFinished`, `RecordError` for a damaged record,
        `RecordHeld` if another process writes it.
        """
        _check(steps=steps, replicas=replicas, max_steps=max_steps, clock=clock, snapshot_every=snapshot_every)
        check_arguments({"directory": directory})
        schedule = Path(directory) / "schedule"
        if not schedule.is_dir():
            law = "has no schedule/ directory, so there is nothing to resume"
            raise ConfigError("directory", str(directory), law, "begin a new run with engine.Session(limits, ...)")
        lock = RecordLock(schedule)
        try:
            record = _record_in(schedule, str(directory))
            recovered = recover(record)
            state = recovered.scheduler.state
            settings = changes(
                [] if max_steps is None else [(MAX_STEPS, str(max_steps))], state.limits, recovered.scheduler.policies
            )
            if state.ending.outcome is not None and state.ending.outcome.outcome == "finished":
                more = max_steps is not None and max_steps > state.training.steps_trained and not state.no_more_prompts
                if not more:
                    law = f"has finished ({state.ending.outcome.reason})"
                    raise RunFinished("directory", str(directory), law, how_to_train_more(state, "max_steps"))
            begin_at = _steps_of(recovered, steps)
            wanted = sum(replica.process.wanted for replica in state.replicas.rollouts) or 1
            if replicas is not None and replicas != wanted:
                check_replicas(replicas, state.limits, MOST_REPLICAS)
            count = (wanted if replicas is None else replicas) + len(state.limits.validators())
            resumed = recovered.resume_from_checkpoint(steps=begin_at, replicas=count)
            ticks = _Clock(clock, recovered.at)
            made = cls.__new__(cls)
            made.directory = Path(directory)
            made._recorder = Recorder(schedule, recovered.end, lock=lock)
        except BaseException:
            lock.release()
            raise
        made._prepare(recovered.scheduler, resumed, settings, ticks, recovered.events, snapshot_every)
        return made

    def _prepare(
        self,
        scheduler: Scheduler,
        first: RunStarted | RunResumed,
        settings: Sequence[Event],
        clock: _Clock,
        events: int,
        snapshot_every: int,
    ) -> None:
        self._owner: threading.Thread | None = None
        """The thread that the session belongs to, until it ends."""
        self._first: tuple[Event, ...] = (first, *settings)
        self._begun = False
        self._closed = False
        self._clock = clock
        self._snapshot_every = snapshot_every
        self._commands = _Commands()
        self._lock = threading.Condition()
        """Of the state and the answers: any thread may answer."""
        self._answers: list[Event] = []
        """Answers that the scheduler has not seen."""
        self.steps: StepId = first.steps if isinstance(first, RunResumed) else 0
        """Train steps in the weights that the loop must have when it calls `begin`."""
        self._connect(scheduler, events)

    def _connect(self, scheduler: Scheduler, events: int) -> None:
        self._scheduler = scheduler
        self._times = OrderTimes(scheduler.state)
        self._driver = Driver(
            scheduler, self._clock, self._recorder, self._commands, self._observe, events, self._snapshot_every
        )

    def _observe(self, tick: Tick) -> None:
        self._times.note(tick.events, tick.commands, tick.at)

    def begin(self) -> Orders:
        """Begin the run, or continue the resumed one. Returns the first orders. Call it once, when the trainer has its
        weights. The session then belongs to the calling thread."""
        self._require_thread(begins=True)
        if self._begun:
            raise IllegalEvent("the session has begun already; call begin() once")
        self._require_open()
        self._tick(*self._first)
        self._begun = True
        return self._new_orders()

    def next_orders(self) -> Orders:
        """Wait until an order is answered, a timer is due or the run has ended, then `report_due`."""
        self._require_running()
        with self._lock:
            self._lock.wait_for(lambda: self._answers or self.outcome is not None, timeout=self.next_due())
        return self.report_due()

    def report(self, *events: Event) -> Orders:
        """Let the scheduler decide about the answers since the last call, up to 64 of them together, then about these
        events, which answer no order. Returns the orders that follow, without those to set and cancel timers.

        Raises: `IllegalEvent` for the first event that cannot be true, `PolicyError` if a policy raised or decided
        something illegal. What came before it counts; it changes nothing, and the session can continue. The next call
        returns the orders that follow from what counted.
        """
        self._take_answers()
        for event in events:
            self._tick(checked_event(event, self._scheduler))
        return self._new_orders()

    def _take_answers(self) -> None:
        """Decide about the answers so far. If the scheduler cannot handle several in one tick, each gets its own: those
        before the wrong one count, and those after it wait for the next call."""
        self._require_running()
        most = MOST_EVENTS
        while self._answers:
            with self._lock:
                together = self._answers[:most]
                del self._answers[:most]
                try:
                    self._tick(*together)
                except (IllegalEvent, PolicyError):
                    if len(together) == 1:
                        raise
                    self._answers[:0], most = together, 1

    def next_due(self) -> float | None:
        """Seconds until a timer is due, for `report_due`; 0: one is due now; None: none is set."""
        self._require_thread()
        timer = self._next_timer()
        due_at = min(NEVER if timer is None else _due_at(timer), self._times.look_at)
        return None if due_at == NEVER else max(0.0, due_at - self._clock.now())

    def report_due(self) -> Orders:
        """Report what was answered, then every timer that is due. Returns the orders that follow, as `report`."""
        self._take_answers()
        while (timer := self._next_timer()) is not None and _due_at(timer) <= self._clock.now():
            self._tick(TimerFired(timer=timer.number))
        now = self._clock.now()
        for one in self._times.overdue(now) if self._times.look_at <= now else ():
            self._tick(one.event())
        return self._new_orders()

    def _next_timer(self) -> Order | None:
        return min(self._scheduler.state.orders.open["timer"].values(), key=_due_at, default=None)

    @property
    def open_orders(self) -> Orders:
        """All orders without an answer, oldest first, without timers."""
        self._require_thread()
        return self._for_user(order.command for order in self._scheduler.state.orders.all())

    def waits(self) -> list[str]:
        """What the run waits for, in words: what blocks the next train step comes first."""
        self._require_thread()
        now = self._clock.now()
        return [wait.sentence(now) for wait in waits(self._scheduler.state)]

    @property
    def view(self) -> View:
        """The state, read-only: steps, versions, groups, replicas."""
        self._require_thread()
        return self._scheduler.view

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self._scheduler.limits

    @property
    def outcome(self) -> FinishRun | None:
        """How the run ended; None while it runs. Orders that are still open need no answer."""
        return self._scheduler.state.ending.outcome if self._begun else None

    @property
    def events(self) -> int:
        """Number of recorded events."""
        return self._driver.events_handled

    @property
    def record(self) -> Record:
        """The record so far, for `engine.record.replay`."""
        self._require_thread()
        self._recorder.flush()
        if isinstance(self._recorder, MemoryRecorder):
            return read(self._recorder)
        return read(self._recorder.directory)

    def close(self) -> None:
        """Close the record. A run without an outcome can be resumed."""
        self._require_thread()
        self._closed = True
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, command: Command, answer: Event) -> None:
        """Take the answer to an order, from any thread. Raises: `IllegalEvent` if it cannot be true."""
        with self._lock:
            self._require_open()
            check_answer(answer, command, self._scheduler.state, self._answers)
            self._answers.append(answer)
            self._lock.notify()

    def _tick(self, *events: Event) -> None:
        """Handle events as one tick, apart from those that are ticks of their own. If the scheduler cannot handle a
        tick, it is recorded as rejected, and the state is recovered from the record, as it was before it."""
        with self._lock:
            try:
                self._driver.deliver(*events)
            except Exception as error:
                if not self._driver.rejected:
                    raise  # the record could not be written
                recovered = recover(self.record)
                self._connect(recovered.scheduler, recovered.events)
                if isinstance(error, PolicyError):
                    raise
                raise IllegalEvent(f"{events[-1]}: the scheduler cannot handle it: {reason_of(error)}") from error

    def _new_orders(self) -> Orders:
        """The orders since the last call."""
        orders = self._for_user(self._commands)
        self._commands.clear()
        return orders

    def _for_user(self, commands: Iterable[Command]) -> Orders:
        return tuple(SessionOrder(one, self._take) for one in commands if not isinstance(one, SetTimer | CancelTimer))

    def _require_thread(self, *, begins: bool = False) -> None:
        """Raises: `IllegalEvent` if the session belongs to another thread, which has not ended."""
        this = threading.current_thread()
        with self._lock:
            owner = self._owner
            if owner is not None and owner is not this and owner.is_alive():
                law = f"the session belongs to the thread {owner.name!r}, which called begin()"
                raise IllegalEvent(f"{law}; this is {this.name!r}, which may only call the answer() of an order")
            if begins or owner is not None:
                self._owner = this

    def _require_running(self) -> None:
        self._require_thread()
        self._require_open()
        if not self._begun:
            raise IllegalEvent("the session has not begun; call begin() first")

    def _require_open(self) -> None:
        if self._closed:
            raise IllegalEvent("the session is closed; continue the run with engine.Session.resume(directory)")


def _check(*, clock: Any, snapshot_every: Any, **optional: Any) -> None:
    """Check arguments; `optional` ones may be None. Raises: `ConfigError`."""
    given = {name: value for name, value in optional.items() if value is not None}
    check_arguments({**given, "clock": clock, "snapshot_every": snapshot_every})


def _due_at(timer: Order) -> float:
    """When a timer is due, in seconds since the run began."""
    command = timer.command
    assert isinstance(command, SetTimer)
    return timer.at + max(0.0, command.delay_s)


def _for_one_process(limits: Limits) -> Limits:
    """Without automatic restarts of the run, and without batches stored for them: nothing restarts a user's loop."""
    return replace(limits, run_restarts=0, keeps_batches=False)


def _require_no_record(directory: Path) -> None:
    if has_segments(directory / "schedule"):
        law = "already has a record"
        fix = "continue it with engine.Session.resume(directory), or use another directory"
        raise ConfigError("directory", str(directory), law, fix)


def _record_in(schedule: Path, shown: str) -> Record:
    """Raises: `ConfigError` if there is none, or it is that of a configured run."""
    try:
        record = read(schedule)
    except RecordNotBegun:
        law = "has a record without events: the session was never begun"
        raise ConfigError("directory", shown, law, "begin a new run in another directory") from None
    if record.header.config:
        law = "has a run that was started from a configuration"
        raise ConfigError("directory", shown, law, f"use: engine resume {shown}")
    return record


def _steps_of(recovered: Recovered, chosen: StepId | None) -> StepId:
    """The train steps to resume from. Raises: `ConfigError` if no such checkpoint was reported as saved."""
    state = recovered.scheduler.state
    saved = [0, *(steps for steps in state.checkpoints.steps if steps <= state.training.steps_trained)]
    if chosen is None:
        return saved[-1]
    if chosen not in saved:
        law = "is not the number of train steps in a checkpoint that was reported as saved"
        raise ConfigError("steps", chosen, law, f"use one of {', '.join(map(str, saved))}")
    return chosen
