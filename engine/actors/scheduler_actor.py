"""The scheduler actor: runs driver, recorder, metrics and prompts in one process, and starts every other actor.

Started by `launch.start`. Everything runs on one event loop, which it must never block. Reports arrive as calls; their
events are recorded and the commands sent before the call returns.

Every process with a handle of this actor imports this module, so what only the scheduler's process needs is imported in
the functions that use it.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from engine.actors.detached_actors import (
    PackedPlan,
    RunningActors,
    detached_options,
    end_actors,
    end_earlier,
    hide_gpus,
    note_launch,
    prepare_process,
)
from engine.actors.failover import STORES, metrics_at_end, recovery_of, take_over
from engine.actors.failures import named, raised
from engine.actors.launcher_watch import announce_process
from engine.actors.placement import (
    found_place,
    free_places,
    on_this_node,
    replicas_wait,
    reserve_trainer,
    trainer_waits,
)
from engine.actors.ray_processes import CLOSE_TIMEOUT_S, RayProcesses, RayStores
from engine.actors.store_actors import TrajectoryStoreActor, WeightsStoreActor
from engine.actors.transports import transport_of
from engine.actors.worker_actor import Batch, Figures, Inbox
from engine.errors import ConfigError, EngineError, RecordError, RecordHeld, RunFailed, StorageFull, reason_of
from engine.ids import LifeNumber, StepId
from engine.metrics.status import Status, read_status
from engine.record.codec import unpack_events
from engine.runtime.garbage_collection import collect_rarely, freeze_objects
from engine.runtime.wire import Message
from engine.states.process import TRAINER
from engine.workers.threads import contained

if TYPE_CHECKING:
    from engine.actors.failover import RunRecovery
    from engine.control.requests import Operation
    from engine.runtime.run_history import RunHistory
    from engine.runtime.run_parts import RunParts


class RelaunchNeeded(RunFailed):
    """The run cannot continue in its current processes, but can be relaunched from its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A status of the run. `last`: it is the final one. `relaunch`: why the run must be relaunched from its record;
    empty if it need not be."""

    number: int
    status: Status
    last: bool
    relaunch: str = ""
    end_requested: bool = False
    """A user has asked the run to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Number of calls between the actors so far, for benchmarks."""

    reports: int
    calls: int
    events: int
    decisions_s: tuple[float, ...]
    """Seconds from the arrival of a report until its events were recorded and the resulting commands were sent, for the
    newest reports."""


log = logging.getLogger(__name__)

TRAINER_PATIENCE_S = 5.0
"""Seconds between two reports on what a trainer waits for."""
PERMANENT = (ConfigError, RecordError, StorageFull)
"""Failures that would repeat at every relaunch until a user acts: the record cannot be read or written, or the plan
cannot start. They end the launch. The user can resume the run."""


class SchedulerActor:
    """After `open` and `begin`, the other actors call `report` and the launching process `next_update`, until `close`.
    If its process ends, Ray restarts it and `_ensure_recovered` recovers the run."""

    def __init__(self, plan: PackedPlan) -> None:
        hide_gpus()
        collect_rarely()
        from engine.runtime.run_parts import Watchers

        self._packed = plan
        self._plan = plan.unpack()
        self._inbox = Inbox()
        self._reports = 0
        self._answered = 0
        """Messages that were sent with the answer to a report."""
        self._decisions_s: deque[float] = deque(maxlen=4096)
        self._watchers = Watchers()
        self._failure: Exception | None = None
        self._ended = False
        self._leaving = asyncio.Event()
        """Set once the run has been shut down."""
        self._parts: RunParts | None = None
        self._gateway: Any = None
        self._trainer_group: Any = None
        self._waits: asyncio.Queue[str] = asyncio.Queue()
        """What the start waits for; empty at its end."""
        self._history: RunHistory | None = None
        self._relaunch = ""
        """Why the run must be relaunched from its record; empty if it need not be."""
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

        Raises: the error in the plan, before any prompt is drawn. `RelaunchNeeded` if another launch may succeed; the
        scheduler of that launch decides whether the run continues.
        """
        try:
            return await self._open()
        except PERMANENT:
            raise
        except Exception as error:
            if self._history is None or not self._plan.resumption.again:
                raise
            raise RelaunchNeeded(str(raised(error))) from error
        finally:
            self._waits.put_nowait("")

    async def next_wait(self) -> str:
        """What the start of the run waits for, whenever that changes; empty once `open` has ended."""
        return await self._waits.get()

    async def _open(self) -> str | None:
        from engine.runtime.run_history import history_of

        plan = self._plan
        prepare_process("scheduler", plan.run_dir, private=True)
        await self._load_extensions()
        if plan.resume and plan.run_dir is not None:
            self._history = await asyncio.to_thread(contained, history_of, plan, end_earlier)
        history = self._history
        await self._load_prompts()
        if history is not None:
            await self._catch_up(history)
        if plan.run_dir is not None:
            note_launch(plan.run_dir, self._packed.launch)
        parts = self._make(history)
        parts.take_settings()
        await self._reserve_trainer()
        self._start_stores()
        self._connect(parts)
        await parts.control.open()
        if waits := await asyncio.to_thread(replicas_wait, plan):
            self._say(waits)
        await asyncio.gather(parts.supervisor.open(None if history is None else history.restore), self._open_gateway())
        return parts.endpoint.url if parts.endpoint else None

    async def _load_extensions(self) -> None:
        """Load the user's extensions, which may be slow."""
        from engine.config import load_extensions_of

        await asyncio.to_thread(contained, load_extensions_of, self._plan.config)

    async def _load_prompts(self) -> None:
        """Load the user's prompts, once it is known from which of its data a resumed run continues."""
        self._prompts = await asyncio.to_thread(contained, self._plan.make_prompts)
        freeze_objects()

    async def _catch_up(self, earlier: "RunHistory | RunRecovery") -> None:
        """Replay the record for prompts that learn from the run."""
        from engine.runtime.prompt_sources import catch_up

        await asyncio.to_thread(contained, catch_up, self._prompts, earlier.recovered)

    async def _reserve_trainer(self) -> None:
        """Reserve the trainer's GPUs before any other process takes some: replicas are spread over the nodes, so that
        no node would have enough left."""
        plan, name = self._plan, self._trainer_place
        self._trainer_group = reserve_trainer(plan, name, self._packed.detached)
        said = ""
        while waits := await asyncio.to_thread(trainer_waits, plan, self._trainer_group, TRAINER_PATIENCE_S):
            if waits != said:
                said = waits
                self._say(waits)

    def _say(self, waits: str) -> None:
        log.warning(waits)
        self._waits.put_nowait(waits)

    @property
    def _trainer_place(self) -> str:
        """The name of the trainer's placement group."""
        return f"{self._packed.launch}/{TRAINER}"

    def _start_stores(self) -> None:
        """Start the stores, and the gateway if there is one."""
        plan, packed = self._plan, self._packed
        light: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}

        def begin(kind: type[Any], source: str, *given: Any, gpus: float = 0.0, **options: Any) -> Any:
            named = {**light, **detached_options(packed, source), **on_this_node(gpus), **options}
            return ray.remote(kind).options(**named).remote(packed, self._self, *given)

        transport = transport_of(plan)
        at, policy, fresh = plan.trajectories_dir, plan.store_policy, not plan.resume
        self._trajectories = begin(TrajectoryStoreActor, STORES[0], at, policy, fresh)
        self._weights = begin(WeightsStoreActor, STORES[1], transport, gpus=transport.store_gpus)
        if plan.make_gateway is not None:
            from engine.actors.gateway_actor import GatewayActor

            self._gateway = begin(GatewayActor, "gateway", max_concurrency=100_000)

    def _make(self, earlier: "RunHistory | RunRecovery | None") -> "RunParts":
        """Make the parts of the run. Opening the record gives it a new epoch."""
        from engine.runtime.run_parts import RunParts, recorder_of

        recorder = recorder_of(self._plan, earlier)
        parts = self._parts = RunParts(self._plan, recorder, self._watchers, earlier)
        return parts

    def _running(self) -> "RunParts":
        assert self._parts is not None  # set by `open`, which is called first
        return self._parts

    def _connect(self, parts: "RunParts", living: RunningActors | None = None) -> None:
        kept = (self._trajectories, self._weights, self._gateway)
        self._processes = RayProcesses(
            self._plan, self._packed, self._self, *kept, epoch=parts.recorder.epoch, trainer_group=self._trainer_group
        )
        found = None if living is None else self._processes.found(living)
        parts.connect(self._prompts, self._processes, RayStores(*kept), self._trajectories.stats.remote, found)

    @ray.method(max_task_retries=-1)
    async def beat(self) -> int:
        """Answer a heartbeat with the process id. Answers at once, even while the record is replayed."""
        return os.getpid()

    # recovery after a restart of this process

    async def _ensure_recovered(self) -> None:
        """Recover the run from its record, if this process was restarted. Every call awaits it first.

        Raises: `RelaunchNeeded` with the reason if it cannot.
        """
        if self._restarted:
            if self._revival is None:
                self._revival = asyncio.get_running_loop().create_task(self._revive())
            await asyncio.shield(self._revival)

    async def _revive(self) -> None:
        try:
            prepare_process("scheduler", self._plan.run_dir, private=True)
            log.warning("the scheduler's process has ended and was restarted")
            await self._load_extensions()
            await self._load_prompts()
            assert self._plan.run_dir is not None
            recovery = await asyncio.to_thread(contained, recovery_of, self._plan.run_dir)
            if recovery.has_ended:
                await self._report_end(recovery)
            else:
                await self._catch_up(recovery)
                await self._continue_run(recovery)
        except Exception as error:
            log.exception("the scheduler cannot recover its state from the record")
            await asyncio.to_thread(end_actors, self._packed.launch)
            story = f"the scheduler's process ended, and the restarted one could not recover: {raised(error)}"
            self._failure, self._ended = RelaunchNeeded(story), True
            raise self._failure from None
        finally:
            self._restarted = self._failure is not None and self._restarted
            self._watchers.changed()

    async def _report_end(self, recovery: "RunRecovery") -> None:
        """End the remaining actors of a run that had already ended, and report its final status."""
        from engine.runtime.metrics_endpoint import withdraw_addresses

        recovery.lock.release()
        await asyncio.to_thread(end_actors, self._packed.launch)
        withdraw_addresses(self._plan)
        assert self._plan.run_dir is not None
        self._last = read_status(metrics_at_end(self._plan.run_dir, recovery))
        self._failure, self._ended = recovery.failure, True
        outcome = recovery.recovered.scheduler.state.ending.outcome
        self._relaunch = outcome.reason if outcome is not None and outcome.again else ""
        self._leaving.set()

    async def _continue_run(self, recovery: "RunRecovery") -> None:
        """Take over the actors, and reissue the open orders."""
        plan, packed = self._plan, self._packed
        parts = self._make(recovery)
        try:
            living = await take_over(packed.launch, plan, recovery, parts.recorder.epoch)
            self._trajectories, self._weights = (living.actors[store, 1] for store in STORES)
            self._gateway = living.actors.get(("gateway", 1))
            self._trainer_group = found_place(self._trainer_place).group
            self._connect(parts, living)
            await parts.control.open()
        except BaseException:
            parts.recorder.close()
            raise
        parts.metrics.finish_replay()
        parts.supervisor.take_up()
        parts.driver.recover(parts.scheduler.state.orders.reissued(recovery.recovered.at))
        parts.supervisor.recover()
        parts.announce()
        self._main = asyncio.get_running_loop().create_task(self._close_at_end())

    @ray.method(max_task_retries=-1)
    async def here(self) -> None:
        """Return once the run has been shut down. If the scheduler ends for good, Ray fails the call."""
        await self._ensure_recovered()
        await self._leaving.wait()

    async def begin(self) -> None:
        """Start the run; returns at once."""
        self._running().begin(self._history)
        self._main = asyncio.get_running_loop().create_task(self._close_at_end())

    @ray.method(max_task_retries=-1)
    async def report(self, batch: Batch) -> list[Message]:
        """Handle a batch of events; returns once they are recorded and their commands sent, with the orders for the
        sender."""
        if self._restarted:
            await self._ensure_recovered()
        source, life, sequence, events, figures = batch
        return await self._inbox.answer(source, life, sequence, lambda: self._handle(source, life, events, figures))

    async def _handle(self, source: str, life: LifeNumber, events: bytes, figures: Figures) -> list[Message]:
        self._reports += 1
        parts, arrived = self._running(), time.perf_counter()
        for step, said in figures:
            parts.metrics.report(step, said)
        sender = self._processes.reporting(source, life)
        await parts.driver.handled(unpack_events(events), (lambda: None) if sender is None else sender.hold)
        orders = [] if sender is None else sender.held()
        self._answered += len(orders)
        took = time.perf_counter() - arrived
        self._decisions_s.append(took)
        parts.metrics.decision_s.observe([took])
        return orders

    @ray.method(max_task_retries=-1)
    async def tell(self, asked: "Operation") -> None:
        """Execute an operation from the launching process; does nothing once the run has ended."""
        await self._ensure_recovered()
        parts = self._parts
        if parts is not None and parts.scheduler.state.ending.outcome is None:
            parts.control.carry_out(asked)

    @ray.method(max_task_retries=-1)
    async def hand_over(self, steps: StepId) -> None:
        """Called by a scorer: make the trainer hand over the weights after `steps` train steps, if it still owes
        them."""
        await self._ensure_recovered()
        with named():
            await self._running().supervisor.hand_over(steps)

    @ray.method(max_task_retries=-1)
    async def next_update(self, since: int) -> Update:
        """Return the newest status once it is newer than number `since`. Raises the failure that ended the run, if any.
        A restarted process counts from 1 again."""
        await self._ensure_recovered()
        since = min(since, self._watchers.number)
        while self._watchers.number <= since and not self._ended:
            await self._watchers.wait()
        if self._ended and self._failure is not None:
            raise self._failure
        if (status := self._last) is None:
            parts = self._running()
            status = read_status(parts.metrics, None if self._ended else parts.driver.clock.now())
        asked = self._parts is not None and self._parts.control.end_requested
        return Update(
            number=self._watchers.number, status=status, last=self._ended, relaunch=self._relaunch, end_requested=asked
        )

    @ray.method(max_task_retries=-1)
    async def history(self) -> str:
        """A description of what a resumed run continued from; empty for a new run."""
        return "" if self._history is None else str(self._history)

    @ray.method(max_task_retries=-1)
    async def traffic(self) -> Traffic:
        await self._ensure_recovered()
        return Traffic(
            reports=self._reports,
            calls=self._running().executor.calls - self._answered,
            events=self._running().driver.events_handled,
            decisions_s=tuple(self._decisions_s),
        )

    async def close(self) -> None:
        """End every actor of the run and close the record, in any state of the run."""
        await self._ensure_recovered()
        if self._ended:
            return
        parts = self._running()
        parts.stop()
        await parts.control.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await asyncio.wait([asyncio.ensure_future(gateway.close.remote())], timeout=CLOSE_TIMEOUT_S)
            ray.kill(gateway)
        await parts.supervisor.close()
        await asyncio.wait([asyncio.ensure_future(self._trajectories.close.remote())], timeout=CLOSE_TIMEOUT_S)
        for store in (self._trajectories, self._weights):
            ray.kill(store)
        await asyncio.to_thread(free_places, self._packed.launch)
        parts.close()
        self._leaving.set()

    # the run

    async def _open_gateway(self) -> None:
        if self._gateway is not None:
            with named():
                await self._gateway.open.remote()

    async def _close_at_end(self) -> None:
        """Wait until the run ends, close everything, and wake the watchers."""
        try:
            finish = await self._running().over
            self._relaunch = finish.reason if finish.again else ""
        except Exception as error:
            self._failure = error if isinstance(error, EngineError) else EngineError(reason_of(error))
        if not isinstance(self._failure, RecordHeld):  # otherwise a scheduler of a higher epoch owns the actors
            with contextlib.suppress(Exception):
                await self.close()
        self._ended = True
        self._watchers.changed()
