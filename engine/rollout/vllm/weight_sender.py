"""The trainer's side of vLLM's weight transfer, for one engine: forms a group with its workers and sends versions.

`actors.transports` calls it in the trainer's process, on threads, where it may block. It is the only module of that
process that imports vLLM. After a failure it is closed and replaced; it must never be used with another group.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from engine.rollout.gloo_groups import family_of
from engine.rollout.sent_weights import WeightsCall
from engine.rollout.vllm.gloo_transfer import GlooTrainerInitInfo, register

register()


@dataclass(slots=True)
class HeldVersion(WeightSource):
    """The tensors of the version that is being sent, under the names in the engine's model."""

    tensors: Mapping[str, torch.Tensor]
    device: str
    """Where messages are assembled. A GPU reads the trainer's pinned memory at its link's full speed."""

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._in_order()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._in_order():
            yield name, tensor.to(self.device, non_blocking=True)

    def _in_order(self) -> list[tuple[str, torch.Tensor]]:
        """Wider types first, so that in packed messages each tensor is aligned to its type."""
        return sorted(self.tensors.items(), key=lambda item: -item[1].dtype.itemsize)


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """vLLM's `VLLMWeightSyncClient`: passes the calls of vLLM's trainer side to the engine through `ask`, which returns
    when the engine is done and raises if it failed."""

    ask: Callable[[WeightsCall], None]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.ask(WeightsCall(name="init_weight_transfer_engine", argument=init_info))

    def start_weight_update(self) -> None:
        self.ask(WeightsCall(name="start_weight_update"))

    def update_weights(self, update_info: Any) -> None:
        self.ask(WeightsCall(name="update_weights", argument=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.ask(WeightsCall(name="finish_weight_update"))


class Sender:
    """A group of this process and all workers of one engine. Every call blocks."""

    def __init__(self, ask: Callable[[WeightsCall], None], info: Any) -> None:
        """Raises: vLLM's exception if the group cannot be formed."""
        self._held = HeldVersion({}, "cpu" if isinstance(info, GlooTrainerInitInfo) else "cuda")
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=EngineCalls(ask), source=self._held)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Carry out one complete update. Raises: vLLM's exceptions of either side."""
        self._held.tensors = tensors
        try:
            self._trainer.send_weights()
        finally:
            self._held.tensors = {}

    def close(self) -> None:
        self._trainer.shutdown()


def trainer_info(backend: str, host: str, workers: int, *, bucket_bytes: int, timeout_s: float) -> Any:
    """What the sender needs to join a group with `workers` workers. For `nccl` it is vLLM's own class, which has no
    timeout."""
    listener = socket.create_server((host, 0), family=family_of(host))
    shape: dict[str, Any] = {
        "rank": 0,
        "master_address": host,
        "master_port": listener.getsockname()[1],
        "world_size": 1 + workers,
        "packed": True,
        "packed_buffer_size_bytes": bucket_bytes,
    }
    if backend == "nccl":
        listener.close()  # vLLM listens there itself
        return NCCLTrainerInitInfo(**shape)
    return GlooTrainerInitInfo(**shape, timeout_s=timeout_s, listener=listener)
