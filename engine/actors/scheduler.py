"""The scheduler actor: driver, recorder, metrics and prompts in one process; the parent of every other actor of a run.

Started by `run.start`. All of it lives on one event loop: reports come in as calls, are handled and recorded at once,
and their commands leave before the call is answered. It must never block that loop.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from engine import __version__
from engine.actors.endpoint import Endpoint
from engine.actors.executor import RayExecutor
from engine.actors.failures import failure_reason, named
from engine.actors.fleet import GOODBYE_S, Fleet
from engine.actors.gateway import GatewayActor
from engine.actors.past import Past, past_of
from engine.actors.process import PackedPlan, prepare_process
from engine.actors.stores import TrajectoryStoreActor, WeightsStoreActor
from engine.actors.wire import unpack_events
from engine.commands import Command, FinishRun
from engine.config import load_extensions_of
from engine.driver import Driver
from engine.errors import EngineError
from engine.events import Event, RunStarted, StopRequested
from engine.hosts.clock import WallClock
from engine.hosts.reasons import clean, reason_of
from engine.hosts.threads import contained
from engine.ids import Incarnation, StepId
from engine.metrics.collector import RunMetrics, Transitions
from engine.metrics.sinks import open_books
from engine.metrics.status import Status
from engine.policies import PolicySet
from engine.ports import Recorder as RecorderPort
from engine.schedule import Header, NullRecorder, Recorder
from engine.scheduler import Scheduler

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.2
"""A status goes out at most so often, and only after something happened."""
SLICE = 64
"""Events of one report after which their commands leave: the first do not wait for the last of a large report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A status on its way to whoever shows the run. `last`: nothing follows it."""

    number: int
    status: Status
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls between the actors so far, for benchmarks."""

    reports: int
    calls: int
    events: int
    decisions_s: tuple[float, ...]
    """Of the newest slices of reports: from the report's arrival until what they led to was recorded and sent."""


class SchedulerActor:
    """`open`, `begin`, then `report` from the other actors and `next_update` from whoever shows the run, until
    `close`."""

    def __init__(self, plan: PackedPlan) -> None:
        self._packed = plan
        self._plan = plan.unpack()
        self._acknowledged: dict[tuple[str, Incarnation], int] = {}
        self._reports = 0
        self._decisions_s: deque[float] = deque(maxlen=4096)
        self._number = 0
        self._status_timer: asyncio.TimerHandle | None = None
        self._watchers: list[asyncio.Future[None]] = []
        self._failure: Exception | None = None
        self._ended = False
        self._draining = False
        self._endpoint: Endpoint | None = None
        self._gateway: Any = None
        self._past: Past | None = None

    async def open(self) -> str | None:
        """Build everything, start every actor; the metrics endpoint, if there is one.

        Raises what is wrong with the plan, before any prompt is drawn.
        """
        plan, loop = self._plan, asyncio.get_running_loop()
        prepare_process("scheduler", plan.run_dir)
        prompts = await asyncio.to_thread(contained, plan.make_prompts)
        await asyncio.to_thread(contained, load_extensions_of, plan.config)
        policies = PolicySet.from_names(plan.policies)
        self._transitions = Transitions()
        if plan.resume and plan.run_dir is not None:
            self._past = await asyncio.to_thread(
                contained, past_of, plan.run_dir, plan.restore_trainer is not None, self._transitions.changed
            )
        past = self._past
        self._scheduler = (
            Scheduler(plan.limits, policies, observe=self._transitions.changed)
            if past is None
            else past.recovered.scheduler
        )
        books = None if plan.run_dir is None else open_books(plan.run_dir, plan.config, plan.sinks)
        self._metrics = RunMetrics(self._scheduler, self._transitions, books)
        self._recorder = self._new_recorder(policies)
        self._clock = self._new_clock()
        self._over: asyncio.Future[FinishRun] = loop.create_future()
        self._self = ray.get_runtime_context().current_actor
        light: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}
        self._trajectories = ray.remote(TrajectoryStoreActor).options(**light).remote()
        held: dict[str, Any] = {**light, "num_gpus": plan.transport.store_gpus}
        self._weights = ray.remote(WeightsStoreActor).options(**held).remote(plan.transport)
        if plan.make_gateway is not None:
            options = {**light, "max_concurrency": 100_000}
            self._gateway = ray.remote(GatewayActor).options(**options).remote(self._packed)
        given = (self._packed, self._self, self._trajectories, self._weights)
        lived = {replica.id: replica.incarnation for replica in self._scheduler.state.fleet.replicas.values()}
        self._fleet = Fleet(plan, given, self._deliver, self._give_up, self._gateway, lived)
        self._executor = RayExecutor(
            fleet=self._fleet,
            prompts=prompts,
            trajectories=self._trajectories,
            weights=self._weights,
            gateway=self._gateway,
            held_out=len(plan.held_out),
            drawn=self._scheduler.state.ledger.drawn,
            deliver=self._deliver,
            finish=self._finish,
        )
        before = 0 if past is None else past.recovered.events
        self._driver = Driver(self._scheduler, self._clock, self._recorder, self._executor, self._observe, before)
        if plan.metrics_port is not None:
            now, port = (lambda: self._clock.now()), plan.metrics_port
            self._endpoint = Endpoint(plan, self._metrics, self._driver, self._trajectories, now, port)
        await asyncio.gather(self._fleet.open(None if past is None else past.restore), self._open_gateway())
        return self._endpoint.url if self._endpoint else None

    def _new_clock(self) -> WallClock:
        """Seconds of the run: those in which no process carried it do not count."""
        return WallClock(0.0 if self._past is None else self._past.recovered.at)

    def _new_recorder(self, policies: PolicySet) -> RecorderPort:
        plan = self._plan
        if plan.run_dir is None:
            return NullRecorder()
        if self._past is not None:
            return Recorder(plan.run_dir / "schedule", self._past.after, lock=self._past.lock)
        header = Header(
            run=plan.run_dir.name,
            limits=plan.limits.to_plain(),
            policies=dict(policies.names),
            config=plan.config,
            code=__version__,
        )
        return Recorder(plan.run_dir / "schedule", header)

    async def begin(self) -> None:
        """Start the run; returns at once."""
        self._clock = self._driver.clock = self._new_clock()
        begun = self._past is not None and self._past.recovered.events > 0
        self._deliver(self._past.event(len(self._plan.lives())) if begun and self._past else RunStarted())
        if self._endpoint is not None:
            self._endpoint.announce()
        self._fleet.join()
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
        key = (source, incarnation)
        if sequence <= self._acknowledged.get(key, 0):
            return sequence
        self._acknowledged[key] = sequence
        self._reports += 1
        arrived = time.perf_counter()
        for step, said in figures:
            self._metrics.report(step, said)
            self._fleet.trainer.reported(said)
        batch = unpack_events(events)
        if not source.startswith("rollout-"):
            for event in batch:
                self._fleet.answered(source, event)
        for first in range(0, len(batch), SLICE):
            self._deliver(*batch[first : first + SLICE])
            took = time.perf_counter() - arrived
            self._decisions_s.append(took)
            self._metrics.decision_s.observe(took)
        return sequence

    async def stop(self, reason: str) -> None:
        """End the run resumably."""
        self._deliver(StopRequested(reason=reason))

    async def hand_over(self, steps: StepId) -> None:
        """Asked by a scorer: have the trainer hand over the weights after so many steps, should it still owe them."""
        with named():
            await self._fleet.trainer.hand_over(steps)

    async def next_update(self, since: int) -> Update:
        """The newest status, as soon as it is newer than the one numbered `since`. Raises what ended the run, if
        something did."""
        while self._number <= since and not self._ended:
            changed = asyncio.get_running_loop().create_future()
            self._watchers.append(changed)
            await changed
        if self._ended and self._failure is not None:
            raise self._failure
        status = self._metrics.status(None if self._ended else self._clock.now())
        return Update(number=self._number, status=status, last=self._ended)

    async def past(self) -> str:
        """What a run that was resumed goes on from, in words; empty for a new one."""
        return "" if self._past is None else str(self._past)

    async def traffic(self) -> Traffic:
        return Traffic(
            reports=self._reports,
            calls=self._executor.calls,
            events=self._driver.events_handled,
            decisions_s=tuple(self._decisions_s),
        )

    async def close(self) -> None:
        """End every actor of the run and close the record, whatever the run is doing."""
        self._executor.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await asyncio.wait([asyncio.ensure_future(gateway.close.remote())], timeout=GOODBYE_S)
            ray.kill(gateway)
        await self._fleet.close()
        for store in (self._trajectories, self._weights):
            ray.kill(store)
        self._metrics.close()
        self._recorder.close()
        if self._endpoint is not None:
            self._endpoint.close()

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
            log.exception("the run cannot go on")
            if not self._over.done():
                self._over.set_exception(error)
        finally:
            self._draining = not outermost

    def _give_up(self, reason: str) -> None:
        """End the run resumably, for a reason of its own."""
        self._deliver(StopRequested(reason=clean(reason)))

    async def _open_gateway(self) -> None:
        if self._gateway is not None:
            with named():
                await self._gateway.open.remote()
            self._fleet.spawn(self._watch_gateway())

    async def _watch_gateway(self) -> None:
        """Without it no agent can go on, and its conversations are lost: the run ends there."""
        try:
            await self._gateway.alive.remote()
        except Exception as error:
            if self._gateway is not None:
                self._give_up(f"the gateway is lost: {failure_reason(error)}")

    def _finish(self, command: FinishRun) -> None:
        if not self._over.done():
            self._over.set_result(command)

    def _observe(self, event: Event, commands: tuple[Command, ...]) -> None:
        self._metrics.observe(event, commands)
        if self._status_timer is None:
            self._status_timer = asyncio.get_running_loop().call_later(STATUS_EVERY_S, self._changed)

    def _changed(self) -> None:
        """A newer status is there: wake those who wait for one."""
        if self._status_timer is not None:
            self._status_timer.cancel()
            self._status_timer = None
        self._number += 1
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def _until_over(self) -> None:
        """Wait for the end, take everything down, tell the watchers."""
        try:
            await self._over
        except Exception as error:
            self._failure = error if isinstance(error, EngineError) else EngineError(reason_of(error))
        with contextlib.suppress(Exception):
            await self.close()
        self._ended = True
        self._changed()
