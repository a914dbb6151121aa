"""The time to publish a weights version and to stage it on two replicas of one machine, and the copies in its memory:
through Ray's object store, and over `torch.distributed`.

Run by hand: `python benchmarks/transport.py [--megabytes 200] [--bucket-mb 64]`. The other processes of a run take
part: the trainer's, which writes each version into its shared memory, the weights store, and the replicas. Copies are
the growth of the machine's shared memory (`Shmem`) while one version is published and staged, so nothing else may use
shared memory meanwhile. Transports are measured in turn in one run; figures are medians.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import ray
import torch

from engine.actors.launch import connect
from engine.actors.store_actors import RemoteWeights, WeightsStoreActor
from engine.actors.transports import DistributedTransport, ObjectStoreTransport, Transport
from engine.rollout.torch.host_weights import stage
from engine.runtime.plan import DistributedSettings
from engine.storage.weights import WeightsStore
from engine.training.shared_weights import Manifest, ReusedMemory

LAYER = 1 << 22
"""Number of float32 values in a large tensor. There is a small tensor for each large one."""


def model(megabytes: int) -> torch.nn.Module:
    side = int(LAYER**0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(max(1, (megabytes << 18) // LAYER))))


class Store(WeightsStoreActor):
    """The weights store without a run, so that it does not watch for the end of one."""

    def __init__(self, transport: Transport) -> None:
        self._store = WeightsStore()
        self._transport = transport


class Publisher:
    """The part of the trainer that publishes."""

    def __init__(self, store: Any, transport: Transport, megabytes: int) -> None:
        self._weights = RemoteWeights(store, transport)
        self._model = model(megabytes)
        self._memory = ReusedMemory(pins=False)

    async def give(self, version: int, *apart: bool) -> Any:
        return self._weights.handed_out(version, *apart)

    async def publish(self, version: int) -> float:
        """As a trainer does. Returns the seconds after its own copy."""
        tensors = self._model.state_dict()
        kinds = tuple(("float32", tuple(value.shape)) for value in tensors.values())
        names = tuple((name, place) for place, name in enumerate(tensors))
        memory = self._memory.take(Manifest(tensors=kinds, names=names))
        for place, value in enumerate(tensors.values()):
            memory.tensors[place].copy_(value)
        published = memory.complete()
        started = time.perf_counter()
        await self._weights.put(version, published)
        return time.perf_counter() - started


class Replica:
    """The part of a replica that stages weights."""

    def __init__(self, store: Any, transport: Transport, megabytes: int) -> None:
        self._weights = RemoteWeights(store, transport)
        self._model = model(megabytes)

    async def stage(self, version: int) -> tuple[float, int]:
        started = time.perf_counter()
        staged = stage(self._model.state_dict(), version, await self._weights.get(version))
        seconds = time.perf_counter() - started
        self._staged = staged  # until the next version
        return seconds, sum(tensor.nbytes for tensor in staged.tensors.values())


def shared_bytes() -> int:
    """Shared memory of this machine that is in use."""
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")]
    return int(line.split()[1]) * 1024


def measure(transports: dict[str, Transport], megabytes: int, rounds: int) -> None:
    ends: dict[str, tuple[Any, Any, list[Any]]] = {}
    for name, transport in transports.items():
        store = ray.remote(Store).options(num_cpus=0).remote(transport)
        made = [ray.remote(kind).options(num_cpus=0) for kind in (Publisher, Replica, Replica)]
        publisher, *replicas = [one.remote(store, transport, megabytes) for one in made]
        ends[name] = (store, publisher, replicas)
    published: dict[str, list[float]] = {name: [] for name in transports}
    staged: dict[str, list[float]] = {name: [] for name in transports}
    copies: dict[str, float] = {}
    size = 0
    for version in range(1, rounds + 2):
        for name, (store, publisher, replicas) in ends.items():
            before = shared_bytes()
            publishing = ray.get(publisher.publish.remote(version))
            results = ray.get([replica.stage.remote(version) for replica in replicas])
            size = results[0][1]
            copies.setdefault(name, (shared_bytes() - before) / size)  # later versions get memory of earlier ones
            ray.get(store.retire.remote(version))
            if version > 1:  # the first one is a warm-up: imports, and new memory pages
                published[name].append(publishing)
                staged[name].append(max(seconds for seconds, _ in results))
    print(f"{size / 1e6:.0f} MB, two replicas, medians of {rounds}")
    for name in transports:
        print(
            f"{name:20} publishing {statistics.median(published[name]):6.3f} s"
            f"   staging {statistics.median(staged[name]):6.3f} s   copies on the machine {copies[name]:.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the model")
    parser.add_argument("--bucket-mb", type=int, default=64, help="MiB of one message")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each; figures are medians")
    chosen = parser.parse_args()
    connect(object_store_bytes=max(chosen.megabytes * 4, 100) << 20)  # Ray needs 75 MiB
    try:
        gloo = DistributedSettings(backend="gloo", bucket_bytes=chosen.bucket_mb << 20, timeout_s=60.0)
        transports: dict[str, Transport] = {
            "object store": ObjectStoreTransport(),
            "distributed, gloo": DistributedTransport(gloo),
        }
        measure(transports, chosen.megabytes, chosen.rounds)
    finally:
        ray.shutdown()
