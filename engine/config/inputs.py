"""Checks what a configuration refers to: the model's directory, the prompts and the reward; and the memory they need.

Called by `engine check`, and by a run before anything starts. It reads files, and loads the tokenizer if transformers
is installed; only the user's generator and trainer, which `engine check` tries, load weights.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.memory import Model, computed_bytes, memory_lines, on_gpu, published_bytes
from engine.config.model_description import files_of, number_bytes, numbers_in, tensor_shapes, vocabulary
from engine.config.reward_functions import reward_of_section, reward_of_set
from engine.config.schema import Config
from engine.config.trainer import adapter_line, adapter_numbers, refuse_adapter_as_model
from engine.errors import ConfigError, counted
from engine.extras import missing_package
from engine.hardware import memory_bytes, object_store_limit
from engine.protocols.named_code import NO_LOCAL, Local
from engine.tasks.answers import answer_of
from engine.tasks.quickstart import MadeModel
from engine.tasks.tokenizer import END, PAD, UNKNOWN
from engine.training.lora import WEIGHTS_FILE, has_experts
from engine.training.named_tensors import Shapes, first_difference
from engine.trajectory import Prompt

if TYPE_CHECKING:
    from engine.tasks.dataset import Dataset
    from engine.tasks.source_files import LoadedSource
from engine.training.packable import why_padded

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
WEIGHTS = ("*.safetensors", "*.bin")
MODEL_FIX = "give a directory into which save_pretrained wrote both the model and its tokenizer"
VERSIONS_HELD = 3
"""Weights versions that must fit: the one in use, the newest, and the one being published."""
LEAST_STORE_BYTES = 256 << 20


Rehearse = Callable[[Config, Prompt], Iterator[str]]
"""Runs the configured agent or environment once on a prompt. Yields lines like those of `check_inputs`."""
RehearseBackends = Callable[[Config], Iterator[str]]
"""Runs the user's generator, trainer and added states once on the first prompt. Also yields such lines."""


def check_inputs(
    config: Config,
    *,
    rehearse: bool = False,
    rehearse_agent: Rehearse | None = None,
    rehearse_backends: RehearseBackends | None = None,
    local: Local = NO_LOCAL,
) -> Iterator[str]:
    """Lines like those of `check_config`. `rehearse`: add those of `dry_run`, which calls the reward; `rehearse_agent`,
    `rehearse_backends`: those of a run of the user's code. `local`: functions and classes that cannot be imported, by
    field.

    Raises: ConfigError for a file that is missing or cannot be used.
    """
    directory = known_directory(config)
    yield from _model_lines(config, directory)
    _check_stop(config)
    yield from _check_store(config, directory)
    sources = [files.load() for files in config.data.source_files()]
    files = {loaded.files.field: loaded.data for loaded in sources}
    files |= _data_sets(config)
    yield from _check_sets(config, local)
    for field, data in files.items():
        yield f"ok: {field} has {counted(len(data), 'answer' if field == WARM_START else 'prompt')}"
        yield from (f"note: {field}: {gap}" for gap in data.gaps)
    yield from _source_lines(config, sources)
    yield from _end_lines(config, sum(len(loaded.data) for loaded in sources))
    reward_of_section(config.reward, config.run.code_dir, local=local)
    for field, spec in config.reward.specs.items():
        if field not in local:
            yield f"ok: {field} {spec} can be imported"
    yield from _objective_lines(config, local)
    if config.model.make is None and files and _has_transformers():
        yield from _check_prompts(config, files, rehearse, local)
    elif config.model.make is None and files and rehearse:
        yield f"note: prompts and reward are not tested: {missing_package('transformers')}"
    if config.environment.class_name is not None:
        from engine.config.episodes import check_environment, load_environment

        if sources and config.model.path is not None and _has_transformers():
            yield from check_environment(config, config.model.path, sources[0].data, local)
        else:
            load_environment(config, local)
            yield f"ok: environment.class_name {config.environment.class_name} can be imported"
    if rehearse_agent is not None and config.several_turns and sources and _has_transformers():
        yield from rehearse_agent(config, sources[0].data.prompt(0))
    if rehearse_backends is not None and (config.rollout.custom or config.trainer.custom or config.scheduler.states):
        why = _why_no_rehearsal(config)
        yield from [f"note: your classes are not tested on a group: {why}"] if why else rehearse_backends(config)


def _why_no_rehearsal(config: Config) -> str:
    """Why the user's classes cannot be called before the run; empty if they can."""
    made: dict[str | None, MadeModel] = {"arithmetic": config.model.arithmetic, "lookup": config.model.lookup}
    model = made.get(config.model.make)
    if not _has_transformers():
        return missing_package("transformers")
    if model is not None and not model.exists(Path(config.run.dir) / ".made", config.run.seed):
        return "model.make builds the model when a run starts; repeat the check after a first run"
    if config.several_turns:
        return "only a run makes a group of several turns"
    return ""


def _model_lines(config: Config, directory: Path | None) -> Iterator[str]:
    """`directory`: of the model's files. Raises: ConfigError for a model that cannot be used."""
    path = config.model.path
    if path is None:
        return
    if local_directory(path) is not None:
        assert directory is not None
        check_model(directory)
        yield f"ok: model.path {path} has a model and a tokenizer"
    elif not _has_transformers():
        yield f"note: model.path {path} is read as a hub name: there is no such directory (for a path, begin with ./)"
    else:
        from engine.config.prompts import find_model

        find_model(path)
        yield f"ok: model.path {path} is a model of the hub"
    reference = config.trainer.reference_path
    teacher = None if reference is None else local_directory(reference, REFERENCE)
    if teacher is not None:
        check_weights(teacher, REFERENCE)
    shapes = {} if directory is None else tensor_shapes(directory)
    if directory is None or not (shapes or Path(path).is_dir()):
        yield f"note: the memory cannot be estimated before model.path {path} is downloaded"
    else:
        yield from _size_lines(config, directory, shapes)
    if directory is not None and not config.trainer.custom:
        yield packing_line(config, directory)
    if config.trainer.compile and not config.trainer.custom:
        yield (
            "note: trainer.compile: each process of the trainer compiles layers in its first passes. This takes a "
            "minute or more, limited by timeouts.train_s, and needs a C++ compiler on the trainer's machine"
        )
    yield from _check_reference(config, directory)
    checkpoint = config.model.checkpoint_path
    if checkpoint is not None:
        check_checkpoint(Path(checkpoint), directory)
        yield f"ok: model.checkpoint_path {checkpoint} has weights of this model"


def _size_lines(config: Config, directory: Path, shapes: Shapes) -> Iterator[str]:
    """Lines on the adapter and on memory. Raises: ConfigError for what cannot fit, and for
    `trainer.router_replay` if the model has no experts."""
    if shapes and config.trainer.router_replay and not has_experts(shapes):
        law = f"model.path {config.model.path} has no experts"
        raise ConfigError("trainer.router_replay", True, law, "use false")
    lora = config.trainer_settings.lora
    if lora is not None:
        yield from adapter_line(lora, shapes, numbers_in(shapes))
    adapter = 0 if lora is None else adapter_numbers(lora, shapes)
    model = Model.of(directory, shapes, adapter, start_bytes(config, directory))
    if model is None:
        yield f"note: the memory is not estimated: the files of model.path {config.model.path} do not say its sizes"
        return
    reference: Model | None = model
    path = config.trainer.reference_path
    if path is not None and config.trainer_settings.needs_reference:
        files = files_of(path)
        reference = None if files is None else Model.of(files, tensor_shapes(files))
        if reference is None:
            why = "its files do not say its size" if Path(path).is_dir() else "it is not downloaded yet"
            yield f"note: the memory estimates below leave out trainer.reference_path {path}: {why}"
    yield from memory_lines(model, config, reference)


def _check_sets(config: Config, local: Local) -> Iterator[str]:
    """Raises: ConfigError if the reward or the answer function of a validation set cannot be imported."""
    for index, one in enumerate(config.validation.sets):
        field = f"validation.sets.{index}"
        if one.reward is not None:
            reward_of_set(one.reward, config.reward, config.run.code_dir, f"{field}.reward", local)
            yield f"ok: {field}.reward {one.reward} can be imported"
        if ":" in one.answer:
            answer_of(one.answer, None, config.run.code_dir, config_field=f"{field}.answer")
            yield f"ok: {field}.answer {one.answer} can be imported"


REFERENCE = "trainer.reference_path"
WARM_START = "model.warm_start.path"


def _objective_lines(config: Config, local: Local) -> Iterator[str]:
    """Lines on the user's functions of the objective, which are called on synthetic tensors. Raises: ConfigError."""
    settings = config.trainer_settings.with_local(local)
    if not settings.custom_functions():
        return
    if find_spec("torch") is None:
        yield f"note: the objective is not tested: {missing_package('torch')}"
        return
    from engine.training.objective_check import check_objective

    yield from (f"ok: {line}" for line in check_objective(settings).lines)


def _has_transformers() -> bool:
    return find_spec("transformers") is not None


def _check_prompts(config: Config, files: dict[str, "Dataset"], rehearse: bool, local: Local) -> Iterator[str]:
    """Raises: ConfigError for prompts that the model cannot read, or stop strings that are not one token."""
    from engine.config.dry_run import dry_run
    from engine.config.prompts import check_prompts, load_tokenizer, stop_ids_of

    model = config.model.path
    assert model is not None
    answered = {field: data for field, data in files.items() if field == WARM_START}
    prompts = {field: data for field, data in files.items() if field != WARM_START}
    if not rehearse:
        tokenizer = load_tokenizer(model)
        check_prompts(config, tokenizer, model, answered if config.several_turns else files)
        stop_ids_of(config, tokenizer, model)
        return
    if answered:
        check_prompts(config, load_tokenizer(model), model, answered)
    yield from dry_run(config, model, prompts, local)


def _source_lines(config: Config, sources: Sequence["LoadedSource"]) -> Iterator[str]:
    """Rows, weight and expected share of each named source."""
    if not config.data.sources:
        return
    curriculum = config.data.chosen_curriculum()
    rows = [len(loaded.data) for loaded in sources]
    weights = [
        count if loaded.files.weight is None else loaded.files.weight
        for count, loaded in zip(rows, sources, strict=True)
    ]
    stages = [tuple(weights)] if curriculum is None else [stage.weights for stage in curriculum.stages]
    for index, loaded in enumerate(sources):
        percent = " -> ".join(f"{stage[index] / sum(stage):.1%}" for stage in stages)
        weight = "in the stages of data.curriculum" if curriculum is not None else f"{weights[index]:g}"
        left = f", {loaded.dropped} left out by {loaded.files.pass_rate}" if loaded.dropped else ""
        yield f"ok: source {loaded.files.name}: {rows[index]} rows{left}, weight {weight}, expected share {percent}"
    if curriculum is None and config.run.epochs is not None:
        draws = config.run.epochs * sum(rows)
        for index, loaded in enumerate(sources):
            passes = draws * weights[index] / sum(weights) / rows[index]
            if passes < 0.995 * config.run.epochs or passes > 1.005 * config.run.epochs:
                yield (
                    f"note: source {loaded.files.name} is read {passes:.2g} times in {draws} draws "
                    f"(run.epochs = {config.run.epochs} times the rows of all sources)"
                )


MOST_PROMPTS = 64


def first_prompts(config: Config) -> list[Prompt]:
    """The first prompts of each source, for simulated runs whose policies see columns of the data; else none."""
    if not config.described or config.data.given is None:
        return []
    loaded = [files.load() for files in config.data.source_files()]
    return [
        replace(one.data.prompt(row), source=one.files.name)
        for row in range(MOST_PROMPTS)
        for one in loaded
        if row < len(one.data)
    ]


def _end_lines(config: Config, rows: int) -> Iterator[str]:
    """A note if the data ends before the train steps do, or if most prompts are never drawn."""
    run = config.run
    if not rows or run.max_steps is None:
        return
    drawn = run.max_steps * config.scheduler.train_batch_size
    if 2 * drawn < rows:
        yield (
            f"note: run.max_steps {run.max_steps} x scheduler.train_batch_size {config.scheduler.train_batch_size} = "
            f"{counted(drawn, 'prompt')}, so most of the {rows} prompts are never drawn; to use them, raise "
            "run.max_steps"
        )
    if run.epochs is None:
        return
    steps = -(-rows * run.epochs // config.scheduler.train_batch_size)
    if steps < run.max_steps:
        yield (
            f"note: {counted(rows, 'prompt')} x {counted(run.epochs, 'epoch')} = {counted(steps, 'train step')}, fewer "
            f"than run.max_steps {run.max_steps}, so the run ends early; set run.epochs: null to repeat the data"
        )


def _data_sets(config: Config) -> dict[str, "Dataset"]:
    """The validation prompts and warm-start answers, by field. Raises: ConfigError if they cannot be read."""
    column = config.data.prompt_field
    named = [("data.validation_path", config.data.validation_path, column)]
    for index, one in enumerate(config.validation.sets):
        named.append((f"validation.sets.{index}.path", one.path, one.prompt_field or column))
    files = {}
    for field, path, prompt_field in named:
        if path is not None:
            from engine.tasks.dataset import Dataset  # late: it needs the extra `train`

            files[field] = Dataset.load(path, prompt_field=prompt_field, config_field=field)
    if config.model.warm_start.path is not None:
        from engine.tasks.warm_start import load_answers

        files[WARM_START], _ = load_answers(config.model.warm_start, config.data.prompt_field)
    return files


def local_directory(model: str, field: str = "model.path") -> Path | None:
    """The directory of a model that a path names; None for a hub name.

    Raises: ConfigError for a path that is not a directory.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory
    if directory.is_absolute():
        fix = "give the directory of a model in Hugging Face format, or a hub name"
        raise ConfigError(field, model, "is not a directory", fix)
    return None


def known_directory(config: Config) -> Path | None:
    """The directory with the files of `model.path`, which may be in the local hub cache; None if there is none.

    Raises: ConfigError for a path that is not a directory.
    """
    path = config.model.path
    return None if path is None else local_directory(path) or files_of(path)


def _check_reference(config: Config, directory: Path | None) -> Iterator[str]:
    """Raises: ConfigError for a reference or teacher with other tokens than the model's."""
    path = config.trainer.reference_path
    if path is None:
        return
    files = files_of(path)
    ours = None if directory is None else vocabulary(directory)
    theirs = None if files is None else vocabulary(files)
    if ours is None or theirs is None:
        missing = f"model.path {config.model.path}" if ours is None else f"trainer.reference_path {path}"
        yield (
            f"note: {missing} has no tokenizer.json on this machine, so its tokens are not compared now; "
            "the start of the run compares their number"
        )
        return
    if ours == theirs:
        yield f"ok: trainer.reference_path {path} has the tokenizer of model.path"
        return
    odd = next(token for token, id in (ours | theirs).items() if ours.get(token) != theirs.get(token, -1))
    law = f"has another tokenizer than model.path: its token {odd!r} is {theirs.get(odd)}, not {ours.get(odd)}"
    raise ConfigError(REFERENCE, path, law, "use a model with the same tokenizer")


def check_model(directory: Path) -> None:
    """Raises: ConfigError if the model's configuration, weights or tokenizer are missing."""
    check_weights(directory)
    if not any((directory / name).is_file() for name in TOKENIZERS):
        raise ConfigError("model.path", str(directory), "has no tokenizer, such as tokenizer.json", MODEL_FIX)


def check_weights(directory: Path, field: str = "model.path") -> None:
    """Raises: ConfigError if the model's configuration or weights are missing."""
    refuse_adapter_as_model(directory, field)
    if not (directory / "config.json").is_file():
        raise ConfigError(field, str(directory), "has no config.json", MODEL_FIX)
    if not any(any(directory.glob(pattern)) for pattern in WEIGHTS):
        raise ConfigError(field, str(directory), "has no weights, such as model.safetensors", MODEL_FIX)


def check_checkpoint(checkpoint: Path, model: Path | None) -> None:
    """Raises: ConfigError unless the checkpoint has the same tensors as the model. `model`: the directory of the
    model's files; None: not downloaded yet, so the tensors are not compared."""
    if not checkpoint.is_dir():
        law, fix = "is not a directory", "give the directory of a checkpoint, or use --from RUN@step-N"
        raise ConfigError("model.checkpoint_path", str(checkpoint), law, fix)
    if (checkpoint / WEIGHTS_FILE).is_file():
        law, fix = (
            "has an adapter, not a whole model",
            "merge it with `engine export`, and use the result as model.path",
        )
        raise ConfigError("model.checkpoint_path", str(checkpoint), law, fix)
    difference = first_difference({} if model is None else tensor_shapes(model), tensor_shapes(checkpoint))
    if difference:
        law = f"is of another model than model.path: {difference}"
        raise ConfigError("model.checkpoint_path", str(checkpoint), law, "use a checkpoint of this model")


def start_bytes(config: Config, directory: Path) -> int:
    """Bytes of a number of the weights that the run begins with, as `config.json` names their type; `directory`: of
    `model.path`."""
    return number_bytes(Path(config.model.checkpoint_path or directory))


def version_bytes(config: Config, directory: Path) -> int | None:
    """Bytes of a published version without tied weights; None if the model's files do not say it."""
    shapes, lora = tensor_shapes(directory), config.trainer_settings.lora
    numbers = numbers_in(shapes) if lora is None else adapter_numbers(lora, shapes)
    return published_bytes(config, start_bytes(config, directory)) * numbers or None


def versions_held(config: Config) -> int:
    """Number of weights versions that may exist at once, including the one being validated and the next to validate."""
    return VERSIONS_HELD + 2 * (config.validation.every > 0 and config.held_out)


def object_store_bytes(config: Config, directory: Path | None) -> int | None:
    """Bytes that the object store must have room for; None if the model's size is not known before it is loaded."""
    if config.rollout.transport == "distributed" or config.model.make is not None:
        return LEAST_STORE_BYTES
    version = None if directory is None else version_bytes(config, directory)
    return None if version is None else max(LEAST_STORE_BYTES, versions_held(config) * version)


def _check_store(config: Config, directory: Path | None) -> Iterator[str]:
    """On one machine, versions stay in the memory in which the built-in trainer publishes them."""
    wanted, limit = object_store_bytes(config, directory), object_store_limit()
    if wanted is None:
        return
    need = f"note: {versions_held(config)} weights versions need {wanted / 1e9:.1f} GB of"
    if config.cluster.joined() is None and not config.trainer.custom:
        if wanted > memory_bytes():
            yield (
                f"{need} shared memory, but this machine has {memory_bytes() / 1e9:.1f} GB of memory in all: train an "
                "adapter (trainer.lora) or a smaller model, or set trainer.publish_dtype: bfloat16"
            )
    elif wanted > limit:
        yield (
            f"{need} object store, but only {limit / 1e9:.1f} GB are available (30 % of memory, /dev/shm): Ray moves "
            "the rest to disk"
        )


def _check_stop(config: Config) -> None:
    """Raises: ConfigError for a stop string that is not one token of the model that `model.make` builds."""
    for text in config.rollout.stop if config.model.make == "arithmetic" else ():
        if text not in (END, PAD, UNKNOWN):
            config.rollout.require_one_token(text, len(text))


def packing_line(config: Config, directory: Path) -> str:
    """Raises: ConfigError if the settings require packed rows, but the model cannot compute them."""
    t = config.trainer
    if t.packing == "off":
        return "ok: trajectories are padded to the longest one of their forward pass (trainer.packing off)"
    try:
        reason = why_padded(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError):
        reason = "has no config.json that can be read"
    if reason is None:
        shared = {"auto": "a prompt is computed once if that saves 15 % of the tokens", "off": "no prompt is shared"}
        varlen = t.attention != "sdpa" and on_gpu(config) and computed_bytes(config) == 2
        return (
            "ok: trajectories are packed without padding if a test of the loaded model gives the same results; "
            f"{shared.get(t.shared_prompts, 'each prompt is computed once')}; "
            f"attention is computed by {'torch.nn.attention.varlen where torch has it' if varlen else 'sdpa'}"
        )
    if t.packing_demands:
        raise t.refuse_padding(f"model.path {config.model.path} {reason}")
    return f"note: trajectories are padded, not packed: model.path {config.model.path} {reason}"
