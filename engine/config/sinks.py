"""The configuration of sinks: where the lines of `metrics.jsonl` go besides. Part of `schema`."""

from typing import Any, Literal

from pydantic import Field

from engine.config.section import Section


class TensorBoardSection(Section):
    """Event files for TensorBoard. Needs the extra `tensorboard`."""

    dir: str | None = Field(None, min_length=1, description="Where they go; null: tensorboard/ in the run's directory.")


class WandbSection(Section):
    """A run of Weights & Biases. Needs the extra `wandb`."""

    project: str = Field("step-engine", min_length=1, description="Project of the run.")
    entity: str | None = Field(None, min_length=1, description="User or team; null: whoever is logged in.")
    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: kept in the run's directory until `wandb sync`."
    )


class MLflowSection(Section):
    """A run of MLflow. Needs the extra `mlflow`."""

    uri: str | None = Field(None, min_length=1, description="Tracking server or store; null: mlruns/ beside the runs.")
    experiment: str = Field("step-engine", min_length=1, description="Experiment of the run.")


class SinksSection(Section):
    """Where the lines of metrics.jsonl go besides: each sink that is given, `{}` for one as it is."""

    tensorboard: TensorBoardSection | None = Field(None, description="TensorBoard's event files.")
    wandb: WandbSection | None = Field(None, description="Weights & Biases.")
    mlflow: MLflowSection | None = Field(None, description="MLflow.")

    def chosen(self) -> dict[str, dict[str, Any]]:
        """Options by the name of each sink that is given."""
        return {name: options for name, options in self.model_dump(mode="json").items() if options is not None}
