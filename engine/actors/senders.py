"""The weights store's side of transfers to an inference engine: one sender for each replica, and its calls.

Used by `stores.WeightsStoreActor`. A sender blocks, so it runs on a thread; its calls to the engine wait here until
the replica fetches them. Any failure ends the process group; the replica then forms a new one.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from engine.actors.sign import awaited
from engine.errors import EngineError
from engine.hosts.reasons import reason_of
from engine.ids import ReplicaId, Version
from engine.rollout.sent_weights import Answer, Call, Join, Manifest, Turn
from engine.states.process import WEIGHTS_STORE

GIVEN_UP = "the group was given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How bytes travel from the store to an engine's workers."""

    backend: str
    bucket_bytes: int
    timeout_s: float
    """Maximum seconds that either side waits for the other; NCCL has no such limit."""
    limit_s: float
    """Seconds that an engine may take for one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """A published version in the store's process: each tensor once, on the device from which it is sent."""

    manifest: Manifest
    tensors: tuple[Any, ...]

    def named(self) -> dict[str, Any]:
        return {name: self.tensors[index] for name, index in self.manifest.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentByStore:
    """A version in the store, as the `SentWeights` of a replica's engine."""

    manifest: Manifest
    wire: Wire
    store: Any
    reader: ReplicaId

    async def exchange(self, turn: Turn) -> Call | None:
        with awaited(WEIGHTS_STORE):
            call: Call | None = await self.store.turn.remote(self.reader, self.wire, turn)
        return call


class Senders:
    """At most one sender for each replica, for its newest incarnation."""

    def __init__(self) -> None:
        self._conversations: dict[ReplicaId, Conversation] = {}

    async def turn(
        self, reader: ReplicaId, wire: Wire, turn: Turn, held: Callable[[Version], KeptTensors]
    ) -> Call | None:
        """See `SentWeights.exchange`."""
        if isinstance(turn, Join):
            before = self._conversations.pop(reader, None)
            if before is not None:
                before.close()
            self._conversations[reader] = Conversation(turn.group, wire)
            return await self._conversations[reader].join(turn.workers)
        conversation = self._conversations.get(reader)
        if conversation is None or conversation.group != turn.group:
            raise EngineError(f"replica {reader} is no longer in the process group of this transfer")
        if isinstance(turn, Answer):
            return await conversation.answered(turn.wrong)
        kept = held(turn.version).named()
        return await conversation.send({name: kept[source] for name, source in turn.wanted})


class Conversation:
    """A sender and its calls to one engine, one at a time."""

    def __init__(self, group: str, wire: Wire) -> None:
        self.group = group
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._calls: asyncio.Queue[tuple[Call, concurrent.futures.Future[str]]] = asyncio.Queue()
        self._asked: concurrent.futures.Future[str] | None = None
        self._work: asyncio.Future[None] | None = None
        self._sender: Any = None

    async def join(self, workers: int) -> Call | None:
        return await self._begin(lambda: self._make(workers))

    async def send(self, tensors: dict[str, Any]) -> Call | None:
        return await self._begin(lambda: self._sender.send(tensors))

    async def answered(self, wrong: str) -> Call | None:
        if self._asked is None:
            raise EngineError("an answer arrived, but no call is open")
        asked, self._asked = self._asked, None
        asked.set_result(wrong)
        return await self._next()

    def close(self) -> None:
        """Give up the group: waiting calls fail, and no new ones start."""
        waiting = [] if self._asked is None else [self._asked]
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait()[1])
        self._asked = None
        for asked in waiting:
            asked.set_result(GIVEN_UP)
        if self._sender is not None:
            threading.Thread(target=self._sender.close, name=f"leave-{self.group}", daemon=True).start()

    async def _begin(self, work: Callable[[], None]) -> Call | None:
        if self._work is not None and not self._work.done():
            raise EngineError("the last transfer to this replica has not ended")
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
            self._loop.call_soon_threadsafe(self.close)
        self._loop.call_soon_threadsafe(_end, done, wrong)

    def _make(self, workers: int) -> None:
        from engine.rollout.vllm_args import prepare_environment

        prepare_environment(1)
        from engine.rollout.vllm_sender import Sender, trainer_info

        wire = self._wire
        host = ray.util.get_node_ip_address()
        info = trainer_info(wire.backend, host, workers, bucket_bytes=wire.bucket_bytes, timeout_s=wire.timeout_s)
        self._sender = Sender(self._ask, info)

    def _ask(self, call: Call) -> None:
        """On a thread: wait until the engine has executed a call. Raises: `EngineError` if it failed."""
        asked: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._calls.put_nowait, (call, asked))
        try:
            wrong = asked.result(self._wire.limit_s)
        except TimeoutError:
            wrong = f"no answer to {call.name} in {self._wire.limit_s:g} s"
        if wrong:
            raise EngineError(wrong)

    async def _next(self) -> Call | None:
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


def _end(done: asyncio.Future[None], wrong: EngineError | None) -> None:
    if wrong is None:
        done.set_result(None)
    else:
        done.set_exception(wrong)
        done.exception()  # retrieved, because its caller may be gone
