"""Transfers tensors between two processes, over a `torch.distributed` group of two for each transfer.

Called by `transports.DistributedTransport`, on threads; does not use Ray. Each group has its own store and does not use
`init_process_group`: torch's default group belongs to the user, and a group of all processes would break whenever a
replica joins or leaves. Every wait ends after `timeout_s`. Must never leave group, store or sockets open after the
transfer.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed

from engine.errors import EngineError
from engine.rollout.gloo_groups import family_of, gloo_group, own_address
from engine.rollout.sent_weights import Offer
from engine.training.shared_weights import Manifest, Memory, PublishedTensors, find, publication_of, turn

log = logging.getLogger(__name__)

SENDER, RECEIVER = 0, 1
"""Ranks."""
DONE, WANTED, WAITS = 0, 1, 2
"""Messages of a receiver: it has the tensors; the sender must send them; another receiver of its machine does not have
them yet."""


def offer(
    weights: Mapping[str, torch.Tensor], host: str, *, backend: str, bucket_bytes: int, timeout_s: float
) -> Offer:
    """Wait for one receiver at a free port of `host`, on a thread. Returns the offer to send to the receiver.

    The thread ends when the receiver has received everything, or has not responded for `timeout_s`. The tensors must
    not change until then. Raises: `OSError` if `host` is not an address of this machine, `EngineError` for tensors that
    are not dense.
    """
    manifest, tensors = described(weights)
    listener = socket.create_server((host, 0), family=family_of(host))
    result = Offer(
        host=host,
        port=listener.getsockname()[1],
        manifest=manifest,
        publication=publication_of(weights),
        backend=backend,
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
    )
    name = f"weights-{result.port}"
    threading.Thread(target=_serve, args=(result, listener, tensors), name=name, daemon=True).start()
    return result


def receive(offered: Offer) -> PublishedTensors:
    """The offered tensors, in memory that all processes of this machine share: one of them receives, and the others
    find what it has. Blocks, so call it on a thread.

    Needs at most one bucket of memory in addition to the tensors.
    Raises: `EngineError` if the sender is gone or has not responded for its `timeout_s`, or memory is lacking.
    """
    try:
        with joined(offered, RECEIVER) as channel:
            with turn(offered.publication, offered.timeout_s / 2, lambda: channel.say(WAITS)) as step:
                found = find(offered.manifest, offered.publication)
                if found is None:
                    channel.say(WANTED)
                    found = _received(offered, channel, step)
            channel.say(DONE)
    except (RuntimeError, OSError) as error:
        story = f"no weights from {offered.host}:{offered.port}: {_reason(error)}"
        raise EngineError(story, host=offered.host, port=offered.port) from None
    return found


def _received(offered: Offer, channel: "Channel", step: Callable[[], None]) -> PublishedTensors:
    memory = Memory(offered.manifest, offered.publication)
    try:
        for pieces in messages(memory.tensors, offered.bucket_bytes):
            channel.receive(pieces)
            step()
        return memory.complete()
    finally:
        memory.close()


def described(weights: Mapping[str, torch.Tensor]) -> tuple[Manifest, list[torch.Tensor]]:
    """The manifest of named tensors, and the distinct tensors. Raises: `EngineError` for one that is not dense."""
    tensors: list[torch.Tensor] = []
    places: dict[tuple[Any, ...], int] = {}
    names: list[tuple[str, int]] = []
    for name, tensor in weights.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise EngineError(f"{name} is {tensor.layout}: only dense tensors can be sent", name=name)
        # Tied names are often separate tensor objects on the same memory.
        memory = (tensor.device, tensor.data_ptr()) if tensor.numel() else (id(tensor),)
        place = (*memory, tensor.shape, tensor.stride(), tensor.dtype)
        if place not in places:
            places[place] = len(tensors)
            tensors.append(tensor.detach())
        names.append((name, places[place]))
    what = tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)
    return Manifest(tensors=what, names=tuple(names)), tensors


def messages(tensors: list[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """The bytes of all tensors, in order, as messages: lists of flat pieces with at most `bucket_bytes` in total."""
    pieces: list[torch.Tensor] = []
    room = bucket_bytes
    for tensor in tensors:
        rest = tensor.contiguous().reshape(-1).view(torch.uint8)
        while rest.numel():
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= pieces[-1].numel()
            if not room:
                yield pieces
                pieces, room = [], bucket_bytes
    if pieces:
        yield pieces


def _serve(offered: Offer, listener: socket.socket, tensors: list[torch.Tensor]) -> None:
    """The sender's thread. It only logs a failure, because the receiver reports it."""
    try:
        with joined(offered, SENDER, listener) as channel:
            # `DONE` comes when the receiver has everything: closing earlier would lose data in transit.
            while (answer := channel.heard()) != DONE:
                for pieces in messages(tensors, offered.bucket_bytes) if answer == WANTED else ():
                    channel.send(pieces)
    except (RuntimeError, OSError) as error:
        log.warning("weights offered at %s:%d were not received: %s", offered.host, offered.port, _reason(error))


class Channel:
    """One end of a group of two. Each call transfers one message. Raises: `RuntimeError`."""

    def __init__(self, group: Any, rank: int, device: str, wait: timedelta) -> None:
        self._group = group
        self._peer = 1 - rank
        self._device = torch.device(device)
        self._wait = wait

    def send(self, pieces: list[torch.Tensor]) -> None:
        bucket = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(self._device)
        # Do not store the handle: it would keep the connection open.
        self._group.send([bucket], self._peer, 0).wait(self._wait)

    def receive(self, pieces: list[torch.Tensor]) -> None:
        """Fill the pieces; a single piece is filled directly, without a bucket."""
        direct = len(pieces) == 1 and pieces[0].device == self._device
        size = sum(piece.numel() for piece in pieces)
        bucket = pieces[0] if direct else torch.empty(size, dtype=torch.uint8, device=self._device)
        self._group.recv([bucket], self._peer, 0).wait(self._wait)
        if not direct:
            for piece, got in zip(pieces, bucket.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(got)

    def say(self, answer: int) -> None:
        self.send([torch.tensor([answer], dtype=torch.uint8)])

    def heard(self) -> int:
        """The message of the other side."""
        answer = torch.empty(1, dtype=torch.uint8)
        self.receive([answer])
        return int(answer)

    def close(self) -> None:
        self._group = None


@contextmanager
def joined(offered: Offer, rank: int, listener: socket.socket | None = None) -> Iterator[Channel]:
    """Context manager: wait for the other side, and yield the channel to it. `listener`: the sender's socket."""
    wait = timedelta(seconds=offered.timeout_s)
    make, device = BACKENDS[offered.backend]
    served: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
    store = distributed.TCPStore(offered.host, offered.port, timeout=wait, wait_for_workers=False, **served)
    channel = Channel(make(store, rank, own_address(offered.host, offered.port), wait), rank, device, wait)
    try:
        yield channel
    finally:
        channel.close()  # before the store, which its rendezvous uses
        del store


def _gloo(store: Any, rank: int, host: str, wait: timedelta) -> Any:
    return gloo_group(store, rank, 2, host, wait)


def _nccl(store: Any, rank: int, host: str, wait: timedelta) -> Any:
    """A group of two GPUs. Untested."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # otherwise a wait ends before the message has arrived
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = wait
    return distributed.ProcessGroupNCCL(store, rank, 2, options)


BACKENDS: dict[str, tuple[Callable[[Any, int, str, timedelta], Any], str]] = {
    "gloo": (_gloo, "cpu"),
    "nccl": (_nccl, "cuda"),
}
"""By backend: the function that makes a group, and the device of its messages."""


def _reason(error: Exception) -> str:
    """The first line of torch's message, without its stack."""
    return str(error).strip().partition("\n")[0]
