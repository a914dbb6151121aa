"""Converts tensors to numpy arrays and back, so that readers of Ray's object store map them without a copy.

Called by `transports.ObjectStoreTransport`. Anything but a mapping of tensors passes unchanged.
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """Arrays and torch types by name. Types that numpy lacks are stored as integers of the same width."""

    arrays: dict[str, Any]
    types: dict[str, str]


def pack_tensors(weights: Any) -> Any:
    """A mapping of tensors as `PackedTensors`; a tensor with several names becomes one array."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(weights, Mapping) or not weights:
        return weights
    if not all(isinstance(value, torch.Tensor) for value in weights.values()):
        return weights
    arrays: dict[str, Any] = {}
    types: dict[str, str] = {}
    seen: dict[int, Any] = {}
    for name, tensor in weights.items():
        if id(tensor) not in seen:
            plain = tensor.detach().cpu().contiguous()
            if plain.dtype.is_floating_point and plain.dtype not in (torch.float16, torch.float32, torch.float64):
                width = {1: torch.uint8, 2: torch.int16}[plain.element_size()]
                seen[id(tensor)] = plain.view(width).numpy()
            else:
                seen[id(tensor)] = plain.numpy()
        arrays[name] = seen[id(tensor)]
        types[name] = str(tensor.dtype).removeprefix("torch.")
    return PackedTensors(arrays, types)


def unpack_tensors(packed: Any) -> Any:
    """The tensors. They share memory with the arrays and must not be written."""
    if not isinstance(packed, PackedTensors):
        return packed
    import numpy as np
    import torch

    seen: dict[int, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, array in packed.arrays.items():
            if id(array) not in seen:
                tensor = torch.from_numpy(np.asarray(array))
                wanted = getattr(torch, packed.types[name])
                seen[id(array)] = tensor if tensor.dtype == wanted else tensor.view(wanted)
    return {name: seen[id(array)] for name, array in packed.arrays.items()}
