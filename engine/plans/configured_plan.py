"""Makes the plan of a configuration: the built-in generator on the configured backend, and the built-in trainer.

`plan_of` runs in the launching process and checks files and rewards before any other process starts. The functions that
the plan refers to run in the processes of the run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import Config, check_backend
from engine.config.episodes import check_environment
from engine.config.gpus import request_of
from engine.config.inputs import known_directory, object_store_bytes
from engine.config.pools import threads_of_scorers
from engine.config.rollout import RolloutSection
from engine.config.sections import ListenerSection
from engine.metrics.address_files import FOLDER
from engine.plans.rollouts import check_agent, make_gateway, make_rollout, make_sharing_rollout, make_work
from engine.plans.run_inputs import Inputs, fit_prompts, held_out_of, inputs_of, make_prompts, reward_of
from engine.plans.trainers import (
    make_custom_trainer,
    make_scorer,
    make_trainer,
    restore_trainer,
    start_of,
    weights_check,
)
from engine.plans.validation_sets import answers_of_sets, judge_of
from engine.protocols import Trainer
from engine.protocols.named_code import NO_LOCAL, Local
from engine.rollout.vllm.engine_args import built_for_cpu
from engine.runtime.prompt_sources import CountedPrompts
from engine.states.limits import Limits
from engine.storage.checkpoints import FIRST, check_first_checkpoint, verify_checkpoint
from engine.storage.durable_trajectories import StorePolicy
from engine.storage.samples import SamplePolicy
from engine.tasks.quickstart import Progress
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt
from engine.workers.cache_reports import CACHE_EVERY_S
from engine.workers.plan import DistributedSettings, Liveness, Plan, ServerAddress, Threads, WeightsWire


def plan_of(config: Config, run_dir: Path, progress: Progress | None = None, local: Local = NO_LOCAL) -> Plan:
    """The plan of a configured run. See `checked_inputs`."""
    return planned(config, checked_inputs(config, progress, local), run_dir)


def checked_inputs(config: Config, progress: Progress | None = None, local: Local = NO_LOCAL) -> Inputs:
    """What a configured run reads. With `model.make`, creates the model and its data. `local`: functions and classes
    that other processes cannot import, by field.

    Raises: `ConfigError` for a file, a model directory, a reward or a rollout backend that cannot be used.
    """
    check_backend(config, local)
    inputs = replace(inputs_of(config, progress), local=local)
    check_agent(config, local)
    reward_of(config, inputs, check=True)
    own = config.environment.class_name is not None
    for line in check_environment(config, inputs.model, inputs.sources[0].load().data, local) if own else ():
        if progress is not None and line.startswith("note: "):
            progress(1.0, line.removeprefix("note: "))
    return fit_prompts(config, inputs, progress)


def check_plan(config: Config, local: Local = NO_LOCAL) -> None:
    """Check what `plan_of` would refuse, before a run's directory is made. Creates no model and copies no checkpoint.

    Raises: `ConfigError`.
    """
    if config.model.make is not None:
        check_backend(config, local)
        check_agent(config, local)
        return
    if config.model.checkpoint_path is not None:
        check_first_checkpoint(Path(config.model.checkpoint_path))
        verify_checkpoint(Path(config.model.checkpoint_path), FIRST)
    none: dict[str, Any] = {"checkpoint_path": None, "checkpoint_optimizer": False}
    none["warm_start"] = config.model.warm_start.model_copy(update={"path": None})
    begins_anew = config.model_copy(update={"model": config.model.model_copy(update=none)})
    plan_of(begins_anew, Path(config.run.dir), local=local)


def evaluation_plan(config: Config, model: str, run_dir: Path, progress: Progress | None = None) -> Plan:
    """The plan of an evaluation: one validation of the weights in `model`, and no train step.

    Raises: `ConfigError` as `plan_of`.
    """
    check_backend(config)
    inputs = replace(inputs_of(config, progress), model=model)
    check_agent(config)
    reward_of(config, inputs, check=True)
    plan = planned(config, fit_prompts(config, inputs, progress, trains=False), run_dir)
    return replace(
        plan, make_trainer=no_trainer, make_prompts=partial(CountedPrompts, 0, _no_prompt), make_scorer=None,
        metrics=None, control=None, sinks={}, endpoints=None, trajectories="memory",
        sample_policy=replace(plan.sample_policy, per_step=0, validation=None),
    )  # fmt: skip


def no_trainer() -> Trainer:
    """The trainer of an evaluation, which trains nothing."""
    from engine.runtime.local.simple import SimpleTrainer

    return SimpleTrainer()


def _no_prompt(group: int) -> Prompt:
    raise AssertionError("an evaluation draws no training prompts")


def planned(config: Config, inputs: Inputs, run_dir: Path) -> Plan:
    """The plan of a run with these inputs. Raises: `ConfigError`."""
    answers_of_sets(config, judge_of(config, inputs.reward, inputs.local), inputs.local)
    settings, begin = start_of(config, run_dir, inputs.model)
    settings = settings.with_local(inputs.local)
    inputs = replace(inputs, model=begin, logs=run_dir.resolve() / "logs")
    limits, held_out = config.limits, list[Prompt]()
    if limits.validation is not None:  # the files may have fewer rows than the configuration requests
        held_out, validation = held_out_of(config, inputs, limits.validation)
        limits = replace(limits, validation=validation)
    return Plan(
        limits=limits,
        samples=config.scheduler.samples_per_prompt,
        replicas=config.rollout.replicas,
        slots=config.rollout.slots,
        prefix_every_tokens=config.durability.prefix_every_tokens,
        cache_every_s=CACHE_EVERY_S if config.measures_cache else 0.0,
        snapshot_every=config.durability.snapshot_every,
        make_rollout=partial(make_rollout, config, inputs),
        make_sharing_rollout=partial(make_sharing_rollout, config, inputs),
        make_trainer=_trainer_of(config, inputs, settings, limits),
        check_weights=weights_check(config, inputs.model),
        make_work=partial(make_work, config, inputs),
        described=config.described,
        state_timeout_s=config.scheduler.state_timeout_s,
        reward_timeout_s=config.reward.longest_s,
        make_scorer=partial(make_scorer, inputs.model, settings),
        restore_trainer=restore_trainer,
        make_gateway=partial(make_gateway, config, inputs.model, inputs.local) if config.agent.on_gateway else None,
        make_prompts=partial(make_prompts, config, inputs, run_dir.resolve()),
        transport=transport_settings(config.rollout),
        policies=config.policies().names,
        run_dir=run_dir.resolve(),
        config=config.model_dump(mode="json"),
        held_out=held_out,
        correct=config.reward.correct_names,
        metrics=_listener(config.metrics),
        control=_listener(config.control) if config.control.enabled else None,
        most_replicas=len(config.rollout.urls) or 4096,
        silence_s=config.run.silence_s,
        sinks=config.metrics.sinks.chosen(),
        endpoints=Path(config.run.dir) / FOLDER,
        trajectories=config.durability.trajectories,
        store_policy=_store_policy(config),
        sample_policy=SamplePolicy(seed=config.run.seed, **config.samples.model_dump()),
        liveness=Liveness(heartbeat_s=config.rollout.heartbeat_s),
        threads=Threads(
            replica=config.rollout.threads,
            trainer=config.trainer.threads,
            scorers=threads_of_scorers(config, limits.scorers()),
        ),
        object_store_bytes=object_store_bytes(config, known_directory(config)),
        gpus=request_of(config, built_for_cpu()),
    )


def _listener(section: ListenerSection) -> ServerAddress:
    return ServerAddress(host=section.host, hosts=tuple(section.hosts), port=section.port)


def _store_policy(config: Config) -> StorePolicy:
    return StorePolicy(
        segment_bytes=config.durability.segment_mb << 20,
        max_bytes=config.durability.max_bytes,
        cache_bytes=config.durability.cache_mb << 20,
        fsync=config.durability.fsync,
    )


def _trainer_of(config: Config, inputs: Inputs, settings: TrainerSettings, limits: Limits) -> Callable[[], Trainer]:
    """What makes the trainer: of the engine, or of the user."""
    if config.trainer.custom:
        return partial(make_custom_trainer, config, inputs.model, inputs.local)
    optimizer = config.model.checkpoint_optimizer
    return partial(
        make_trainer, inputs.model, settings, limits.scored_apart, optimizer, in_turns=limits.trains_in_turns
    )


def transport_settings(rollout: RolloutSection) -> DistributedSettings | None:
    """The transport named by `rollout.transport`; None: shared memory and Ray's object store."""
    if rollout.transport == "object_store":
        return None
    backend, bucket_bytes = rollout.transport_backend, rollout.bucket_mb << 20
    if rollout.transport == "distributed":
        return DistributedSettings(backend=backend, bucket_bytes=bucket_bytes, timeout_s=rollout.transport_timeout_s)
    return WeightsWire(
        backend=backend,
        bucket_bytes=bucket_bytes,
        # A worker whose sender is lost must fail early enough for the store's copy to be installed instead.
        timeout_s=min(rollout.transport_timeout_s, rollout.install_timeout_s / 4),
        limit_s=rollout.install_timeout_s / 2,
    )
