"""Ends of transfers for tests, some of which die half way: run in processes of their own."""

import os
import signal
import socket
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine.rollout.sent_weights import Offer
from engine.rollout.torch import transfer
from engine.training.shared_weights import Manifest

HOST = "127.0.0.1"
LARGE = 1 << 20
"""Bytes of what is cut off half way, in `HALVES` messages."""
HALVES = 2


def sample() -> dict[str, torch.Tensor]:
    """One of every kind; the same in every process."""
    torch.manual_seed(5)
    large = torch.randn(300, 300)
    tied = torch.randn(33, 7)
    return {
        "float32": torch.tensor([0.1, -0.0, float("nan"), float("inf")]),
        "bfloat16": torch.randn(5, 3).bfloat16(),
        "float16": torch.randn(17).half(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "int64": torch.tensor([[2**62, -1]]),
        "uint8": torch.arange(255, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "large": large,
        "transposed": large.T,
        "every other": large[::2, ::3],
        "tied": tied,
        "tied too": tied.detach(),
        "not tied": tied.clone(),
    }


def differences(got: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not, to the bit, what `sample` is."""
    wanted = sample()
    wrong = [
        name
        for name, tensor in wanted.items()
        if name not in got
        or (got[name].dtype, got[name].shape) != (tensor.dtype, tensor.shape)
        or not torch.equal(bits(got[name]), bits(tensor))
    ]
    if list(got) != list(wanted) or got["tied"] is not got["tied too"] or got["tied"] is got["not tied"]:
        wrong.append("names")
    return wrong


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def take(offered: Offer) -> list[str]:
    return differences(transfer.receive(offered))


def large_offer(port: int, timeout_s: float) -> Offer:
    manifest = Manifest(tensors=(("uint8", (LARGE,)),), names=(("large", 0),))
    return Offer(
        host=HOST, port=port, manifest=manifest, publication=f"large-{port}", backend="gloo",
        bucket_bytes=LARGE // HALVES, timeout_s=timeout_s,
    )  # fmt: skip


def send_half(parent: Connection, deadly: bool) -> None:
    """Offer, send one message of two, then die, or wait for the parent to end."""
    listener = socket.create_server((HOST, 0))
    offered = large_offer(listener.getsockname()[1], 60.0)
    parent.send(offered)
    with transfer.joined(offered, transfer.SENDER, listener) as channel:
        while channel.heard() != transfer.WANTED:
            pass
        channel.send([torch.zeros(LARGE // HALVES, dtype=torch.uint8)])
        end(parent, deadly)


def receive_half(parent: Connection, deadly: bool) -> None:
    """Take one message of two, then die, or wait for the parent to end."""
    parent.send("up")
    offered: Any = replace(parent.recv(), timeout_s=60.0)
    with transfer.joined(offered, transfer.RECEIVER) as channel:
        channel.say(transfer.WANTED)
        channel.receive([torch.empty(LARGE // HALVES, dtype=torch.uint8)])
        end(parent, deadly)


def end(parent: Connection, deadly: bool) -> None:
    if deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    parent.recv()
