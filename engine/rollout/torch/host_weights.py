"""Stages weights for a model: brings them to its device while it samples, and swaps them in between two tokens.

Called by `rollout.torch.torch_backend`: `stage` on the caller's thread, `swap_in` on the sampling thread. Must
never leave a model half swapped: it first checks and moves all tensors, and only then changes the pointers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import EngineError
from engine.ids import Version
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
    if not isinstance(weights, Mapping):
        raise EngineError(f"weights of version {version} must map names to tensors, not be {type(weights).__name__}")
    tensors: dict[str, torch.Tensor] = {}
    staged: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, value in weights.items():
        source = torch.as_tensor(value).detach()
        wanted = own.get(name, source)
        place = (source.data_ptr(), source.shape, wanted.dtype, wanted.device)
        if place not in staged or source.numel() == 0:
            staged[place] = source.to(wanted.device, wanted.dtype, copy=copy).contiguous()
        tensors[name] = staged[place]  # tensors that share memory at the sender get one copy
    return StagedWeights(version, tensors)


def swap_in(own: Mapping[str, torch.Tensor], staged: StagedWeights) -> None:
    """Replace a model's `own` tensors by staged ones. If they do not fit, raises `EngineError` and changes nothing.

    A tied parameter is one tensor with several names: it may be given under any of them; if it is given under several,
    the values must be equal. All other parameters must be given.
    """
    owners: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in own.items():
        owners.setdefault(id(tensor), (tensor, []))[1].append(name)
    known = {name for _, names in owners.values() for name in names}
    unknown = [name for name in staged.tensors if name not in known]
    missing = [names[0] for _, names in owners.values() if not any(name in staged.tensors for name in names)]
    if unknown or missing:
        raise EngineError(
            f"weights of version {staged.version} do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}",
            version=staged.version, missing=missing, unknown=unknown,
        )  # fmt: skip
    ready = [(tensor, _agreed(staged, names, tensor)) for tensor, names in owners.values()]
    moved = [(tensor, new.to(tensor.device)) for tensor, new in ready]
    for tensor, new in moved:
        tensor.data = new


def _agreed(staged: StagedWeights, names: list[str], old: torch.Tensor) -> torch.Tensor:
    """The tensor staged under any of these names, checked against the tensor that it replaces and against its
    aliases."""
    given = [(name, staged.tensors[name]) for name in names if name in staged.tensors]
    for name, new in given:
        if new.shape != old.shape:
            raise EngineError(
                f"weights of version {staged.version} do not fit the model: "
                f"{name} has shape {tuple(new.shape)}, the model's has {tuple(old.shape)}",
                version=staged.version, name=name,
            )  # fmt: skip
        if new is not given[0][1] and not torch.allclose(new, given[0][1], rtol=0, atol=0, equal_nan=True):
            raise EngineError(
                f"weights of version {staged.version}: {given[0][0]} and {name} are one tensor in this model "
                "(tied) but were given different values",
                version=staged.version, name=name,
            )  # fmt: skip
    return given[0][1]
