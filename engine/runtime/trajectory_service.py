"""The trajectory store of a run: a service that executes calls on one thread, and its client.

Workers use the client. Over Ray the service is an actor; in one process it shares the event loop. It stores packed
groups and must never unpack them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import reason_of
from engine.ids import GroupId, StepId
from engine.runtime.wire import WAIT_S, GatheredCalls
from engine.states.process import TRAJECTORY_STORE
from engine.storage.durable_trajectories import DurableStore, StorePolicy
from engine.storage.group_codec import MAX_GROUP_BYTES, pack_group, pack_growth, unpack_group
from engine.storage.prefixes import Growth
from engine.storage.trajectories import ScoreRow, StoreStats, TrajectoryStore, pack_scores, unpack_scores
from engine.trajectory import TrajectoryGroup
from engine.workers.threads import OneThread, on_a_thread

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Packed = tuple[GroupId, int, bytes, bool]
"""(group, attempt, packed group or growth, whether it is a growth)"""
LARGEST_TOKEN_BYTES = 32
"""Upper bound of the bytes of a stored token, with its share of texts and spans."""
SMALL_BYTES = 1 << 16
"""Up to this total size, unpacking groups takes less time than starting a thread."""


class TrajectoryService:
    """The server of a trajectory store: on disk if it has a directory, otherwise in memory.

    One thread executes all calls in order, so a slow disk does not delay the event loop."""

    def __init__(self, directory: Path | None = None, policy: StorePolicy | None = None, fresh: bool = True) -> None:
        """`fresh`: `directory` must hold no trajectories; otherwise they are read."""
        self._thread = OneThread("trajectories")
        self._failed = asyncio.Event()
        self._reason = ""
        self._store: TrajectoryStore[bytes] | DurableStore = (
            TrajectoryStore(len) if directory is None else DurableStore(directory, policy, fresh=fresh)
        )

    async def alive(self) -> str:
        """Return only once a write has failed, with the reason."""
        await self._failed.wait()
        return self._reason

    async def put(self, groups: list[Packed]) -> None:
        def put_all() -> None:
            for group, attempt, payload, grows in groups:
                store = self._store.extend if grows else self._store.put
                store(group, attempt, payload)

        await self._write(put_all)

    async def replace(self, group: GroupId, attempt: int, payload: bytes) -> None:
        await self._write(self._store.replace, group, attempt, payload)

    async def partial(self, group: GroupId) -> bytes | None:
        return await self._call(self._store.partial, group)

    async def get(self, groups: list[GroupId]) -> list[bytes]:
        return await self._call(self._store.get, groups)

    async def put_scores(self, step: StepId, task: str, groups: list[GroupId], packed: list[bytes]) -> None:
        await self._write(self._store.put_scores, step, task, groups, packed)

    async def scores(self, step: StepId, task: str, groups: list[GroupId]) -> list[bytes]:
        return await self._call(self._store.scores, step, task, groups)

    async def discard(self, groups: list[GroupId], attempt: int | None = None) -> None:
        await self._write(self._store.discard, groups, attempt)

    async def stats(self) -> StoreStats:
        return await self._call(self._store.stats)

    async def close(self) -> None:
        """Close the store and release its directory."""
        await self._call(self._store.close)
        self._thread.abandon()

    async def _call(self, operation: Callable[..., Result], *given: Any) -> Result:
        return await self._thread.run(operation, *given)

    async def _write(self, change: Callable[..., object], *given: Any) -> None:
        """Change the store; returns once that is flushed. After a failure it never returns, so that no caller loses an
        attempt; `alive` then reports the failure and the run ends."""

        def keep() -> None:
            change(*given)
            self._store.flush()

        try:
            await self._thread.run(keep)
        except Exception as error:
            if not self._failed.is_set():
                log.exception("the trajectory store can no longer store data")
                self._reason = reason_of(error)
                self._failed.set()
            await asyncio.Event().wait()


async def unpacked(answer: Awaitable[Sequence[bytes | TrajectoryGroup]]) -> list[TrajectoryGroup]:
    """The groups in a store's answer, which may be packed. Large ones are unpacked on a thread."""
    packed = await answer

    def unpack() -> list[TrajectoryGroup]:
        return [unpack_group(one) if isinstance(one, bytes) else one for one in packed]

    small = sum(len(one) for one in packed if isinstance(one, bytes)) <= SMALL_BYTES
    return unpack() if small else await on_a_thread(unpack)


class Waits:
    """The open calls of one process."""

    def __init__(self) -> None:
        self._calls: dict[object, str] = {}

    @contextmanager
    def on(self, process: str) -> Iterator[None]:
        """Context manager around a call to a process, given by name."""
        call = object()
        self._calls[call] = process
        try:
            yield
        finally:
            del self._calls[call]

    @property
    def oldest(self) -> str:
        """The process that has not answered for longest; empty if no call is open."""
        return next(iter(self._calls.values()), "")


class PackedTrajectories:
    """The client of a `TrajectoryService`: packs groups, and sends concurrent puts in one call."""

    def __init__(self, store: Any, awaited: Callable[[str], AbstractContextManager[None]]) -> None:
        """`store`: has the methods of a `TrajectoryService`. `awaited(process)`: context manager for each call."""
        self._store = store
        self._awaited = awaited
        self._puts: GatheredCalls[Packed] = GatheredCalls(partial(self._call, store.put))

    async def _call(self, method: Callable[..., Awaitable[Any]], *given: Any) -> Any:
        with self._awaited(TRAJECTORY_STORE):
            return await method(*given)

    async def put(self, group: TrajectoryGroup, attempt: int, *, urgent: bool = True) -> None:
        """Return once the group is stored. If it is not urgent, it waits for other groups."""
        await self._puts.add((group.group, attempt, pack_group(group), False), 0.0 if urgent else WAIT_S)

    async def grow(self, growth: Growth, attempt: int) -> None:
        if growth.group.tokens * LARGEST_TOKEN_BYTES > MAX_GROUP_BYTES:  # appended parts must not exceed the limit
            await self.put(growth.group, attempt)
            return
        await self._puts.add((growth.group.group, attempt, pack_growth(growth), True))

    async def replace(self, group: TrajectoryGroup, attempt: int) -> None:
        await self._call(self._store.replace, group.group, attempt, pack_group(group))

    async def partial(self, group: GroupId) -> TrajectoryGroup | None:
        packed = await self._call(self._store.partial, group)
        return None if packed is None else unpack_group(packed)

    async def get(self, groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
        return await unpacked(self._call(self._store.get, list(groups)))

    async def put_scores(
        self, step: StepId, task: str, groups: Sequence[GroupId], scores: Sequence[Sequence[ScoreRow]]
    ) -> None:
        packed = [pack_scores(rows) for rows in scores]
        await self._call(self._store.put_scores, step, task, list(groups), packed)

    async def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[list[ScoreRow]]:
        packed = await self._call(self._store.scores, step, task, list(groups))
        return [unpack_scores(data) for data in packed]

    async def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        await self._call(self._store.discard, list(groups), attempt)
