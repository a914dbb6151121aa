"""The section `model.lookup`: sizes of what `model.make: lookup` builds. Part of `schema.Config`."""

from typing import Self

from pydantic import Field, model_validator

from engine.config.section import Section
from engine.errors import ConfigError
from engine.tasks.lookup import LookupModel

_MADE = LookupModel()
MOST_MADE = 10_000_000
"""Prompts and supervised steps of a model that is made on the spot."""


class LookupSection(Section):
    """The model and rows that `model.make: lookup` builds on the spot, for `engine.environments.lookup:Lookup`."""

    train_prompts: int = Field(_MADE.train_prompts, ge=1, le=MOST_MADE, description="Prompts in the training set.")
    validation_prompts: int = Field(_MADE.validation_prompts, ge=1, le=MOST_MADE, description="Validation prompts.")
    warmup_steps: int = Field(_MADE.warmup_steps, ge=0, le=MOST_MADE, description="Supervised steps before the run.")
    most_steps: int = Field(_MADE.most_steps, ge=1, le=9, description="Maximum number of links in a question.")
    haste: float = Field(
        _MADE.haste, ge=0, le=1, description="Share of warm-up turns that answer before every link is followed."
    )
    wrong_tool: float = Field(
        _MADE.wrong_tool, ge=0, le=1, description="Share of warm-up turns that call a tool that does not exist."
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
