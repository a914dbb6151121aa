"""How published weights get from the trainer to the weights store and from there to the replicas.

Used by the weights clients and the store actor in `stores.py`; a plan names one for its whole run. Anything that is no
mapping of tensors goes in the actors' answers themselves, whatever the transport. Must not import torch before weights
pass: some of these processes set their threads first, some never need it.
"""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.actors.offer import Offer
from engine.actors.senders import KeptTensors, SentByStore, Wire
from engine.actors.tensors import pack_tensors, unpack_tensors
from engine.errors import EngineError
from engine.ids import ReplicaId


class Transport(Protocol):
    """What passes between three processes. `answer` is a call to another actor that is under way."""

    @property
    def store_gpus(self) -> float:
        """GPUs that the store actor takes for itself. With any, every actor at either end needs one of its own."""

    def pack(self, weights: Any) -> Any:
        """In the trainer, on a thread: what is kept until the store has taken it."""

    def hand_out(self, packed: Any) -> Any:
        """In the trainer: what the store is answered."""

    async def keep(self, answer: Any) -> Any:
        """In the store, from what the trainer answers: what is kept. Needs the trainer no more when it returns."""

    def give(self, kept: Any, reader: ReplicaId | None) -> Any:
        """In the store: what a replica is answered, or with None a trainer that is restored and needs them whole."""

    async def take(self, answer: Any) -> Any:
        """In a replica, or in a trainer that is restored, from what the store answers: the weights."""


@dataclass(frozen=True, slots=True)
class ObjectStoreTransport:
    """Through Ray's object store. The store actor keeps a reference: what a caller is answered belongs to the caller,
    so the tensors outlive the trainer without passing through the store's memory."""

    @property
    def store_gpus(self) -> float:
        return 0.0

    def pack(self, weights: Any) -> Any:
        return pack_tensors(weights)

    def hand_out(self, packed: Any) -> Any:
        return packed

    async def keep(self, answer: Any) -> Any:
        await answer
        return answer

    def give(self, kept: Any, reader: ReplicaId | None) -> Any:
        """The reference in a list: Ray would take a bare one for the answer itself."""
        return [kept]

    async def take(self, answer: Any) -> Any:
        (reference,) = await answer
        return unpack_tensors(await reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedTransport:
    """Over `torch.distributed`, one group of two for every transfer: `transfer.py`. The store actor holds the tensors
    and sends them to each replica that asks, to several at once if they do."""

    backend: str
    bucket_bytes: int
    timeout_s: float
    """How long either side waits for the other at any point."""

    @property
    def store_gpus(self) -> float:
        return {"gloo": 0.0, "nccl": 1.0}[self.backend]

    def pack(self, weights: Any) -> Any:
        return weights

    def hand_out(self, packed: Any) -> Any:
        if not _tensors(packed):
            return packed
        import ray

        from engine.actors import transfer

        return transfer.offer(
            packed,
            ray.util.get_node_ip_address(),
            backend=self.backend,
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.timeout_s,
        )

    async def keep(self, answer: Any) -> Any:
        return await self.take(answer)

    def give(self, kept: Any, reader: ReplicaId | None) -> Any:
        return self.hand_out(kept)

    async def take(self, answer: Any) -> Any:
        """Raises: `EngineError` when the other side does not answer, ends or stalls."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answered = await answer
        except TimeoutError:
            raise EngineError(f"no offer of weights came within {self.timeout_s:g} s") from None
        return await asyncio.to_thread(_receive, answered) if isinstance(answered, Offer) else answered


@dataclass(frozen=True, slots=True)
class VllmTransport:
    """Into the store over `torch.distributed`; from there, within a replica's install, by vLLM's own weight transfer,
    whose trainer the store plays: `senders.py`. A replica is answered what it must know beforehand, and no bytes."""

    inward: DistributedTransport
    wire: Wire

    @property
    def store_gpus(self) -> float:
        return self.inward.store_gpus

    def pack(self, weights: Any) -> Any:
        if not _tensors(weights):
            raise EngineError(f"vLLM's weight transfer takes tensors by name, not {type(weights).__name__}")
        return self.inward.pack(weights)

    def hand_out(self, packed: Any) -> Any:
        return self.inward.hand_out(packed)

    async def keep(self, answer: Any) -> Any:
        """On the store's own GPU if it has one, so that an install waits for the group alone."""
        weights = await self.inward.keep(answer)
        return await asyncio.to_thread(_kept, weights, self.inward.backend)

    def give(self, kept: Any, reader: ReplicaId | None) -> Any:
        if reader is None:
            return self.inward.give(kept.named(), None)
        import ray

        store = ray.get_runtime_context().current_actor
        return SentByStore(manifest=kept.manifest, wire=self.wire, store=store, reader=reader)

    async def take(self, answer: Any) -> Any:
        return await self.inward.take(answer)


def _kept(weights: Any, backend: str) -> KeptTensors:
    from engine.actors import transfer

    manifest, tensors = transfer.described(weights)
    device = transfer.BACKENDS[backend][1]
    return KeptTensors(manifest=manifest, tensors=tuple(tensor.to(device) for tensor in tensors))


def _receive(offered: Offer) -> Any:
    from engine.actors import transfer  # brings torch: not on an event loop

    return transfer.receive(offered)


def _tensors(weights: Any) -> bool:
    """Whether weights are tensors by name; where torch was never imported there are none."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(weights, Mapping)
        and bool(weights)
        and all(isinstance(value, torch.Tensor) for value in weights.values())
    )
