"""The time to stage a weights version on a replica: through Ray's object store, and over `torch.distributed`.

Run by hand: `python benchmarks/transport.py [--megabytes 200] [--bucket-mb 64]`. Two more processes take part, as in a
run: the weights store, and a replica that receives a version and copies it into host memory if its transport has not
done so. Transports are measured in turn in one run; figures are medians.
"""

import argparse
import statistics
import time
from typing import Any

import ray
import torch

from engine.actors.launch import connect
from engine.actors.store_actors import RemoteWeights, WeightsStoreActor
from engine.actors.transports import DistributedTransport, ObjectStoreTransport, Transport
from engine.rollout.torch.host_weights import stage
from engine.runtime.plan import DistributedSettings
from engine.storage.weights import WeightsStore

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

    async def give(self, version: int) -> Any:
        return self._weights.handed_out(version)

    async def publish(self, version: int) -> float:
        started = time.perf_counter()
        await self._weights.put(version, {name: value.clone() for name, value in self._model.state_dict().items()})
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
        return seconds, sum(tensor.nbytes for tensor in staged.tensors.values())


def measure(transports: dict[str, Transport], megabytes: int, rounds: int) -> None:
    ends: dict[str, tuple[Any, Any, Any]] = {}
    for name, transport in transports.items():
        store = ray.remote(Store).options(num_cpus=0).remote(transport)
        given = (store, transport, megabytes)
        publisher, replica = (ray.remote(kind).options(num_cpus=0).remote(*given) for kind in (Publisher, Replica))
        ends[name] = (store, publisher, replica)
    published: dict[str, list[float]] = {name: [] for name in transports}
    staged: dict[str, list[float]] = {name: [] for name in transports}
    size = 0
    for version in range(1, rounds + 2):
        for name, (store, publisher, replica) in ends.items():
            publishing = ray.get(publisher.publish.remote(version))
            staging, size = ray.get(replica.stage.remote(version))
            ray.get(store.retire.remote(version))
            if version > 1:  # the first one is a warm-up: imports, and new memory pages
                published[name].append(publishing)
                staged[name].append(staging)
    print(f"{size / 1e6:.0f} MB, medians of {rounds}")
    for name in transports:
        seconds = statistics.median(staged[name])
        print(
            f"{name:20} staging {seconds:6.3f} s {size / seconds / 1e6:7.0f} MB/s"
            f"   publishing {statistics.median(published[name]):6.3f} s"
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
