"""The section `model`: the model to train, models that the engine builds, and a supervised warm start. Part of
`schema.Config`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.errors import ConfigError
from engine.section import Section
from engine.tasks.lookup import LookupModel
from engine.tasks.quickstart import Quickstart
from engine.tasks.warm_start import WarmStart


class ModelSection(Section):
    """Which model is trained: give `path`, or `make`."""

    path: str | None = Field(
        None, min_length=1, description="Directory of a model in Hugging Face format, or a hub name."
    )
    make: Literal["arithmetic", "lookup"] | None = Field(
        None, description="Build a small model and its data instead of loading them."
    )
    arithmetic: Quickstart = Field(default_factory=Quickstart, description="Parameters of `make: arithmetic`.")
    lookup: LookupModel = Field(default_factory=LookupModel, description="Parameters of `make: lookup`.")
    warm_start: WarmStart = Field(default_factory=WarmStart, description="Supervised training before the run begins.")
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
