"""In-memory trajectory and weights stores for a run in one process.

Used by the hosts through `local.processes`. Trajectories on disk are in a `runtime.trajectories.TrajectoryService`."""

import asyncio
from collections.abc import Sequence
from typing import Any

from engine.hosts.scores import ScoreRow, pack_scores, unpack_scores
from engine.hosts.trajectories import StoreStats, TrajectoryStore, copy_group, size_of
from engine.hosts.weights import Trained, WeightsStore
from engine.ids import GroupId, StepId, Version
from engine.trajectory import TrajectoryGroup


class LocalTrajectories:
    """Stores groups unpacked and returns copies, so that a failed attempt cannot change the stored group."""

    def __init__(self) -> None:
        self.store: TrajectoryStore[TrajectoryGroup] = TrajectoryStore()

    async def put(self, group: TrajectoryGroup, attempt: int) -> None:
        self.store.put(group.group, attempt, group, size_of(group))

    async def replace(self, group: TrajectoryGroup, attempt: int) -> None:
        self.store.replace(group.group, attempt, group, size_of(group))

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
    def __init__(self) -> None:
        self.store = WeightsStore()

    async def put(self, version: Version | Trained, weights: Any) -> None:
        self.store.put(version, weights)

    async def get(self, version: Version | Trained) -> Any:
        return self.store.get(version)
