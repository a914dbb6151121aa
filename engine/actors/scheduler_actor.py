"""The scheduler actor: runs driver, recorder, metrics and prompts in one process, and starts every other actor.

Started by `launch.start`. Everything runs on one event loop, which it must never block. Reports arrive as calls; their
events are handled and recorded at once, and the commands are sent before the call returns.
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

from engine.actors.detached_actors import (
    Living,
    PackedPlan,
    collect_rarely,
    end_earlier,
    end_living,
    lasting,
    note_launch,
    prepare_process,
)
from engine.actors.failover import STORES, Survived, metrics_at_end, survived_of, take_hold
from engine.actors.failures import named, raised
from engine.actors.gateway_actor import GatewayActor
from engine.actors.launcher_watch import announce_process
from engine.actors.placement import beside_the_run
from engine.actors.ray_processes import GOODBYE_S, RayProcesses, RayStores
from engine.actors.store_actors import TrajectoryStoreActor, WeightsStoreActor
from engine.actors.transports import transport_of
from engine.actors.worker_actor import Inbox
from engine.config import load_extensions_of
from engine.control.requests import Operation
from engine.errors import ConfigError, EngineError, RecordError, RecordHeld, StorageFull, reason_of
from engine.events import SchedulerRecovered
from engine.ids import Incarnation, StepId
from engine.metrics.status import Status
from engine.metrics.transitions import Transitions
from engine.runtime.metrics_endpoint import leave_no_word
from engine.runtime.recovery import Past, past_of
from engine.runtime.session import Session, Watchers, recorder_of
from engine.runtime.updates import BeginAgain, Traffic, Update
from engine.runtime.wire import unpack_events
from engine.workers.threads import contained

log = logging.getLogger(__name__)

SLICE = 64
"""Number of events of a report to handle before their commands are sent, so that a large report delays none."""


LASTING = (ConfigError, RecordError, StorageFull)
"""Failures that every further launch would repeat until a user acts: the record cannot be read or written, or the plan
cannot start. The scheduler does not decide on these. The run can still be resumed."""


class SchedulerActor:
    """After `open` and `begin`, the other actors call `report` and the launching process `next_update`, until `close`.
    If its process ends, Ray restarts it and `_there` recovers the run."""

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
        """Set once the run has been shut down."""
        self._session: Session | None = None
        self._gateway: Any = None
        self._past: Past | None = None
        self._transitions = Transitions()
        self._relaunch = ""
        """Why the run must be launched again from its record; empty if it need not."""
        self._last: Status | None = None
        """The final status of a run that had ended before this process was restarted."""
        context = ray.get_runtime_context()
        self._self = context.current_actor
        self._restarted: bool = context.was_current_actor_reconstructed
        self._revival: asyncio.Task[None] | None = None
        if self._plan.run_dir is not None:
            announce_process(self._plan.run_dir, plan.launch)

    async def open(self) -> str | None:
        """Start every actor. Returns the URL of the metrics endpoint, if there is one.

        Raises what is wrong with the plan, before any prompt is drawn. Raises `BeginAgain` if another launch may
        succeed; that launch's scheduler decides whether the run continues.
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
        """Load the user's prompts and extensions, which may be slow."""
        self._prompts = await asyncio.to_thread(contained, self._plan.make_prompts)
        await asyncio.to_thread(contained, load_extensions_of, self._plan.config)
        collect_rarely()

    def _start_stores(self) -> None:
        """Start the stores, and the gateway if there is one."""
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
        """Make the session. Opening the record gives it a new epoch."""
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
        """Answer a heartbeat with the process id, at once, also while the record is replayed."""
        return os.getpid()

    # recovery after a restart of this process

    async def _there(self) -> None:
        """Recover the run from its record, if this process was restarted. Every call awaits it first.

        Raises: `BeginAgain` with the reason if it cannot.
        """
        if self._restarted:
            if self._revival is None:
                self._revival = asyncio.get_running_loop().create_task(self._revive())
            await asyncio.shield(self._revival)

    async def _revive(self) -> None:
        try:
            prepare_process("scheduler", self._plan.run_dir, private=True)
            log.warning("the scheduler's process has ended and was restarted")
            await self._load()
            assert self._plan.run_dir is not None
            survived = await asyncio.to_thread(contained, survived_of, self._plan.run_dir, self._transitions)
            if survived.ended:
                await self._stay_ended(survived)
            else:
                await self._go_on(survived)
        except Exception as error:
            log.exception("the scheduler cannot recover its state from the record")
            await asyncio.to_thread(end_living, self._packed.launch)
            story = f"the scheduler's process ended, and the restarted one could not recover: {raised(error)}"
            self._failure, self._ended = BeginAgain(story), True
            raise self._failure from None
        finally:
            self._restarted = self._failure is not None and self._restarted
            self._watchers.changed()

    async def _stay_ended(self, survived: Survived) -> None:
        """The run had ended already: end the remaining actors and report its final status."""
        survived.lock.release()
        await asyncio.to_thread(end_living, self._packed.launch)
        leave_no_word(self._plan)
        self._last = metrics_at_end(survived, self._transitions).status(None)
        self._failure, self._ended = survived.failure, True
        outcome = survived.recovered.scheduler.state.outcome
        self._relaunch = outcome.reason if outcome is not None and outcome.again else ""
        self._leaving.set()

    async def _go_on(self, survived: Survived) -> None:
        """Take over the actors, and reissue the open orders."""
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
        """Return once the run has been shut down. If the scheduler ends for good, Ray fails the call."""
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
        """Handle a batch of events; returns its sequence number once they are recorded and their commands sent."""
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
        """Execute an operation from the launching process; does nothing once the run has ended."""
        await self._there()
        session = self._session
        if session is not None and session.scheduler.state.outcome is None:
            session.control.carry_out(asked)

    @ray.method(max_task_retries=-1)
    async def hand_over(self, steps: StepId) -> None:
        """Called by a scorer: make the trainer hand over the weights after `steps` train steps, if it still owes
        them."""
        await self._there()
        with named():
            await self._running().supervisor.hand_over(steps)

    @ray.method(max_task_retries=-1)
    async def next_update(self, since: int) -> Update:
        """Return the newest status once it is newer than number `since`. Raises the failure that ended the run, if any.
        A restarted process counts from 1 again."""
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
        """What a resumed run continued from, in words; empty for a new run."""
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
        """End every actor of the run and close the record, in any state of the run."""
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
        """Wait until the run ends, close everything, and wake the watchers."""
        try:
            finish = await self._running().over
            self._relaunch = finish.reason if finish.again else ""
        except Exception as error:
            self._failure = error if isinstance(error, EngineError) else EngineError(reason_of(error))
        if not isinstance(self._failure, RecordHeld):  # else a scheduler of a higher epoch owns the actors
            with contextlib.suppress(Exception):
                await self.close()
        self._ended = True
        self._watchers.changed()
