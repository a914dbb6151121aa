"""The configuration of a run: every section and field, its bounds, its meaning, and the laws between fields.

A `Config` can only be made if every law holds. `states.limits.Limits` checks the laws on batch, staleness and
concurrency; `training.trainer_settings.TrainerSettings` checks those on the train step: a Config builds both. Reads no
file: `loading.py` does.
"""

from typing import Literal, Self

import yaml
from pydantic import Field, model_validator

from engine.config.agent import AgentSection, EnvironmentSection
from engine.config.cluster import ClusterSection
from engine.config.data import DataSection
from engine.config.deterministic import settled
from engine.config.model import ModelSection
from engine.config.paths import RUNS
from engine.config.pools import PoolSection, check_pools, limit_pools, rewarding, settled_by_pools
from engine.config.reports import SamplesSection, SinksSection
from engine.config.reward import RewardSection, refuse_rewards
from engine.config.rollout import RolloutSection
from engine.config.scheduler import SchedulerSection, TimeoutsSection
from engine.config.section import HostName, Section, refuse_secrets
from engine.config.trainer import TrainerSection, refuse_adapter, refuse_idle_gpus
from engine.config.validation import ValidationSection, refuse_validation, validation_limits
from engine.errors import ConfigError
from engine.policies import PolicySet, added_states
from engine.scheduling.settings import require_time_for_rewards
from engine.states.limits import BOUNDS, Limits
from engine.training.trainer_settings import TrainerSettings

# -- the control endpoint ----------------------------------------------------------------------------------------------


class ControlSection(Section):
    """Where `engine scale`, `set`, `drain` and `stop` reach the run. They need the token in `control.json`."""

    enabled: bool = Field(True, description="Whether the run accepts requests.")
    host: str = Field("127.0.0.1", min_length=1, description="Listen address.")
    hosts: list[HostName] = Field(
        default_factory=list, max_length=64, description="Additional accepted host names of requests."
    )
    port: int = Field(0, ge=0, le=65_535, description="Port; 0: any free one.")


# -- the configuration -------------------------------------------------------------------------------------------------


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
    max_steps: int | None = Field(
        None,
        **BOUNDS["max_steps"].as_field(),
        description="Number of train steps; null: until the data ends.",
    )
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
            raise ConfigError(
                "run.epochs",
                None,
                "the run would never end, because run.max_steps is null too",
                "set one of them, for example run.epochs: 1",
            )
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
    drain_s: float | None = Field(
        None,
        **BOUNDS["drain_s"].as_field(),
        description="Maximum seconds of a drain; then the run stops. null: no limit.",
    )
    snapshot_every: int = Field(
        50_000, ge=0, le=1 << 40, description="Events between snapshots of the state in the record; 0: none."
    )


class MetricsSection(Section):
    """The Prometheus endpoint, and the sinks."""

    port: int = Field(0, ge=0, le=65_535, description="Port; 0: any free one, which the run prints.")
    host: str = Field("127.0.0.1", min_length=1, description="Listen address.")
    hosts: list[HostName] = Field(
        default_factory=list, max_length=64, description="Additional accepted host names of requests."
    )
    sinks: SinksSection = Field(
        default_factory=SinksSection, description="Other destinations for the rows of metrics.jsonl."
    )


class Config(Section):
    """The configuration of a whole run. Cannot be made if a law is broken."""

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

    @model_validator(mode="after")
    def _laws(self) -> Self:
        refuse_secrets(self.model_dump(mode="json"))
        for name, section in settled(self).items():
            object.__setattr__(self, name, section)
        check_pools(self)
        for name, section in settled_by_pools(self).items():
            object.__setattr__(self, name, section)
        self.limits()
        self.trainer_settings()
        samples = self.scheduler.samples_per_prompt
        if samples < 2 and self.trainer_settings().compares_siblings:
            law = f"must be at least 2: trainer.advantage {self.trainer.advantage} compares the trajectories of a group"
            raise ConfigError("scheduler.samples_per_prompt", samples, law, "use 2 or more")
        if self.trainer_settings().distills and self.scheduler.policies.filter == "zero-variance":
            law = "drops groups by their rewards, which trainer.advantage distillation does not read"
            raise ConfigError("scheduler.policies.filter", "zero-variance", law, "use none")
        each = (self.scheduler.policy_mini_batch_size or self.scheduler.train_batch_size) * samples
        if self.trainer.ranks > each:
            law = f"an optimizer step has {each} trajectories, and each rank needs one"
            raise ConfigError("trainer.ranks", self.trainer.ranks, law, f"use at most {each}")
        refuse_rewards(self.reward)
        reward = (
            self.reward.specs or self.agent.function or self.agent.rollout or self.environment.class_name
        )  # may return one
        for field, value in {"data.path": self.data.given, "reward.function": reward or None}.items():
            if value is None and self.model.make is None:
                fix = "set it, or use model.make to build model, data and reward"
                raise ConfigError(field, value, "required with model.path", fix)
        refuse_adapter(self)
        refuse_idle_gpus(self.trainer)
        self._refuse_two_players()
        self._refuse_beside_a_made_model()
        require_time_for_rewards(self.limits().timeouts, self.reward.longest_s)
        refuse_validation(self, self.held_out)
        return self

    def _refuse_two_players(self) -> None:
        """Raises: ConfigError for an environment together with an agent, and for `model.make: lookup` without its
        environment."""
        path, made = self.environment.class_name, self.model.make == "lookup"
        if path is not None and self.agent.given is not None:
            raise ConfigError("environment.class_name", path, f"{self.agent.given} is set too", "remove one of them")
        if made and path is None and self.agent.given is None:
            law = "model.make lookup builds a model and rows, but no reward: an environment gives it"
            raise ConfigError(
                "environment.class_name", path, law, "set environment.class_name: engine.environments.lookup:Lookup"
            )

    def _refuse_beside_a_made_model(self) -> None:
        """Raises: ConfigError for fields whose content `model.make` builds itself, and for settings of a chat template,
        which its model does not have."""
        ignored = {
            "data.path": self.data.path,
            "data.sources": [source.name for source in self.data.sources] or None,
            "data.validation_path": self.data.validation_path,
            "data.system_prompt": self.data.system_prompt,
            "data.chat_template_kwargs": self.data.chat_template_kwargs or None,
            "reward.function": self.reward.function,
            "reward.functions": [part.name for part in self.reward.functions] or None,
        }
        for field, value in ignored.items():
            if value is not None and self.model.make is not None:
                law = f"model.make {self.model.make} builds its own model, data and reward, without a chat template"
                raise ConfigError(field, value, law, "remove it, or use model.path instead of model.make")

    def limits(self) -> Limits:
        """The limits for the scheduler. Raises: ConfigError if they break a law of DESIGN 4."""
        s, r = self.scheduler, self.rollout
        return Limits(
            train_batch_size=s.train_batch_size,
            max_staleness_steps=s.max_staleness_steps,
            max_concurrent_groups=s.max_concurrent_groups,
            sync_every=s.sync_every,
            max_steps=self.run.max_steps,
            sync_mode=r.sync_mode,
            scoring_tasks=self.scoring_tasks,
            deadline_timeout_s=s.deadline_timeout_s,
            max_drops=s.max_drops,
            max_filtered_in_a_row=s.max_filtered_in_a_row,
            max_failure_share=self.reward.max_failure_share,
            infrastructure_attempts=s.infrastructure_attempts,
            data_attempts=s.data_attempts,
            checkpoint_every=self.trainer.checkpoint_every,
            keep_checkpoints=self.trainer.keep_checkpoints,
            keep_checkpoints_every=self.trainer.keep_checkpoints_every,
            keep_best="" if self.trainer.keep_best is None else self.trainer.keep_best.metric,
            keep_best_mode="max" if self.trainer.keep_best is None else self.trainer.keep_best.mode,
            validation=(
                validation_limits(self.validation, r, self.reward, s.samples_per_prompt, replicas=r.replicas)
                if self.held_out
                else None
            ),
            pools=limit_pools(self),
            train_after_sync=s.train_after_sync,
            async_ratio=s.async_ratio,
            over_sample=s.over_sample,
            added_states=(*rewarding(self), *added_states(s.states)),
            keeps_batches=self.trainer.checkpoint_every > 0,
            timeouts=self.timeouts.limits(
                group=self.reward.longest_s,
                stage=s.state_timeout_s,
                sync=max(r.transport_timeout_s, r.install_timeout_s),
            ),
            straggler_factor=r.straggler_factor,
            give_up_s=r.give_up_s,
            drain_s=self.durability.drain_s,
        )

    @property
    def held_out(self) -> bool:
        """Whether there are held-out prompts."""
        own = any(one.path is not None for one in self.validation.sets)
        return own or self.model.make is not None or self.data.validation_path is not None

    @property
    def several_turns(self) -> bool:
        """Whether agents or an environment make rollouts of several answers, and write their own messages."""
        return self.agent.given is not None or self.environment.class_name is not None

    def policies(self) -> PolicySet:
        """The policy of each decision. Raises: ConfigError for a name that is not registered, or not yet."""
        chosen = self.scheduler.policies.model_dump()
        return PolicySet.from_names({**chosen, "sync": chosen["sync"] or self.rollout.sync_order})

    @property
    def scoring_tasks(self) -> tuple[str, ...]:
        """The tasks that score each batch before it is trained, in order."""
        return self.trainer_settings().scoring_tasks(self.scheduler.train_batch_size)

    def trainer_settings(self) -> TrainerSettings:
        """The trainer's settings, including those that it shares with the rollout. Raises: ConfigError."""
        # Over several turns `max_tokens` limits each answer, and only the context limits the whole response.
        return self.trainer.settings(
            response_tokens=self.rollout.longest if self.several_turns else self.rollout.max_tokens,
            samplers="float32" if self._scores_old_log_probs_apart() else self.rollout.sampler_dtype,
            policy_mini_batch_size=self.scheduler.policy_mini_batch_size,
            temperature=self.rollout.temperature,
            seed=self.run.seed,
        )

    def _scores_old_log_probs_apart(self) -> bool:
        """Whether a scorer computes old log-probs from published weights. These must not be rounded, because rounded
        weights are not the trainer's policy."""
        return any("old_logprobs" in pool.tasks and "train" not in pool.tasks for pool in self.pools)

    def dump_yaml(self) -> str:
        """The configuration with every default written out; loads back to an equal one."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120))
