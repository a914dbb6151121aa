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

from engine.actors.failures import named, raised
from engine.actors.gateway import GatewayActor
from engine.actors.lasting import Living, end_earlier, end_living, lasting, note_launch
from engine.actors.outbox import Inbox
from engine.actors.placement import beside_the_run
from engine.actors.process import PackedPlan, collect_rarely, prepare_process
from engine.actors.processes import GOODBYE_S, RayProcesses, RayStores
from engine.actors.scheduler_watch import announce_process
from engine.actors.stores import TrajectoryStoreActor, WeightsStoreActor
from engine.actors.survived import STORES, Survived, metrics_at_end, survived_of, take_hold
from engine.actors.told import BeginAgain, Traffic, Update
from engine.actors.transports import transport_of
from engine.actors.wire import unpack_events
from engine.config import load_extensions_of
from engine.control.requests import Operation
from engine.errors import ConfigError, EngineError, RecordError, RecordHeld, StorageFull
from engine.events import SchedulerRecovered
from engine.hosts.reasons import reason_of
from engine.hosts.threads import contained
from engine.ids import Incarnation, StepId
from engine.metrics.status import Status
from engine.metrics.transitions import Transitions
from engine.runtime.endpoint import leave_no_word
from engine.runtime.past import Past, past_of
from engine.runtime.session import Session, recorder_of
from engine.runtime.watchers import Watchers

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
        self._session: Session | None = None
        self._gateway: Any = None
        self._past: Past | None = None
        self._transitions = Transitions()
        self._relaunch = ""
        """Why the run is to be started again from its record, if so."""
        self._last: Status | None = None
        """Of a run whose end this process only found."""
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
            self._past = await asyncio.to_thread(contained, past_of, plan, self._transitions, end_earlier)
        past = self._past
        if plan.run_dir is not None:
            note_launch(plan.run_dir, self._packed.launch)
        session = self._make(past)
        session.take_settings()
        self._start_stores()
        self._connect(session)
        await session.control.open()
        await asyncio.gather(session.supervisor.open(None if past is None else past.restore), self._open_gateway())
        return session.endpoint.url if session.endpoint else None

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

    def _make(self, earlier: Past | Survived | None) -> Session:
        """Take the record, and with it an epoch."""
        recorder = recorder_of(self._plan, earlier)
        session = self._session = Session(self._plan, recorder, self._transitions, self._watchers, earlier)
        return session

    def _running(self) -> Session:
        assert self._session is not None  # nobody calls before it is open
        return self._session

    def _connect(self, session: Session, living: Living | None = None) -> None:
        kept = (self._trajectories, self._weights, self._gateway)
        processes = RayProcesses(self._plan, self._packed, self._self, *kept, epoch=session.recorder.epoch)
        found = None if living is None else processes.found(living)
        session.connect(self._prompts, processes, RayStores(*kept), self._trajectories.stats.remote, found)

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
        self._last = metrics_at_end(survived, self._transitions).status(None)
        self._failure, self._ended = survived.failure, True
        outcome = survived.recovered.scheduler.state.outcome
        self._relaunch = outcome.reason if outcome is not None and outcome.again else ""
        self._leaving.set()

    async def _go_on(self, survived: Survived) -> None:
        """Take hold of the actors, and order again what none of them has answered."""
        plan, packed = self._plan, self._packed
        session = self._make(survived)
        try:
            living = await take_hold(packed.launch, plan, survived, session.recorder.epoch)
            self._trajectories, self._weights = (living.actors[store, 1] for store in STORES)
            self._gateway = living.actors.get(("gateway", 1))
            self._connect(session, living)
            await session.control.open()
        except BaseException:
            session.recorder.close()
            raise
        session.metrics.go_on()
        session.supervisor.take_up()
        session.deliver(SchedulerRecovered())
        session.executor.execute(session.scheduler.state.orders.reissued(survived.recovered.at))
        session.executor.flush()
        session.supervisor.recover()
        session.announce()
        self._main = asyncio.get_running_loop().create_task(self._until_over())

    @ray.method(max_task_retries=-1)
    async def here(self) -> None:
        """Answered when the run has been taken down: that the scheduler is gone for good is known by this call."""
        await self._there()
        await self._leaving.wait()

    async def begin(self) -> None:
        """Start the run; returns at once."""
        self._running().begin(self._past)
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
        session, arrived = self._running(), time.perf_counter()
        for step, said in figures:
            session.metrics.report(step, said)
        batch = unpack_events(events)
        for first in range(0, len(batch), SLICE):
            session.deliver(*batch[first : first + SLICE])
            took = time.perf_counter() - arrived
            self._decisions_s.append(took)
            session.metrics.decision_s.observe(took)
        return sequence

    @ray.method(max_task_retries=-1)
    async def tell(self, asked: Operation) -> None:
        """Carry out an order of whoever launched the run; nothing where that is over."""
        await self._there()
        session = self._session
        if session is not None and session.scheduler.state.outcome is None:
            session.control.carry_out(asked)

    @ray.method(max_task_retries=-1)
    async def hand_over(self, steps: StepId) -> None:
        """Asked by a scorer: have the trainer hand over the weights after so many steps, should it still owe them."""
        await self._there()
        with named():
            await self._running().supervisor.hand_over(steps)

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
        status = self._last or self._running().metrics.status(None if self._ended else self._running().now())
        told = self._session is not None and self._session.control.told
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
            calls=self._running().executor.calls,
            events=self._running().driver.events_handled,
            decisions_s=tuple(self._decisions_s),
        )

    async def close(self) -> None:
        """End every actor of the run and close the record, whatever the run is doing."""
        await self._there()
        if self._ended:
            return
        session = self._running()
        session.stop()
        await session.control.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await asyncio.wait([asyncio.ensure_future(gateway.close.remote())], timeout=GOODBYE_S)
            ray.kill(gateway)
        await session.supervisor.close()
        await asyncio.wait([asyncio.ensure_future(self._trajectories.close.remote())], timeout=GOODBYE_S)
        for store in (self._trajectories, self._weights):
            ray.kill(store)
        session.close()
        self._leaving.set()

    # the run

    async def _open_gateway(self) -> None:
        if self._gateway is not None:
            with named():
                await self._gateway.open.remote()

    async def _until_over(self) -> None:
        """Wait for the end, take everything down, tell the watchers."""
        try:
            finish = await self._running().over
            self._relaunch = finish.reason if finish.again else ""
        except Exception as error:
            self._failure = error if isinstance(error, EngineError) else EngineError(reason_of(error))
        if not isinstance(self._failure, RecordHeld):  # else the actors are those of a scheduler of a higher epoch
            with contextlib.suppress(Exception):
                await self.close()
        self._ended = True
        self._watchers.changed()
