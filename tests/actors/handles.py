"""Ray as far as `Supervisor` asks it: handles of actors that a test opens and ends, what was killed and set aside.

`Scene` is a supervisor over it, with the state that some events lead to.
"""

import asyncio
import gc
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from ray_plans import plan

from engine.actors import placement
from engine.actors.detached_actors import PackedPlan, RunningActors
from engine.actors.ray_processes import RayProcesses
from engine.commands import Command, StartProcess, StopProcess
from engine.events import Event, ProcessLost, stamp
from engine.runtime.process_port import SentOrder, Sign, source_of
from engine.runtime.supervisor import Supervisor
from engine.runtime.wire import unpack_orders
from engine.scheduling.scheduler import Scheduler
from engine.workers.plan import Liveness, Plan

ACTORS = {"RolloutActor", "TrainerActor", "ScorerActor", "AddedStatesActor"}


class Handle:
    """An actor. Nothing answers before the test lets it; a handle that is killed answers by a failure."""

    def __init__(self, name: str, pid: int | None = None) -> None:
        self.name = name
        self.opens, self.over, self.asked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None
        """What opening it raises."""
        self.end: str | Exception = RayError("it died")
        """What its end says once it is `over`."""
        self.pid = pid
        """None: it is silent."""
        self.opened_with: list[tuple[Any, ...]] = []
        self.orders: list[Command] = []
        self.joins = self.watchers = self.closes = self.handed_over = 0
        for method in ("bring_up", "join", "carry_out", "alive", "beat", "close", "hand_over"):
            setattr(self, method, SimpleNamespace(remote=getattr(self, f"_{method}")))

    def die(self) -> None:
        self.over.set()

    def _bring_up(self, *given: Any) -> Awaitable[None]:
        self.opened_with.append(given)
        self.asked.set()
        return self._opened()

    async def _opened(self) -> None:
        opened, over = (asyncio.ensure_future(one.wait()) for one in (self.opens, self.over))
        await asyncio.wait([opened, over], return_when=asyncio.FIRST_COMPLETED)
        opened.cancel(), over.cancel()
        if self.failure is not None or self.over.is_set():
            raise self.failure or RayError("it was killed")

    def _join(self) -> None:
        self.joins += 1

    def _carry_out(self, epoch: int, sequence: int, packed: bytes) -> None:
        self.orders += [order.command for order in unpack_orders(packed)]

    async def _alive(self) -> str:
        self.watchers += 1
        await self.over.wait()
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    async def _beat(self) -> Sign:
        while self.pid is None:
            await asyncio.Event().wait()
        return Sign(self.pid)

    async def _close(self) -> None:
        self.closes += 1

    async def _hand_over(self, steps: int) -> None:
        self.handed_over = steps


class RayOfHandles:
    """`refuses`: the name of the actor that Ray does not make."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.handles: dict[str, Handle] = {}
        self.killed: list[str] = []
        self.set_aside: list[str] = []
        self.refuses = ""
        self.up_at_once = True
        self.gpus = 64.0
        self.pid: int | None = None
        """Of actors made from now on."""
        patch.setattr(ray, "remote", self._remote)
        patch.setattr(ray, "kill", self._kill)
        patch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": self.gpus}}])
        patch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a" * 56))
        patch.setattr(placement, "placement_group", self._place)
        patch.setattr(placement, "get_placement_group", self._find)
        patch.setattr(placement, "remove_placement_group", lambda group: self.set_aside.remove(group.name))

    def _remote(self, kind: type[Any]) -> Any:
        assert kind.__name__ in ACTORS
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *_: self._make(options)))

    def _make(self, options: dict[str, Any]) -> Handle:
        name = options["name"].partition("/")[2]
        if name == self.refuses:
            raise ValueError("no node has such a resource")
        assert name not in self.handles or self.handles[name].failure, "one life is one actor"
        return self.add(name)

    def add(self, name: str) -> Handle:
        handle = self.handles[name] = Handle(name, self.pid)
        if self.up_at_once:
            handle.opens.set()
        return handle

    def _kill(self, handle: Handle) -> None:
        self.killed.append(handle.name)
        handle.die()

    def _place(self, bundles: Any, name: str, **options: Any) -> Any:
        self.set_aside.append(name.partition("/")[2])
        return SimpleNamespace(name=self.set_aside[-1])

    def _find(self, name: str) -> Any:
        if name.partition("/")[2] not in self.set_aside:
            raise ValueError(name)
        return SimpleNamespace(name=name.partition("/")[2])


class Scene:
    """A supervisor whose state is that after `events`. `living`: it takes over what the names say, but for `silent`."""

    def __init__(
        self,
        run_dir: Path,
        cluster: RayOfHandles,
        events: Sequence[Event] = (),
        living: Sequence[str] | None = None,
        silent: Sequence[str] = (),
        gateway: bool = False,
        **changes: Any,
    ) -> None:
        self.plan: Plan = plan(run_dir, **{"liveness": Liveness(heartbeat_s=0.0), **changes})
        self.cluster = cluster
        self.scheduler = Scheduler(self.plan.limits)
        for number, event in enumerate(events):
            stamp(event, number, 0.0)
            self.scheduler.tick((event,))
        self.events: list[Event] = []
        self._delivery = asyncio.Event()
        self.stores = [Handle("trajectories"), Handle("weights"), Handle("gateway")]
        self.newest: Callable[[], Awaitable[int]] = lambda: asyncio.sleep(0, 0)
        self.stores[1].newest = SimpleNamespace(remote=lambda: self.newest())  # type: ignore[attr-defined]
        kept = (*self.stores[:2], self.stores[2] if gateway else None)
        packed = replace(PackedPlan.of(self.plan), launch="run")
        self.processes = processes = RayProcesses(self.plan, packed, None, *kept)
        taken = None
        if living is not None:
            actors = {(name.split("/")[0], int(name.split("/")[1])): cluster.add(name) for name in living}
            taken = processes.found(
                RunningActors(actors=actors, epoch=100, silent=dict.fromkeys(silent, "it is silent"))
            )
        self.supervisor = Supervisor(
            self.plan,
            processes,
            self.scheduler.state,
            self._deliver,
            pytest.fail,
            taken,  # type: ignore[arg-type]
        )

    def handle(self, name: str) -> Handle:
        return self.cluster.handles[name]

    def _deliver(self, event: Event) -> None:
        self.events.append(event)
        self._delivery.set()

    async def hears(self, kind: type[Event], count: int = 1) -> None:
        """Until so many events of a kind have come."""
        while sum(isinstance(event, kind) for event in self.events) < count:
            self._delivery.clear()
            await self._delivery.wait()

    async def begin(self, kind: str, index: int, life: int) -> Handle:
        """Start a life, and let it come as far as it can."""
        self.start(kind, index, life)
        await settled()
        return self.handle(f"{source_of(kind, index)}/{life}")

    def start(self, kind: str, index: int, life: int, **beginning: Any) -> None:
        self.supervisor.start(StartProcess(kind=kind, index=index, life=life, cause=0, **beginning))

    def stop(self, kind: str, index: int, life: int) -> None:
        self.supervisor.stop(StopProcess(kind=kind, index=index, life=life, reason="enough", cause=0))

    def send(self, kind: str, index: int, command: Command) -> None:
        """Send an order to the current life of a process."""
        self.supervisor.lives[kind, index].send([SentOrder(command)])

    def take_over(self) -> None:
        """As the scheduler actor does it."""
        orders = self.scheduler.state.orders.reissued(0.0)
        self.supervisor.take_up()
        for order in orders:
            if isinstance(order, StartProcess):
                self.supervisor.start(order)
            elif isinstance(order, StopProcess):
                self.supervisor.stop(order)
        self.supervisor.recover()

    @property
    def lost(self) -> list[tuple[str, int, str]]:
        """(source, life, reason) of each loss that was reported."""
        return [
            (source_of(event.kind, event.index), event.life, without_place(event.reason))
            for event in self.events
            if isinstance(event, ProcessLost)
        ]


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop, and fail if it hangs. What it does on threads it does in order: `settled` knows the
    end of it."""

    async def whole(**given: Any) -> None:
        complaints: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        await asyncio.wait_for(test(**given), 60.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        gc.collect()
        assert complaints == [], "asyncio says of no failure that nobody heard of it"

    return wraps(test)(lambda **given: asyncio.run(whole(**given)))


async def settled() -> None:
    """Until everything that waits for nothing has come as far as it can."""
    for _ in range(8):
        for _ in range(10):
            await asyncio.sleep(0)
        for thread in [one for one in threading.enumerate() if one.name in ("is_sound", "damaged_of")]:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(lambda: None)


def without_place(reason: str) -> str:
    """A reason without the line of the test's own code that raised it."""
    return re.sub(r" \(\w+\.py:\d+, in [\w<>]+\)", "", reason)
