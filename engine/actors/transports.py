"""Moves published weights from the trainer to the weights store, and from there to the replicas.

Used by the weights clients and the store actor in `stores.py`; a plan chooses one transport for its whole run. Weights
that are not a mapping of tensors travel in the actors' answers with any transport. Must not import torch before weights
pass: some of these processes set their thread counts first, some never need it.
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
from engine.runtime.plan import Plan


class Transport(Protocol):
    """The steps of a transfer between three processes. `answer`: the open call to another actor."""

    @property
    def store_gpus(self) -> float:
        """GPUs of the store actor. If it has any, every actor that sends or receives needs one, too."""

    def pack(self, weights: Any) -> Any:
        """In the trainer, on a thread: prepare what is kept until the store has it."""

    def hand_out(self, packed: Any) -> Any:
        """In the trainer: the answer to the store."""

    async def keep(self, answer: Any) -> Any:
        """In the store: what is kept, from the trainer's answer. Does not need the trainer after it returns."""

    def give(self, kept: Any, reader: ReplicaId | None) -> Any:
        """In the store: the answer to a replica or, with None, to a restored trainer, which needs complete weights."""

    async def take(self, answer: Any) -> Any:
        """In a replica or a restored trainer: the weights, from the store's answer."""


@dataclass(frozen=True, slots=True)
class ObjectStoreTransport:
    """Sends weights through Ray's object store. The store actor keeps a reference, and the tensors belong to its
    caller, so they survive the trainer without passing through the store's memory."""

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
        """The reference in a list, because Ray would resolve a bare one."""
        return [kept]

    async def take(self, answer: Any) -> Any:
        (reference,) = await answer
        return unpack_tensors(await reference)


def transport_of(plan: Plan) -> Transport:
    """The transport of a plan."""
    given: Transport | None = plan.transport
    return ObjectStoreTransport() if given is None else given


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedTransport:
    """Sends weights over `torch.distributed`, in one group of two for every transfer: `transfer.py`. The store actor
    holds the tensors and sends them to each replica that asks, to several at once."""

    backend: str
    bucket_bytes: int
    timeout_s: float
    """Seconds that either side waits for the other at any point."""

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
        """Raises: `EngineError` if the other side does not answer, ends or stalls."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answered = await answer
        except TimeoutError:
            raise EngineError(f"no offer of weights came within {self.timeout_s:g} s") from None
        return await asyncio.to_thread(_receive, answered) if isinstance(answered, Offer) else answered


@dataclass(frozen=True, slots=True)
class VllmTransport:
    """Sends weights to the store over `torch.distributed`, and from there by vLLM's own weight transfer during a
    replica's install; the store acts as vLLM's trainer: `senders.py`. The answer to a replica holds only metadata."""

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
        """Keep the tensors on the store's GPU, if it has one, so that an install does not wait for a copy."""
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
    from engine.actors import transfer  # imports torch, so never on an event loop

    return transfer.receive(offered)


def _tensors(weights: Any) -> bool:
    """Whether weights are a mapping of tensors; false if torch was never imported."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(weights, Mapping)
        and bool(weights)
        and all(isinstance(value, torch.Tensor) for value in weights.values())
    )
