"""Finds installs that went wrong without an error: parameters without new weights, other weights than published.

`rollout.vllm.worker_extension` calls it in a worker, `rollout.vllm.weight_receiver` in the replica, `actors.transports`
in the weights store. It must keep no threads: some of these processes fork.
"""

import hashlib
import math
import os
import time
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch

WeightChecks = Literal["first", "always", "never"]
"""Which installs of an engine are checked: see `rollout.check_weights`."""
PART_BYTES = 1 << 20
"""Larger tensors are hashed in parts of this size, several at once."""
THREADS = min(8, os.cpu_count() or 1)
OVERDUE = "exceeded its time limit"
"""In the text of an error: an install or a check was cut, and nothing is known to be wrong."""


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
    """Of a tensor's bytes: their SHA-256; if they have several parts, the one of the parts' SHA-256."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if len(flat) <= PART_BYTES:
        return hashlib.sha256(flat).hexdigest()
    parts = [flat[start : start + PART_BYTES] for start in range(0, len(flat), PART_BYTES)]
    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(lambda part: hashlib.sha256(part).digest(), parts)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def checksums_of(tensors: Mapping[str, torch.Tensor], until: float = math.inf) -> dict[str, str]:
    """The checksum of each tensor by its name. Reads all of them. `until`: a time of `time.monotonic`. Raises:
    `TimeoutError` before the first tensor after it."""
    checksums: dict[str, str] = {}
    for name, tensor in tensors.items():
        if time.monotonic() > until:
            raise TimeoutError(f"the check {OVERDUE} before tensor {name}")
        checksums[name] = checksum(tensor)
    return checksums


def differing(ones: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Names whose checksums differ, or that only one side has."""
    return sorted(name for name in {*ones, *others} if ones.get(name) != others.get(name))
