"""The data section of a configuration: the sources of prompts, how they are mixed, and how a prompt becomes the tokens
that a model reads."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.errors import ConfigError, choice
from engine.section import Section
from engine.tasks.chat import GIVEN, ChatSettings
from engine.tasks.source_files import Curriculum, CurriculumStage, PassRate, SourceFiles

FilePath = Annotated[str, Field(min_length=1)]
Paths = FilePath | Annotated[list[FilePath], Field(min_length=1, max_length=10_000)]
"""A file, a directory of `datasets`, a glob, an address on the hub, or a list of these."""
MOST_SOURCES = 64


class SourceSection(Section):
    """One of several sources of training prompts."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=64,
        description="Name of the source in metrics, samples and the curriculum.",
    )
    path: Paths = Field(description="Files of prompts, as in data.path.")
    weight: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="Share of the draws relative to other sources; null: in proportion to their rows. To use no row of "
        "a source, remove it.",
    )
    prompt_field: str | None = Field(None, min_length=1, description="Column with the prompt; null: data.prompt_field.")
    columns: dict[FilePath, FilePath] = Field(
        default_factory=dict, max_length=1000, description="New names of columns, by their names in the files."
    )
    pass_rate: PassRate | None = Field(None, description="Which rows are drawn; null: all.")


class StageSection(Section):
    """One stage of a curriculum."""

    weights: dict[FilePath, Annotated[float, Field(ge=0, le=1e9)]] = Field(
        min_length=1,
        max_length=MOST_SOURCES,
        description="Weight of each source, by its name; the weight of a source that is not named is 0.",
    )
    until: float | None = Field(
        None,
        ge=-1e9,
        le=1e9,
        description="Where the stage ends: a number of train steps, or a mean reward; null: the last stage.",
    )


class CurriculumSection(Section):
    """Stages with different weights, instead of `weight` of the sources."""

    by: Literal["step", "accuracy"] = Field(
        "step", description="What ends a stage: a number of train steps, or the mean reward of its newest groups."
    )
    window: int = Field(
        256, ge=1, le=1_000_000, description="With by: accuracy, number of newest groups whose mean reward counts."
    )
    stages: list[StageSection] = Field(min_length=1, max_length=1000, description="The stages, in order.")


class DataSection(Section):
    """The prompts. Not needed with `model.make`, which builds its own."""

    path: Paths | None = Field(
        None,
        description="Training prompts: a JSONL, JSON, CSV or Parquet file, a directory of datasets' save_to_disk, a "
        "glob, files of a dataset on the hub (hf://datasets/OWNER/NAME/FILE), or a list of these.",
    )
    sources: list[SourceSection] = Field(
        [], max_length=MOST_SOURCES, description="Several sources with weights, instead of data.path."
    )
    curriculum: CurriculumSection | None = Field(
        None, description="Weights of the sources that change during the run; null: constant weights."
    )
    validation_path: Paths | None = Field(None, description="Validation prompts, as in data.path.")
    prompt_field: str = Field(
        "prompt", min_length=1, description="Column with the prompt; the reward gets all columns."
    )
    shuffle: bool = Field(True, description="Shuffle each epoch with run.seed.")
    chat: Literal["auto", "never"] = Field(
        "auto",
        description="auto: a text prompt is a user message if the tokenizer has a chat template. never: it is used "
        "unchanged.",
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="System message of every chat that has none; null: no system message."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, for example enable_thinking: false."
    )

    overlong: Literal["error", "drop", "truncate_left"] = Field(
        "error", description="Prompts above the limit: refuse the data, drop them, or cut them, whole messages first."
    )
    max_prompt_tokens: int | None = Field(
        None,
        ge=2,
        le=10_000_000,
        description="Maximum tokens of a prompt; null: the context length minus one response token; with "
        "truncate_left, minus the longest response.",
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        _refuse_sources(self)
        _refuse_curriculum(self)
        given = {"data.system_prompt": self.system_prompt, "data.chat_template_kwargs": self.chat_template_kwargs}
        for field, value in given.items():
            if value and self.chat == "never":
                law = "needs the chat template, and data.chat is never"
                raise ConfigError(field, value, law, "remove it, or use data.chat: auto")
        for name in self.chat_template_kwargs:
            if name in GIVEN:
                fix = "remove it" + ("; use the column tools of the data" if name == "tools" else "")
                raise ConfigError("data.chat_template_kwargs", name, "is set by the engine", fix)
        return self

    def chat_settings(self) -> ChatSettings:
        """How prompts are rendered."""
        return ChatSettings(mode=self.chat, system_prompt=self.system_prompt, template_kwargs=self.chat_template_kwargs)

    def source_files(self) -> list[SourceFiles]:
        """The sources of training prompts; `data.path` is one without a name."""
        if self.path is not None:
            return [SourceFiles(name="", field="data.path", path=self.path, prompt_field=self.prompt_field)]
        return [
            SourceFiles(
                name=source.name,
                field=f"data.sources.{source.name}",
                path=source.path,
                prompt_field=source.prompt_field or self.prompt_field,
                columns=source.columns,
                weight=source.weight,
                pass_rate=source.pass_rate,
            )
            for source in self.sources
        ]

    def chosen_curriculum(self) -> Curriculum | None:
        """The stages, with the weights in the order of the sources."""
        if self.curriculum is None:
            return None
        names = [source.name for source in self.sources]
        stages = [
            CurriculumStage(weights=tuple(stage.weights.get(name, 0.0) for name in names), until=stage.until)
            for stage in self.curriculum.stages
        ]
        return Curriculum(
            stages=tuple(stages), by_accuracy=self.curriculum.by == "accuracy", window=self.curriculum.window
        )

    @property
    def given(self) -> Any:
        """The path or the source names of the training prompts; None if there are none."""
        return self.path if self.path is not None else [source.name for source in self.sources] or None


def _refuse_sources(data: DataSection) -> None:
    """Raises: `ConfigError` for both a path and sources, a repeated name, or weights that cannot be used together."""
    if data.path is not None and data.sources:
        law = "cannot be set together with data.sources"
        raise ConfigError("data.path", data.path, law, "make it one of the sources, or remove the sources")
    names = [source.name for source in data.sources]
    weighted = [source.weight is not None for source in data.sources]
    for index, source in enumerate(data.sources):
        field = f"data.sources.{index}"
        if source.name in names[:index]:
            law = "must be unique: an earlier source has this name"
            raise ConfigError(f"{field}.name", source.name, law, "use another name")
        if source.weight is None and any(weighted):
            other = names[weighted.index(True)]
            law = f"source {source.name!r} has no weight, but source {other!r} has one"
            raise ConfigError(f"{field}.weight", None, law, "give every source a weight, or none")
        repeated = [new for new in source.columns.values() if [*source.columns.values()].count(new) > 1]
        if repeated:
            law = f"source {source.name!r} gives two columns the name {repeated[0]!r}"
            raise ConfigError(f"{field}.columns", source.columns, law, "use different names")
        if source.pass_rate is not None:
            _refuse_pass_rate(f"{field}.pass_rate", source.pass_rate)


def _refuse_pass_rate(field: str, wanted: PassRate) -> None:
    if wanted.min is None and wanted.max is None:
        raise ConfigError(field, None, "min and max are both null", "set one of them, for example max: 0.9")
    if wanted.min is not None and wanted.max is not None and wanted.min > wanted.max:
        raise ConfigError(f"{field}.min", wanted.min, f"must be at most max = {wanted.max:g}", "swap them")


def _refuse_curriculum(data: DataSection) -> None:
    """Raises: `ConfigError` for stages that name an unknown source, have no weight, or end in the wrong order."""
    curriculum = data.curriculum
    if curriculum is None:
        return
    names = [source.name for source in data.sources]
    if not names:
        law = "needs data.sources, whose weights it changes"
        raise ConfigError("data.curriculum", curriculum.by, law, "set data.sources, or remove the curriculum")
    for index, source in enumerate(data.sources):
        if source.weight is not None:
            law = "cannot be set together with data.curriculum, whose stages have the weights"
            raise ConfigError(f"data.sources.{index}.weight", source.weight, law, "remove one of them")
    for index, stage in enumerate(curriculum.stages):
        field = f"data.curriculum.stages.{index}"
        for name in stage.weights:
            if name not in names:
                raise ConfigError(f"{field}.weights", name, "is not the name of a source", choice(name, names))
        if not any(stage.weights.values()):
            raise ConfigError(f"{field}.weights", stage.weights, "are all 0", "give one source a weight above 0")
    _refuse_ends(curriculum)


def _refuse_ends(curriculum: CurriculumSection) -> None:
    last = len(curriculum.stages) - 1
    before = 0.0
    for index, stage in enumerate(curriculum.stages):
        field = f"data.curriculum.stages.{index}.until"
        if index == last:
            if stage.until is not None:
                raise ConfigError(field, stage.until, "must be null: the last stage has no end", "remove it")
        elif stage.until is None:
            law = "is required: only the last stage has no end"
            fix = "a number of train steps" if curriculum.by == "step" else "a mean reward"
            raise ConfigError(field, None, law, f"set it to {fix}")
        elif curriculum.by == "step":
            if stage.until != int(stage.until) or stage.until <= before:
                law = f"must be a whole number of train steps above {before:g}"
                raise ConfigError(field, stage.until, law, f"for example {before + 100:g}")
            before = stage.until
