"""The two stores in this very process, as the hosts use them."""

from collections.abc import Sequence
from typing import Any

from engine.hosts.trajectories import TrajectoryStore, copy_group, size_of
from engine.hosts.weights import WeightsStore
from engine.ids import GroupId, Version
from engine.trajectory import TrajectoryGroup


class LocalTrajectories:
    """Keeps groups as they are; hands out partial ones as copies, so that a failed attempt leaves no trace."""

    def __init__(self) -> None:
        self.store: TrajectoryStore[TrajectoryGroup] = TrajectoryStore()

    async def put(self, group: TrajectoryGroup, attempt: int) -> None:
        self.store.put(group.group, attempt, group, size_of(group))

    async def partial(self, group: GroupId) -> TrajectoryGroup | None:
        kept = self.store.partial(group)
        return None if kept is None else copy_group(kept)

    async def get(self, groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
        return self.store.get(groups)

    async def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        self.store.discard(groups, attempt)


class LocalWeights:
    def __init__(self) -> None:
        self.store = WeightsStore()

    async def put(self, version: Version, weights: Any) -> None:
        self.store.put(version, weights)

    async def get(self, version: Version) -> Any:
        return self.store.get(version)
