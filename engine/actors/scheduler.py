"""The scheduler actor: driver, recorder, metrics and prompts in one process; it starts every other actor of a run.

Started by `run.start`. All of it lives on one event loop: reports come in as calls, are handled and recorded at once,
and their commands leave before the call is answered. It must never block that loop.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import ray

from engine.actors.control import Control
from engine.actors.endpoint import Endpoint, leave_no_word
from engine.actors.failures import named, raised
from engine.actors.gateway import GatewayActor
from engine.actors.lasting import Living, end_living, lasting, note_launch
from engine.actors.outbox import Inbox
from engine.actors.past import Past, past_of
from engine.actors.placement import beside_the_run
from engine.actors.process import PackedPlan, collect_rarely, prepare_process
from engine.actors.processes import GOODBYE_S, RayProcesses, RayStores
from engine.actors.record import recorder_of
from engine.actors.scheduler_watch import announce_process
from engine.actors.stores import TrajectoryStoreActor, WeightsStoreActor
from engine.actors.survived import STORES, Survived, metrics_at_end, survived_of, take_hold
from engine.actors.told import BeginAgain, Traffic, Update
from engine.actors.transports import transport_of
from engine.actors.watched import Watchers
from engine.actors.wire import unpack_events
from engine.commands import Command, FinishRun
from engine.config import load_extensions_of
from engine.control.decide import after_resuming
from engine.control.requests import Operation
from engine.driver import Driver
from engine.errors import ConfigError, EngineError, RecordError, RecordHeld, StorageFull
from engine.events import Event, RunInterrupted, RunStarted, SchedulerRecovered
from engine.hosts.clock import WallClock
from engine.hosts.reasons import clean, reason_of
from engine.hosts.threads import contained
from engine.ids import Incarnation, StepId
from engine.metrics.collector import RunMetrics
from engine.metrics.sinks import open_books
from engine.metrics.transitions import Transitions
from engine.policies import PolicySet
from engine.runtime.executor import RunExecutor
from engine.runtime.supervisor import Supervisor
from engine.scheduler import Scheduler

log = logging.getLogger(__name__)

SLICE = 64
"""Events of one report after which their commands leave: the first do not wait for the last of a large report."""


LASTING = (ConfigError, RecordError, StorageFull)
"""Failures of a launch that every further launch repeats until a user acts. This is no decision of the run: they leave
no record that can be read or written, or a plan that cannot start. The run stays resumable."""


class SchedulerActor:
    """`open`, `begin`, then `report` from the other actors and `next_update` from whoever shows the run, until
    `close`. Ray starts it again should its process end: `_there`."""

    def __init__(self, plan: PackedPlan) -> None:
        self._packed = plan
        self._plan = plan.unpack()
        self._inbox = Inbox()
        self._reports = 0
        self._decisions_s: deque[float] = deque(maxlen=4096)
        self._watchers = Watchers()
        self._failure: Exception | None = None
        self._ended = False
        self._leaving = asyncio.Event()
        """Nothing more is wanted of this actor."""
        self._draining = False
        self._endpoint: Endpoint | None = None
        self._control: Control | None = None
        self._gateway: Any = None
        self._past: Past | None = None
        self._transitions = Transitions()
        self._relaunch = ""
        """Why the run is to be started again from its record, if so."""
        context = ray.get_runtime_context()
        self._self = context.current_actor
        self._restarted: bool = context.was_current_actor_reconstructed
        self._revival: asyncio.Task[None] | None = None
        if self._plan.run_dir is not None:
            announce_process(self._plan.run_dir, plan.launch)

    async def open(self) -> str | None:
        """Build everything, start every actor; the metrics endpoint, if there is one.

        Raises what is wrong with the plan, before any prompt is drawn. `BeginAgain`: another launch may succeed where
        this one failed, and its scheduler decides whether there is one.
        """
        try:
            return await self._open()
        except LASTING:
            raise
        except Exception as error:
            if self._past is None or not self._plan.again:
                raise
            raise BeginAgain(str(raised(error))) from error

    async def _open(self) -> str | None:
        plan = self._plan
        prepare_process("scheduler", plan.run_dir, private=True)
        await self._load()
        if plan.resume and plan.run_dir is not None:
            self._past = await asyncio.to_thread(contained, past_of, plan, self._transitions)
        past = self._past
        if plan.run_dir is not None:
            note_launch(plan.run_dir, self._packed.launch)
        self._record(past)
        self._start_stores()
        control = self._make(past, None)
        self._after_resuming = after_resuming(self._scheduler, plan.settings, plan.replicas)
        await control.open()
        await asyncio.gather(self._supervisor.open(None if past is None else past.restore), self._open_gateway())
        return self._endpoint.url if self._endpoint else None

    async def _load(self) -> None:
        """What takes a while and is the user's: extensions, prompts."""
        self._prompts = await asyncio.to_thread(contained, self._plan.make_prompts)
        await asyncio.to_thread(contained, load_extensions_of, self._plan.config)
        collect_rarely()

    def _start_stores(self) -> None:
        """And the gateway, if there is one."""
        plan, packed = self._plan, self._packed
        light: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}

        def begin(kind: type[Any], source: str, *given: Any, gpus: float = 0.0, **options: Any) -> Any:
            named = {**light, **lasting(packed, source), **beside_the_run(gpus), **options}
            return ray.remote(kind).options(**named).remote(packed, self._self, *given)

        transport = transport_of(plan)
        at, policy, fresh = plan.trajectories_dir, plan.store_policy, not plan.resume
        self._trajectories = begin(TrajectoryStoreActor, STORES[0], at, policy, fresh)
        self._weights = begin(WeightsStoreActor, STORES[1], transport, gpus=transport.store_gpus)
        if plan.make_gateway is not None:
            self._gateway = begin(GatewayActor, "gateway", max_concurrency=100_000)

    def _record(self, earlier: Past | Survived | None) -> None:
        """Take the record, and with it an epoch."""
        self._policies = PolicySet.from_names(self._plan.policies)
        self._recorder = recorder_of(self._plan, self._policies, earlier)

    def _make(self, earlier: Past | Survived | None, living: Living | None) -> Control:
        """Everything in this process, around a new scheduler or the one that a record has led to. `_record` comes
        first."""
        plan = self._plan
        recovered = None if earlier is None else earlier.recovered.scheduler
        self._scheduler = recovered or Scheduler(plan.limits, self._policies, observe=self._transitions.changed)
        journal = None if plan.run_dir is None else open_books(plan.run_dir, plan.config, plan.sinks)
        rows = None if earlier is None else earlier.rows
        self._metrics = RunMetrics(self._scheduler, self._transitions, journal, rows)
        self._clock = self._new_clock(earlier)
        self._over = asyncio.get_running_loop().create_future()
        kept = (self._trajectories, self._weights, self._gateway)
        processes = RayProcesses(plan, self._packed, self._self, *kept, epoch=self._recorder.epoch)
        found = None if living is None else processes.found(living)
        self._supervisor = Supervisor(plan, processes, self._scheduler.state, self._deliver, self._lose_run, found)
        self._executor = RunExecutor(
            supervisor=self._supervisor,
            scorers=plan.limits.scorers(),
            prompts=self._prompts,
            stores=RayStores(*kept),
            held_out=len(plan.held_out),
            drawn=self._scheduler.state.ledger.drawn,
            deliver=self._deliver,
            finish=self._finish,
        )
        before = 0 if earlier is None else earlier.recovered.events
        self._driver = Driver(
            self._scheduler, self._clock, self._recorder, self._executor, self._observe, before,
            0 if plan.run_dir is None else plan.snapshot_every, self._transitions,
        )  # fmt: skip
        if plan.metrics_port is not None:
            now, port = (lambda: self._clock.now()), plan.metrics_port
            self._endpoint = Endpoint(plan, self._metrics, self._driver, self._trajectories, now, port)
        self._control = Control(
            plan, self._metrics, self._driver, self._deliver, lambda: self._clock.now(), self._watchers.changed
        )
        return self._control

    @ray.method(max_task_retries=-1)
    async def beat(self) -> int:
        """The process id: a sign of life, answered at once, also while the record is being replayed."""
        return os.getpid()

    # another process of the same run

    async def _there(self) -> None:
        """To be awaited by every call: a process that takes the place of one that ended first becomes what that was.

        Raises: why it could not.
        """
        if self._restarted:
            if self._revival is None:
                self._revival = asyncio.get_running_loop().create_task(self._revive())
            await asyncio.shield(self._revival)

    async def _revive(self) -> None:
        try:
            prepare_process("scheduler", self._plan.run_dir, private=True)
            log.warning("the scheduler's process has ended and been started again")
            await self._load()
            assert self._plan.run_dir is not None
            survived = await asyncio.to_thread(contained, survived_of, self._plan.run_dir, self._transitions)
            if survived.ended:
                await self._stay_ended(survived)
            else:
                await self._go_on(survived)
        except Exception as error:
            log.exception("the scheduler cannot go on from the record")
            await asyncio.to_thread(end_living, self._packed.launch)
            story = f"the scheduler's process ended, and another could not go on: {raised(error)}"
            self._failure, self._ended = BeginAgain(story), True
            raise self._failure from None
        finally:
            self._restarted = self._failure is not None and self._restarted
            self._watchers.changed()

    async def _stay_ended(self, survived: Survived) -> None:
        """The process that ended had only to take the rest down."""
        survived.lock.release()
        await asyncio.to_thread(end_living, self._packed.launch)
        leave_no_word(self._plan)
        self._metrics = metrics_at_end(survived, self._transitions)
        self._failure, self._ended = survived.failure, True
        outcome = survived.recovered.scheduler.state.outcome
        self._relaunch = outcome.reason if outcome is not None and outcome.again else ""
        self._leaving.set()

    async def _go_on(self, survived: Survived) -> None:
        """Take hold of the actors, and order again what none of them has answered."""
        plan, packed = self._plan, self._packed
        self._record(survived)
        try:
            living = await take_hold(packed.launch, plan, survived, self._recorder.epoch)
            self._trajectories, self._weights = (living.actors[store, 1] for store in STORES)
            self._gateway = living.actors.get(("gateway", 1))
            control = self._make(survived, living)
            await control.open()
        except BaseException:
            self._recorder.close()
            raise
        self._metrics.go_on()
        self._supervisor.take_up()
        self._deliver(SchedulerRecovered())
        self._executor.execute(self._scheduler.state.orders.reissued(survived.recovered.at))
        self._executor.flush()
        self._supervisor.recover()
        if self._endpoint is not None:
            self._endpoint.announce()
        control.begin()
        self._main = asyncio.get_running_loop().create_task(self._until_over())

    @ray.method(max_task_retries=-1)
    async def here(self) -> None:
        """Answered when the run has been taken down: that the scheduler is gone for good is known by this call."""
        await self._there()
        await self._leaving.wait()

    def _new_clock(self, earlier: Past | Survived | None) -> WallClock:
        """Seconds of the run: those in which no process carried it do not count."""
        return WallClock(0.0 if earlier is None else earlier.recovered.at)

    async def begin(self) -> None:
        """Start the run; returns at once."""
        self._clock = self._driver.clock = self._new_clock(self._past)
        lives = len(self._plan.lives())
        begun = self._past is not None and self._past.recovered.events > 0
        resumed = self._past.event(lives, self._plan.again) if begun and self._past else None
        self._deliver(resumed or RunStarted(replicas=lives))
        self._deliver(*self._after_resuming)
        if self._endpoint is not None:
            self._endpoint.announce()
        if self._control is not None:
            self._control.begin()
        self._supervisor.begin()
        self._main = asyncio.get_running_loop().create_task(self._until_over())

    @ray.method(max_task_retries=-1)
    async def report(
        self,
        source: str,
        incarnation: Incarnation,
        sequence: int,
        events: bytes,
        figures: list[tuple[StepId, Mapping[str, Any]]],
    ) -> int:
        """Take in a batch of events; answered when they are recorded and what they led to is on its way."""
        if self._restarted:
            await self._there()
        if not self._inbox.takes(source, incarnation, sequence):
            return sequence
        self._reports += 1
        arrived = time.perf_counter()
        for step, said in figures:
            self._metrics.report(step, said)
        batch = unpack_events(events)
        for first in range(0, len(batch), SLICE):
            self._deliver(*batch[first : first + SLICE])
            took = time.perf_counter() - arrived
            self._decisions_s.append(took)
            self._metrics.decision_s.observe(took)
        return sequence

    @ray.method(max_task_retries=-1)
    async def tell(self, asked: Operation) -> None:
        """Carry out an order of whoever launched the run; nothing where that is over."""
        await self._there()
        if self._control is not None and self._scheduler.state.outcome is None:
            self._control.carry_out(asked)

    @ray.method(max_task_retries=-1)
    async def hand_over(self, steps: StepId) -> None:
        """Asked by a scorer: have the trainer hand over the weights after so many steps, should it still owe them."""
        await self._there()
        with named():
            await self._supervisor.hand_over(steps)

    @ray.method(max_task_retries=-1)
    async def next_update(self, since: int) -> Update:
        """The newest status, as soon as it is newer than the one numbered `since`. Raises what ended the run, if
        something did. A process that took the place of another counts from 1 again."""
        await self._there()
        since = min(since, self._watchers.number)
        while self._watchers.number <= since and not self._ended:
            await self._watchers.wait()
        if self._ended and self._failure is not None:
            raise self._failure
        status = self._metrics.status(None if self._ended else self._clock.now())
        told = self._control is not None and self._control.told
        return Update(number=self._watchers.number, status=status, last=self._ended, relaunch=self._relaunch, told=told)

    @ray.method(max_task_retries=-1)
    async def past(self) -> str:
        """What a run that was resumed goes on from, in words; empty for a new one."""
        return "" if self._past is None else str(self._past)

    @ray.method(max_task_retries=-1)
    async def traffic(self) -> Traffic:
        await self._there()
        return Traffic(
            reports=self._reports,
            calls=self._executor.calls,
            events=self._driver.events_handled,
            decisions_s=tuple(self._decisions_s),
        )

    async def close(self) -> None:
        """End every actor of the run and close the record, whatever the run is doing."""
        await self._there()
        if self._ended:
            return
        self._executor.close()
        self._supervisor.stop_watching()
        if self._control is not None:
            await self._control.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await asyncio.wait([asyncio.ensure_future(gateway.close.remote())], timeout=GOODBYE_S)
            ray.kill(gateway)
        await self._supervisor.close()
        await asyncio.wait([asyncio.ensure_future(self._trajectories.close.remote())], timeout=GOODBYE_S)
        for store in (self._trajectories, self._weights):
            ray.kill(store)
        with contextlib.closing(self._recorder):
            self._metrics.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._leaving.set()

    # the run

    def _deliver(self, *events: Event) -> None:
        """Hand events to the driver and send what they led to. What the driver raises ends the run."""
        if self._over.done():
            return
        outermost, self._draining = not self._draining, True
        try:
            self._driver.deliver(*events)
            if outermost:
                self._executor.flush()
        except Exception as error:
            if not self._over.done():
                self._over.set_exception(error)
            log.exception("the run cannot go on")
        finally:
            self._draining = not outermost

    def _lose_run(self, reason: str) -> None:
        """Report that the run cannot continue in these processes."""
        self._deliver(RunInterrupted(reason=clean(reason)))

    async def _open_gateway(self) -> None:
        if self._gateway is not None:
            with named():
                await self._gateway.open.remote()

    def _finish(self, command: FinishRun) -> None:
        if command.again:
            self._relaunch = command.reason
        if not self._over.done():
            self._over.set_result(command)

    def _observe(self, event: Event, commands: tuple[Command, ...]) -> None:
        self._metrics.observe(event, commands)
        self._watchers.soon()

    async def _until_over(self) -> None:
        """Wait for the end, take everything down, tell the watchers."""
        try:
            await self._over
        except Exception as error:
            self._failure = error if isinstance(error, EngineError) else EngineError(reason_of(error))
        if not isinstance(self._failure, RecordHeld):  # else the actors are those of a scheduler of a higher epoch
            with contextlib.suppress(Exception):
                await self.close()
        self._ended = True
        self._watchers.changed()
