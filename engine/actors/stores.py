"""The two store actors, which outlive replicas and trainer, and their clients as the hosts use them.

Groups are kept as the bytes they came in, on disk where the run's durability says so. Weights are asked of the trainer
and kept as the run's transport has them: as references into Ray's object store, or as tensors in the store actor's own
memory. Either way they outlive the trainer.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray

from engine.actors.lasting import end_when_orphaned
from engine.actors.outbox import Batcher
from engine.actors.process import PackedPlan
from engine.actors.senders import Senders, Wire
from engine.actors.sign import Watched, awaited
from engine.actors.transports import Transport
from engine.hosts.durable import DurableStore, StorePolicy
from engine.hosts.packed import pack_group, unpack_group
from engine.hosts.reasons import reason_of
from engine.hosts.scores import ScoreRow, pack_scores, unpack_scores
from engine.hosts.trajectories import StoreStats, TrajectoryStore
from engine.hosts.weights import Trained, WeightsStore
from engine.ids import GroupId, ReplicaId, StepId, Version
from engine.rollout.sent_weights import Call, Turn
from engine.states.process import TRAINER, TRAJECTORY_STORE, WEIGHTS_STORE
from engine.trajectory import TrajectoryGroup

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Packed = tuple[GroupId, int, bytes]
"""(group, attempt, packed group)"""


class TrajectoryStoreActor(Watched):
    """A trajectory store in its own process: on disk if it is given a directory, otherwise in memory.

    One thread executes all calls in order, so a slow disk does not delay heartbeats."""

    def __init__(
        self,
        plan: PackedPlan,
        scheduler: Any,
        directory: Path | None = None,
        policy: StorePolicy | None = None,
        fresh: bool = True,
    ) -> None:
        """`fresh`: `directory` must not hold trajectories yet; else what it holds is read."""
        plan.register_stacks("trajectories")
        end_when_orphaned(plan, scheduler)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._failed = asyncio.Event()
        self._reason = ""
        self._store: TrajectoryStore[bytes] | DurableStore = (
            TrajectoryStore() if directory is None else DurableStore(directory, policy, fresh=fresh)
        )

    async def alive(self) -> str:
        """Never answered while all is well; then with the reason. That the actor dies is known by the same call."""
        await self._failed.wait()
        return self._reason

    async def put(self, groups: list[Packed]) -> None:
        def put_all() -> None:
            for group, attempt, payload in groups:
                self._store.put(group, attempt, payload, len(payload))

        await self._write(put_all)

    async def replace(self, group: GroupId, attempt: int, payload: bytes) -> None:
        await self._write(self._store.replace, group, attempt, payload, len(payload))

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
        """Let go of the directory."""
        await self._call(self._store.close)

    async def _call(self, operation: Callable[..., Result], *given: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, operation, *given)

    async def _write(self, change: Callable[..., object], *given: Any) -> None:
        """Returns once what changed is kept. Where nothing more can be written it never does: that costs nobody an
        attempt, and whoever watches this actor ends the run."""

        def keep() -> None:
            change(*given)
            self._store.flush()

        try:
            await self._call(keep)
        except Exception as error:
            if not self._failed.is_set():
                log.exception("the trajectory store cannot store anything more")
                self._reason = reason_of(error)
                self._failed.set()
            await asyncio.Event().wait()


class RemoteTrajectories:
    """The store actor from a replica or the trainer. Puts that come up together go in one call."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._puts: Batcher[Packed] = Batcher(lambda groups: store.put.remote(list(groups)))

    async def put(self, group: TrajectoryGroup, attempt: int) -> None:
        with awaited(TRAJECTORY_STORE):
            await self._puts.put((group.group, attempt, pack_group(group)))

    async def replace(self, group: TrajectoryGroup, attempt: int) -> None:
        with awaited(TRAJECTORY_STORE):
            await self._store.replace.remote(group.group, attempt, pack_group(group))

    async def partial(self, group: GroupId) -> TrajectoryGroup | None:
        with awaited(TRAJECTORY_STORE):
            packed = await self._store.partial.remote(group)
        return None if packed is None else unpack_group(packed)

    async def get(self, groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
        with awaited(TRAJECTORY_STORE):
            packed = await self._store.get.remote(list(groups))
        return await asyncio.to_thread(lambda: [unpack_group(one) for one in packed])

    async def put_scores(
        self, step: StepId, task: str, groups: Sequence[GroupId], scores: Sequence[Sequence[ScoreRow]]
    ) -> None:
        with awaited(TRAJECTORY_STORE):
            await self._store.put_scores.remote(step, task, list(groups), [pack_scores(rows) for rows in scores])

    async def scores(self, step: StepId, task: str, groups: Sequence[GroupId]) -> list[list[ScoreRow]]:
        with awaited(TRAJECTORY_STORE):
            packed = await self._store.scores.remote(step, task, list(groups))
        return [unpack_scores(data) for data in packed]

    async def discard(self, groups: Sequence[GroupId], attempt: int | None = None) -> None:
        with awaited(TRAJECTORY_STORE):
            await self._store.discard.remote(list(groups), attempt)


class WeightsStoreActor(Watched):
    """Holds published versions for the replicas."""

    def __init__(self, plan: PackedPlan, scheduler: Any, transport: Transport) -> None:
        plan.register_stacks("weights")
        end_when_orphaned(plan, scheduler)
        self._store = WeightsStore()
        self._transport = transport
        self._senders = Senders()

    async def alive(self) -> None:
        """Never answered: that the actor dies is known by this call."""
        await asyncio.Event().wait()

    async def pull(self, version: Version | Trained, publisher: Any) -> None:
        """Have the weights of a version from the trainer; returns once they no longer need it."""
        with awaited(TRAINER):
            weights = await self._transport.keep(publisher.give.remote(version))
        self._store.put(version, weights)

    async def get(self, version: Version | Trained, reader: ReplicaId | None) -> Any:
        """What `Transport.take` makes weights of, for a replica or for a trainer."""
        return self._transport.give(self._store.get(version), reader)

    async def turn(self, reader: ReplicaId, wire: Wire, turn: Turn) -> Call | None:
        """A replica's engine takes its turn in getting weights: `SentByStore.exchange`."""
        return await self._senders.turn(reader, wire, turn, self._store.get)

    async def retire(self, version: Version) -> None:
        self._store.retire(version)

    async def newest(self) -> Version:
        """The newest version ever put; 0 before the first."""
        return self._store.newest


class RemoteWeights:
    """The store actor from a replica, the `reader`, or from the trainer or a scorer. The trainer's actor must have
    `give`, which calls `handed_out`."""

    def __init__(self, store: Any, transport: Transport, reader: ReplicaId | None = None) -> None:
        self._store = store
        self._transport = transport
        self._reader = reader
        self._outgoing: dict[Version | Trained, Any] = {}

    async def put(self, version: Version | Trained, weights: Any) -> None:
        self._outgoing[version] = await asyncio.to_thread(self._transport.pack, weights)
        try:
            with awaited(WEIGHTS_STORE):
                await self._store.pull.remote(version, ray.get_runtime_context().current_actor)
        finally:
            del self._outgoing[version]

    def handed_out(self, version: Version | Trained) -> Any:
        """What the store is to be answered when it asks for a version."""
        return self._transport.hand_out(self._outgoing[version])

    async def get(self, version: Version | Trained) -> Any:
        with awaited(WEIGHTS_STORE):
            return await self._transport.take(self._store.get.remote(version, self._reader))
