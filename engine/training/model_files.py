"""Models on disk: models that begin without weights, and the files of checkpoints.

No rank of a trainer may hold a whole model in memory. Therefore `load_model` builds the model of several ranks without
weights; when it is sharded, each rank reads its own part of each tensor (`Ranks.fill`). Called by `ModelTrainer` and
for reference models; `model_checkpoint` writes weights in the same way. Nothing here is ever unpickled.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from engine.training.lora import Lora, add_adapter
from engine.training.ranks import Ranks, replace_parameters
from engine.training.stored_tensors import Stored, matching, named_tensors, stored_tensors

log = logging.getLogger(__name__)

FILE_BYTES = 1 << 30
"""Most bytes of tensors in one file of a checkpoint, unless one tensor has more: the first rank gathers these before it
writes them."""


def config_dtype(path: str) -> torch.dtype:
    """The type that the configuration of a model names: that of its weights in samplers. float32 if it names none."""
    kind = AutoConfig.from_pretrained(path, trust_remote_code=False).dtype
    return kind if isinstance(kind, torch.dtype) else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A float32 model in evaluation mode, perhaps with an adapter."""

    model: PreTrainedModel
    missing: Mapping[str, Stored]
    """By the model's names without its adapter, what its parameters must be filled with after it is sharded; empty if
    they have their values."""
    files: Mapping[str, Stored] | None
    """By the model's names without its adapter, what its files have of each tensor; None if transformers converts them
    in a way that cannot be done tensor by tensor."""


def load_model(path: str, ranks: Ranks, lora: Lora | None = None, seed: int = 0) -> LoadedModel:
    """The model at `path`, with a new adapter if `lora` is given. With several ranks, it has no weights yet, unless its
    tensors cannot be read one by one: then each rank loads all of it."""
    stored = stored_tensors(path)
    if ranks.count > 1:
        empty = _without_weights(path)
        found = matching(stored, empty)
        if found is not None and getattr(empty.config, "quantization_config", None) is None:
            if lora is not None:
                _adapt_without_weights(empty, lora, seed)
            return LoadedModel(model=empty, missing=found, files=found)
        log.warning("each rank loads the whole model for a moment: the files of %s have other tensors than it", path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    files = matching(stored, loaded)
    if lora is not None:
        add_adapter(loaded, lora, seed)
    return LoadedModel(model=loaded.eval(), missing={}, files=files)


def fill_model(model: nn.Module, missing: Mapping[str, Stored], ranks: Ranks) -> None:
    """Give a sharded model the weights that it is missing."""
    for name, value in named_tensors(model).items():
        stored = missing.get(name.replace(".base_layer.", "."))
        if stored is not None:
            ranks.fill(value.detach(), stored)


def _without_weights(path: str) -> PreTrainedModel:
    """As `from_pretrained` gives it, but its parameters are on the meta device."""
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path, trust_remote_code=False), dtype=torch.float32, trust_remote_code=False
        )
    model.tie_weights()
    if model.can_generate():
        with suppress(OSError):  # it has none of its own
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def _adapt_without_weights(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Add an adapter, which has its values: as long as peft makes it, the model's own parameters are on the CPU, but
    take no memory."""
    replace_parameters(model, lambda own: torch.zeros((), dtype=own.dtype).expand(own.shape))
    own = set(model.parameters())
    add_adapter(model, lora, seed)
    replace_parameters(model, lambda value: torch.empty_like(value, device="meta") if value in own else value)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_model(
    folder: Path,
    model: PreTrainedModel,
    own: Mapping[str, Tensor],
    stored: Mapping[str, Stored],
    ranks: Ranks,
    progressed: Callable[[], None],
) -> None:
    """Write `own`, the tensors of a model by name, as files that transformers loads, with its configuration. Tensors
    have the names of those in `stored`. The first rank writes, and holds one file at a time. `progressed` is called
    after each file. Collective. Raises in every rank if it cannot write."""
    first = ranks.index == 0
    names: dict[int, str] = {}
    for name, value in own.items():
        names.setdefault(id(value), name)  # of tied tensors, the first
    files = divide_into_files({name: own[name] for name in names.values()})
    places: dict[str, str] = {}
    for number, each in enumerate(files, 1):
        file = SAFE_WEIGHTS_NAME if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        held: dict[str, Tensor] = {}
        for name in each:
            places |= dict.fromkeys(stored[name].names, file)
            whole = ranks.whole(own[name].detach())
            if first:
                held.update(stored[name].divide(whole.cpu()))
        with ranks.together():
            if first:
                save_file(held, folder / file, metadata={"format": "pt"})
        progressed()
    with ranks.together():
        if first:
            _write_config(folder, model)
            if len(files) > 1:
                size = sum(own[name].nbytes for name in names.values())
                index = {"metadata": {"total_size": size}, "weight_map": places}
                (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def divide_into_files(tensors: Mapping[str, Tensor]) -> Sequence[Sequence[str]]:
    """The names of each file: in order, and of at most `FILE_BYTES`, unless one tensor has more."""
    files: list[list[str]] = []
    room = 0
    for name, value in tensors.items():
        if not files or value.nbytes > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= value.nbytes
    return files


def _write_config(folder: Path, model: PreTrainedModel) -> None:
    """As `save_pretrained` does."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
