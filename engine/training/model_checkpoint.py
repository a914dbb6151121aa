"""Checkpoints on disk: a directory that transformers loads as a model, and whose tensors this engine restores to the
bit.

    config.json, model.safetensors, tokenizer files   as `save_pretrained` writes them: of a large model several files,
                                                      with an index; of an adapter, what peft writes:
                                                      adapter_config.json, adapter_model.safetensors. Tensors are
                                                      float32; config.json names the type of the model that was trained
    optimizer/                                        AdamW's moments, `exp_avg/<parameter>` and so on: files of each
                                                      rank, as torch.distributed.checkpoint writes safetensors
    random.safetensors                                torch's random states
    trainer_state.json                                format, train steps, optimizer steps, settings

Any number of ranks reads what any other number wrote. Called by `model_trainer.ModelTrainer`. A checkpoint appears
under its name by one rename, after every byte of it is on disk; so a directory with a `trainer_state.json` is complete.
Nothing here is ever pickled or unpickled.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.errors import ConfigError, reason_of
from engine.ids import StepId
from engine.training.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_tensors,
    has_adapter,
    lora_of,
    merged_model,
    write_adapter,
)
from engine.training.masters import UNSPLIT, Masters
from engine.training.model_files import (
    FILE_BYTES,
    divide_into_files,
    write_model,
)
from engine.training.ranks import ALONE, Ranks, Whole, own_part
from engine.training.shared_weights import Manifest, ReusedMemory
from engine.training.stored_tensors import Stored, matching, named_tensors, stored_tensors

# -- failed steps ------------------------------------------------------------------------------------------------------


class ModelSnapshot:
    """Copies in host memory of everything that a train step changes; of several ranks, each has its own part."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: Masters, memory: ReusedMemory
    ) -> None:  # fmt: skip
        """The copies are in `memory`. A later snapshot may overwrite them once nothing refers to this one."""
        self._optimizer = optimizer
        self._masters = masters
        self._live = [*self._masters.trained(model), *model.buffers()]
        moments = [value for state in optimizer.state.values() for value in state.values()]
        values = [own_part(value) for value in (*self._live, *moments)]
        kinds = [(str(value.dtype).removeprefix("torch."), tuple(value.shape)) for value in values]
        copies = memory.take(Manifest(tensors=tuple(kinds), names=())).tensors
        for copy, value in zip(copies, values, strict=True):
            copy.copy_(value)
        self._kept, rest = copies[: len(self._live)], iter(copies[len(self._live) :])
        self._moments = {
            parameter: {name: next(rest) for name in state} for parameter, state in optimizer.state.items()
        }
        self._random = random_state()

    def restore(self) -> None:
        """Weights, buffers, optimizer state and random state are as before, in place. Gradients are dropped."""
        self._optimizer.zero_grad(set_to_none=True)
        for live, kept in zip(self._live, self._kept, strict=True):
            own_part(live).copy_(kept)
        self._masters.round()
        for parameter in list(self._optimizer.state):
            if parameter not in self._moments:
                del self._optimizer.state[parameter]
                continue
            for name, value in self._moments[parameter].items():
                own_part(self._optimizer.state[parameter][name]).copy_(value)
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


# -- checkpoints -------------------------------------------------------------------------------------------------------


FORMAT = 1
STATE_FILE = "trainer_state.json"
MODEL_CONFIG = "config.json"
OPTIMIZER = "optimizer"
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
    directory: Path,
    state: TrainerState,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    model_path: str,
    ranks: Ranks = ALONE,
    masters: Masters = UNSPLIT,
    *,
    config_dtype: torch.dtype,
    files: Mapping[str, Stored] | None,
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint. One of the same step that is there already is kept: a repeated order changes nothing.

    With several ranks the first one gathers and writes the weights, one file after another, under the names of `files`;
    without these, it holds all of them for a while. Moments are written by the rank that has
    them. If one rank cannot write, all raise, and the checkpoint is not there. The configuration of a whole model names
    `config_dtype`, that of the model at `model_path`. `progressed` is called after each part. Collective.

    Raises `ConfigError` where the directory holds anything else.
    """
    if directory.exists() and any(directory.iterdir()):
        if (directory / STATE_FILE).is_file() and read_state(directory).step == state.step:
            return
        raise ConfigError("checkpoint directory", str(directory), "is not empty", "use a new or empty directory")
    unfinished = directory.parent / f".{directory.name}.unfinished"
    first = ranks.index == 0
    with ranks.together():
        if first:
            directory.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
    with ranks.together():
        if not unfinished.is_dir():
            law = "is not shared: this node does not see what the first rank writes there"
            fix = "put run.dir on storage that every node has under the same path"
            raise ConfigError("checkpoint directory", str(directory), law, fix)
    own = {name: masters.of(value) for name, value in trained_tensors(model).items()}
    if files is not None and not has_adapter(model):
        write_model(unfinished, model, own, files, ranks, progressed)
    else:
        _write_whole(unfinished, model, own, model_path, ranks)
    progressed()
    if moments := optimizer_tensors(model, optimizer, masters):
        write_moments(unfinished / OPTIMIZER, moments, ranks)
        progressed()
    with ranks.together():
        if first:
            if not has_adapter(model):
                _name_type(unfinished / MODEL_CONFIG, config_dtype)
            _copy_tokenizer(model_path, unfinished, leave=(MODEL_CONFIG,))
            _finish(unfinished, state)
            os.rename(unfinished, directory)
            _fsync(directory.parent)


def _write_whole(
    folder: Path, model: PreTrainedModel, own: Mapping[str, Tensor], model_path: str, ranks: Ranks
) -> None:
    """Write an adapter, or a model whose tensors transformers converts: together. Collective."""
    whole = {}
    for name, value in own.items():
        gathered = ranks.whole(value.detach())
        if ranks.index == 0:
            whole[name] = gathered.cpu()
    with ranks.together():
        if whole and has_adapter(model):
            write_adapter(folder, whole, lora_of(model), model_path)
        elif whole:
            model.save_pretrained(folder, state_dict=whole, max_shard_size=FILE_BYTES)


def _finish(folder: Path, state: TrainerState) -> None:
    """Write the random states and the numbers; then every byte is on disk."""
    save_file(random_state(), folder / "random.safetensors")
    record = {"format": FORMAT, **asdict(state)}
    (folder / STATE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for path in sorted(folder.rglob("*")):
        _fsync(path)
    _fsync(folder)


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


def read_checkpoint(
    directory: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks = ALONE,
    masters: Masters = UNSPLIT,
) -> TrainerState:
    """Put a checkpoint into a model and its optimizer. Names and shapes are compared before anything is changed; then
    weights are read one by one, by each rank its own part."""
    state = read_state(directory)
    own = trained_tensors(model)
    weights = _stored_weights(directory, model)
    _check_weights(directory, weights, own)
    random = load_file(directory / "random.safetensors")
    groups = read_moments(directory, model, optimizer, ranks, masters)
    load_weights(own, weights, ranks, masters)
    optimizer.load_state_dict(groups)
    set_random_state(random)
    return state


def has_only_adapter(checkpoint: Path) -> bool:
    """Whether a checkpoint has only an adapter, not a whole model."""
    return (checkpoint / WEIGHTS_FILE).is_file()


def export_model(checkpoint: Path, target: Path, dtype: str, *, adapter: bool = False, argument: str = "--to") -> None:
    """Write the model in a checkpoint, with its tokenizer, as a directory that transformers loads. An adapter is merged
    into its model, unless only the `adapter` is wanted, as a directory that peft loads.

    Raises: `ConfigError` for a checkpoint of another trainer, a target that has files or cannot be written (`argument`
    names it), or a model that no longer exists.
    """
    transformers_logging.disable_progress_bar()
    read_state(checkpoint)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(argument, str(target), "is there already", "use a new or empty directory")
    has_one = has_only_adapter(checkpoint)
    if adapter and not has_one:
        raise ConfigError("--adapter", True, "the checkpoint has a whole model", "leave --adapter out")
    kind = getattr(torch, dtype)
    model: Any = None
    tensors: dict[str, Tensor] = {}
    if adapter:
        tensors = {name: tensor.to(kind) for name, tensor in load_file(checkpoint / WEIGHTS_FILE).items()}
    else:
        model = merged_model(checkpoint).to(kind) if has_one else _model_in(checkpoint, kind)
    unfinished = target.parent / f".{target.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        if model is not None:
            model.save_pretrained(unfinished)
        else:
            save_file(tensors, unfinished / WEIGHTS_FILE)
            shutil.copyfile(checkpoint / CONFIG_FILE, unfinished / CONFIG_FILE)
        _copy_tokenizer(str(checkpoint), unfinished, leave=(CONFIG_FILE,))
        os.rename(unfinished, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(argument, str(target), f"cannot be written: {reason}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _model_in(directory: Path, kind: torch.dtype) -> Any:
    """Without unpickling anything: a pickle beside the tensors is not even looked at."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=kind, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )


def trained_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """What training changes, by the names under which it is published and saved: everything in the model's `state_dict`
    with the parameters themselves, or only those of its adapter."""
    if has_adapter(model):
        return adapter_tensors(model)
    return named_tensors(model)


def load_weights(
    own: Mapping[str, Tensor], weights: Mapping[str, Whole], ranks: Ranks = ALONE, masters: Masters = UNSPLIT
) -> None:
    """Fill a model's own `trained_tensors` with whole weights. Raises: `ConfigError` if a name or a shape differs."""
    _check_weights("weights", weights, own)
    for value, name in {value: name for name, value in own.items()}.items():  # tied ones once
        ranks.fill(masters.of(value).detach(), weights[name])
    masters.round()


def _stored_weights(directory: Path, model: PreTrainedModel) -> Mapping[str, Whole]:
    """The `trained_tensors` in a checkpoint. Raises: `ConfigError` if the other kind is there."""
    adapter = has_adapter(model)
    if adapter != has_only_adapter(directory):
        law, fix = "has a whole model, but trainer.lora trains an adapter", "remove trainer.lora"
        if not adapter:
            law, fix = "has an adapter, but the whole model is trained", "set trainer.lora"
        raise ConfigError("checkpoint", str(directory), law, f"{fix}, or use another checkpoint")
    if adapter:
        return dict(load_file(directory / WEIGHTS_FILE))
    found = matching(stored_tensors(str(directory)), model)
    return dict(_model_in(directory, torch.float32).state_dict()) if found is None else found


def _check_weights(directory: Path | str, weights: Mapping[str, Whole], own: Mapping[str, Tensor]) -> None:
    """Before anything is changed."""
    for name in sorted(weights.keys() | own.keys()):
        theirs, ours = (list(held[name].shape) if name in held else "none" for held in (weights, own))
        if theirs != ours:
            law = f"is of another model: {name} has shape {theirs} there and {ours} here"
            raise ConfigError("checkpoint", str(directory), law, "use a checkpoint of this model")


def optimizer_tensors(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, masters: Masters = UNSPLIT
) -> dict[str, Tensor]:
    """The optimizer's own tensors, named `<kind>/<parameter>`; none before the first optimizer step."""
    return {
        f"{kind}/{name}": value.detach()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(masters.of(parameter), {}).items()
    }


def write_moments(folder: Path, moments: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write the tensors of `optimizer_tensors`, each rank its own shards. Collective. Raises: `OSError`, in every rank,
    if one of them cannot write."""
    files = {name: number for number, names in enumerate(divide_into_files(moments), 1) for name in names}
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    with _dcp("cannot write the optimizer's state"):
        dcp.save({**moments}, storage_writer=writer, no_dist=ranks.count == 1)


def read_moments(
    directory: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, ranks: Ranks, masters: Masters
) -> dict[str, Any]:
    """The optimizer's state in a checkpoint, each rank its own shards, in the form that `Optimizer.load_state_dict`
    takes: numbered as its parameter groups are."""
    parameters = {name: masters.of(parameter) for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in parameters.items()}
    by_name: dict[str, dict[str, Tensor]] = {}
    folder = directory / OPTIMIZER
    if folder.is_dir():
        reader = HuggingFaceStorageReader(str(folder))
        wanted = {}
        for key, entry in reader.read_metadata().state_dict_metadata.items():
            kind, _, name = key.partition("/")
            if name not in parameters:
                law = "is not a parameter of this model, but the optimizer state has it"
                raise ConfigError("checkpoint", name, law)
            like = parameters[name].detach()
            shaped = like.ndim == len(entry.size)
            wanted[key] = torch.zeros_like(like) if shaped and kind != "step" else torch.zeros(entry.size)
        with _dcp("cannot read the optimizer's state"):
            dcp.load(dict(wanted), storage_reader=reader, no_dist=ranks.count == 1)
        for key, value in wanted.items():
            kind, _, name = key.partition("/")
            by_name.setdefault(name, {})[kind] = value
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: by_name[name] for index, name in enumerate(ordered) if name in by_name}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _name_type(config: Path, kind: torch.dtype) -> None:
    """Write the type in which transformers and samplers load the model. Its files have the float32 masters."""
    plain = json.loads(config.read_text(encoding="utf-8"))
    plain["dtype"] = str(kind).removeprefix("torch.")
    config.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(model_path: str, target: Path, leave: Sequence[str] = ()) -> None:
    """What lies beside the weights of the model this run began with, unless `save_pretrained` has written its own, and
    but for the files to `leave`."""
    source = Path(model_path)
    if not source.is_dir():
        AutoTokenizer.from_pretrained(model_path, trust_remote_code=False).save_pretrained(target)
        return
    ours = {STATE_FILE, "SHA256SUMS", *leave}  # the digests are written by `storage.checkpoints`
    for path in sorted(source.iterdir()):
        weights = path.suffix in NOT_TOKENIZER or path.name.endswith(".index.json") or path.name in ours
        if path.is_file() and not weights and not path.name.startswith(".") and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


@contextmanager
def _dcp(problem: str) -> Iterator[None]:
    """Context manager around torch.distributed.checkpoint: its error, which is no `Exception` and the same in every
    rank, becomes an `OSError`; without its warning that a process without a group saves alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank} {problem}: {reason_of(cause)}") from cause


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
