"""The laws between sections of a configuration. `schema.Config` obeys them, so that no unlawful configuration exists.

A section checks itself, `states.limits.Limits` the figures of the scheduler, `training.trainer_settings` those of the
train step, and `pools.py` and `deterministic.py` their own subjects. Reads no file and changes nothing.
"""

from engine.config.reward import refuse_rewards
from engine.config.sections import Sections
from engine.config.trainer import refuse_idle_gpus
from engine.config.validation import validation_sets
from engine.errors import ConfigError, choice
from engine.rollout.vllm.engine_args import LORA_RANKS
from engine.scheduling.settings import require_time_for_rewards
from engine.states.limits import PUBLISHING, Limits, ValidationLimits
from engine.states.validation_figures import metric_names
from engine.training.trainer_settings import TrainerSettings


def refuse_unlawful(config: Sections, limits: Limits, settings: TrainerSettings) -> None:
    """Raises: `ConfigError` for the first law that the sections break together."""
    _refuse_samples(config, settings)
    refuse_rewards(config.reward)
    _refuse_missing_inputs(config)
    _refuse_adapter(config)
    _refuse_router_replay(config)
    _refuse_adaptive_concurrency(config)
    refuse_idle_gpus(config.trainer)
    _refuse_two_players(config)
    _refuse_beside_a_made_model(config)
    require_time_for_rewards(limits.timeouts, config.reward.longest_s)
    _refuse_validation(config)
    _refuse_best(config, limits.validation)
    _refuse_inspections_by_gpu(config, limits)


def _refuse_samples(config: Sections, settings: TrainerSettings) -> None:
    """Raises: `ConfigError` for groups or batches that are too small for the train step."""
    samples, scheduler, trainer = config.scheduler.samples_per_prompt, config.scheduler, config.trainer
    if samples < 2 and settings.compares_siblings and not trainer.custom:
        law = f"must be at least 2: trainer.advantage {trainer.advantage} compares the trajectories of a group"
        raise ConfigError("scheduler.samples_per_prompt", samples, law, "use 2 or more")
    if settings.distills and scheduler.policies.filter == "zero-variance":
        law = "drops groups by their rewards, which trainer.advantage distillation does not read"
        raise ConfigError("scheduler.policies.filter", "zero-variance", law, "use none")
    each = (scheduler.policy_mini_batch_size or scheduler.train_batch_size) * samples
    if trainer.ranks > each:
        law = f"an optimizer step has {each} trajectories, and each rank needs one"
        raise ConfigError("trainer.ranks", trainer.ranks, law, f"use at most {each}")


def _refuse_missing_inputs(config: Sections) -> None:
    """Raises: `ConfigError` for a model that nobody makes without data or a reward."""
    # Agents, environments and generators of the user may return a reward.
    reward = config.reward.specs or config.agent.function or config.agent.rollout or config.environment.class_name
    reward = reward or (config.rollout.backend if config.rollout.custom else None)
    for field, value in {"data.path": config.data.given, "reward.function": reward or None}.items():
        if value is None and config.model.make is None:
            fix = "set it, or use model.make to build model, data and reward"
            raise ConfigError(field, value, "required with model.path", fix)


def _refuse_router_replay(config: Sections) -> None:
    """Raises: `ConfigError` for a section that cannot work with `trainer.router_replay`."""
    if not config.trainer.router_replay:
        return
    if config.rollout.backend not in ("torch", "vllm"):
        law = f"rollout.backend {config.rollout.backend} does not say which experts sampled a token"
        raise ConfigError("trainer.router_replay", True, law, "use rollout.backend torch or vllm, or false")
    if config.trainer.compile:
        law = "compiled layers do not take the experts that sampled a token"
        raise ConfigError("trainer.router_replay", True, law, "use trainer.compile: false")


def _refuse_adaptive_concurrency(config: Sections) -> None:
    """Raises: `ConfigError` for servers, which do not report how full their KV caches are."""
    if config.scheduler.policies.concurrency == "kv-cache" and config.rollout.served:
        law = f"rollout.backend {config.rollout.backend} does not report how full the KV caches of its servers are"
        raise ConfigError("scheduler.policies.concurrency", "kv-cache", law, "use slots, or rollout.backend vllm")


def _refuse_adapter(config: Sections) -> None:
    """Raises: `ConfigError` for a section that cannot work with `trainer.lora`."""
    if config.trainer.lora is None:
        return
    backend = config.rollout.backend
    if backend == "sglang":
        law = "does not load adapters, but trainer.lora is set"
        raise ConfigError("rollout.backend", backend, law, "use vllm, openai or torch, or train all weights")
    if backend == "openai" and config.rollout.sync_mode == "keep":
        law = "a request on a server ends with the adapter it began with, so trainer.lora cannot freeze and continue it"
        raise ConfigError("rollout.sync_mode", "keep", law, "use abort or wait")
    if backend == "vllm" and config.trainer.lora.rank > LORA_RANKS[-1]:
        law = f"must be at most {LORA_RANKS[-1]}, the highest rank that vLLM takes"
        raise ConfigError("trainer.lora.rank", config.trainer.lora.rank, law, f"use {LORA_RANKS[-1]} or less")
    if config.rollout.transport == "vllm":
        law = "sends whole models, but trainer.lora publishes an adapter"
        raise ConfigError("rollout.transport", "vllm", law, "use object_store or distributed")
    if config.model.checkpoint_path is not None:
        law = "has a whole model, but trainer.lora begins with an adapter of its own"
        fix = "write the model of the checkpoint with `engine export`, and give that as model.path"
        raise ConfigError("model.checkpoint_path", config.model.checkpoint_path, law, fix)


def _refuse_two_players(config: Sections) -> None:
    """Raises: ConfigError for an environment together with an agent, and for `model.make: lookup` without its
    environment."""
    path, made = config.environment.class_name, config.model.make == "lookup"
    if path is not None and config.agent.given is not None:
        raise ConfigError("environment.class_name", path, f"{config.agent.given} is set too", "remove one of them")
    if config.rollout.custom and (player := config.agent.given or ("environment.class_name" if path else None)):
        law = f"{player} is set too, but a custom generator runs whole rollouts"
        raise ConfigError("rollout.backend", config.rollout.backend, law, "remove one of them")
    if made and path is None and config.agent.given is None:
        law = "model.make lookup builds a model and rows, but no reward: an environment gives it"
        fix = "set environment.class_name: engine.environments.lookup:Lookup"
        raise ConfigError("environment.class_name", path, law, fix)


def _refuse_beside_a_made_model(config: Sections) -> None:
    """Raises: ConfigError for fields whose content `model.make` builds itself, and for settings of a chat template,
    which its model does not have."""
    ignored = {
        "data.path": config.data.path,
        "data.sources": [source.name for source in config.data.sources] or None,
        "data.validation_path": config.data.validation_path,
        "data.system_prompt": config.data.system_prompt,
        "data.chat_template_kwargs": config.data.chat_template_kwargs or None,
        "reward.function": config.reward.function,
        "reward.functions": [part.name for part in config.reward.functions] or None,
    }
    for field, value in ignored.items():
        if value is not None and config.model.make is not None:
            law = f"model.make {config.model.make} builds its own model, data and reward, without a chat template"
            raise ConfigError(field, value, law, "remove it, or use model.path instead of model.make")


def _refuse_validation(config: Sections) -> None:
    """Raises: `ConfigError` for sets that cannot be measured."""
    section, rollout = config.validation, config.rollout
    for one in validation_sets(section, rollout, config.reward) if section.sets else ():
        if one.path is None and config.data.validation_path is None and config.model.make is None:
            raise ConfigError(f"{one.field}.path", None, "required without data.validation_path", "set it to a file")
    if section.every and not config.held_out:
        law = "there are no validation prompts"
        raise ConfigError("validation.every", section.every, law, "set data.validation_path: <file>, or use 0")
    if section.placement == "own" and rollout.served:
        law = f"the {rollout.backend} backend cannot reserve replicas for validation"
        raise ConfigError("validation.placement", section.placement, law, "use shared")
    if section.placement == "shared" and section.replicas > rollout.replicas:
        law = f"must be at most rollout.replicas = {rollout.replicas}"
        raise ConfigError("validation.replicas", section.replicas, law, f"use {rollout.replicas}")
    if config.agent.on_gateway and len({one.way for one in validation_sets(section, rollout, config.reward)}) > 1:
        law = "must have the same sampling and the same reward, because gateway agents use these for all sets"
        raise ConfigError(
            "validation.sets", [one.name for one in section.sets], law, "remove the fields in which the sets differ"
        )


def _refuse_best(config: Sections, limits: ValidationLimits | None) -> None:
    """Raises: `ConfigError` for a best checkpoint that is never measured."""
    best = config.trainer.keep_best
    if best is None or limits is None:  # `Limits` has refused a best checkpoint without validation
        return
    known = metric_names(limits.measured_sets)
    if best.metric not in known:
        fix = choice(best.metric, known)
        raise ConfigError("trainer.keep_best.metric", best.metric, "is not a validation metric", fix)
    every = config.validation.every
    for field, step in (
        ("trainer.checkpoint_every", config.trainer.checkpoint_every),
        ("scheduler.sync_every", config.scheduler.sync_every),
    ):
        if not every or every % step:
            law = (
                f"must be a multiple of {field} = {step} with trainer.keep_best: only measured checkpoints can be best"
            )
            raise ConfigError("validation.every", every, law, f"use {max(step, every - every % step)}")


def _refuse_inspections_by_gpu(config: Sections, limits: Limits) -> None:
    """Raises: `ConfigError` for an added state that inspects weights, if only a process with a GPU can receive them."""
    states, rollout = limits.states_at(PUBLISHING), config.rollout
    if states and rollout.transport == "distributed" and rollout.transport_backend == "nccl":
        law = f"the process of the added state {states[0]}, which inspects weights, has no GPU to receive them"
        raise ConfigError("rollout.transport_backend", "nccl", law, "use gloo, or remove the state")
