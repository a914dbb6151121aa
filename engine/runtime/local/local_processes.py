"""Implements the runtime's process port in one process: workers on the driver's event loop.

Created by `run.LocalRun`. A user's blocking calls run on threads. A hung call cannot be killed: its life is
abandoned and the next one starts.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from engine.errors import EngineError
from engine.events import Event
from engine.ids import GroupId, LifeNumber, ReplicaId, StepId, Version
from engine.runtime.process_port import Life, ProcessEnd, SentOrder, Sign
from engine.runtime.trajectory_service import PackedTrajectories, TrajectoryService, Waits, unpacked
from engine.states.process import REPLICA, TRAINER, TRAJECTORY_STORE
from engine.storage.group_codec import plain_prompt
from engine.storage.prefixes import Growth
from engine.storage.trajectories import (
    ScoreRow,
    StoreStats,
    Trajectories,
    TrajectoryStore,
    copy_group,
    pack_scores,
    size_of,
    unpack_scores,
)
from engine.storage.weights import Trained, WeightsStore
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.added_states import StateWorker
from engine.workers.plan import Plan, Restore
from engine.workers.replica import ReplicaWorker
from engine.workers.scorer import ScorerWorker
from engine.workers.trainer import TrainerWorker
from engine.workers.worker import Peers, Worker

# -- stores in memory --------------------------------------------------------------------------------------------------


class LocalTrajectories:
    """Stores and returns copies of groups, so that nobody can change a stored one."""

    def __init__(self) -> None:
        self.store = TrajectoryStore(size_of)

    async def put(self, group: TrajectoryGroup, attempt: int, *, urgent: bool = True) -> None:
        self.store.put(group.group, attempt, copy_group(group))

    async def grow(self, growth: Growth, attempt: int) -> None:
        await self.put(growth.group, attempt)

    async def replace(self, group: TrajectoryGroup, attempt: int) -> None:
        self.store.replace(group.group, attempt, copy_group(group))

    async def partial(self, group: GroupId) -> TrajectoryGroup | None:
        kept = self.store.partial(group)
        return None if kept is None else copy_group(kept)

    async def get(self, groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
        return [copy_group(group) for group in self.store.get(groups)]

    async def put_scores(
        self, step: StepId, task: str, groups: Sequence[GroupId], scores: Sequence[Sequence[ScoreRow]]
    ) -> None:
        self.store.put_scores(step, task, groups, [pack_scores(rows) for rows in scores])

    async def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[list[ScoreRow]]:
        return [unpack_scores(data) for data in self.store.scores(step, task, groups)]

    async def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        self.store.discard(groups, attempt)

    async def alive(self) -> str:
        """Never returns: memory does not fail."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None: ...

    async def stats(self) -> StoreStats:
        return self.store.stats()


class LocalWeights:
    """The weights store of this process, for workers."""

    def __init__(self) -> None:
        self.store = WeightsStore()

    async def put(self, version: Version | Trained, weights: Any) -> None:
        self.store.put(version, weights)

    async def get(self, version: Version | Trained) -> Any:
        return self.store.get(version)


# -- processes ---------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Seconds that a worker gets to close. Then its `close` is canceled."""


WORKERS: Mapping[str, type[Worker]] = {
    kind.kind: kind for kind in (ReplicaWorker, TrainerWorker, ScorerWorker, StateWorker)
}
"""By kind of process."""


class LocalProcess(Life):
    """One life of a worker."""

    def __init__(self, worker: Worker, waits: Waits, loading: asyncio.Lock) -> None:
        """`waits`: whom its worker waits for. `loading`: held by the worker that loads; libraries that load models are
        rarely thread-safe."""
        super().__init__(worker.kind, worker.index, worker.life)
        self._worker = worker
        self._waits = waits
        self._loading = loading
        self._closing: asyncio.Task[None] | None = None

    async def bring_up(self, restore: Restore | None) -> None:
        async with self._loading:
            if self._closing is not None:
                raise EngineError("the process was ended before it could load")
            await self._worker.open(restore)

    def join(self) -> None:
        assert isinstance(self._worker, ReplicaWorker)
        self._worker.join()

    def send(self, orders: Sequence[SentOrder]) -> None:
        for command, prompt in orders:
            self._worker.carry_out(command, prompt)

    async def probe(self) -> Sign | None:
        """Always answers, because the worker shares this event loop."""
        return Sign(os.getpid(), self._waits.oldest)

    async def lost(self) -> ProcessEnd:
        return ProcessEnd(await self._worker.breakdown(), self_reported=True)

    async def hand_over(self, steps: StepId) -> None:
        assert isinstance(self._worker, TrainerWorker)
        await self._worker.hand_over(steps)

    async def close(self) -> None:
        await asyncio.shield(self._close())

    def kill(self, *, hung: bool = False) -> Awaitable[object] | None:
        """Close it. The next life waits for that, because it may need the same resources."""
        if hung:
            self._worker.abandon()
        return self._close()

    def _close(self) -> "asyncio.Task[None]":
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close_in_time())
        return self._closing

    async def _close_in_time(self) -> None:
        closing = asyncio.get_running_loop().create_task(self._worker.close())
        _, unfinished = await asyncio.wait([closing], timeout=CLOSE_S)
        if unfinished:
            closing.cancel()
            log.warning("%s did not close within %g s, so its close is canceled", self._worker.name, CLOSE_S)


class LocalStore(Life):
    """The trajectory store of this process. It is lost when it can no longer store data."""

    def __init__(self, kind: str, store: TrajectoryService | LocalTrajectories) -> None:
        super().__init__(kind, 0, 0)
        self._store = store

    async def lost(self) -> ProcessEnd:
        return ProcessEnd(await self._store.alive(), self_reported=True)


class LocalProcesses:
    """Makes lives in this process."""

    goodbye_s: float = CLOSE_S
    look_again_s: float | None = None

    def __init__(
        self,
        plan: Plan,
        store: TrajectoryService | LocalTrajectories,
        weights: LocalWeights,
        emit: Callable[[Event], None],
        report: Callable[[StepId, Mapping[str, Any]], None],
        can_make: Callable[[ReplicaId], bool],
    ) -> None:
        """`can_make`: whether another life of a replica can be made."""
        self._plan = plan
        self._store = store
        self._weights = weights
        self._emit = emit
        self._report = report
        self._can_make = can_make
        self._trainer: LocalProcess | None = None
        self._loading = asyncio.Lock()

    def make(self, kind: str, index: int, life: LifeNumber) -> LocalProcess:
        waits = Waits()
        made = LocalProcess(WORKERS[kind](self._plan, index, life, self._peers(waits)), waits, self._loading)
        if kind == TRAINER:
            self._trainer = made
        return made

    def last(self, kind: str, index: int) -> bool:
        return kind == TRAINER or (kind == REPLICA and not self._can_make(index))

    def check(self, prompt: Prompt) -> None:
        if isinstance(self._store, TrajectoryService):
            plain_prompt(prompt)

    def services(self) -> Mapping[str, Life]:
        return {TRAJECTORY_STORE: LocalStore(TRAJECTORY_STORE, self._store)}

    async def room(self) -> int:
        return len(self._plan.lives())

    async def lacking(self, kind: str, replicas: int) -> None:
        return None

    async def published(self) -> Version:
        return self._weights.store.newest

    def _peers(self, waits: Waits) -> Peers:
        async def ask_trainer(steps: StepId) -> None:
            assert self._trainer is not None
            with waits.on(TRAINER):
                await self._trainer.hand_over(steps)

        return Peers(
            trajectories=self._client(waits),
            weights=self._weights,
            emit=self._emit,
            report=self._report,
            ask_trainer=ask_trainer,
        )

    def _client(self, waits: Waits) -> Trajectories:
        """The trajectory store, for one worker."""
        if isinstance(self._store, LocalTrajectories):
            return self._store
        return PackedTrajectories(self._store, waits.on)


class LocalStores:
    """The stores of this process, for the executor."""

    def __init__(self, store: TrajectoryService | LocalTrajectories, weights: LocalWeights) -> None:
        self._store = store
        self._weights = weights

    def read(self, groups: Sequence[GroupId]) -> Awaitable[list[TrajectoryGroup]]:
        return unpacked(self._store.get([*groups]))

    def discard(self, groups: Sequence[GroupId]) -> Awaitable[None]:
        return self._store.discard([*groups])

    def retire(self, version: Version) -> None:
        self._weights.store.retire(version)

    def cut_agents(self, groups: Sequence[GroupId]) -> bool:
        return False
