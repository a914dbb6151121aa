"""The simulated world: a whole run on a virtual clock, with seeded durations and faults.

The driver, the scheduler, the executor, the supervisor and the workers are the real ones. Only the user's roles and the
network are simulated. Used by the tests, and to try a configuration without machines. The same seed gives the same run,
event for event.
"""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.commands import Command, FinishRun
from engine.errors import EngineError
from engine.events import Event, OrderDone, PromptsDrawn, RunInterrupted, RunStarted
from engine.ids import ReplicaId, StepId
from engine.policies import PolicySet
from engine.protocols import Trainer
from engine.record import NullRecorder
from engine.record.frames import Tick
from engine.record.recorder import RecordWriter
from engine.runtime.driver import Driver
from engine.runtime.executor import RunExecutor
from engine.runtime.local.local_processes import LocalStores, LocalTrajectories, LocalWeights
from engine.runtime.process_port import Found, source_of
from engine.runtime.prompt_sources import CountedPrompts
from engine.runtime.supervisor import Supervisor
from engine.runtime.watchdog import Watchdog
from engine.scheduling.scheduler import Scheduler
from engine.simulation.run_settings import Faults, Setting
from engine.simulation.shared_hardware import Hardware
from engine.simulation.simulated_models import (
    Dice,
    SimGenerator,
    SimScorer,
    SimTrainer,
    inspection_of,
    restore,
    work_of,
)
from engine.simulation.virtual_processes import VirtualProcess, VirtualProcesses
from engine.states.process import REPLICA
from engine.states.state import State
from engine.trajectory import Prompt
from engine.workers.cache_reports import CACHE_EVERY_S
from engine.workers.clock import Deadlock, VirtualLoop
from engine.workers.plan import Plan, Rollout

__all__ = ["Faults", "Finding", "Setting", "World"]

MAX_EVENTS = 1_000_000
"""A run with more events counts as one that never ends."""


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _warnings_off() -> Iterator[None]:
    """Without the workers' warnings about faults that the setting asked for."""
    log = logging.getLogger("engine")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _never(state: State) -> bool:
    return False


class Finding(EngineError):
    """A simulated run deadlocked, raised an error or, if it is checked, broke a law."""


class World:
    """One run: `run` it to the end; or `run_until` a state, `tell` it events, run on, and `close` it."""

    def __init__(
        self,
        setting: Setting,
        policies: PolicySet | None = None,
        recorder: RecordWriter | None = None,
        snapshot_every: int = 0,
        dice: Dice | None = None,
        store: LocalTrajectories | None = None,
    ) -> None:
        """`dice`: draws durations, lengths and rewards; by default, seeded ones. `store`: the trajectory store; by
        default, a new one."""
        self.setting = setting
        self.dice = dice or Dice(setting)
        policies = policies or PolicySet.from_names({})
        self.store = store or LocalTrajectories()
        self.scheduler = Scheduler(setting.limits, policies)
        self.trainer_busy_s = 0.0
        self._hardware = Hardware()
        self.generators: dict[ReplicaId, SimGenerator] = {}
        self._loop = VirtualLoop()
        self._over: asyncio.Future[FinishRun] = self._loop.create_future()
        self._running: asyncio.Task[FinishRun] | None = None
        self._reached: Callable[[State], bool] = _never
        self._error: Exception | None = None
        self._max_events = MAX_EVENTS
        self._weights = LocalWeights()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.plan = self._plan()
        self.processes = VirtualProcesses(
            self.plan, self.store, self._weights, self.dice, self._post, self._report,
            lambda: self.driver.events_handled > 0,
        )  # fmt: skip
        self._connect()
        self.driver = Driver(
            self.scheduler, self, recorder or NullRecorder(), self, self._observe, snapshot_every=snapshot_every,
            fail=self._fail,
        )  # fmt: skip
        self.driver.tick_size = self.dice.tick_size

    def _connect(self, found: Found | None = None) -> None:
        """Make the parts of the scheduler's process other than the driver. `found`: processes that an earlier
        scheduler's process started."""
        state = self.scheduler.state
        self.supervisor = Supervisor(self.plan, self.processes, state, self.deliver, self._give_up, found)
        self.executor = RunExecutor(
            self.plan,
            supervisor=self.supervisor,
            prompts=self.plan.make_prompts(),
            stores=LocalStores(self.store, self._weights),
            post=self._post_unless_it_hangs,
            finish=lambda command: None,
        )
        self.watchdog = Watchdog(state, self.now, self.supervisor.probe, self.deliver, self.supervisor.spawn)

    def _plan(self) -> Plan:
        setting, limits = self.setting, self.setting.limits
        if limits.checkpoint_every:
            self._directory = tempfile.TemporaryDirectory()
        rows = 0 if limits.validation is None else limits.validation.rows
        return Plan(
            limits=limits,
            samples=setting.samples,
            make_rollout=self._rollout,
            make_trainer=self._trainer,
            make_prompts=lambda: CountedPrompts(setting.prompts, setting.prompt),
            described=setting.described,
            replicas=setting.replicas,
            slots=setting.slots,
            prefix_every_tokens=setting.prefix_every_tokens,
            cache_every_s=CACHE_EVERY_S if setting.cache_tokens else 0.0,
            restore_trainer=restore,
            make_scorer=lambda tasks: SimScorer(self.dice),
            make_work=lambda state: work_of(self.dice, state),  # not the user's: it may be slow
            make_inspection=lambda state: inspection_of(self.dice),
            run_dir=None if self._directory is None else Path(self._directory.name),
            held_out=[Prompt(row=row, text="") for row in range(rows)],
            trajectories="memory",
        )

    def _rollout(self, replica: ReplicaId) -> Rollout:
        generator = self.generators[replica] = SimGenerator(self.dice, self._fail, self._hardware)
        return Rollout(generator=generator, evaluator=generator)

    def _trainer(self) -> Trainer:
        return SimTrainer(self.dice, self._count_busy, self._hardware)

    def _count_busy(self, seconds: float) -> None:
        self.trainer_busy_s += seconds

    # clock

    @property
    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self._loop.time()

    def now(self) -> float:
        return self.time

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after a delay. An exception of the action ends the run."""

        def act() -> None:
            try:
                action()
            except Exception as error:
                self._fail(error)

        self._loop.call_later(delay_s, act)

    def run(self, events: int = MAX_EVENTS) -> FinishRun:
        """Run to the end. Raises: `Finding`, with the seed, for a broken law or a deadlock."""
        self._max_events = events
        self._go_on(_never)
        assert self._running is not None
        return self._running.result()

    def run_until(self, reached: Callable[[State], bool]) -> bool:
        """Run until `reached(state)` holds, now or after a tick. Returns False if the run ends first. Later events
        wait until the run continues. Raises: `Finding`, as `run`."""
        if not self._loop.is_closed() and not reached(self.scheduler.state):
            self._go_on(reached)
        return reached(self.scheduler.state)

    def run_for(self, seconds: float) -> None:
        """Run for this number of virtual seconds, or to the end. Raises: `Finding`, as `run`."""
        if not self._loop.is_closed():
            timer = self._loop.call_later(seconds, self._pause)
            self._go_on(_never)
            timer.cancel()

    def tell(self, *events: Event) -> None:
        """Deliver events that do not come from a process, such as a user's requests, while the run pauses.
        Raises: `Finding`, as `run`; `EngineError` if the run has ended."""
        if self._loop.is_closed():
            raise EngineError("the run has ended")
        self._reached = _never
        self._loop.call_soon(self._tell, events)
        self._step()
        if self._error is not None:
            self.run()

    def _tell(self, events: Sequence[Event]) -> None:
        """Deliver events before those that wait until the run continues."""
        waiting, self.driver.held = self.driver.withdraw(), False
        self.deliver(*events)
        self.driver.held = True
        self.driver.post(*waiting)

    def close(self) -> None:
        """End a run that has not ended: cancel its tasks, and drop their errors. Call it unless the run has ended."""
        if self._loop.is_closed():
            return
        self.driver.held = True  # events of canceled tasks change nothing
        if self._running is not None:
            self._running.remove_done_callback(self._stop)
        try:
            with _warnings_off():
                self._step()  # so that every task has begun: otherwise a coroutine that it awaits is never awaited
                self.executor.close()
                self.watchdog.close()
                self.supervisor.stop_watching()
                self._loop.run_until_complete(_cancel_others())
        except Deadlock as error:
            raise self._finding("a canceled task does not end") from error
        finally:
            self._loop.close()
            if self._directory is not None:
                self._directory.cleanup()

    def _step(self) -> None:
        """Call what is ready."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def _go_on(self, reached: Callable[[State], bool]) -> None:
        """Run until `reached(state)` holds after a tick, `_pause` is called or the run ends."""
        if self._loop.is_closed():
            return
        self._reached, self.driver.held = reached, False
        try:
            if self._running is None:
                self._running = self._loop.create_task(self._to_end())
                self._running.add_done_callback(self._stop)
            self._loop.call_soon(self._post)  # what waits takes its turn
            with _warnings_off():
                self._loop.run_forever()
            if self._running.done():
                self._running.result()
        except Deadlock as error:
            raise self._finding(f"liveness: {error}; {self._where()}") from error
        except EngineError as error:
            raise self._finding(str(error)) from error
        finally:
            if not self.driver.held or self._running is None or self._running.done():
                self.close()

    def _pause(self) -> None:
        self.driver.held = True
        self._loop.stop()

    def _stop(self, running: "asyncio.Task[FinishRun]") -> None:
        self._loop.stop()

    async def _to_end(self) -> FinishRun:
        await self.supervisor.open()
        self.deliver(RunStarted(replicas=len(self.plan.lives())))
        self.supervisor.begin()
        return await self._over

    def _finding(self, what: str) -> Finding:
        return Finding(f"{what} [seed {self.setting.seed}, event {self.driver.events_handled}]")

    def _where(self) -> str:
        state = self.scheduler.state
        return f"{state.groups.ledger.count}, step {state.training.steps_batched}"

    # events and commands

    def deliver(self, *events: Event) -> None:
        """Let the driver handle events of the run now, or once it resumes. An exception of the driver ends the run."""
        if self._error is None:
            self.driver.deliver(*events)

    def _post(self, *events: Event) -> None:
        """Let the driver handle events in the next turn of the loop, once the run continues."""
        if self._error is None:
            self.driver.post(*events)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        if not self._over.done():
            self._over.set_exception(error)

    def execute(self, commands: Sequence[Command]) -> None:
        self.executor.execute(commands)
        if self.driver.outcome is not None and not self._over.done():
            self._over.set_result(self.driver.outcome)
        if not self.driver.held and self._reached(self.scheduler.state):
            self._pause()

    def _post_unless_it_hangs(self, *events: Event) -> None:
        """Post an event of the executor itself, unless the data source or the store hangs at random."""
        if isinstance(events[0], PromptsDrawn | OrderDone) and self.dice.chance(self.setting.faults.hang):
            return
        self._post(*events)

    def _give_up(self, reason: str) -> None:
        self.deliver(RunInterrupted(reason=reason))

    def _report(self, step: StepId, metrics: Mapping[str, Any]) -> None:
        """Take the trainer's metrics of a step."""

    def _observe(self, tick: Tick) -> None:
        self.watchdog.observe(tick)
        if self.driver.events_handled > self._max_events:
            raise Finding(f"liveness: still running after {self._max_events} events; {self._where()}")

    # processes

    def fail_over(self, scheduler: Scheduler | None = None, times: int = 1) -> None:
        """Replace the scheduler's process, which loses its timers and draws. The new one has `scheduler`, or the state
        of the old one. It takes over the processes and sends the open orders again, `times` times."""
        self.executor.close()
        self.watchdog.close()
        self.supervisor.stop_watching()
        self.scheduler = self.driver.scheduler = scheduler or self.scheduler
        alive = {
            (source_of(kind, index), process.number): process
            for (kind, index), process in self.processes.newest.items()
            if not process.dead
        }
        self._connect(Found(processes=alive))
        self.supervisor.take_up()
        self.driver.recover(self.scheduler.state.orders.reissued(self.time) * times)
        self.supervisor.recover()

    def process(self, kind: str, index: int = 0) -> VirtualProcess:
        """The newest life of a process."""
        return self.processes.newest[kind, index]

    @property
    def replicas(self) -> dict[ReplicaId, VirtualProcess]:
        """The replicas that have not died; they may be hung."""
        newest = self.processes.newest.items()
        return {index: process for (kind, index), process in newest if kind == REPLICA and not process.dead}
