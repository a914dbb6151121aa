"""Processes of `test_shared_weights.py` and `test_staged_weights.py` that hold a publication. They import no more than
they need."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.rollout.torch import transfer
from engine.rollout.torch.host_weights import stage
from engine.rollout.vllm.mapped_weights import MappedTensors
from engine.training.shared_weights import (
    LINK,
    Manifest,
    Memory,
    PublishedTensors,
    ReusedMemory,
    find,
    publication_in,
    turn,
)

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "engine.rollout.torch.host_weights"])  # importing these takes seconds
WIDE = 4 << 20
"""float32 values of the large tensor."""


@contextmanager
def process(run: Any, *given: Any) -> Iterator[tuple[Any, Connection]]:
    ours, theirs = FORKS.Pipe()
    started = FORKS.Process(target=run, args=(theirs, *given), daemon=True)
    started.start()
    try:
        yield started, ours
    finally:
        started.kill()
        started.join()


def manifest() -> Manifest:
    return Manifest(
        tensors=(("float32", (WIDE,)), ("bfloat16", (3, 5)), ("float32", (0, 4))),
        names=(("wide", 0), ("odd", 1), ("odd too", 1), ("nothing", 2)),
    )


def inodes(pid: int, publication: str = "") -> set[int]:
    """Of the publications that a process holds."""
    folder = f"/proc/{pid}/fd"
    found: set[int] = set()
    for link in [f"{folder}/{handle}" for handle in os.listdir(folder)]:
        if os.path.islink(link) and os.readlink(link) == LINK:
            with open(link, "rb") as file:
                if publication in ("", publication_in(file.fileno())):
                    found.add(os.stat(link).st_ino)
    return found


def own_memory(pid: int) -> int:
    """Bytes of a process that it can share with no other."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))


def replica(link: Connection) -> None:
    """Stages and installs what it is offered, as the embedded sampler does, and keeps the installed version."""
    model = {"wide": torch.zeros(WIDE), "odd": torch.zeros(3, 5).bfloat16(), "nothing": torch.zeros(0, 4)}
    model["odd too"] = model["odd"]
    while True:
        offered = link.recv()
        staged = stage(model, 1, transfer.receive(offered))
        model = staged.tensors
        sums = (model["wide"].sum(dtype=torch.float64).item(), model["odd"].float().sum().item())
        digest = (*sums, model["odd"] is model["odd too"])
        del staged
        link.send((digest, own_memory(os.getpid()), inodes(os.getpid())))


def digest(tensor: torch.Tensor) -> float:
    """The sum of the bits of float32 values, which does not depend on the order."""
    return tensor.view(torch.int32).sum().item()


def worker(link: Connection, directory: str) -> None:
    """Reads a staged version as vLLM's workers do, and then keeps what it should not."""
    before = own_memory(os.getpid())
    staged = MappedTensors.of(Path(directory))
    assert staged is not None
    link.send({name: digest(tensor) for name, tensor in staged})
    after_reading = staged.in_use()
    tensors = dict(staged)
    link.send((after_reading, staged.in_use(), own_memory(os.getpid()) - before))
    del tensors


class Model:
    """Stands for vLLM's model runner."""

    def __init__(self) -> None:
        self.keeps = False
        self.loaded: dict[str, torch.Tensor] = {}

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Module()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = {name: tensor if self.keeps else tensor.clone() for name, tensor in weights}


def vllm_worker(link: Connection) -> None:
    """A worker with the engine's extension: carries out its calls, after which it answers with what it has loaded."""
    from vllm.config import VllmConfig

    from engine.rollout.vllm.worker_extension import WeightsExtension

    class Worker(WeightsExtension):
        vllm_config = VllmConfig()
        model_runner = Model()

        def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.model_runner.load(weights)

        def synchronize_device(self) -> None:
            """It has none."""

    worker = Worker()
    link.send("ready")
    while True:
        worker.model_runner.keeps, method, arguments = link.recv()
        wrong = getattr(worker, method)(*arguments)
        link.send((wrong, {name: digest(tensor) for name, tensor in worker.model_runner.loaded.items()}))


def fill(reused: ReusedMemory, value: float) -> PublishedTensors:
    """Publish tensors that have one value everywhere."""
    memory = reused.take(manifest())
    for tensor in memory.tensors:
        tensor.fill_(value)
    return memory.complete()


def values(weights: PublishedTensors | None) -> set[float]:
    """All that is in published tensors."""
    return {value for tensor in ({} if weights is None else weights).values() for value in tensor.unique().tolist()}


def reader(link: Connection) -> None:
    """Holds each publication that it is asked for, until it is asked for the next one. Says what it reads, again
    after each empty name."""
    held = None
    while True:
        publication = link.recv()
        if publication:
            held = None
            held = find(manifest(), publication)
        link.send(values(held))


def fill_again(link: Connection) -> None:
    """Publish, and then stop in the middle of the next publication into the same memory."""
    reused = ReusedMemory(pins=False)
    link.send(fill(reused, 1.0).publication)
    link.recv()
    memory = reused.take(manifest())
    memory.tensors[0][: WIDE // 2] = 2.0
    link.send("half")
    link.recv()


def hold(link: Connection, publication: str, complete: bool) -> None:
    """Take a turn and make a copy, all of it or a part, and keep it."""
    with turn(publication):
        memory = Memory(manifest(), publication)
        memory.tensors[0].fill_(7.0)
        kept = memory.complete() if complete else memory.tensors
        link.send("made")
        link.recv()
        del kept
