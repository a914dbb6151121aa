"""Weights on their way into a model: copied into host memory while it samples, then swapped in between two tokens.

Called by `rollout.torch.torch_backend`: `copy_to_host` on the thread that asked, `swap_in` on the sampling thread. Must
never leave a model half swapped: everything is checked and moved first, and only then do the pointers change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import EngineError
from engine.ids import Version


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version's tensors in this process' host memory, by the names of `state_dict()`."""

    version: Version
    tensors: dict[str, torch.Tensor]


class OwnTensors(dict[str, torch.Tensor]):
    """Tensors in host memory that only their receiver has: it may keep them as they are instead of copying them."""


def copy_to_host(model: torch.nn.Module, version: Version, weights: Any) -> StagedWeights:
    """Copy tensors (or arrays) by name, in the model's own types, so that the swap has nothing left to convert.

    `OwnTensors` that are as the swap wants them are taken, not copied.
    """
    if not isinstance(weights, Mapping):
        raise EngineError(f"weights of version {version} must map names to tensors, not be {type(weights).__name__}")
    types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    pin = any(tensor.is_cuda for tensor in model.state_dict().values())
    take = isinstance(weights, OwnTensors) and not pin
    tensors: dict[str, torch.Tensor] = {}
    copied: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
    for name, value in weights.items():
        source = torch.as_tensor(value).detach()
        dtype = types.get(name, source.dtype)
        place = (source.data_ptr(), source.shape, dtype)
        if place not in copied or source.numel() == 0:
            if take and source.dtype == dtype:
                copied[place] = source
            else:
                copied[place] = torch.empty(source.shape, dtype=dtype, pin_memory=pin).copy_(source)
        tensors[name] = copied[place]  # tied at the sender: one copy here too
    return StagedWeights(version, tensors)


def swap_in(model: torch.nn.Module, staged: StagedWeights) -> None:
    """Replace the model's tensors by staged ones. Raises `EngineError` and changes nothing where they do not
    fit.

    Tied parameters are one tensor under several names: any of the names will do, and where several are given they must
    agree. Untied ones must all be there.
    """
    owners: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
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
    """The one tensor staged under any of these names, checked against the one it replaces and against its aliases."""
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
