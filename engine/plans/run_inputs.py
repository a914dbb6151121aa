"""The files and functions that a configuration refers to: model, prompts, reward.

Called by `configured_plan`, in the launching process, and by `rollouts`. Must never change a file of the user.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.config import Config
from engine.config.prompts import check_prompts, load_tokenizer, prompt_limit, renderer_of
from engine.config.reward_functions import reward_of_section
from engine.config.validation import SetSettings
from engine.errors import ConfigError
from engine.input_identity import InputIdentity
from engine.plans.trainers import make_warm_start
from engine.plans.validation_sets import held_out_rows, set_files
from engine.protocols import Prompts
from engine.protocols.named_code import Local
from engine.rollout.reward_parts import RewardParts
from engine.runtime.prompt_sources import CountedPrompts, MixedPrompts
from engine.states.limits import ValidationLimits
from engine.storage.input_files import read_inputs
from engine.tasks.dataset import Dataset, PromptSource
from engine.tasks.mixture import Mixture, Source
from engine.tasks.prompt_lengths import count_tokens, fitting_prompts
from engine.tasks.quickstart import Progress, prepare
from engine.tasks.source_files import LoadedSource, SourceFiles
from engine.trajectory import Prompt

HELD_OUT = "data.validation_path"


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files and functions that a configuration refers to."""

    model: str
    sources: tuple[SourceFiles, ...]
    """The training prompts, with the rows that the run uses."""
    held_out: str | Sequence[str] | None
    reward: str | None
    """`module:function`."""
    prompt_field: str
    local: Local = field(default_factory=dict)
    held_out_rows: Sequence[int] | None = None
    set_rows: Mapping[str, Sequence[int]] | None = None
    """Rows to use from the files of validation sets, by the field that names the file. A missing file or None: all
    rows."""
    most_prompt_tokens: int | None = None
    """Maximum tokens of a prompt; longer ones are truncated. None: no prompt is truncated."""
    logs: Path | None = None
    """The run's directory of logs."""
    gpu_part: float = 0.0
    """GPUs of each replica, if it shares a GPU."""


def inputs_of(config: Config, progress: Progress | None = None) -> Inputs:
    """The paths of model and data and the name of the reward. With `model.make`, creates model and data first.

    Raises: `ConfigError` if a path is missing or an input cannot be used.
    """
    if config.model.make is not None:
        made, seed = Path(config.run.dir) / ".made", config.run.seed
        wanted = config.model.lookup if config.model.make == "lookup" else config.model.arithmetic
        ready = prepare(made, wanted, progress or (lambda done, text: None), seed=seed)
        made_source = SourceFiles(name="", field="data.path", path=ready.training_path)
        return Inputs(ready.model_path, (made_source,), ready.validation_path, ready.reward, "prompt")
    path, data, reward = config.model.path, config.data, config.reward
    if path is None or data.given is None:
        raise ConfigError("model.path", path, "model.path and data.path are required", "set them, or use model.make")
    model = path if config.model.warm_start.path is None else make_warm_start(config, path, progress)
    return Inputs(model, tuple(data.source_files()), data.validation_path, reward.function, data.prompt_field)


def reward_of(config: Config, inputs: Inputs, *, check: bool = False) -> RewardParts | None:
    """The reward of a run: its function, or the weighted sum of several. None: rollouts return their rewards. `check`:
    also test what the functions need.

    Raises: `ConfigError` for a function that cannot be imported or called.
    """
    section = config.reward
    if inputs.reward is not None:
        section = section.model_copy(update={"function": inputs.reward})
    return reward_of_section(section, config.run.code_dir, check=check, local=inputs.local)


def fit_prompts(config: Config, inputs: Inputs, progress: Progress | None, *, trains: bool = True) -> Inputs:
    """The inputs, with only the prompts that fit the model. `trains`: also select the training prompts.

    Raises: `ConfigError` for prompts that cannot be read, or that this model cannot read.
    """
    files = {source.field: source.load().data for source in inputs.sources} if trains else {}
    if config.model.make is not None:
        set_files(config, inputs.prompt_field)
        return inputs
    if inputs.held_out is not None:
        files[HELD_OUT] = _held_out_data(inputs, inputs.held_out)
    files |= set_files(config, inputs.prompt_field)
    tokenizer = load_tokenizer(inputs.model)
    if config.several_turns:
        check_prompts(config, tokenizer, inputs.model, {})
        return inputs
    check_prompts(config, tokenizer, inputs.model, files)
    limit = prompt_limit(config, inputs.model)
    if limit is None:
        return inputs
    fittings = {}
    for name, data in files.items():
        counts = count_tokens(data, renderer_of(config, tokenizer), name, limit.tokens)
        cutter = renderer_of(config, tokenizer, limit.tokens)
        fittings[name] = fitting_prompts(data, counts, limit, config.data.overlong, name, cutter)
        if progress is not None and fittings[name].note:
            progress(1.0, fittings[name].note)
    held_out = fittings.get(HELD_OUT)
    sources = [replace(source, rows=fittings[source.field].rows) if trains else source for source in inputs.sources]
    return replace(
        inputs, sources=tuple(sources),
        set_rows={name: found.rows for name, found in fittings.items() if found.rows is not None},
        held_out_rows=None if held_out is None else held_out.rows,
        most_prompt_tokens=limit.tokens if config.data.overlong == "truncate_left" else None,
    )  # fmt: skip


def _held_out_data(inputs: Inputs, path: str | Sequence[str]) -> Dataset:
    data = Dataset.load(path, prompt_field=inputs.prompt_field, config_field=HELD_OUT)
    return data if inputs.held_out_rows is None else data.only(inputs.held_out_rows)


def held_out_of(config: Config, inputs: Inputs, limits: ValidationLimits) -> tuple[list[Prompt], ValidationLimits]:
    """The prompt of each row of a validation, and the limits with the number of rows."""

    def data_of(one: SetSettings) -> tuple[Dataset, Sequence[int] | None]:
        field = HELD_OUT if one.path is None else f"{one.field}.path"
        path = one.path or inputs.held_out
        assert path is not None  # the configuration was checked
        data = Dataset.load(path, prompt_field=one.prompt_field or inputs.prompt_field, config_field=field)
        return data, inputs.held_out_rows if one.path is None else (inputs.set_rows or {}).get(field)

    rows, sets = held_out_rows(config, data_of)
    return rows, replace(limits, rows=len(rows), sets=sets)


def make_prompts(config: Config, inputs: Inputs, run_dir: Path) -> Prompts:
    """The training prompts, in the order of the run's seed, and as the run in a directory has read them so far.

    Raises: `ConfigError` for data that has changed since the run was launched.
    """
    loaded, kept = [source.load() for source in inputs.sources], read_inputs(run_dir)
    for one in loaded if kept else ():
        if one.data.ids() != kept[-1].rows.get(one.files.name):
            fix = "restore it, or use `engine resume RUN --accept-data-change`"
            raise ConfigError(one.files.field, one.files.path, "was changed while the run was running", fix)
    if config.data.sources:
        return MixedPrompts(mixture_of(config, loaded, kept))
    if len(kept) > 1:
        changed = mixture_of(config, loaded, kept)
        return CountedPrompts(changed.total, changed.prompt)
    (alone,) = loaded
    source = PromptSource(alone.data, seed=config.run.seed, epochs=config.run.epochs, shuffle=config.data.shuffle)
    return CountedPrompts(source.total, source.prompt)


def mixture_of(config: Config, loaded: Sequence[LoadedSource], kept: Sequence[InputIdentity]) -> Mixture:
    """The draws from the sources. `kept`: what the run began with, then each change of its data."""
    sources = [
        Source(name=one.files.name, data=one.data, weight=one.files.weight, rest=one.files.rest, dropped=one.dropped)
        for one in loaded
    ]
    return Mixture(
        sources, seed=config.run.seed, epochs=config.run.epochs, shuffle=config.data.shuffle,
        curriculum=config.data.chosen_curriculum(), inputs=kept,
    )  # fmt: skip
