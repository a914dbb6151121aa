"""vLLM's NCCL weight transfer over gloo, for machines without NCCL and for tests without GPUs.

Registered in vLLM's two factories as `step_gloo`: the workers' side by `rollout.vllm.worker_extension`, the trainer's
side by `rollout.vllm.weight_sender`. Only the group and the transfer of bytes are ours. The calls, their order and
contents, and the loading into the model come from vLLM's dense NCCL engines, which these classes extend.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from math import prod
from typing import Any, ClassVar, Self

import torch
import torch.distributed as distributed
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from engine.rollout.gloo_groups import gloo_group, own_address
from engine.rollout.model_tensors import buckets

GLOO = "step_gloo"
Described = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, type, shape)"""


@cache
def register() -> None:
    """Register both sides with vLLM in this process, once: vLLM refuses a second registration."""
    WeightTransferEngineFactory.register_engine(GLOO, GlooWeightTransferEngine)
    WeightTransferTrainerFactory.register_engine(GLOO, GlooTrainerEngine)


@dataclass(kw_only=True)
class GlooInitInfo(NCCLWeightTransferInitInfo):
    """What a worker needs to join the group."""

    timeout_s: float


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):
    """What the sender needs to join the group."""

    backend: ClassVar[str] = GLOO

    timeout_s: float = 60.0
    """Seconds that either side waits for the other at any point."""
    listener: socket.socket | None = None
    """Listens at the address, so that no other process gets the port before the group is formed."""


class GlooGroup:
    """One end of a group whose rank 0 sends; only it has a `listener`. Every wait is bounded."""

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout_s: float, listener: socket.socket | None = None
    ) -> None:
        self._wait = timedelta(seconds=timeout_s)
        served: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
        self._store: Any = distributed.TCPStore(host, port, timeout=self._wait, wait_for_workers=False, **served)
        self._group: Any = gloo_group(self._store, rank, size, own_address(host, port), self._wait)

    def broadcast(self, flat: torch.Tensor) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("the process group was closed")
        group.broadcast(flat, 0).wait(self._wait)  # the handle would keep the connection alive

    def destroy(self) -> None:
        self._group = None
        self._store = None  # after the group, whose rendezvous was made over it


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """The worker's side."""

    init_info_cls = GlooInitInfo
    model_update_group: GlooGroup | None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self.shutdown()
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.model_update_group = GlooGroup(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Raises: `RuntimeError` if the sender has ended or is silent."""
        if self.model_update_group is None:
            raise RuntimeError("the sender did not join the process group")
        types = [getattr(torch, name) for name in update_info.dtype_names]
        shapes = [tuple(shape) for shape in update_info.shapes]
        described = list(zip(update_info.names, types, shapes, strict=True))
        for bucket in buckets(described, _bytes, self.packed_buffer_size_bytes):
            sizes = [_bytes(one) for one in bucket]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            self.model_update_group.broadcast(flat)
            # Copies, because a view may not be aligned to its type and vLLM keeps tensors until a layer is complete.
            parts = [part.clone() for part in flat.split(sizes)]
            whole = [
                (name, part.view(kind).view(shape)) for (name, kind, shape), part in zip(bucket, parts, strict=True)
            ]
            self.model.load_weights([(name, tensor.to(self.device)) for name, tensor in whole])


class GlooTrainerEngine(NCCLTrainerWeightTransferEngine):
    """The sender's side."""

    init_info_cls = GlooTrainerInitInfo
    model_update_group: GlooGroup | None

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        made = cls(client=client, source=source, packed_buffer_size_bytes=init_info.packed_buffer_size_bytes)
        where = (init_info.master_address, init_info.master_port)
        joining = GlooInitInfo(
            master_address=where[0],
            master_port=where[1],
            rank_offset=1,
            world_size=init_info.world_size,
            packed=init_info.packed,
            packed_buffer_size_bytes=init_info.packed_buffer_size_bytes,
            timeout_s=init_info.timeout_s,
        )
        with ThreadPoolExecutor(max_workers=1) as aside:  # during the call, the workers wait for this side
            asked = aside.submit(client.init_weight_transfer_engine, asdict(joining))
            made.model_update_group = GlooGroup(
                *where, 0, init_info.world_size, init_info.timeout_s, init_info.listener
            )
            asked.result()
        return made

    def _broadcast(self, source: Any, meta: Any) -> None:
        group = self.model_update_group
        assert group is not None
        pairs = self._checked_iter(source, meta)
        described = [(one.name, one.dtype, one.shape) for one in meta]
        for bucket in buckets(described, _bytes, self.packed_buffer_size_bytes):
            parts = [next(pairs)[1].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for _ in bucket]
            group.broadcast(torch.cat(parts))
        for _ in pairs:  # at its end, the iterator checks that it has sent all tensors
            pass


def _bytes(tensor: Described) -> int:
    return prod(tensor[2]) * tensor[1].itemsize
