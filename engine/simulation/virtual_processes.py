"""Implements the runtime's process port on a virtual clock: the real workers behind a network with delays and faults.

Used by `world.World`. Orders and events take time, and may be late or arrive twice. A process may die, hang or fail to
start. What a process runs is in `simulated_models`.
"""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec import structs

from engine.commands import MeasureRows, ResumeGroup, StartGroup
from engine.events import Event, GroupAborted, GroupGenerated, PrefixStored
from engine.ids import LifeNumber, StepId, Version
from engine.runtime.local.local_processes import WORKERS, LocalProcess, LocalStore, LocalTrajectories, LocalWeights
from engine.runtime.process_port import Key, Life, SentOrder, Sign
from engine.runtime.trajectory_service import Waits
from engine.simulation.simulated_models import Dice, Fault
from engine.states.process import ADDED_STATES, REPLICA, TRAINER, TRAJECTORY_STORE, WEIGHTS_STORE
from engine.trajectory import Prompt
from engine.workers.plan import Plan, Restore
from engine.workers.worker import Peers, Worker

Message = TypeVar("Message")


class VirtualChannel(Generic[Message]):
    """Messages from one process to another, which arrive in order: late if they are lost and resent, perhaps twice."""

    def __init__(self, dice: Dice, arrive: Callable[[Message], None]) -> None:
        self._dice = dice
        self._arrive = arrive
        self._batches: deque[list[Message]] = deque()
        """Messages that arrive at the same time."""
        self._last = 0.0
        """When the last of them arrive."""

    def send(self, message: Message) -> None:
        setting, loop = self._dice.setting, asyncio.get_running_loop()
        latency = self._dice.vary(setting.latency_s)
        if self._dice.chance(setting.faults.lose):
            latency *= 10
        at = max(loop.time() + latency, self._last)
        if not self._batches or at > self._last:
            self._last = at
            self._batches.append([])
            loop.call_at(at, self._arrive_together)
        self._batches[-1].append(message)
        if self._dice.chance(setting.faults.duplicate):
            self._batches[-1].append(copy(message))

    def _arrive_together(self) -> None:
        for message in self._batches.popleft():
            self._arrive(message)


class VirtualProcess(LocalProcess):
    """One life of a worker, which dies and hangs by chance."""

    def __init__(self, worker: Worker, waits: Waits, dice: Dice, late: bool) -> None:
        """`late`: the process starts after the launch, so its start takes time."""
        super().__init__(worker, waits, asyncio.Lock())
        self.hung = False
        """A hung process carries out no orders and reports nothing until it is replaced."""
        self.dead = False
        self._dice = dice
        self._late = late
        self._inbox = VirtualChannel(dice, self._take)

    async def bring_up(self, restore: Restore | None) -> None:
        faults = self._dice.setting.faults
        if self._late:
            if self.hung or self._dice.chance(faults.hang):
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(self._dice.setting.start_s)
            if self._dice.chance(faults.fail_start):
                raise Fault("fault")
        await super().bring_up(restore)

    def send(self, orders: Sequence[SentOrder]) -> None:
        for order in orders:
            self._inbox.send(order)

    def _take(self, order: SentOrder) -> None:
        faults, kind = self._dice.setting.faults, self.kind
        if kind != ADDED_STATES:
            self.hung |= self._dice.chance(faults.hang)
        elif self._dice.chance(faults.hang):
            return  # one coroutine of many hangs
        if self.hung or self.dead:
            return
        super().send([order])
        if (
            kind == REPLICA
            and isinstance(order.command, StartGroup | ResumeGroup | MeasureRows)
            and self._dice.chance(faults.die)
        ):
            self.die()
        elif kind not in (REPLICA, ADDED_STATES) and self._dice.chance(faults.die_trainer):
            asyncio.get_running_loop().call_later(self._dice.vary(self._dice.setting.sync_s), self.die)

    def die(self, reason: str = "fault") -> None:
        """End at once. Events that were sent before still arrive, perhaps after the loss is reported."""
        if not self.dead:
            self.dead = True
            asyncio.get_running_loop().call_later(self._dice.setting.latency_s, self._worker.break_down, reason)

    async def probe(self) -> Sign | None:
        if self.hung:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._dice.setting.latency_s)
        return None if self.dead else Sign(os.getpid(), self._waits.oldest)

    def kill(self, *, hung: bool = False) -> Awaitable[object] | None:
        self.dead = True
        return super().kill(hung=True)


def in_tokens(event: Event, size: int) -> Event:
    """The event of a world whose simulated tokens stand for `size` tokens each."""
    if size == 1 or not isinstance(event, GroupGenerated | GroupAborted | PrefixStored):
        return event
    if isinstance(event, GroupGenerated):
        return structs.replace(event, tokens=event.tokens * size, longest=event.longest * size)
    return structs.replace(event, tokens=event.tokens * size)


class VirtualProcesses:
    """Makes lives on the virtual clock."""

    goodbye_s: float = 30.0
    look_again_s: float | None = None

    def __init__(
        self,
        plan: Plan,
        trajectories: LocalTrajectories,
        weights: LocalWeights,
        dice: Dice,
        emit: Callable[[Event], None],
        report: Callable[[StepId, Mapping[str, Any]], None],
        launched: Callable[[], bool],
    ) -> None:
        """`launched()`: whether the run has begun."""
        self._plan = plan
        self._trajectories = trajectories
        self._weights = weights
        self._dice = dice
        self._emit = emit
        self._report = report
        self._launched = launched
        self.newest: dict[Key, VirtualProcess] = {}
        """The newest life of each process."""

    def make(self, kind: str, index: int, life: LifeNumber) -> VirtualProcess:
        outbox, waits = VirtualChannel(self._dice, self._emit), Waits()
        peers = Peers(
            trajectories=self._trajectories, weights=self._weights, report=self._report,
            emit=lambda event: self._send(process, outbox, event), ask_trainer=partial(self._ask_trainer, waits),
        )  # fmt: skip
        worker = WORKERS[kind](self._plan, index, life, peers)
        process = VirtualProcess(worker, waits, self._dice, self._launched())
        self.newest[kind, index] = process
        return process

    def _send(self, process: VirtualProcess, outbox: VirtualChannel[Event], event: Event) -> None:
        if not (process.hung or process.dead):
            outbox.send(in_tokens(event, self._dice.token_size))

    async def _ask_trainer(self, waits: Waits, steps: StepId) -> None:
        with waits.on(TRAINER):
            await self.newest[TRAINER, 0].hand_over(steps)

    def last(self, kind: str, index: int) -> bool:
        return kind == REPLICA and self._dice.chance(self._dice.setting.faults.stay_dead)

    def check(self, prompt: Prompt) -> None: ...

    def services(self) -> Mapping[str, Life]:
        return {kind: LocalStore(kind, self._trajectories) for kind in (TRAJECTORY_STORE, WEIGHTS_STORE)}

    async def room(self) -> int:
        return len(self._plan.lives())

    async def lacking(self, kind: str, replicas: int) -> None:
        return None

    async def published(self) -> Version:
        return self._weights.store.newest
