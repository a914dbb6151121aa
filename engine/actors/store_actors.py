"""The two store actors, which survive replicas and trainer, and their clients for the workers.

The trajectory store keeps packed groups, on disk or in memory. The weights store fetches weights from the trainer and
keeps them as the run's transport requires: as the open file of the trainer's shared memory, as references into Ray's
object store, or as tensors in its own memory. Both survive the trainer.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray

from engine.actors.detached_actors import PackedPlan, end_when_orphaned, hide_gpus
from engine.actors.failures import HeartbeatActor, awaited
from engine.actors.transports import Senders, Transport
from engine.ids import ReplicaId, Version
from engine.rollout.sent_weights import Turn, WeightsCall
from engine.runtime.garbage_collection import collect_rarely, freeze_objects
from engine.runtime.plan import WeightsWire
from engine.runtime.trajectory_service import PackedTrajectories, TrajectoryService
from engine.states.process import TRAINER, WEIGHTS_STORE
from engine.storage.durable_trajectories import StorePolicy
from engine.storage.weights import Trained, WeightsStore

log = logging.getLogger(__name__)


class Remote:
    """Wraps an actor so that its methods can be called without `.remote`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name).remote


class TrajectoryStoreActor(HeartbeatActor, TrajectoryService):
    """A trajectory store in its own process."""

    def __init__(
        self,
        plan: PackedPlan,
        scheduler: Any,
        directory: Path | None = None,
        policy: StorePolicy | None = None,
        fresh: bool = True,
    ) -> None:
        hide_gpus()
        plan.register_stacks("trajectories")
        end_when_orphaned(plan, scheduler)
        super().__init__(directory, policy, fresh)
        collect_rarely()
        freeze_objects()


def remote_trajectories(store: Any) -> PackedTrajectories:
    """The client of the trajectory store actor, for workers."""
    return PackedTrajectories(Remote(store), awaited)


class WeightsStoreActor(HeartbeatActor):
    """Holds published versions for the replicas, and the newest trained weights for scorers."""

    def __init__(self, plan: PackedPlan, scheduler: Any, transport: Transport) -> None:
        hide_gpus()
        plan.register_stacks("weights")
        end_when_orphaned(plan, scheduler)
        self._store = WeightsStore()
        self._transport = transport
        self._senders = Senders()

    async def alive(self) -> None:
        """Never returns. If the actor dies, Ray fails this call."""
        await asyncio.Event().wait()

    async def pull(self, version: Version | Trained, publisher: Any) -> None:
        """Fetch the weights of a version from the trainer; returns once the trainer is no longer needed."""
        with awaited(TRAINER):
            weights = await self._transport.keep(lambda apart: publisher.give.remote(version, apart))
        self._store.put(version, weights)

    async def get(self, version: Version | Trained, reader: ReplicaId | None, apart: bool) -> Any:
        """See `Transport.give`: for a replica or, with None, for a trainer or a scorer."""
        return await self._transport.give(self._store.get(version), reader, apart)

    async def turn(self, reader: ReplicaId, wire: WeightsWire, turn: Turn) -> WeightsCall | None:
        """One turn of a transfer to a replica's engine: see `SentByStore.exchange`."""
        return await self._senders.turn(reader, wire, turn, self._store.get)

    async def retire(self, version: Version) -> None:
        self._store.retire(version)

    async def newest(self) -> Version:
        """The newest published version; 0 if there is none."""
        return self._store.newest


class RemoteWeights:
    """The client of the weights store actor, for a replica (the `reader`), the trainer or a scorer. The trainer's actor
    must have a method `give` that calls `handed_out`."""

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

    def handed_out(self, version: Version | Trained, apart: bool) -> Any:
        """The answer to the store when it fetches a version."""
        return self._transport.hand_out(self._outgoing[version], apart)

    async def get(self, version: Version | Trained) -> Any:
        with awaited(WEIGHTS_STORE):
            return await self._transport.take(lambda apart: self._store.get.remote(version, self._reader, apart))
