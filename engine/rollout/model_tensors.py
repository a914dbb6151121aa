"""The tensors of a model by name, and whether published weights fit them. Also how tensors are divided into buckets.

The embedded backend checks a version with it before it swaps it in, vLLM's and servers' before they stage it: vLLM
would load a part of a version without an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import EngineError
from engine.ids import Version
from engine.training.lora import Lora, adapter_tensors, add_adapter

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Names in a model's `state_dict()`: the shape of each, and for tied names the first name of the same tensor."""

    shapes: dict[str, torch.Size]
    aliases: dict[str, str]

    @classmethod
    def of(cls, model: str, lora: Lora | None = None) -> Self:
        """Created without allocating memory for weights. Of the model's adapter alone, if it has one."""
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(model, trust_remote_code=False), trust_remote_code=False
            )
            if lora is not None:
                add_adapter(whole, lora)
                return cls.named(adapter_tensors(whole))
        return cls.named(whole.state_dict(keep_vars=True))

    @classmethod
    def named(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Of tensors by name. A tied tensor is one object with several names."""
        first: dict[int, str] = {}
        owners = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        shapes = {name: tensors[name].shape for name, owner in owners.items() if name == owner}
        return cls(shapes, {name: owner for name, owner in owners.items() if name != owner})

    def zeros(self) -> dict[str, torch.Tensor]:
        """All of them zero: of an adapter, one that changes nothing."""
        return {name: torch.zeros(shape) for name, shape in self.shapes.items()}

    def checked(self, version: Version, weights: Any) -> dict[str, torch.Tensor]:
        """One tensor for each tensor of the model, which may be given under any of its names. Raises: `EngineError`
        that names what does not fit."""
        require_mapping(version, weights)
        found: dict[str, torch.Tensor] = {}
        unknown: list[str] = []
        for name, value in weights.items():
            owner = self.aliases.get(name, name)
            if owner not in self.shapes:
                unknown.append(name)
                continue
            tensor = torch.as_tensor(value).detach()
            if tensor.shape != self.shapes[owner]:
                raise EngineError(
                    f"weights of version {version} do not fit the model: {name} has shape {tuple(tensor.shape)}, the "
                    f"model's has {tuple(self.shapes[owner])}", version=version, name=name,
                )  # fmt: skip
            before = found.setdefault(owner, tensor)
            if before.data_ptr() != tensor.data_ptr() and not _equal(before, tensor):
                raise EngineError(
                    f"weights of version {version}: {owner} and {name} are one tensor in this model (tied) but were "
                    "given different values", version=version, name=name,
                )  # fmt: skip
        missing = [name for name in self.shapes if name not in found]
        if unknown or missing:
            raise EngineError(
                f"weights of version {version} do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}",
                version=version, missing=missing, unknown=unknown,
            )  # fmt: skip
        return {name: found[name] for name in self.shapes}


def require_mapping(version: Version, weights: Any) -> None:
    """Raises: `EngineError` for weights that are not tensors by name."""
    if not isinstance(weights, Mapping):
        raise EngineError(f"weights of version {version} must map names to tensors, not be {type(weights).__name__}")


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def buckets(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Consecutive items, at most `limit` bytes together; a larger one is alone."""
    bucket: list[Item] = []
    size = 0
    for item in items:
        if bucket and size + size_of(item) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += size_of(item)
    if bucket:
        yield bucket
