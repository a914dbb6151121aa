"""The two store actors, which outlive replicas and trainer, and their clients as the hosts use them.

Groups are kept as the bytes they came in. Weights are kept as references into Ray's object store: the store asks the
trainer for them, and what a caller is answered belongs to the caller, so that they outlive the trainer without
passing through the store's memory.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from engine.actors.outbox import Batcher
from engine.actors.tensors import pack_tensors, unpack_tensors
from engine.actors.wire import pack_group, unpack_group
from engine.hosts.trajectories import StoreStats, TrajectoryStore
from engine.hosts.weights import WeightsStore
from engine.ids import GroupId, Version
from engine.trajectory import TrajectoryGroup

Packed = tuple[GroupId, int, bytes]
"""(group, attempt, pickled group)"""


class TrajectoryStoreActor:
    """A trajectory store in a process of its own."""

    def __init__(self) -> None:
        self._store: TrajectoryStore[bytes] = TrajectoryStore()

    async def put(self, groups: list[Packed]) -> None:
        for group, attempt, payload in groups:
            self._store.put(group, attempt, payload, len(payload))

    async def partial(self, group: GroupId) -> bytes | None:
        return self._store.partial(group)

    async def get(self, groups: list[GroupId]) -> list[bytes]:
        return self._store.get(groups)

    async def discard(self, groups: list[GroupId]) -> None:
        self._store.discard(groups)

    async def stats(self) -> StoreStats:
        return self._store.stats()


class RemoteTrajectories:
    """The store actor from a replica or the trainer. Puts that come up together go in one call."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._puts: Batcher[Packed] = Batcher(lambda groups: store.put.remote(list(groups)))

    async def put(self, group: TrajectoryGroup, attempt: int) -> None:
        await self._puts.put((group.group, attempt, pack_group(group)))

    async def partial(self, group: GroupId) -> TrajectoryGroup | None:
        packed = await self._store.partial.remote(group)
        return None if packed is None else unpack_group(packed)

    async def get(self, groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
        packed = await self._store.get.remote(list(groups))
        return await asyncio.to_thread(lambda: [unpack_group(one) for one in packed])

    async def discard(self, groups: Sequence[GroupId]) -> None:
        await self._store.discard.remote(list(groups))


class WeightsStoreActor:
    """Holds references to published versions; owns what they refer to."""

    def __init__(self) -> None:
        self._store = WeightsStore()

    async def pull(self, version: Version, publisher: Any) -> None:
        """Have the weights of a version from the trainer; returns once they are in the object store."""
        reference = publisher.give.remote(version)
        await reference
        self._store.put(version, reference)

    async def get(self, version: Version) -> list[Any]:
        """The reference in a list: Ray would take a bare one for the answer itself."""
        return [self._store.get(version)]

    async def retire(self, version: Version) -> None:
        self._store.retire(version)

    async def newest(self) -> Version:
        """The newest version ever put; 0 before the first."""
        return self._store.newest


class RemoteWeights:
    """The store actor from a replica or the trainer. The trainer's actor must have `give`, which calls `handed_out`."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._outgoing: dict[Version, Any] = {}

    async def put(self, version: Version, weights: Any) -> None:
        self._outgoing[version] = await asyncio.to_thread(pack_tensors, weights)
        try:
            await self._store.pull.remote(version, ray.get_runtime_context().current_actor)
        finally:
            del self._outgoing[version]

    def handed_out(self, version: Version) -> Any:
        """What the store is to be answered when it asks for a version."""
        return self._outgoing[version]

    async def get(self, version: Version) -> Any:
        (reference,) = await self._store.get.remote(version)
        return unpack_tensors(await reference)
