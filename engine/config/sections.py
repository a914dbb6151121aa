"""Every section of a configuration in one tree, each section valid by itself, and the sections that need no module.

Read by the modules with the laws between sections, and by `schema.Config`, which obeys these laws. Reads no file and
must not import a law: `schema.py` joins both.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config.agent import AgentSection, EnvironmentSection
from engine.config.cluster import ClusterSection
from engine.config.data import DataSection
from engine.config.limit_fields import limit_field
from engine.config.model import ModelSection
from engine.config.paths import RUNS
from engine.config.reports import SamplesSection, SinksSection
from engine.config.reward import RewardSection
from engine.config.rollout import RolloutSection
from engine.config.scheduler import SchedulerSection, TimeoutsSection
from engine.config.trainer import TrainerSection
from engine.config.validation import ValidationSection
from engine.errors import ConfigError
from engine.section import HostName, Section
from engine.states.limits import TASKS


class ListenerSection(Section):
    """Where a server of the run listens."""

    host: str = Field("127.0.0.1", min_length=1, description="Listen address.")
    hosts: list[HostName] = Field(
        default_factory=list, max_length=64, description="Additional accepted host names of requests."
    )
    port: int = Field(0, ge=0, le=65_535, description="Port; 0: any free one.")


class ControlSection(ListenerSection):
    """Where `engine scale`, `set`, `drain` and `stop` reach the run. They need the token in `control.json`."""

    enabled: bool = Field(True, description="Whether the run accepts requests.")


class RunSection(Section):
    """Where a run is stored and when it ends."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Last part of the run's id; `run`: the config's file name.",
    )
    dir: str = Field(
        RUNS, min_length=1, description="Parent of the run directories; by default runs/ in the working directory."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of data order, sampling and models of model.make.")
    max_steps: int | None = limit_field("max_steps")
    epochs: int | None = Field(1, ge=1, le=1_000_000, description="Passes over the data; null: until max_steps.")
    silence_s: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Seconds without progress after which the run reports what it waits for.",
    )
    extensions: tuple[str, ...] = Field(
        (),
        strict=False,
        max_length=100,
        description="Modules with custom policies and states, on the Python path or in code_dir.",
    )
    code_dir: str | None = Field(
        None,
        min_length=1,
        description="Directory of your modules and agent programs; null: the configuration file's directory.",
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.epochs is None and self.max_steps is None:
            law = "the run would never end, because run.max_steps is null too"
            raise ConfigError("run.epochs", None, law, "set one of them, for example run.epochs: 1")
        return self


class DurabilitySection(Section):
    """Storage that limits how much data failures lose."""

    prefix_every_tokens: int = Field(
        1024,
        ge=0,
        le=10_000_000,
        description="Store a group's prefixes whenever a trajectory has this many new tokens; 0: only at an abort.",
    )
    trajectories: Literal["disk", "memory"] = Field(
        "disk",
        description="Where trajectories are stored: in the run's directory (a resume then loses none), or in memory.",
    )
    fsync: Literal["segment", "always"] = Field(
        "segment",
        description="When trajectories are safe from a power cut: as segments close, or as groups are stored.",
    )
    segment_mb: int = Field(64, ge=1, le=1024, description="Size at which a segment of trajectories is closed, in MiB.")
    max_bytes: int | None = Field(
        None, ge=1 << 20, le=1 << 60, description="Maximum bytes of trajectories on disk; null: limited by the disk."
    )
    cache_mb: int = Field(
        128,
        ge=0,
        le=1 << 20,
        description="Size of the memory cache of the newest trajectories, in MiB.",
    )
    drain_s: float | None = limit_field("drain_s")
    snapshot_every: int = Field(
        12_500,
        ge=0,
        le=1 << 40,
        description="Events between snapshots of the state in the record; if more groups are open, as many as groups. "
        "Checkpoints, resumes, failovers and the end of a drained or finished run are followed by one, too. 0: none.",
    )


class MetricsSection(ListenerSection):
    """The Prometheus endpoint, and the sinks."""

    sinks: SinksSection = Field(
        default_factory=SinksSection, description="Other destinations for the rows of metrics.jsonl."
    )


class PoolSection(Section):
    """One pool: the tasks that take turns on its hardware."""

    tasks: list[str] = Field(min_length=1, max_length=len(TASKS), description=f"One or more of {', '.join(TASKS)}.")
    share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of all CPU threads and GPUs; null in every pool: use each task's own settings.",
    )
    replicas: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Number of rollout.replicas in this pool; if only validation is in it, its own replicas.",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="Groups rewarded at once, if reward is alone in this pool; null: rollout.slots.",
    )


class Sections(Section):
    """All sections of a run, before the laws between them are checked."""

    run: RunSection = Field(default_factory=RunSection, description="Where the run is stored and when it ends.")
    model: ModelSection = Field(description="Which model is trained.")
    data: DataSection = Field(default_factory=DataSection, description="The prompts.")
    reward: RewardSection = Field(default_factory=RewardSection, description="The reward of a response.")
    agent: AgentSection = Field(default_factory=AgentSection, description="Multi-turn rollouts.")
    environment: EnvironmentSection = Field(
        default_factory=EnvironmentSection, description="Episodes of an environment with tools."
    )
    scheduler: SchedulerSection = Field(
        default_factory=SchedulerSection, description="Batches, concurrency, staleness."
    )
    rollout: RolloutSection = Field(default_factory=RolloutSection, description="The rollout engines.")
    pools: list[PoolSection] = Field(
        default_factory=list,
        max_length=64,
        description="Which tasks share hardware; by default, the replicas and the trainer each have their own.",
    )
    trainer: TrainerSection = Field(default_factory=TrainerSection, description="The train step.")
    validation: ValidationSection = Field(default_factory=ValidationSection, description="Validation.")
    timeouts: TimeoutsSection = Field(
        default_factory=TimeoutsSection, description="Time limits for each kind of order."
    )
    durability: DurabilitySection = Field(
        default_factory=DurabilitySection, description="How much data failures may lose."
    )
    metrics: MetricsSection = Field(default_factory=MetricsSection, description="The Prometheus endpoint.")
    samples: SamplesSection = Field(default_factory=SamplesSection, description="Responses that are kept for reading.")
    control: ControlSection = Field(default_factory=ControlSection, description="Requests to a running run.")
    cluster: ClusterSection = Field(default_factory=ClusterSection, description="The Ray cluster of the run.")

    @property
    def held_out(self) -> bool:
        """Whether there are validation prompts."""
        own = any(one.path is not None for one in self.validation.sets)
        return own or self.model.make is not None or self.data.validation_path is not None

    @property
    def several_turns(self) -> bool:
        """Whether agents or an environment make rollouts of several answers, and write their own messages."""
        return self.agent.given is not None or self.environment.class_name is not None
