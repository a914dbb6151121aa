"""Finds installs that went wrong without an error: parameters without new weights, weights other than the published.

`rollout.vllm.worker_extension` calls it in a worker, `rollout.vllm.weight_receiver` in the replica, `actors.transports`
in the weights store. Pure.
"""

import hashlib
from collections.abc import Mapping, Set
from typing import Literal

import torch

WeightChecks = Literal["first", "always", "never"]
"""Which installs of an engine are checked: see `rollout.check_weights`."""


def not_loaded(parameters: Set[str], loaded: Set[str] | None, *, quantized: bool) -> list[str]:
    """The parameters of a model that an install left as they were, by vLLM's names (`qkv_proj` for its three parts).

    `loaded`: what the model's `load_weights` returned; a few models return None, and cannot be checked. Of a quantized
    model, a layer counts as loaded with any of its parameters, because vLLM computes the others (scales).
    """
    if loaded is None:
        return []
    if quantized:
        layers = {name.rpartition(".")[0] for name in loaded}
        return sorted(name for name in parameters if name.rpartition(".")[0] not in layers)
    return sorted(parameters - loaded)


def checksum(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes, as `compute_weight_checksums` of vLLM has it."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The checksum of each tensor by its name. Reads all of them: at about 1 GB/s on one core."""
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def differing(ones: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Names whose checksums differ, or that only one side has."""
    return sorted(name for name in {*ones, *others} if ones.get(name) != others.get(name))
