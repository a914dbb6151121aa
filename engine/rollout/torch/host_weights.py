"""Stages weights for a model: brings them to its device while it samples, and swaps them in between two tokens.

Called by `rollout.torch.torch_backend`: `stage` on the caller's thread, `swap_in` on the sampling thread. Must
never leave a model half swapped: it first checks and moves all tensors, and only then changes the pointers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.ids import Version
from engine.rollout.model_tensors import ModelTensors, require_mapping
from engine.training.shared_weights import PublishedTensors


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version's tensors by the names under which they were published, with the model's types, on its device."""

    version: Version
    tensors: dict[str, torch.Tensor]


def stage(own: Mapping[str, torch.Tensor], version: Version, weights: Any, *, shares: bool = False) -> StagedWeights:
    """Bring tensors (or arrays) by name to the types and device of the model's `own` tensors.

    Of `PublishedTensors`, which nobody writes, a tensor that already has them is used without a copy: all models of a
    machine share one copy. `shares`: other weights are never written either.
    """
    copy = not shares and not isinstance(weights, PublishedTensors)
    require_mapping(version, weights)
    tensors: dict[str, torch.Tensor] = {}
    staged: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, value in weights.items():
        source = torch.as_tensor(value).detach()
        wanted = own.get(name, source)
        place = (source.data_ptr(), source.shape, source.stride(), wanted.dtype, wanted.device)
        if place not in staged or source.numel() == 0:
            staged[place] = source.to(wanted.device, wanted.dtype, copy=copy).contiguous()
        tensors[name] = staged[place]  # tensors that share memory at the sender get one copy
    return StagedWeights(version, tensors)


def swap_in(own: Mapping[str, torch.Tensor], staged: StagedWeights) -> None:
    """Replace a model's `own` tensors by staged ones. If they do not fit, raises `EngineError` and changes nothing."""
    fitting = ModelTensors.named(own).checked(staged.version, staged.tensors)
    moved = {name: tensor.to(own[name].device) for name, tensor in fitting.items()}
    for name, tensor in moved.items():
        own[name].data = tensor
