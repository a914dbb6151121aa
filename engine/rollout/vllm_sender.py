"""The trainer's side of vLLM's weight transfer, for one engine: forms the group with its workers, sends versions.

Called by `actors.senders` in the weights store's process, on threads, where it may block; the only module of that
process that imports vLLM. Must never outlive its group: after a failure it is closed, and another one is made.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from engine.rollout.gloo import family_of
from engine.rollout.sent_weights import Call
from engine.rollout.vllm_gloo import GlooTrainerInitInfo, register

register()


@dataclass(slots=True)
class HeldVersion(WeightSource):
    """The tensors of the version that is being sent, by the names that the engine's model has for them."""

    tensors: Mapping[str, torch.Tensor]

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wider types first: where messages are packed, each tensor then begins where its type may."""
        return iter(sorted(self.tensors.items(), key=lambda item: -item[1].dtype.itemsize))


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """vLLM's `VLLMWeightSyncClient`: what its trainer's side asks of the engine, carried there by `ask`, which returns
    when it is done and raises where it failed."""

    ask: Callable[[Call], None]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.ask(Call(name="init_weight_transfer_engine", argument=init_info))

    def start_weight_update(self) -> None:
        self.ask(Call(name="start_weight_update"))

    def update_weights(self, update_info: Any) -> None:
        self.ask(Call(name="update_weights", argument=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.ask(Call(name="finish_weight_update"))


class Sender:
    """A group of this process and all workers of one engine. Every call blocks."""

    def __init__(self, ask: Callable[[Call], None], info: Any) -> None:
        """Raises: what vLLM raises when the group does not come about."""
        self._held = HeldVersion({})
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=EngineCalls(ask), source=self._held)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Carry out one whole update. Raises: what vLLM raises on either side."""
        self._held.tensors = tensors
        try:
            self._trainer.send_weights()
        finally:
            self._held.tensors = {}

    def close(self) -> None:
        self._trainer.shutdown()


def trainer_info(backend: str, host: str, workers: int, *, bucket_bytes: int, timeout_s: float) -> Any:
    """What the sender joins a group of `workers` workers with: vLLM's own info for `nccl`, which knows no timeout."""
    with socket.create_server((host, 0), family=family_of(host)) as free:
        port = free.getsockname()[1]
    shape: dict[str, Any] = {
        "rank": 0,
        "master_address": host,
        "master_port": port,
        "world_size": 1 + workers,
        "packed": True,
        "packed_buffer_size_bytes": bucket_bytes,
    }
    if backend == "nccl":
        return NCCLTrainerInitInfo(**shape)
    return GlooTrainerInitInfo(**shape, timeout_s=timeout_s)
