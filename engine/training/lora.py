"""LoRA: the settings of a low-rank adapter, and models with an adapter (by peft).

The configuration reads the settings. The trainer, the scorer and the embedded sampler add the same adapter to their
models, and name its tensors as peft's files do. torch and peft are imported late, because a configuration is checked
without them. Must not train or publish, and writes no files except an adapter's.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from engine.errors import ConfigError
from engine.section import Section

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "trainer.lora"
ALL_LINEAR = "all-linear"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
"""The two files of an adapter, as peft writes and reads them."""
OF_EXPERTS = frozenset(("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
"""Names of the layers of experts and of their router."""
_NAME = "default"
_PREFIX = "base_model.model."
"""Prefix of the names of a model's parameters in peft's files."""


class Lora(Section):
    """A low-rank adapter (arXiv 2106.09685): W x becomes W x + alpha / rank · B A x, and only A and B are trained.

    The section `trainer.lora` of a configuration. Raises `ConfigError` for invalid `target_modules`.
    """

    rank: int = Field(16, ge=1, le=4096, description="Rank of the adapter's matrices.")
    """Number of rows of A and of columns of B."""
    alpha: float = Field(32.0, gt=0, le=1_000_000, description="The product of the matrices is scaled by alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        (ALL_LINEAR,),
        strict=False,
        max_length=64,
        description="Linear layers to adapt: all-linear, or names such as q_proj.",
    )
    """Last parts of the names of linear layers; all-linear: every one except the model's head and experts."""
    dropout: float = Field(0.0, ge=0, le=0, description="Must be 0: with dropout, the sampler's log-probs differ.")

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if not self.target_modules:
            law = "names no layer"
            raise ConfigError(f"{FIELD}.target_modules", [], law, f"use {ALL_LINEAR}, or a list such as [q_proj]")
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            law = f"{ALL_LINEAR} contains every other name"
            raise ConfigError(f"{FIELD}.target_modules", list(self.target_modules), law, f"use only {ALL_LINEAR}")
        return self

    def targets(self, available: list[str]) -> list[str]:
        """Names of the layers to adapt, from the `available` ones. Raises `ConfigError` for an unknown name, with the
        available names."""
        if self.target_modules == (ALL_LINEAR,):
            return available
        unknown = [name for name in self.target_modules if name not in available]
        if unknown:
            law = f"the model has no linear layer named {', '.join(unknown)}"
            if OF_EXPERTS.intersection(unknown):
                law += " that can have an adapter: in a model with experts, layers with experts' names get none"
            fix = f"use {ALL_LINEAR}, or names from {', '.join(available)}"
            raise ConfigError(f"{FIELD}.target_modules", list(self.target_modules), law, fix)
        return [name for name in available if name in self.target_modules]


# -- models with an adapter --------------------------------------------------------------------------------------------


def add_adapter(model: Any, lora: Lora, seed: int = 0) -> None:
    """Add an adapter to a model, in place, and freeze all other parameters. A is drawn from the seed. B starts at 0, so
    the model's outputs do not change. Raises `ConfigError` for layers that the model does not have."""
    import torch
    from peft import inject_adapter_in_model

    if _config_of(model) is not None:
        law = "is an adapter, not a model"
        raise ConfigError("model.path", model.config.name_or_path, law, "merge it into its model first")
    config = _config(lora, lora.targets(linear_layers(model)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)


def without_experts(layers: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """The names of the layers that an adapter can have, sorted: all, or in a model with experts those that no expert
    has. peft takes the others for the experts, and changes the targets of an adapter accordingly."""
    return sorted({*layers} - OF_EXPERTS if has_experts(parameters) else {*layers})


def has_experts(parameters: Iterable[str]) -> bool:
    """Whether a model with parameters of these names is a mixture of experts."""
    return any("experts" in parameter.split(".") for parameter in parameters)


def linear_layers(model: Any) -> list[str]:
    """The last parts of the names of a model's linear layers, without its head and experts; sorted, each once."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    return without_experts(names, (name for name, _ in model.named_parameters()))


def has_adapter(model: Any) -> bool:
    return _config_of(model) is not None


def adapter_tensors(model: Any) -> "dict[str, Tensor]":
    """The adapter's parameters, by the names that peft's files give them."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), _NAME, save_embedding_layers=False)
    return {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Context manager: the model computes without its adapter, and has no trainable parameters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def drawn_adapter(model: Any, seed: int = 0) -> Iterator[None]:
    """Context manager: the adapter changes the model's outputs, because B is drawn at random. Does nothing if the model
    has no adapter."""
    import torch

    products = [tensor for name, tensor in adapter_tensors(model).items() if "lora_B" in name]
    draws = torch.Generator().manual_seed(seed)
    for product in products:
        product.data.copy_(torch.randn(product.shape, generator=draws) * 0.1)
    try:
        yield
    finally:
        for product in products:
            product.data.zero_()


def write_adapter(directory: Path, tensors: "Mapping[str, Tensor]", lora: Lora, base: str) -> None:
    """Write an adapter of the model at `base` in peft's format: its tensors and its configuration."""
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS_FILE)
    layers = sorted({name.split(".")[-3] for name in tensors})  # …<layer>.lora_A.weight
    described = _config(lora, layers)
    described.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    described.inference_mode = True
    described.target_modules = layers  # peft makes it a set, which has no fixed order in the file
    described.save_pretrained(str(directory))


def lora_of(model: Any) -> Lora:
    """The settings of a model's adapter, with the names of its layers."""
    config = _config_of(model)
    return Lora(rank=config.r, alpha=config.lora_alpha, target_modules=tuple(sorted(config.target_modules)))


def _config(lora: Lora, layers: list[str]) -> Any:
    """peft's description of an adapter."""
    from peft import LoraConfig

    alpha: Any = lora.alpha  # peft declares an integer, but accepts any number
    return LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=layers, task_type="CAUSAL_LM")


def merged_model(directory: Path) -> Any:
    """The float32 model that the adapter in `directory` belongs to, with the adapter merged into its weights.

    Raises `ConfigError` if that model is not there.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    described = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    base = str(described["base_model_name_or_path"])
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        law = f"belongs to the model at {base}, which cannot be loaded: {error}"
        fix = f"restore the model, or write its new path into {directory / CONFIG_FILE}"
        raise ConfigError("adapter", str(directory), law, fix) from error
    adapted: Any = PeftModel.from_pretrained(model, str(directory))
    return adapted.merge_and_unload(safe_merge=True)


def _config_of(model: Any) -> Any:
    """peft's description of a model's adapter; None if it has none."""
    return getattr(model, "peft_config", {}).get(_NAME)
