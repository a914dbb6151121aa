"""Checkpoints on disk: a directory that transformers loads as a model and this engine resumes from to the bit.

    config.json, model.safetensors, tokenizer files   as `save_pretrained` writes them
    optimizer.safetensors                             AdamW's moments, `exp_avg/<parameter>` and so on
    random.safetensors                                torch's random states
    trainer_state.json                                format, train steps, optimizer steps, settings

Called by `model_trainer.ModelTrainer`. A checkpoint appears under its name by one rename, after every byte of it is on
disk; so a directory with a `trainer_state.json` is complete. Nothing here is ever pickled or unpickled.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.errors import ConfigError
from engine.ids import StepId

# -- failed steps ------------------------------------------------------------------------------------------------------


class Snapshot:
    """Copies in host memory of everything that a train step changes."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._live = [*model.parameters(), *model.buffers()]
        self._kept = [_copy(tensor) for tensor in self._live]
        self._moments = {
            parameter: {name: _copy(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }
        self._random = random_state()

    def restore(self) -> None:
        """Weights, buffers, optimizer state and random state are as before, in place. Gradients are dropped."""
        self._optimizer.zero_grad(set_to_none=True)
        for live, kept in zip(self._live, self._kept, strict=True):
            live.detach().copy_(kept)
        for parameter in list(self._optimizer.state):
            if parameter not in self._moments:
                del self._optimizer.state[parameter]
                continue
            for name, value in self._moments[parameter].items():
                self._optimizer.state[parameter][name].copy_(value)
        set_random_state(self._random)


def random_state() -> dict[str, Tensor]:
    """Torch's random states by device: `cpu`, and `cuda.0`, … once CUDA is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Undo `random_state`. States of devices that are not here are ignored."""
    torch.set_rng_state(states["cpu"])
    for name, state in states.items():
        if name.startswith("cuda.") and int(name[5:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name[5:]))


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


# -- checkpoints -------------------------------------------------------------------------------------------------------


FORMAT = 1
STATE_FILE = "trainer_state.json"
NOT_TOKENIZER = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Endings of weight files: all else that lies beside them (tokenizer, templates, generation defaults) is copied
along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The numbers of a checkpoint."""

    step: StepId
    """Train steps that the weights contain."""
    optimizer_steps: int
    """Optimizer steps taken: the position in the learning-rate schedule."""
    settings: dict[str, Any]
    """`TrainerSettings` it was trained with, for the reader; a resumed run uses its own."""


def write_checkpoint(
    directory: Path, state: TrainerState, model: PreTrainedModel, optimizer: torch.optim.Optimizer, model_path: str
) -> None:
    """Write a checkpoint. One of the same step that is there already is kept: a repeated order changes nothing.

    Raises `ConfigError` where the directory holds anything else.
    """
    if directory.exists() and any(directory.iterdir()):
        if (directory / STATE_FILE).is_file() and read_state(directory).step == state.step:
            return
        raise ConfigError("checkpoint directory", str(directory), "is not empty", "use a new or empty directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.parent / f".{directory.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    model.save_pretrained(unfinished, max_shard_size="1TB")
    _copy_tokenizer(model_path, unfinished)
    save_file(optimizer_tensors(model, optimizer), unfinished / "optimizer.safetensors")
    save_file(random_state(), unfinished / "random.safetensors")
    record = {
        "format": FORMAT,
        "step": state.step,
        "optimizer_steps": state.optimizer_steps,
        "settings": state.settings,
    }
    (unfinished / STATE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for path in sorted(unfinished.rglob("*")):
        _fsync(path)
    _fsync(unfinished)
    os.rename(unfinished, directory)
    _fsync(directory.parent)


def read_state(directory: Path) -> TrainerState:
    """The numbers of a checkpoint. Raises `ConfigError` for a directory that is not a complete one of this format."""
    path = directory / STATE_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ConfigError(
                "checkpoint", str(directory), f"has format {record['format']!r}, but this version reads {FORMAT}"
            )
        return TrainerState(
            step=int(record["step"]), optimizer_steps=int(record["optimizer_steps"]), settings=dict(record["settings"])
        )
    except FileNotFoundError:
        raise ConfigError(
            "checkpoint", str(directory), f"is not a complete checkpoint: {STATE_FILE} is missing"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("checkpoint", str(directory), f"has an unreadable {STATE_FILE}: {error!r}") from error


def read_checkpoint(directory: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Put a checkpoint into a model and its optimizer. Everything is read before anything is changed."""
    state = read_state(directory)
    loaded = AutoModelForCausalLM.from_pretrained(  # a pickle beside the tensors is not even looked at
        directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    weights = loaded.state_dict()
    moments = load_file(directory / "optimizer.safetensors")
    random = load_file(directory / "random.safetensors")
    groups = optimizer_state(model, optimizer, moments)
    _check_weights(directory, weights, model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_dict(groups)
    set_random_state(random)
    return state


def _check_weights(directory: Path, weights: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """`load_state_dict` finds out half-way; this does before."""
    for name in sorted(weights.keys() | own.keys()):
        theirs, ours = (list(held[name].shape) if name in held else "none" for held in (weights, own))
        if theirs != ours:
            law = f"is of another model: {name} has shape {theirs} there and {ours} here"
            raise ConfigError("checkpoint", str(directory), law, "use a checkpoint of this model")


def optimizer_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, named `<kind>/<parameter>`; empty before the first optimizer step."""
    return {
        f"{kind}/{name}": value.detach().to("cpu", copy=True).contiguous()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def optimizer_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """`optimizer_tensors` in the form that `Optimizer.load_state_dict` takes: numbered as its parameter groups are."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        by_name.setdefault(name, {})[kind] = value
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := sorted(set(by_name) - set(ordered)):
        raise ConfigError("checkpoint", unknown[0], "is not a parameter of this model, but the optimizer state has it")
    state = {index: by_name[name] for index, name in enumerate(ordered) if name in by_name}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _copy_tokenizer(model_path: str, target: Path) -> None:
    """What lies beside the weights of the model this run began with, unless `save_pretrained` has written its own."""
    source = Path(model_path)
    if not source.is_dir():
        AutoTokenizer.from_pretrained(model_path).save_pretrained(target)
        return
    ours = {STATE_FILE, "optimizer.safetensors", "random.safetensors"}
    for path in sorted(source.iterdir()):
        weights = path.suffix in NOT_TOKENIZER or path.name.endswith(".index.json") or path.name in ours
        if path.is_file() and not weights and not path.name.startswith(".") and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
