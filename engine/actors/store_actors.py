"""The two store actors, which survive replicas and trainer, and their clients for the workers.

The trajectory store keeps packed groups, on disk or in memory. The weights store fetches weights from the trainer and
keeps them as the run's transport requires: as the open file of the trainer's shared memory, as references into Ray's
object store, or as tensors in its own memory. Both survive the trainer.

With a `WeightsWire`, replicas get the newest version from the trainer's process instead. The store's copy is for those
that the trainer cannot serve: it has died, has published another version meanwhile, or does not answer.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray

from engine.actors.detached_actors import PackedPlan, end_when_orphaned, hide_gpus
from engine.actors.failures import HeartbeatActor, awaited, named, wait_for_end
from engine.actors.transports import Senders, SentByTrainer, Transport, publication_to_send, sender_module
from engine.errors import EngineError
from engine.ids import ReplicaId, Version
from engine.rollout.sent_weights import Join, Turn, WeightsCall
from engine.runtime.garbage_collection import collect_rarely, freeze_objects
from engine.runtime.trajectory_service import PackedTrajectories, TrajectoryService
from engine.states.process import TRAINER, WEIGHTS_STORE
from engine.storage.durable_trajectories import StorePolicy
from engine.storage.weights import Trained, WeightsStore
from engine.training.shared_weights import Manifest
from engine.workers.plan import WeightsWire

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
        self._publisher: Any = None

    async def alive(self) -> None:
        """Never returns. If the actor dies, Ray fails this call."""
        await asyncio.Event().wait()

    async def pull(self, version: Version | Trained, publisher: Any) -> None:
        """Fetch the weights of a version from the trainer; returns once the trainer is no longer needed."""
        with awaited(TRAINER):
            weights = await self._transport.keep(lambda apart: publisher.give.remote(version, apart))
        self._store.put(version, weights)
        self._publisher = publisher

    async def get(self, version: Version | Trained, apart: bool) -> Any:
        """See `Transport.give`."""
        return await self._transport.give(self._store.get(version), apart)

    async def publisher(self) -> Any:
        """The trainer's actor that has published last; it may be dead. Raises: `EngineError` if none has."""
        if self._publisher is None:
            raise EngineError("nothing has been published yet")
        return self._publisher

    async def retire(self, version: Version) -> None:
        self._store.retire(version)

    async def newest(self) -> Version:
        """The newest published version; 0 if there is none."""
        return self._store.newest


class RemoteWeights:
    """The client of the weights store actor, for a replica (the `reader`), the trainer or a scorer. With a `wire`, a
    replica gets what the trainer's process can send as `SentWeights`.

    The trainer's actor must have methods `give`, `manifest` and `turn`, which call `handed_out`, `manifest_to_send` and
    `turn`."""

    def __init__(
        self, store: Any, transport: Transport, reader: ReplicaId | None = None, wire: WeightsWire | None = None
    ) -> None:
        self._store = store
        self._transport = transport
        self._reader = reader
        self._wire = wire
        self._senders = None if wire is None else Senders(wire)
        self._outgoing: dict[Version | Trained, Any] = {}
        self._watches: dict[ReplicaId, asyncio.Task[None]] = {}

    async def prepare_to_send(self) -> None:
        """Import, before the trainer trains, the modules that a process group needs: an import may fail if two threads
        import the same modules at once. If the import fails, replicas get all versions from the store."""
        if self._senders is None:
            return
        try:
            await asyncio.to_thread(sender_module)
        except Exception:
            log.warning("the trainer's process cannot import vLLM, so it sends no weights", exc_info=True)
            self._senders = None

    async def put(self, version: Version | Trained, weights: Any) -> None:
        if self._senders is not None and not isinstance(version, Trained):
            weights = await asyncio.to_thread(publication_to_send, weights)
            await asyncio.to_thread(self._senders.hold, version, weights)
        self._outgoing[version] = await asyncio.to_thread(self._transport.pack, weights)
        try:
            with awaited(WEIGHTS_STORE):
                await self._store.pull.remote(version, ray.get_runtime_context().current_actor)
        finally:
            del self._outgoing[version]

    def handed_out(self, version: Version | Trained, apart: bool) -> Any:
        """The answer to the store when it fetches a version."""
        return self._transport.hand_out(self._outgoing[version], apart)

    def manifest_to_send(self, version: Version) -> Manifest:
        """See `Senders.manifest`."""
        return self._sending.manifest(version)

    async def turn(self, reader: ReplicaId, turn: Turn, replica: Any) -> WeightsCall | None:
        """See `Senders.turn`. `replica`: the actor of the reader. When it has ended, its group is closed."""
        sending = self._sending
        if isinstance(turn, Join):
            if reader in self._watches:
                self._watches[reader].cancel()
            self._watches[reader] = asyncio.ensure_future(self._leave_after(replica, reader))
        return await sending.turn(reader, turn)

    async def _leave_after(self, replica: Any, reader: ReplicaId) -> None:
        end = await wait_for_end(replica)
        log.info("the process group of replica %d is closed: %s", reader, end.reason)
        self._sending.leave(reader)

    @property
    def _sending(self) -> Senders:
        if self._senders is None:
            raise EngineError("the trainer's process sends no weights, because it cannot import vLLM")
        return self._senders

    async def get(self, version: Version | Trained) -> Any:
        sent = None if isinstance(version, Trained) else await self._offered(version)
        return await self._stored(version) if sent is None else sent

    async def _stored(self, version: Version | Trained) -> Any:
        with awaited(WEIGHTS_STORE):
            return await self._transport.take(lambda apart: self._store.get.remote(version, apart))

    async def _offered(self, version: Version) -> SentByTrainer | None:
        """For a replica: a version that the trainer's process can send; None if it cannot."""
        if self._reader is None or self._wire is None:
            return None
        try:
            async with asyncio.timeout(self._wire.timeout_s):
                with named():
                    trainer = await self._store.publisher.remote()
                    manifest = await trainer.manifest.remote(version)
        except (EngineError, TimeoutError) as error:
            said = str(error) or f"the trainer did not answer within {self._wire.timeout_s:g} s"
            log.warning("version %s is taken from the weights store: %s", version, said)
            return None
        return SentByTrainer(
            manifest=manifest, trainer=trainer, reader=self._reader, fetch=lambda: self._stored(version)
        )
