"""The configuration of sinks: where the lines of `metrics.jsonl` go besides. Part of `schema`."""

from typing import Any, Literal

from pydantic import Field

from engine.config.section import Section


class TensorBoardSection(Section):
    """Event files for TensorBoard. Needs the extra `tensorboard`."""

    enabled: bool = Field(False, description="Whether the sink is used.")
    dir: str | None = Field(None, min_length=1, description="Its directory; null: tensorboard/ in the run's directory.")


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
    """Where the lines of metrics.jsonl go besides."""

    tensorboard: TensorBoardSection = Field(
        default_factory=TensorBoardSection, description="TensorBoard's event files."
    )
    wandb: WandbSection = Field(default_factory=WandbSection, description="Weights & Biases.")
    mlflow: MLflowSection = Field(default_factory=MLflowSection, description="MLflow.")

    def chosen(self) -> dict[str, dict[str, Any]]:
        """Options by the name of each sink that is enabled."""
        sinks = self.model_dump(mode="json")
        return {name: options for name, options in sinks.items() if options.pop("enabled")}
