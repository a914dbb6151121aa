"""The sections `metrics.sinks` and `samples`: what a run writes for people, in addition to its record. Part of
`schema.Config`."""

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from engine.extras import install_command
from engine.section import Section


class TensorBoardSection(Section):
    """Event files for TensorBoard. Needs the extra `tensorboard`."""

    enabled: bool = Field(False, description="Whether the sink is used.")
    dir: str | None = Field(None, min_length=1, description="Directory; null: tensorboard/ in the run's directory.")


class WandbSection(Section):
    """A run of Weights & Biases. Needs the extra `wandb`."""

    enabled: bool = Field(False, description="Whether the sink is used.")
    project: str = Field("step-engine", min_length=1, description="Project of the run.")
    entity: str | None = Field(None, min_length=1, description="User or team; null: the logged-in user.")
    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: stored in the run's directory until `wandb sync`."
    )


class MLflowSection(Section):
    """A run of MLflow. Needs the extra `mlflow`."""

    enabled: bool = Field(False, description="Whether the sink is used.")
    uri: str | None = Field(
        None, min_length=1, description="Tracking server or store; null: mlruns/ beside the run directories."
    )
    experiment: str = Field("step-engine", min_length=1, description="Experiment of the run.")


class SinksSection(Section):
    """Other destinations for the rows of metrics.jsonl."""

    tensorboard: TensorBoardSection = Field(
        default_factory=TensorBoardSection, description="TensorBoard's event files."
    )
    wandb: WandbSection = Field(default_factory=WandbSection, description="Weights & Biases.")
    mlflow: MLflowSection = Field(default_factory=MLflowSection, description="MLflow.")

    def chosen(self) -> dict[str, dict[str, Any]]:
        """Options of each enabled sink, by its name."""
        sinks = self.model_dump(mode="json")
        return {name: options for name, options in sinks.items() if options.pop("enabled")}


class SamplesSection(Section):
    """Responses that are kept in samples/ of the run's directory. `engine samples` shows them."""

    per_step: int = Field(
        8,
        ge=0,
        le=100_000,
        description="Maximum number of responses kept for each train step: worst, best, random, longest, truncated. "
        "Also the maximum number of filtered ones before each train step, and of those whose reward failed for each "
        "replica and weights version. 0: none.",
    )
    validation: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Maximum number of prompts of each validation set whose responses are kept, the same prompts each "
        "time; 0: none; null: all.",
    )
    max_characters: int = Field(
        20_000,
        ge=100,
        le=100_000_000,
        description="Maximum length of a kept prompt or response; the middle of a longer one is left out.",
    )
    sink_every: int = Field(
        10,
        ge=0,
        le=1_000_000,
        description="Train steps between samples sent to metrics.sinks; validations always send theirs. 0: none.",
    )


def missing_package(section: SamplesSection) -> Iterator[str]:
    """A note if samples are wanted but cannot be written here."""
    if (section.per_step or section.validation != 0) and importlib.util.find_spec("pyarrow") is None:
        yield (
            f"the package pyarrow is not installed, so no samples are kept; run `{install_command('train')}`, or "
            "set samples.per_step and samples.validation to 0"
        )
