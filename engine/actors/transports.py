"""Moves published weights from the trainer to the weights store, from there to the replicas, and from the trainer's
process to the engines of replicas.

The weights clients and the store actor in `store_actors.py` use it; a plan chooses one transport for its whole run.
With every transport, weights that are not a mapping of tensors are sent in the actors' answers. It must not import
torch before weights arrive, because some of these processes set their thread counts first and some never need torch.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Protocol

import ray

from engine.actors.failures import named
from engine.errors import EngineError, reason_of
from engine.ids import ReplicaId, Version
from engine.rollout.sent_weights import OUTDATED, Check, Join, Offer, Turn, WeightsAnswer, WeightsCall
from engine.training.shared_weights import (
    Manifest,
    PublishedTensors,
    copy_of,
    find,
    open_publication,
    publication_of,
    published_in,
)
from engine.workers.plan import DistributedSettings, Plan, WeightsWire

log = logging.getLogger(__name__)

# -- from the trainer's process to an inference engine -----------------------------------------------------------------


GIVEN_UP = "the process group of this transfer was closed"


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """A published version in the trainer's process, each tensor once."""

    manifest: Manifest
    tensors: tuple[Any, ...]
    hashing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def checksums(self) -> Mapping[str, str]:
        """By the names in the manifest. The first call hashes the tensors for all replicas; others wait for it."""
        with self.hashing:
            return self._checksums

    @cached_property
    def _checksums(self) -> Mapping[str, str]:
        from engine.rollout.vllm.weight_checks import checksums_of

        by_index = checksums_of({str(index): tensor for index, tensor in enumerate(self.tensors)})
        return {name: by_index[str(index)] for name, index in self.manifest.names}

    def named(self) -> dict[str, Any]:
        return {name: self.tensors[index] for name, index in self.manifest.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentByTrainer:
    """A version in the trainer's process, as the `SentWeights` of a replica's engine."""

    manifest: Manifest
    trainer: Any
    reader: ReplicaId
    fetch: Callable[[], Awaitable[Any]]
    """Gets the store's copy."""

    async def exchange(self, turn: Turn) -> WeightsCall | None:
        with named():
            replica = ray.get_runtime_context().current_actor
            call: WeightsCall | None = await self.trainer.turn.remote(self.reader, turn, replica)
        return call

    async def stored(self) -> Any:
        return await self.fetch()


class Senders:
    """The trainer's process as the sender of the newest published version. Each engine has a process group of its own,
    so an engine that dies or hangs delays no other. A replica has at most one group: that of its newest life."""

    def __init__(self, wire: WeightsWire) -> None:
        self._wire = wire
        self._newest: tuple[Version, HeldTensors] | None = None
        self._conversations: dict[ReplicaId, Exchange] = {}

    def hold(self, version: Version, weights: Mapping[str, Any]) -> None:
        """Keep a version, in place of the one before. The tensors must not change. Call it on a thread."""
        from engine.rollout.torch import transfer

        manifest, tensors = transfer.described(weights)
        self._newest = version, HeldTensors(manifest=manifest, tensors=tuple(tensors))

    def manifest(self, version: Version) -> Manifest:
        """Raises: `EngineError` if the version is not the newest that this process has published."""
        held = self._held_as(version)
        if held is None:
            raise EngineError(f"the trainer's process does not hold version {version}")
        return held.manifest

    async def turn(self, reader: ReplicaId, turn: Turn) -> WeightsCall | None:
        """See `SentWeights.exchange`."""
        if isinstance(turn, Join):
            self.leave(reader)
            self._conversations[reader] = Exchange(turn.group, self._wire)
            return await self._conversations[reader].join(turn.workers)
        held = None if isinstance(turn, WeightsAnswer) else self._held_as(turn.version)
        if isinstance(turn, Check):
            return OUTDATED if held is None else await asyncio.to_thread(_check_call, held, turn.wanted)
        conversation = self._conversations.get(reader)
        if conversation is None or conversation.group != turn.group:
            raise EngineError(f"replica {reader} is no longer in the process group of this transfer")
        if isinstance(turn, WeightsAnswer):
            return await conversation.answered(turn.wrong)
        if held is None:
            return OUTDATED
        tensors = held.named()
        return await conversation.send({name: tensors[source] for name, source in turn.wanted})

    def leave(self, reader: ReplicaId) -> None:
        """Close the group of a replica, if it has one."""
        conversation = self._conversations.pop(reader, None)
        if conversation is not None:
            conversation.close()

    def _held_as(self, version: Version) -> HeldTensors | None:
        return self._newest[1] if self._newest is not None and self._newest[0] == version else None


def _check_call(held: HeldTensors, wanted: Sequence[tuple[str, str]]) -> WeightsCall:
    checksums = held.checksums()
    return WeightsCall(name="compare_with", argument={name: checksums[source] for name, source in wanted})


def sender_module() -> ModuleType:
    """The module that sends weights. The first call imports vLLM, which takes many seconds."""
    from engine.rollout.vllm.engine_args import prepare_environment

    prepare_environment(1)
    from engine.rollout.vllm import weight_sender

    return weight_sender


class Exchange:
    """A sender and its calls to one engine, one at a time."""

    def __init__(self, group: str, wire: WeightsWire) -> None:
        self.group = group
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._calls: asyncio.Queue[tuple[WeightsCall, concurrent.futures.Future[str]]] = asyncio.Queue()
        self._asked: concurrent.futures.Future[str] | None = None
        self._work: asyncio.Future[None] | None = None
        self._sender: Any = None
        self._closed = False

    async def join(self, workers: int) -> WeightsCall | None:
        return await self._begin(lambda: self._make(workers))

    async def send(self, tensors: dict[str, Any]) -> WeightsCall | None:
        sender = self._sender
        if sender is None:
            raise EngineError(GIVEN_UP)
        return await self._begin(lambda: sender.send(tensors))

    async def answered(self, wrong: str) -> WeightsCall | None:
        if self._asked is None:
            if self._work is not None and self._work.done():
                self._work.result()  # raises why the work ended during the call
            raise EngineError("an answer arrived, but no call is open")
        asked, self._asked = self._asked, None
        asked.set_result(wrong)
        return await self._next()

    def close(self) -> None:
        """Close the group: waiting calls fail, and no new ones start. A group that is still being formed is closed
        once it is formed."""
        self._closed = True
        waiting = [] if self._asked is None else [self._asked]
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait()[1])
        self._asked = None
        for asked in waiting:
            asked.set_result(GIVEN_UP)
        sender, self._sender = self._sender, None
        if sender is not None:
            threading.Thread(target=sender.close, name=f"leave-{self.group}", daemon=True).start()

    async def _begin(self, work: Callable[[], None]) -> WeightsCall | None:
        if self._work is not None and not self._work.done():
            raise EngineError("the previous transfer to this replica has not ended")
        self._work = self._loop.create_future()
        threading.Thread(target=self._do, args=(work, self._work), name=f"send-{self.group}", daemon=True).start()
        return await self._next()

    def _do(self, work: Callable[[], None], done: asyncio.Future[None]) -> None:
        """On a thread."""
        wrong: EngineError | None = None
        try:
            work()
        except Exception as error:
            wrong = EngineError(f"the weights could not be sent: {reason_of(error)}")
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            self._loop.call_soon_threadsafe(self._end, done, wrong)

    def _end(self, done: asyncio.Future[None], wrong: EngineError | None) -> None:
        if wrong is None:
            done.set_result(None)
            return
        self.close()
        done.set_exception(wrong)
        done.exception()  # retrieved, because its caller may be gone

    def _make(self, workers: int) -> None:
        vllm, wire = sender_module(), self._wire
        host = ray.util.get_node_ip_address()
        info = vllm.trainer_info(wire.backend, host, workers, bucket_bytes=wire.bucket_bytes, timeout_s=wire.timeout_s)
        self._loop.call_soon_threadsafe(self._hold, vllm.Sender(self._ask, info))

    def _hold(self, sender: Any) -> None:
        self._sender = sender
        if self._closed:
            self.close()

    def _ask(self, call: WeightsCall) -> None:
        """On a thread: wait until the engine has executed a call. Raises: `EngineError` if it failed. Then the group is
        closed: another thread may be sending to workers that do not receive, which would hang over NCCL."""
        asked: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._put, call, asked)
        try:
            wrong = asked.result(self._wire.limit_s)
        except TimeoutError:
            wrong = f"the engine did not answer {call.name} within {self._wire.limit_s:g} s"
        if wrong:
            self._loop.call_soon_threadsafe(self.close)
            raise EngineError(wrong)

    def _put(self, call: WeightsCall, asked: "concurrent.futures.Future[str]") -> None:
        if self._closed:
            asked.set_result(GIVEN_UP)
        else:
            self._calls.put_nowait((call, asked))

    async def _next(self) -> WeightsCall | None:
        """The next call for the engine; None if the work is done. Raises the exception that ended the work."""
        assert self._work is not None
        asking = asyncio.ensure_future(self._calls.get())
        both: list[asyncio.Future[Any]] = [asking, self._work]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            call, self._asked = asking.result()
            return call
        asking.cancel()
        self._work.result()
        return None


# -- tensors in Ray's object store -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Arrays and torch types by name. Types that numpy lacks are stored as integers of the same width."""

    arrays: dict[str, Any]
    types: dict[str, str]
    publication: str


def pack_tensors(weights: Any) -> Any:
    """A mapping of tensors as `PackedTensors`; a tensor with several names becomes one array."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(weights, Mapping) or not weights:
        return weights
    if not all(isinstance(value, torch.Tensor) for value in weights.values()):
        return weights
    arrays: dict[str, Any] = {}
    types: dict[str, str] = {}
    seen: dict[int, Any] = {}
    for name, tensor in weights.items():
        if id(tensor) not in seen:
            plain = tensor.detach().cpu().contiguous()
            if plain.dtype.is_floating_point and plain.dtype not in (torch.float16, torch.float32, torch.float64):
                width = {1: torch.uint8, 2: torch.int16}[plain.element_size()]
                seen[id(tensor)] = plain.view(width).numpy()
            else:
                seen[id(tensor)] = plain.numpy()
        arrays[name] = seen[id(tensor)]
        types[name] = str(tensor.dtype).removeprefix("torch.")
    return PackedTensors(arrays, types, publication_of(weights))


def unpack_tensors(packed: Any) -> Any:
    """The tensors. They share memory with the arrays and must not be written."""
    if isinstance(packed, PackedMemory):
        return published_in(packed.bytes, packed.manifest, packed.publication)
    if not isinstance(packed, PackedTensors):
        return packed
    import numpy as np
    import torch

    seen: dict[int, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, array in packed.arrays.items():
            if id(array) not in seen:
                tensor = torch.from_numpy(np.asarray(array))
                wanted = getattr(torch, packed.types[name])
                seen[id(array)] = tensor if tensor.dtype == wanted else tensor.view(wanted)
    return PublishedTensors({name: seen[id(array)] for name, array in packed.arrays.items()}, packed.publication)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMemory:
    """A copy of the shared memory of a publication, for other machines."""

    bytes: Any
    """An array."""
    manifest: Manifest
    publication: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlace:
    """A publication in the shared memory of a machine, where other processes find it."""

    manifest: Manifest
    publication: str
    pid: int
    """A process that has it."""


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Published tensors in the trainer's shared memory, until the store has them."""

    tensors: PublishedTensors
    place: SharedPlace


def place_of(weights: Any) -> SharedPlace | None:
    """Where other processes of this machine find published tensors; None if they cannot."""
    if not isinstance(weights, PublishedTensors):
        return None
    handle = open_publication(weights.publication, os.getpid())
    if handle is None:
        return None
    os.close(handle)
    from engine.rollout.torch import transfer

    manifest, _ = transfer.described(weights)
    return SharedPlace(manifest=manifest, publication=weights.publication, pid=os.getpid())


class HeldMemory:
    """In the store: a publication in the shared memory of its machine, which stays until nothing refers to it."""

    def __init__(self, place: SharedPlace, handle: int) -> None:
        """`handle`: the open file, which this closes."""
        self.place = replace(place, pid=os.getpid())
        self._handle = handle
        self._copying: asyncio.Future[Any] | None = None
        weakref.finalize(self, os.close, handle)

    @classmethod
    def of(cls, place: SharedPlace) -> "HeldMemory | None":
        """None if it is on another machine, or this process may not read it."""
        handle = open_publication(place.publication, place.pid)
        return None if handle is None else cls(place, handle)

    async def copied(self) -> Any:
        """A reference to a copy in Ray's object store, which all other machines share."""
        if self._copying is None or (self._copying.done() and self._copying.exception() is not None):
            self._copying = asyncio.ensure_future(asyncio.to_thread(self._copy))
        return await asyncio.shield(self._copying)

    def _copy(self) -> Any:
        import numpy as np

        memory = mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ)
        whole = np.frombuffer(memory, dtype=np.uint8)
        place = self.place
        return ray.put(PackedMemory(bytes=whole, manifest=place.manifest, publication=place.publication))


# -- the transports ----------------------------------------------------------------------------------------------------


Ask = Callable[[bool], Any]
"""Calls another actor. The argument says that this machine cannot map the weights. If it is false, the answer may be a
`SharedPlace`."""


class Transport(Protocol):
    """The steps of a transfer between three processes. `ask`: calls the actor that has the weights."""

    @property
    def store_gpus(self) -> float:
        """GPUs of the store actor. If it has any, every actor that sends or receives needs one, too."""

    def pack(self, weights: Any) -> Any:
        """In the trainer, on a thread: the weights in the form that is kept until the store has them."""

    def hand_out(self, packed: Any, apart: bool) -> Any:
        """In the trainer: the answer to the store. `apart`: the store may be on another machine."""

    async def keep(self, ask: Ask) -> Any:
        """In the store: the weights in the form that is kept, from the trainer's answer. When it returns, the trainer
        is no longer needed."""

    async def give(self, kept: Any, apart: bool) -> Any:
        """In the store: the answer to a reader. `apart`: the reader may be on another machine."""

    async def take(self, ask: Ask) -> Any:
        """In a reader: the weights, from the store's answer."""


@dataclass(frozen=True, slots=True)
class ObjectStoreTransport:
    """Processes of one machine map the memory in which the trainer has published a version. It is held by the store
    actor, so it survives the trainer. To other machines, and if the memory cannot be mapped, weights go through Ray's
    object store: the store actor keeps a reference, and the tensors belong to its caller."""

    @property
    def store_gpus(self) -> float:
        return 0.0

    def pack(self, weights: Any) -> Any:
        place = place_of(weights)
        return pack_tensors(weights) if place is None else SharedTensors(weights, place)

    def hand_out(self, packed: Any, apart: bool) -> Any:
        if not isinstance(packed, SharedTensors):
            return packed
        return pack_tensors(packed.tensors) if apart else packed.place

    async def keep(self, ask: Ask) -> Any:
        reference = ask(False)
        answer = await reference
        if isinstance(answer, SharedPlace):
            held = HeldMemory.of(answer)
            if held is not None:
                return held
            reference = ask(True)
            await reference
        return reference

    async def give(self, kept: Any, apart: bool) -> Any:
        """References in a list, because Ray would resolve a bare one."""
        if not isinstance(kept, HeldMemory):
            return [kept]
        return [await kept.copied()] if apart else kept.place

    async def take(self, ask: Ask) -> Any:
        answer = await ask(False)
        if isinstance(answer, SharedPlace):
            try:
                found = await asyncio.to_thread(find, answer.manifest, answer.publication, answer.pid)
            except OSError:
                log.warning("shared weights cannot be mapped; they come through Ray's object store", exc_info=True)
                found = None
            if found is not None:
                return found
            answer = await ask(True)
        (reference,) = answer
        return unpack_tensors(await reference)


@dataclass(frozen=True, slots=True)
class DistributedTransport:
    """Sends weights over `torch.distributed`, in one group of two for every transfer: `rollout/torch/transfer.py`. The
    store actor holds the tensors and sends them to each replica that asks, to several at once."""

    settings: DistributedSettings

    @property
    def store_gpus(self) -> float:
        return {"gloo": 0.0, "nccl": 1.0}[self.settings.backend]

    def pack(self, weights: Any) -> Any:
        """Named, so that the processes of one machine know that they have the same."""
        return PublishedTensors(weights, publication_of(weights)) if _tensors(weights) else weights

    def hand_out(self, packed: Any, apart: bool) -> Any:
        if not _tensors(packed):
            return packed
        from engine.rollout.torch import transfer

        return transfer.offer(
            packed,
            ray.util.get_node_ip_address(),
            backend=self.settings.backend,
            bucket_bytes=self.settings.bucket_bytes,
            timeout_s=self.settings.timeout_s,
        )

    async def keep(self, ask: Ask) -> Any:
        return await self.take(ask)

    async def give(self, kept: Any, apart: bool) -> Any:
        return self.hand_out(kept, apart)

    async def take(self, ask: Ask) -> Any:
        """Raises: `EngineError` if the other side does not answer, ends or stalls."""
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                answered = await ask(True)
        except TimeoutError:
            raise EngineError(f"no offer of weights came within {self.settings.timeout_s:g} s") from None
        return await asyncio.to_thread(_receive, answered) if isinstance(answered, Offer) else answered


def transport_of(plan: Plan) -> Transport:
    """The transport to the store and from it."""
    if plan.transport is None or isinstance(plan.transport, WeightsWire):
        return ObjectStoreTransport()
    return DistributedTransport(plan.transport)


def wire_of(plan: Plan) -> WeightsWire | None:
    """How the trainer's process sends weights to replicas; None: replicas get them from the store only."""
    return plan.transport if isinstance(plan.transport, WeightsWire) else None


def publication_to_send(weights: Any) -> PublishedTensors:
    """Weights that a trainer publishes as tensors that do not change: a custom trainer's are copied. Call it on a
    thread. Raises: `EngineError` if the weights are not a mapping of tensors."""
    if isinstance(weights, PublishedTensors):
        return weights
    if not _tensors(weights):
        raise EngineError(f"vLLM's weight transfer takes tensors by name, not {type(weights).__name__}")
    memory, _ = copy_of(weights)
    try:
        return memory.complete()
    finally:
        memory.close()


def _receive(offered: Offer) -> Any:
    from engine.rollout.torch import transfer  # imports torch, so never on an event loop

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
