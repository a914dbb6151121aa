"""The section `model`: the model to train, models that the engine builds, and a supervised warm start. Part of
`schema.Config`."""

import dataclasses
from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config.scheduler import divisor
from engine.errors import ConfigError
from engine.section import Section
from engine.tasks.arithmetic import Division
from engine.tasks.lookup import LookupModel
from engine.tasks.quickstart import Quickstart

_MADE = Quickstart()
MOST_MADE = 10_000_000
"""Maximum number of prompts, and of supervised steps, of a model that the engine builds."""
_LOOKUP = LookupModel()
_FAMILY = {field.name for field in dataclasses.fields(Division)}


class ArithmeticSection(Section):
    """The model and data that `model.make: arithmetic` builds: `tasks.quickstart.Quickstart`."""

    layers: int = Field(_MADE.layers, ge=1, le=64, description="Transformer layers.")
    hidden_size: int = Field(_MADE.hidden_size, ge=8, le=8192, description="Width of the model.")
    heads: int = Field(_MADE.heads, ge=1, le=64, description="Attention heads; must divide half of hidden_size.")
    train_prompts: int = Field(_MADE.train_prompts, ge=1, le=MOST_MADE, description="Prompts in the training set.")
    validation_prompts: int = Field(_MADE.validation_prompts, ge=1, le=MOST_MADE, description="Validation prompts.")
    warmup_steps: int = Field(_MADE.warmup_steps, ge=0, le=MOST_MADE, description="Supervised steps before the run.")
    warmup_batch: int = Field(
        _MADE.warmup_batch, ge=1, le=MOST_MADE, description="Worked solutions per supervised step."
    )
    warmup_learning_rate: float = Field(
        _MADE.warmup_learning_rate, gt=0, le=1, description="Learning rate of the supervised steps."
    )
    short_steps: int = Field(
        _MADE.short_steps,
        ge=1,
        le=24,
        description="Number of steps to which most supervised examples cut an answer.",
    )
    carelessness: float = Field(
        _MADE.carelessness,
        ge=0,
        le=1,
        description="Probability that a supervised step across a ten is 1 too small; the run unlearns it.",
    )
    largest_divisor: int = Field(
        _MADE.family.largest_divisor, ge=2, le=9, description="Largest divisor in a question, a single digit."
    )
    median_steps: float = Field(
        _MADE.family.median_steps, ge=1, le=24, description="Median number of subtractions that an answer takes."
    )
    spread: float = Field(
        _MADE.family.spread,
        ge=0,
        le=3,
        description="Log-normal spread of the number of subtractions: p99 / median = exp(2.33 spread).",
    )
    most_steps: int = Field(
        _MADE.family.most_steps, ge=1, le=24, description="Subtractions of the longest answer; each is 6 tokens."
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            law = f"must divide half of hidden_size = {self.hidden_size}"
            fix = (
                f"use {divisor(self.hidden_size // 2, self.heads)}"
                if self.hidden_size % 2 == 0
                else "use an even hidden_size"
            )
            raise ConfigError("model.arithmetic.heads", self.heads, law, fix)
        return self

    def family(self) -> Division:
        """The family of questions."""
        return Division(**self.model_dump(include=_FAMILY))

    def quickstart(self, seed: int) -> Quickstart:
        """The parameters for `tasks.quickstart.prepare`."""
        return Quickstart(seed=seed, family=self.family(), **self.model_dump(exclude=_FAMILY))


class LookupSection(Section):
    """The model and rows that `model.make: lookup` builds for `engine.environments.lookup:Lookup`."""

    train_prompts: int = Field(_LOOKUP.train_prompts, ge=1, le=MOST_MADE, description="Prompts in the training set.")
    validation_prompts: int = Field(_LOOKUP.validation_prompts, ge=1, le=MOST_MADE, description="Validation prompts.")
    warmup_steps: int = Field(_LOOKUP.warmup_steps, ge=0, le=MOST_MADE, description="Supervised steps before the run.")
    most_steps: int = Field(_LOOKUP.most_steps, ge=1, le=9, description="Maximum number of links in a question.")
    haste: float = Field(
        _LOOKUP.haste, ge=0, le=1, description="Share of warm-up turns that answer before every link is followed."
    )
    wrong_tool: float = Field(
        _LOOKUP.wrong_tool, ge=0, le=1, description="Share of warm-up turns that call a tool that does not exist."
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.haste + self.wrong_tool > 1:
            law = f"must be at most {1 - self.wrong_tool:g}: with wrong_tool = {self.wrong_tool:g}, the sum may be 1"
            raise ConfigError("model.lookup.haste", self.haste, law, "lower one of them")
        return self

    def model(self, seed: int) -> LookupModel:
        """The parameters for `tasks.lookup.prepare_lookup`."""
        return LookupModel(seed=seed, **self.model_dump())


class WarmStartSection(Section):
    """Supervised training on written answers before the run begins."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Prompts with answers: a file, a directory of datasets, or a glob, as in data.path; null: no warm "
        "start.",
    )
    answer_field: str = Field("answer", min_length=1, description="Column with the answer.")
    epochs: int = Field(1, ge=1, le=1000, description="Passes over the file.")
    batch_size: int = Field(32, ge=1, le=65_536, description="Answers per optimizer step.")
    learning_rate: float = Field(1e-5, gt=0, le=1, description="AdamW's peak learning rate.")


class ModelSection(Section):
    """Which model is trained: give `path`, or `make`."""

    path: str | None = Field(
        None, min_length=1, description="Directory of a model in Hugging Face format, or a hub name."
    )
    make: Literal["arithmetic", "lookup"] | None = Field(
        None, description="Build a small model and its data instead of loading them."
    )
    arithmetic: ArithmeticSection = Field(
        default_factory=ArithmeticSection, description="Parameters of `make: arithmetic`."
    )
    lookup: LookupSection = Field(default_factory=LookupSection, description="Parameters of `make: lookup`.")
    warm_start: WarmStartSection = Field(
        default_factory=WarmStartSection, description="Supervised training before the run begins."
    )
    checkpoint_path: str | None = Field(
        None, min_length=1, description="Directory of a run's checkpoint whose weights the run begins with."
    )
    checkpoint_optimizer: bool = Field(
        False, description="Whether the trainer also begins with the optimizer state of model.checkpoint_path."
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if (self.path is None) == (self.make is None):
            law = "exactly one of model.path and model.make must be set"
            raise ConfigError(
                "model.path", self.path, law, "set model.path: <directory or hub name>, or model.make: arithmetic"
            )
        if self.make is not None and self.warm_start.path is not None:
            law = "model.make already builds a model with its own warm start"
            raise ConfigError("model.warm_start.path", self.warm_start.path, law, "remove it, or use model.path")
        if self.checkpoint_optimizer and self.checkpoint_path is None:
            law = "needs model.checkpoint_path, whose optimizer state it takes"
            raise ConfigError("model.checkpoint_optimizer", True, law, "set model.checkpoint_path, or run with --from")
        return self
