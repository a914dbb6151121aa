"""The laws of `trainer.lora`: what else a configuration must say, and which layers of the model's files it adapts.

Called by `schema.py`, and by `inputs.py` where the model is at hand. Reads the headers of safetensors files; never
imports torch or peft.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.lora import CONFIG_FILE, Lora
from engine.rollout.vllm.engine_args import LORA_RANKS

if TYPE_CHECKING:
    from engine.config.schema import Config

Shapes = Mapping[str, tuple[int, ...]]
"""Of each tensor in the model's files, by its name."""


def refuse_adapter(config: "Config") -> None:
    """Raises: `ConfigError` for a section that cannot work with `trainer.lora`."""
    if config.trainer.lora is None:
        return
    backend = config.rollout.backend
    if backend == "openai" and config.rollout.sync_mode == "keep":
        law = "a request on a server ends with the adapter it began with, so trainer.lora cannot freeze and continue it"
        raise ConfigError("rollout.sync_mode", "keep", law, "use abort or wait")
    if backend == "vllm" and config.trainer.lora.rank > LORA_RANKS[-1]:
        law = f"must be at most {LORA_RANKS[-1]}, the highest rank that vLLM takes"
        raise ConfigError("trainer.lora.rank", config.trainer.lora.rank, law, f"use {LORA_RANKS[-1]} or less")
    if config.rollout.transport == "vllm":
        law = "it sends whole models, but trainer.lora publishes an adapter"
        raise ConfigError("rollout.transport", "vllm", law, "use object_store or distributed")
    if config.model.checkpoint_path is not None:
        law = "has a whole model, but trainer.lora begins with an adapter of its own"
        fix = "write the model of the checkpoint with `engine export`, and give that as model.path"
        raise ConfigError("model.checkpoint_path", config.model.checkpoint_path, law, fix)


def refuse_adapter_as_model(directory: Path) -> None:
    """Raises: `ConfigError` for the directory of an adapter."""
    if (directory / CONFIG_FILE).is_file():
        law = "is an adapter (it has adapter_config.json), not a model"
        fix = "give the model that it belongs to, or merge them, for example with `engine export`"
        raise ConfigError("model.path", str(directory), law, fix)


def linear_layers(shapes: Shapes) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the matrices in numbered blocks, by the last part of their layers' names. Embeddings and the head are
    in no block."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        if parts[-1] == "weight" and len(shape) == 2 and any(part.isdigit() for part in parts[:-2]):
            found.setdefault(parts[-2], []).append(shape)
    return dict(sorted(found.items()))


def adapter_numbers(lora: Lora, shapes: Shapes) -> int:
    """How many numbers an adapter has. Raises: `ConfigError` for layers that the model lacks."""
    layers = linear_layers(shapes)
    adapted = lora.targets(list(layers)) if layers else []
    return sum(lora.rank * (rows + columns) for name in adapted for rows, columns in layers[name])


def adapter_line(lora: Lora, shapes: Shapes, parameters: int) -> Iterator[str]:
    """A line of `engine check`. Raises: `ConfigError` for layers that the model lacks."""
    numbers = adapter_numbers(lora, shapes)
    if numbers:
        share = numbers / max(1, parameters)
        yield f"ok: trainer.lora trains {numbers:,} parameters beside the model's {parameters:,} ({share:.2%})"
