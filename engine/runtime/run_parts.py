"""Connects a run's scheduler with the rest of its process: driver, record, metrics, executor, supervisor, control and
metrics endpoint.

Created by the scheduler actor, and in one process by `runtime.local.run`. It runs on one event loop, which it must
never block. The events of the workers, timers and data source are posted: those of one turn of the event loop are one
tick. All others are delivered at once.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence

from engine.commands import FinishRun
from engine.control.requests import after_resuming
from engine.errors import clean
from engine.events import Event, RunInterrupted, RunStarted
from engine.hardware import gpu_count
from engine.metrics.collector import RunMetrics
from engine.metrics.history_log import HistoryLog
from engine.metrics.journal import Row, first_rows, validation_rows
from engine.metrics.sinks import open_row_writer
from engine.policies import PolicySet
from engine.protocols import Prompts
from engine.record import Header, NullRecorder, Recorder
from engine.record.frames import Tick
from engine.record.recorder import RecordWriter
from engine.runtime.control_requests import Control
from engine.runtime.driver import Driver
from engine.runtime.executor import RunExecutor
from engine.runtime.filtered_samples import FilteredSamples
from engine.runtime.metrics_endpoint import Endpoint
from engine.runtime.process_port import Found, Processes, Stores
from engine.runtime.prompt_sources import MixedPrompts
from engine.runtime.run_history import RecoveredRun, RunHistory
from engine.runtime.supervisor import Supervisor
from engine.runtime.watchdog import Watchdog
from engine.scheduling.scheduler import Scheduler
from engine.storage.samples import FOLDER, samples_for_sinks
from engine.storage.trajectories import StoreStats
from engine.version import __version__
from engine.workers.clock import LoopClock
from engine.workers.plan import Plan
from engine.workers.sample_keeper import keeper_of

# -- watchers of the status --------------------------------------------------------------------------------------------


STATUS_EVERY_S = 0.2
"""Minimum seconds between two statuses. One is sent only after an event."""


class Watchers:
    """`number` counts the statuses. `changed` wakes the observers at once, `soon` after a short delay."""

    def __init__(self) -> None:
        self.number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""

    async def wait(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def soon(self) -> None:
        """Wake the observers within `STATUS_EVERY_S`, because an event was handled."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STATUS_EVERY_S, self.changed)

    def changed(self) -> None:
        """There is a new status: wake the observers now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.number += 1
        self._changed.set()
        self._changed = asyncio.Event()


# -- the parts ---------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


def header_of(plan: Plan) -> Header:
    """The header of a new record of a plan."""
    return Header(
        run="local" if plan.run_dir is None else plan.run_dir.name,
        limits=plan.limits.to_plain(),
        policies=dict(PolicySet.from_names(plan.policies).names),
        config=dict(plan.config),
        code=__version__,
        cores=0 if gpu_count() else len(os.sched_getaffinity(0)),
    )


def recorder_of(plan: Plan, earlier: RecoveredRun | None) -> RecordWriter:
    """The recorder of a run: writes a new record, continues an earlier one, or writes nothing if there is no run
    directory. Raises: `RecordError`."""
    if plan.run_dir is None:
        return NullRecorder()
    if earlier is not None:
        return Recorder(plan.run_dir / "schedule", earlier.recovered.end, lock=earlier.lock)
    return Recorder(plan.run_dir / "schedule", header_of(plan))


class RunParts:
    """Call `connect`, then `begin`, finally `stop` and `close`. `over` completes when the run ends: with its
    `FinishRun`, or with the exception that ended it."""

    def __init__(
        self,
        plan: Plan,
        recorder: RecordWriter,
        watchers: Watchers,
        earlier: RecoveredRun | None = None,
    ) -> None:
        self.plan = plan
        self.recorder = recorder
        self.watchers = watchers
        self.over: asyncio.Future[FinishRun] = asyncio.get_running_loop().create_future()
        self._at = 0.0 if earlier is None else earlier.recovered.at
        if earlier is None:
            policies = PolicySet.from_names(plan.policies)
            self.scheduler = Scheduler(plan.limits, policies)
        else:
            self.scheduler = earlier.recovered.scheduler
        journal, first, validations = None, list[Row](), list[Row]()
        if plan.run_dir is not None:
            samples = samples_for_sinks(plan.run_dir / FOLDER, plan.sample_policy)
            journal = open_row_writer(plan.run_dir, plan.config, plan.sinks, samples)
            first = first_rows(journal.path)
            validations = [*validation_rows(journal.path)]
        self.metrics = RunMetrics(self.scheduler, journal, first, validations)
        self.history = HistoryLog(plan.run_dir) if earlier is None else earlier.log
        self.history.begin(self.scheduler, self.metrics, recorder)
        self.driver = Driver(
            self.scheduler, LoopClock(self._at), recorder, None, self._observe,
            0 if earlier is None else earlier.recovered.events,
            0 if plan.run_dir is None else plan.snapshot_every, self._fail,
        )  # fmt: skip
        self._settings: Sequence[Event] = ()
        self._learning: MixedPrompts | None = None
        self._filtered: FilteredSamples | None = None
        self.endpoint: Endpoint | None = None

    def take_settings(self) -> None:
        """Take the plan's changes of live settings, for `begin`. Raises: `ConfigError`."""
        self._settings = after_resuming(self.scheduler, self.plan.resumption.settings, self.plan.replicas)

    def connect(
        self,
        prompts: Prompts,
        processes: Processes,
        stores: Stores,
        held: Callable[[], Awaitable[StoreStats]],
        found: Found | None = None,
    ) -> None:
        """Connect the scheduler with the processes of the run. `held()` returns the trajectory store's statistics."""
        plan = self.plan
        if isinstance(prompts, MixedPrompts):
            self.metrics.mixed = prompts
            self._learning = prompts if prompts.learns else None
        keeper = keeper_of(plan.run_dir, plan.sample_policy)
        if keeper is not None and keeper.filtered_groups:
            self._filtered = FilteredSamples(keeper, stores.read)
        driver, state = self.driver, self.scheduler.state
        self.supervisor = Supervisor(plan, processes, state, driver.deliver, self.lose, found)
        self.executor = driver.executor = RunExecutor(
            plan,
            supervisor=self.supervisor,
            prompts=prompts,
            stores=stores,
            check=processes.check,
            limit_of_prompt=lambda: self.watchdog.times.limit_s("draw"),  # as long as a draw
            post=driver.post,
            finish=self._finish,
        )
        self.watchdog = Watchdog(
            state, lambda: driver.clock.now(), self.supervisor.probe, driver.deliver, self.supervisor.spawn
        )  # `begin` replaces the clock
        if plan.metrics is not None:
            self.endpoint = Endpoint(plan, plan.metrics, self.metrics, driver, held)
        self.control = Control(plan, self.metrics, driver, self.watchers.changed)

    def begin(self, history: RunHistory | None) -> None:
        """Start the run, or resume it from `history`, once every process is open."""
        self.driver.clock = LoopClock(self._at)
        lives = len(self.plan.lives())
        begun = history is not None and history.recovered.events > 0
        resumed = history.event(lives, self.plan.resumption.again) if begun and history is not None else None
        self.driver.deliver(resumed or RunStarted(replicas=lives))
        self.driver.deliver(*self._settings)
        self.announce()
        self.supervisor.begin()

    def announce(self) -> None:
        """Announce the addresses of the metrics and the control endpoint."""
        if self.endpoint is not None:
            self.endpoint.announce()
        self.control.begin()

    def _fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)
        log.error("the run has failed", exc_info=error)

    def lose(self, reason: str) -> None:
        """Report that the run cannot continue in these processes."""
        self.driver.deliver(RunInterrupted(reason=clean(reason)))

    def stop(self) -> None:
        """Execute no more orders, and report no more lost processes."""
        self.executor.close()
        self.watchdog.close()
        self.supervisor.stop_watching()
        if self._filtered is not None:
            self._filtered.close()

    def close(self) -> None:
        """Close the record, the history log, the metrics and the metrics endpoint."""
        with contextlib.closing(self.recorder), contextlib.closing(self.history):
            self.metrics.close()
        if self.endpoint is not None:
            self.endpoint.close()

    def _finish(self, command: FinishRun) -> None:
        if not self.over.done():
            self.over.set_result(command)

    def _observe(self, tick: Tick) -> None:
        self.watchdog.observe(tick)
        state = self.scheduler.state
        if self._learning is not None:
            self._learning.watch(tick, state)
        if self._filtered is not None and state.filtered:
            self._filtered.keep(state.filtered, state.training.steps_trained, self.scheduler.policies.names["filter"])
        self.metrics.observe(tick)
        self.history.take(tick)
        self.watchers.soon()
