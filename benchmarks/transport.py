"""What each transport of weights costs: the time to publish a version, to stage it on replicas of one machine and to
install it, and the copies and bytes that this takes.

Run by hand: `python benchmarks/transport.py [--megabytes 200] [--bucket-mb 64]` for two replicas of the embedded
sampler, and `python benchmarks/transport.py --vllm` for one vLLM engine on the CPU with a model of 302 M parameters in
bfloat16, which also measures how long its sampling is stopped. The other processes of a run take part: the trainer's,
which writes each version into its shared memory, the weights store, and the replicas. Copies are the growth of the
machine's shared memory (`Shmem`) while one version is published and staged. Bytes are those that the machine sends over
all its network devices until the version is installed. Both are divided by the size of the version; nothing else may
use shared memory or the network meanwhile. Transports are measured in turn in one run; figures are medians.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from trainer import make_model

from engine.actors.private_cluster import connect
from engine.actors.store_actors import RemoteWeights, WeightsStoreActor
from engine.actors.transports import DistributedTransport, ObjectStoreTransport, Transport
from engine.rollout.sent_weights import Turn
from engine.rollout.torch.host_weights import stage
from engine.storage.weights import WeightsStore
from engine.training.shared_weights import Manifest, ReusedMemory
from engine.workers.plan import DistributedSettings, WeightsWire

LAYER = 1 << 22
"""Number of float32 values in a large tensor. There is a small tensor for each large one."""


def linear_model(megabytes: int) -> torch.nn.Module:
    side = int(LAYER**0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(max(1, (megabytes << 18) // LAYER))))


def model_at(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


class Store(WeightsStoreActor):
    """The weights store without a run, so that it does not watch for the end of one."""

    def __init__(self, transport: Transport) -> None:
        self._store = WeightsStore()
        self._transport = transport


class Publisher:
    """The part of the trainer that publishes."""

    def __init__(self, store: Any, transport: Transport, wire: WeightsWire | None, make: Any, *given: Any) -> None:
        self._weights = RemoteWeights(store, transport, wire=wire)
        self._model = make(*given)
        self._memory = ReusedMemory(pins=False)

    async def give(self, version: int, *apart: bool) -> Any:
        return self._weights.handed_out(version, *apart)

    async def manifest(self, version: int) -> Manifest:
        return self._weights.manifest_to_send(version)

    async def turn(self, reader: int, turn: Turn, replica: Any) -> Any:
        return await self._weights.turn(reader, turn, replica)

    async def publish(self, version: int) -> tuple[float, float]:
        """As a trainer does. Returns the seconds of its own copy, and after it."""
        started = time.perf_counter()
        tensors = self._model.state_dict(keep_vars=True)
        places = {id(value): index for index, value in enumerate({id(one): one for one in tensors.values()}.values())}
        each = {id(value): value.detach() for value in tensors.values()}.values()
        kinds = tuple((str(value.dtype).removeprefix("torch."), tuple(value.shape)) for value in each)
        names = tuple((name, places[id(value)]) for name, value in tensors.items())
        memory = self._memory.take(Manifest(tensors=kinds, names=names))
        for place, value in enumerate(each):
            memory.tensors[place].copy_(value)
        published = memory.complete()
        copied = time.perf_counter()
        await self._weights.put(version, published)
        return copied - started, time.perf_counter() - copied


class Replica:
    """The part of a replica that stages weights."""

    def __init__(self, store: Any, transport: Transport, megabytes: int) -> None:
        self._weights = RemoteWeights(store, transport)
        self._model = linear_model(megabytes)

    async def stage(self, version: int) -> tuple[float, int]:
        started = time.perf_counter()
        staged = stage(self._model.state_dict(), version, await self._weights.get(version))
        seconds = time.perf_counter() - started
        self._staged = staged  # until the next version
        return seconds, sum(tensor.nbytes for tensor in staged.tensors.values())


class VllmReplica:
    """One vLLM engine, which gets its weights through several transports, by name."""

    async def open(self, path: str, bucket_mb: int) -> None:
        from engine.rollout.vllm.vllm_backend import VllmBackend

        arguments = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 256}
        options: dict[str, Any] = {"weight_transfer": "gloo", "check_weights": "never", "bucket_mb": bucket_mb}
        self._backend = await asyncio.to_thread(lambda: VllmBackend(path, rows=8, engine_args=arguments, **options))
        self._sources: dict[str, RemoteWeights] = {}

    async def connect(self, name: str, store: Any, transport: Transport, wire: WeightsWire | None) -> None:
        self._sources[name] = RemoteWeights(store, transport, 0, wire)

    async def stage(self, name: str, version: int) -> float:
        started = time.perf_counter()
        await self._backend.stage(version, await self._sources[name].get(version))
        return time.perf_counter() - started

    async def install(self, version: int) -> float:
        """Returns the seconds in which nothing can be sampled."""
        started = time.perf_counter()
        await self._backend.pause("keep")
        await self._backend.install(version)
        await self._backend.resume()
        return time.perf_counter() - started

    async def alive(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._backend.close()


def shared_bytes() -> int:
    """Shared memory of this machine that is in use."""
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")]
    return int(line.split()[1]) * 1024


def looped_bytes() -> int:
    """Bytes that this machine has sent over all its network devices, the loopback device included."""
    return sum(counted.bytes_sent for counted in psutil.net_io_counters(pernic=True).values())


def measure(transports: dict[str, Transport], megabytes: int, rounds: int) -> None:
    ends: dict[str, tuple[Any, Any, list[Any]]] = {}
    for name, transport in transports.items():
        store = ray.remote(Store).options(num_cpus=0).remote(transport)
        publisher = ray.remote(Publisher).options(num_cpus=0).remote(store, transport, None, linear_model, megabytes)
        replicas = [ray.remote(Replica).options(num_cpus=0).remote(store, transport, megabytes) for _ in range(2)]
        ends[name] = (store, publisher, replicas)
    published: dict[str, list[float]] = {name: [] for name in transports}
    staged: dict[str, list[float]] = {name: [] for name in transports}
    copies: dict[str, float] = {}
    size = 0
    for version in range(1, rounds + 2):
        for name, (store, publisher, replicas) in ends.items():
            before = shared_bytes()
            _, publishing = ray.get(publisher.publish.remote(version))
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


@dataclass(slots=True)
class Measured:
    """The figures of one transport to a vLLM engine."""

    copying: list[float] = field(default_factory=list)
    publishing: list[float] = field(default_factory=list)
    staging: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    copies: float = 0.0

    def __str__(self) -> str:
        copying, publishing, staging, stopped, sent = map(
            statistics.median, (self.copying, self.publishing, self.staging, self.stopped, self.sent)
        )
        return (
            f"the trainer's copy {copying:6.3f} s   publishing after it {publishing:6.3f} s   staging {staging:6.3f} s"
            f"   sampling stopped {stopped:6.3f} s   copies on the machine {self.copies:.2f}   bytes sent {sent:.2f}"
        )


def measure_vllm(transports: dict[str, Transport], wires: dict[str, WeightsWire], bucket_mb: int, rounds: int) -> None:
    """`wires`: the settings of the transports with which the trainer's process sends to the engine."""
    with tempfile.TemporaryDirectory() as path:
        parameters = make_model(Path(path), False)
        replica = ray.remote(VllmReplica).options(num_cpus=0).remote()
        ray.get(replica.open.remote(path, bucket_mb))
        ends: dict[str, tuple[Any, Any]] = {}
        for name, transport in transports.items():
            store, wire = ray.remote(Store).options(num_cpus=0).remote(transport), wires.get(name)
            publisher = ray.remote(Publisher).options(num_cpus=0).remote(store, transport, wire, model_at, path)
            ray.get(replica.connect.remote(name, store, transport, wire))
            ends[name] = (store, publisher)
        results = {name: Measured() for name in transports}
        version = 0
        for turn in range(rounds + 1):
            for name, (store, publisher) in ends.items():
                version += 1
                shared, looped, result = shared_bytes(), looped_bytes(), results[name]
                copying, publishing = ray.get(publisher.publish.remote(version))
                staging = ray.get(replica.stage.remote(name, version))
                result.copies = result.copies or (shared_bytes() - shared) / (parameters * 2)
                stopped = ray.get(replica.install.remote(version))
                ray.get(store.retire.remote(version))
                if turn:  # the first one is a warm-up: imports, and new memory pages
                    result.copying.append(copying)
                    result.publishing.append(publishing)
                    result.staging.append(staging)
                    result.stopped.append(stopped)
                    result.sent.append((looped_bytes() - looped) / (parameters * 2))
        ray.get(replica.close.remote())
    print(f"{parameters / 1e6:.0f} M parameters in bfloat16, one vLLM engine, medians of {rounds}")
    for name, result in results.items():
        print(f"{name:20} {result}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the model for the embedded sampler")
    parser.add_argument("--vllm", action="store_true", help="measure one vLLM engine")
    parser.add_argument("--bucket-mb", type=int, default=64, help="MiB of one message")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each; figures are medians")
    chosen = parser.parse_args()
    connect(object_store_bytes=max(chosen.megabytes * 4, 100) << 20)  # Ray needs 75 MiB
    try:
        gloo: dict[str, Any] = {"backend": "gloo", "bucket_bytes": chosen.bucket_mb << 20, "timeout_s": 60.0}
        transports: dict[str, Transport] = {
            "object store": ObjectStoreTransport(),
            "distributed, gloo": DistributedTransport(DistributedSettings(**gloo)),
        }
        if chosen.vllm:
            transports["vllm, gloo"] = ObjectStoreTransport()
            wires = {"vllm, gloo": WeightsWire(**gloo, limit_s=300.0)}
            measure_vllm(transports, wires, chosen.bucket_mb, chosen.rounds)
        else:
            measure(transports, chosen.megabytes, chosen.rounds)
    finally:
        ray.shutdown()
