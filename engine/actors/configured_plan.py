"""Makes the plan of a configuration: the built-in generator on the configured backend, and the built-in trainer.

`plan_of` runs in the launching process and checks files and rewards before any actor starts. The functions that the
plan refers to run in the actors, which import torch.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.actors.held_out import answers_of_sets, held_out_rows, judge_of, make_evaluator, set_files
from engine.actors.start_weights import start_of
from engine.actors.transports import DistributedTransport, ObjectStoreTransport, Transport, VllmTransport, Wire
from engine.chat import turn_end
from engine.config import Config, check_backend
from engine.config.episodes import check_environment, parser_of, settings_of
from engine.config.inputs import model_directory, object_store_bytes, warm_start_of
from engine.config.pools import rewarding, threads_of_scorers
from engine.config.prompts import check_prompts, has_agents, load_tokenizer, prompt_limit, renderer_of, stop_ids_of
from engine.config.reward_functions import reward_of_section
from engine.config.rollout import RolloutSection
from engine.config.validation import SetSettings
from engine.errors import ConfigError
from engine.gateway.agents import GatewayParts
from engine.gateway.openai_format import MOST_TOP_LOGPROBS
from engine.gateway.runners import CommandRunner, FunctionRunner, Runner
from engine.gateway.sessions import Bounds
from engine.ids import ReplicaId
from engine.metrics.address_files import FOLDER
from engine.protocols import Closable, Generator
from engine.protocols import Scorer as RoleScorer
from engine.rollout.agents.agent_generator import AgentGenerator
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.environment_program import EnvironmentGenerator
from engine.rollout.agents.program_generator import ProgramGenerator
from engine.rollout.backend import RolloutBackend, SamplingParams
from engine.rollout.generator import ModelGenerator
from engine.rollout.reward_parts import RewardParts
from engine.rollout.scoring import RewardWork, Scorer
from engine.rollout.vllm.engine_args import built_for_cpu, workers_of
from engine.runtime.local.simple import SimpleTrainer
from engine.runtime.plan import Plan, Restore, Rollout
from engine.runtime.prompts import ChosenPrompts, CountedPrompts, MixtureOfSources, Prompts
from engine.states.limits import ValidationLimits
from engine.storage.checkpoints import verify_checkpoint
from engine.storage.durable_trajectories import StorePolicy
from engine.storage.samples import SamplePolicy
from engine.tasks.dataset import Dataset, PromptSource
from engine.tasks.lookup import prepare_lookup
from engine.tasks.mixture import Mixture, Source
from engine.tasks.prompt_lengths import count_tokens, fitting_prompts
from engine.tasks.quickstart import prepare
from engine.tasks.rewards import NO_LOCAL, Local, load_coroutine
from engine.tasks.source_files import SourceFiles
from engine.tasks.warm_start import load_answers, warm_started
from engine.trajectory import Prompt
from engine.workers.stage import Work, unchanged

# -- multi-turn rollouts -----------------------------------------------------------------------------------------------


HELD_OUT = "data.validation_path"
AGENT = ("base_url", "api_key", "prompt")
PROGRAM = ("client", "prompt")

MakeGenerator = Callable[[RolloutBackend, Any, RewardParts | None, SamplingParams, bool], Generator]
"""(backend, tokenizer, reward, sampling parameters, whether rewards are assigned later) → a replica's generator."""


def check_agent(config: Config, local: Local = NO_LOCAL) -> None:
    """Check that the functions in the configuration can be imported. Raises: `ConfigError`."""
    if config.agent.function is not None:
        _agent_function(config, local)
    if config.agent.rollout is not None:
        _agent_rollout(config, local)
    if config.agent.on_gateway:
        parser_of(config.agent.tool_parser, config.run.code_dir, "agent.tool_parser")


def _agent_function(config: Config, local: Local) -> Callable[..., Any]:
    name, field = config.agent.function or "", "agent.function"
    return load_coroutine(name, AGENT, config.run.code_dir, config_field=field, local=local)


def _agent_rollout(config: Config, local: Local) -> Callable[..., Any]:
    name, field = config.agent.rollout or "", "agent.rollout"
    return load_coroutine(name, PROGRAM, config.run.code_dir, config_field=field, local=local)


StopIds = Callable[[Any, str, list[str]], tuple[int, ...]]


def gateway_of(config: Config, model: str, stop_ids: StopIds, local: Local = NO_LOCAL) -> Any:
    """The value of `Plan.make_gateway`; None if no agent uses the gateway."""
    return partial(make_gateway, config, model, stop_ids, local) if config.agent.on_gateway else None


def make_gateway(config: Config, model: str, stop_ids: StopIds, local: Local = NO_LOCAL) -> GatewayParts:
    """Make the gateway's parts, in its actor."""
    from transformers import AutoConfig, AutoTokenizer

    agent = config.agent
    tokenizer = AutoTokenizer.from_pretrained(model)
    context = config.rollout.context or getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    return GatewayParts(
        chat=Chat(
            tokenizer, stop_ids(tokenizer, model, config.rollout.stop), config.data.chat_settings().template_kwargs
        ),
        runner=_runner(config, local),
        bounds=Bounds(
            max_tokens=config.rollout.max_tokens,
            context=context,
            timeout_s=agent.timeout_s,
            top_logprobs=0 if config.rollout.backend == "openai" else MOST_TOP_LOGPROBS,
        ),
        model=agent.served_model_name or config.model.path or "model",
        parser=parser_of(agent.tool_parser, config.run.code_dir, "agent.tool_parser"),
        max_body_bytes=agent.max_body_mb << 20,
        host=agent.host,
        port=agent.port,
    )


def _runner(config: Config, local: Local) -> Runner:
    if config.agent.command is not None:
        return CommandRunner(list(config.agent.command), config.run.code_dir)
    return FunctionRunner(_agent_function(config, local))


def generator_maker(config: Config, most_prompt_tokens: int | None = None, local: Local = NO_LOCAL) -> MakeGenerator:
    """The factory of the replicas' generators: for agents on the gateway, for rollouts in Python, or for single
    responses, whose prompts have at most `most_prompt_tokens`."""
    agent, seed, timeout_s = config.agent, config.run.seed, config.reward.timeout_s

    def on_gateway(
        backend: RolloutBackend, tokenizer: Any, reward: RewardParts | None, params: SamplingParams, later: bool = False
    ) -> Generator:
        scorer = Scorer(tokenizer, reward, timeout_s=timeout_s, later=later)
        return AgentGenerator(backend, scorer, params=params, seed=seed)

    def program(
        backend: RolloutBackend, tokenizer: Any, reward: RewardParts | None, params: SamplingParams, later: bool = False
    ) -> Generator:
        rollout = _agent_rollout(config, local)
        scorer = Scorer(tokenizer, reward, timeout_s=timeout_s, later=later)
        chat = Chat(tokenizer, params.stop_ids, config.data.chat_settings().template_kwargs)
        return ProgramGenerator(backend, chat, scorer, rollout, params=params, seed=seed, timeout_s=agent.timeout_s)

    def environment(
        backend: RolloutBackend, tokenizer: Any, reward: RewardParts | None, params: SamplingParams, later: bool = False
    ) -> Generator:
        scorer = Scorer(tokenizer, reward, timeout_s=timeout_s, later=later)
        chat = Chat(tokenizer, params.stop_ids, config.data.chat_settings().template_kwargs)
        settings = settings_of(config, scored=reward is not None or later, local=local)
        return EnvironmentGenerator(
            backend, chat, scorer, settings, params=params, seed=seed, timeout_s=config.environment.timeout_s
        )

    def single(
        backend: RolloutBackend, tokenizer: Any, reward: RewardParts | None, params: SamplingParams, later: bool = False
    ) -> Generator:
        assert reward is not None  # the configuration was checked
        return ModelGenerator(
            backend, tokenizer, reward, params=params, seed=seed, reward_timeout_s=timeout_s, rewards_later=later,
            renderer=renderer_of(config, tokenizer, most_prompt_tokens),
        )  # fmt: skip

    if config.environment.class_name is not None:
        return environment
    return on_gateway if agent.on_gateway else program if agent.rollout is not None else single


# -- the plan ----------------------------------------------------------------------------------------------------------


Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files and functions that a configuration refers to."""

    model: str
    sources: tuple[SourceFiles, ...]
    """The training prompts, with the rows that the run takes."""
    held_out: str | Sequence[str] | None
    reward: str | None
    """`module:function`."""
    prompt_field: str
    local: Local = dataclasses.field(default_factory=dict)
    held_out_rows: Sequence[int] | None = None
    set_rows: Mapping[str, Sequence[int]] | None = None
    """Rows of the files of validation sets, by the field that names the file; others, and None: all."""
    most_prompt_tokens: int | None = None
    """Longer prompts are cut; None: there are none."""


def plan_of(config: Config, run_dir: Path, progress: Progress | None = None, local: Local = NO_LOCAL) -> Plan:
    """The plan of a configured run. With `model.make`, creates the quickstart's model and data. `local`: functions and
    classes that other processes cannot import.

    Raises: `ConfigError` for a file, a model directory, a reward or a rollout backend that cannot be used.
    """
    check_backend(config)
    inputs = replace(inputs_of(config, progress), local=local)
    check_agent(config, local)
    reward_of(config, inputs, check=True)
    for line in check_environment(config, inputs.model, inputs.sources[0].load().data, local):
        if progress is not None and line.startswith("note: "):
            progress(1.0, line.removeprefix("note: "))
    inputs = _fitted(config, inputs, progress)
    return _planned(config, inputs, run_dir)


def check_plan(config: Config, local: Local = NO_LOCAL) -> None:
    """What `plan_of` refuses, before a run's directory is made. Creates no model and copies no checkpoint.

    Raises: `ConfigError`.
    """
    if config.model.make is not None:
        check_backend(config)
        check_agent(config, local)
        return
    if config.model.checkpoint_path is not None:
        verify_checkpoint(Path(config.model.checkpoint_path))
    none: dict[str, Any] = {"checkpoint_path": None, "checkpoint_optimizer": False}
    none["warm_start"] = config.model.warm_start.model_copy(update={"path": None})
    plan_of(
        config.model_copy(update={"model": config.model.model_copy(update=none)}), Path(config.run.dir), local=local
    )


def evaluation_plan(config: Config, model: str, run_dir: Path, progress: Progress | None = None) -> Plan:
    """The plan of an evaluation: one validation of the weights in `model`, and no train step.

    Raises: `ConfigError` as `plan_of`.
    """
    check_backend(config)
    inputs = replace(inputs_of(config, progress), model=model)
    check_agent(config)
    reward_of(config, inputs, check=True)
    plan = _planned(config, _fitted(config, inputs, progress, trains=False), run_dir)
    return replace(
        plan, make_trainer=NoTrainer, make_prompts=partial(CountedPrompts, 0, _no_prompt), make_scorer=None,
        metrics_port=None, control_port=None, sinks={}, endpoints=None, trajectories="memory",
        sample_policy=replace(plan.sample_policy, per_step=0, validation=None),
    )  # fmt: skip


class NoTrainer(SimpleTrainer):
    """The trainer of an evaluation, which trains nothing."""


def _no_prompt(group: int) -> Prompt:
    raise AssertionError("an evaluation draws no training prompts")


def _planned(config: Config, inputs: Inputs, run_dir: Path) -> Plan:
    answers_of_sets(config, judge_of(config, inputs.reward, inputs.local), inputs.local)
    settings, begin = start_of(config, run_dir, inputs.model)
    inputs, limits, held_out = replace(inputs, model=begin), config.limits(), list[Prompt]()
    if limits.validation is not None:  # the files may have fewer rows than the configuration requests
        held_out, validation = held_out_of(config, inputs, limits.validation)
        limits = replace(limits, validation=validation)
    return Plan(
        limits=limits,
        samples=config.scheduler.samples_per_prompt,
        replicas=config.rollout.replicas,
        slots=config.rollout.slots,
        prefix_every_tokens=config.durability.prefix_every_tokens,
        snapshot_every=config.durability.snapshot_every,
        make_rollout=partial(make_rollout, config, inputs),
        make_trainer=partial(make_trainer, begin, settings, limits.scored_apart, config.model.checkpoint_optimizer),
        make_work=partial(make_work, config, inputs),
        state_timeout_s=config.scheduler.state_timeout_s,
        reward_timeout_s=config.reward.longest_s,
        make_scorer=partial(make_scorer, inputs.model, settings),
        restore_trainer=restore_trainer,
        make_gateway=gateway_of(
            config, inputs.model, partial(stop_ids_of, chat=config.data.chat_settings()), inputs.local
        ),
        make_prompts=partial(make_prompts, config, inputs),
        transport=TRANSPORTS[config.rollout.transport](config.rollout),
        policies=config.policies().names,
        run_dir=run_dir.resolve(),
        config=config.model_dump(mode="json"),
        held_out=held_out,
        correct=config.reward.correct_names,
        metrics_host=config.metrics.host,
        metrics_hosts=tuple(config.metrics.hosts),
        metrics_port=config.metrics.port,
        control_host=config.control.host,
        control_hosts=tuple(config.control.hosts),
        control_port=config.control.port if config.control.enabled else None,
        most_replicas=len(config.rollout.urls) or 4096,
        silence_s=config.run.silence_s,
        sinks=config.metrics.sinks.chosen(),
        endpoints=Path(config.run.dir) / FOLDER,
        trajectories=config.durability.trajectories,
        store_policy=StorePolicy(
            segment_bytes=config.durability.segment_mb << 20,
            max_bytes=config.durability.max_bytes,
            cache_bytes=config.durability.cache_mb << 20,
            fsync=config.durability.fsync,
        ),
        sample_policy=SamplePolicy(seed=config.run.seed, **config.samples.model_dump()),
        heartbeat_s=config.rollout.heartbeat_s,
        rollout_threads=config.rollout.threads,
        trainer_threads=config.trainer.threads,
        trainer_ranks=1 if config.trainer.device == "cpu" else config.trainer.ranks,
        trainer_gpus=float(config.trainer.ranks * config.trainer.gpus_per_rank),
        scorer_threads=threads_of_scorers(config, limits.scorers()),
        pool_shares=tuple(pool.share or 0.0 for pool in config.pools),
        object_store_bytes=object_store_bytes(config, model_directory(config)),
        rollout_gpus=gpus_of(config.rollout),
        rollout_spread=config.rollout.engine_args.get("distributed_executor_backend") == "ray",
    )


def gpus_of(rollout: RolloutSection) -> float:
    """GPUs that Ray reserves for a replica; 0: a share that `placement.with_gpus` computes."""
    workers = workers_of(rollout.engine_args) if rollout.backend == "vllm" and not built_for_cpu() else 1
    return rollout.gpus or (workers if workers > 1 else 0.0)


def _distributed(rollout: RolloutSection) -> DistributedTransport:
    # Both ends of a message hold a bucket of its size.
    bucket_mb = min(rollout.send_bucket_mb, rollout.receive_bucket_mb)
    return DistributedTransport(
        backend=rollout.transport_backend, bucket_bytes=bucket_mb << 20, timeout_s=rollout.transport_timeout_s
    )


def _by_vllm(rollout: RolloutSection) -> Transport:
    inward = _distributed(rollout)
    wire = Wire(
        backend=inward.backend,
        bucket_bytes=inward.bucket_bytes,
        # A worker whose sender is lost must fail early enough that the install can still be undone.
        timeout_s=min(rollout.transport_timeout_s, rollout.install_timeout_s / 2),
        limit_s=rollout.install_timeout_s,
    )
    return VllmTransport(inward, wire)


TRANSPORTS: dict[str, Callable[[RolloutSection], Transport]] = {
    "object_store": lambda rollout: ObjectStoreTransport(),
    "distributed": _distributed,
    "vllm": _by_vllm,
}
"""By `rollout.transport`."""


def inputs_of(config: Config, progress: Progress | None = None) -> Inputs:
    """The paths of model and data and the name of the reward. With `model.make`, creates model and data first.

    Raises: `ConfigError` if a path is missing or an input cannot be used.
    """
    if config.model.make is not None:
        made, seed = Path(config.run.dir) / ".made", config.run.seed
        if config.model.make == "lookup":
            ready = prepare_lookup(made, config.model.lookup.model(seed), progress)
        else:
            ready = prepare(made, config.model.arithmetic.quickstart(seed), progress)
        made_source = SourceFiles(name="", field="data.path", path=ready.training_path)
        return Inputs(ready.model_path, (made_source,), ready.validation_path, ready.reward, "prompt")
    path, data, reward = config.model.path, config.data, config.reward
    if path is None or data.given is None:
        raise ConfigError("model.path", path, "model.path and data.path are required", "set them, or use model.make")
    model = path if config.model.warm_start.path is None else _warm_started(config, path, progress)
    return Inputs(model, tuple(data.source_files()), data.validation_path, reward.function, data.prompt_field)


def reward_of(config: Config, inputs: Inputs, *, check: bool = False) -> RewardParts | None:
    """The reward of a run: its function, or the weighted sum of several. None: rollouts return their own. `check`: also
    what the functions need.

    Raises: `ConfigError` for a function that cannot be imported or called.
    """
    section = config.reward
    if inputs.reward is not None:
        section = section.model_copy(update={"function": inputs.reward})
    return reward_of_section(section, config.run.code_dir, check=check, local=inputs.local)


def _fitted(config: Config, inputs: Inputs, progress: Progress | None, *, trains: bool = True) -> Inputs:
    """With the prompts that fit the model. `trains`: the training prompts, too.

    Raises: `ConfigError` for prompts that cannot be read, or not by this model.
    """
    files = {source.field: source.load().data for source in inputs.sources} if trains else {}
    if config.model.make is not None:
        set_files(config, inputs.prompt_field)
        return inputs
    if inputs.held_out is not None:
        files[HELD_OUT] = _held_out_data(inputs, inputs.held_out)
    files |= set_files(config, inputs.prompt_field)
    tokenizer = load_tokenizer(inputs.model)
    if has_agents(config):
        check_prompts(config, tokenizer, inputs.model, {})
        return inputs
    check_prompts(config, tokenizer, inputs.model, files)
    limit = prompt_limit(config, inputs.model)
    if limit is None:
        return inputs
    fittings = {}
    for field, data in files.items():
        counts = count_tokens(data, renderer_of(config, tokenizer), field, limit.tokens)
        fittings[field] = fitting_prompts(data, counts, limit, config.data.overlong, field)
        if progress is not None and fittings[field].note:
            progress(1.0, fittings[field].note)
    held_out = fittings.get(HELD_OUT)
    sources = [replace(source, rows=fittings[source.field].rows) if trains else source for source in inputs.sources]
    return replace(
        inputs, sources=tuple(sources),
        set_rows={field: found.rows for field, found in fittings.items() if found.rows is not None},
        held_out_rows=None if held_out is None else held_out.rows,
        most_prompt_tokens=limit.tokens if config.data.overlong == "truncate_left" else None,
    )  # fmt: skip


def _held_out_data(inputs: Inputs, path: str | Sequence[str]) -> Dataset:
    data = Dataset.load(path, prompt_field=inputs.prompt_field, config_field=HELD_OUT)
    return data if inputs.held_out_rows is None else data.only(inputs.held_out_rows)


def _warm_started(config: Config, model: str, progress: Progress | None) -> str:
    """The directory of the model after its supervised warm start. Runs the warm start unless its result exists."""
    from transformers import AutoConfig

    tokenizer = load_tokenizer(model)
    renderer = renderer_of(config, tokenizer)
    ends = stop_ids_of(tokenizer, model, config.rollout.stop, config.data.chat_settings())
    turn = turn_end(tokenizer, config.data.chat_template_kwargs) if renderer.templated else None
    end = ends[0] if turn is None or turn.token is None else turn.token

    def encode(prompt: Prompt, answer: str) -> tuple[list[int], list[int]]:
        return renderer.ids(prompt), [*tokenizer.encode(answer, add_special_tokens=False), end]

    wanted = warm_start_of(config)
    data, answers = load_answers(wanted, config.data.prompt_field)
    check_prompts(config, tokenizer, model, {"model.warm_start.path": data})
    settings = replace(
        config.trainer_settings(), kl_loss_coef=0.0, kl_reward_coef=0.0, reference_path=None, publish_dtype="float32"
    )
    return warm_started(
        Path(config.run.dir) / ".made", model, wanted,
        [(data.prompt(row), answer) for row, answer in enumerate(answers)],
        encode=encode, rendering=asdict(config.data.chat_settings()),
        longest=AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings,
        learner=lambda: make_trainer(model, settings),
        close=lambda trainer: trainer.close() if isinstance(trainer, Closable) else None,
        progress=progress or (lambda done, text: None),
    )  # fmt: skip


def held_out_of(config: Config, inputs: Inputs, limits: ValidationLimits) -> tuple[list[Prompt], ValidationLimits]:
    """The prompt of each row of a validation, and the limits with their number."""

    def data_of(one: SetSettings) -> Dataset:
        field = HELD_OUT if one.path is None else f"{one.field}.path"
        path = one.path or inputs.held_out
        assert path is not None  # the configuration was checked
        data = Dataset.load(path, prompt_field=one.prompt_field or inputs.prompt_field, config_field=field)
        kept = inputs.held_out_rows if one.path is None else (inputs.set_rows or {}).get(field)
        return data if kept is None else data.only(kept)

    rows, sets = held_out_rows(config, data_of)
    return rows, replace(limits, rows=len(rows), sets=sets)


def make_prompts(config: Config, inputs: Inputs) -> Prompts:
    """The training prompts, in the order of the run's seed."""
    loaded = [source.load() for source in inputs.sources]
    order: dict[str, Any] = {
        "seed": config.run.seed, "epochs": config.run.epochs, "shuffle": config.data.shuffle
    }  # fmt: skip
    if not config.data.sources:
        (alone,) = loaded
        source = PromptSource(alone.data, **order)
        return CountedPrompts(source.total, source.prompt)
    sources = [
        Source(name=one.files.name, data=one.data, weight=one.files.weight, rest=one.files.rest, dropped=one.dropped)
        for one in loaded
    ]
    mixture = Mixture(sources, curriculum=config.data.chosen_curriculum(), **order)
    return ChosenPrompts(mixture) if mixture.learns else MixtureOfSources(mixture)


def make_trainer(model: str, settings: Any, scored_apart: Sequence[str] = (), optimizer: bool = False) -> Any:
    """`optimizer`: `model` is a checkpoint, whose optimizer state the trainer begins with."""
    trainer: Any
    if settings.ranks > 1:
        from engine.training.ranked_trainer import RankedTrainer

        trainer = RankedTrainer(model, settings, scored_apart=scored_apart)
    else:
        from engine.training.model_trainer import ModelTrainer

        trainer = ModelTrainer(model, settings, scored_apart=scored_apart)
    if optimizer:
        trainer.load(model)
    return trainer


def make_scorer(model: str, settings: Any, tasks: Sequence[str]) -> RoleScorer:
    from engine.training.model_scorer import ModelScorer

    return ModelScorer(model, settings, tasks)


def restore_trainer(trainer: Any, restore: Restore) -> None:
    """Restore a trainer: bit for bit from a checkpoint, or from published weights with new optimizer moments."""
    if restore.checkpoint is not None:
        trainer.load(restore.checkpoint)
    else:
        trainer.start_from(restore.weights, restore.optimizer_steps)


def make_rollout(config: Config, inputs: Inputs, replica: ReplicaId) -> Rollout:
    """A replica: a generator with the run's sampling parameters, and one for held-out prompts on the same backend."""
    from transformers import AutoTokenizer

    r = config.rollout
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    reward = reward_of(config, inputs)
    backend = BACKENDS[r.backend](config, inputs, replica)
    stop_ids = stop_ids_of(tokenizer, inputs.model, r.stop, config.data.chat_settings())
    params = SamplingParams(temperature=r.temperature, top_p=r.top_p, max_tokens=r.max_tokens, stop_ids=stop_ids)
    make = generator_maker(config, inputs.most_prompt_tokens, inputs.local)
    return Rollout(
        generator=make(backend, tokenizer, reward, params, bool(rewarding(config))),
        evaluator=make_evaluator(
            config,
            stop_ids,
            reward,
            lambda judge, sampling: make(backend, tokenizer, judge, sampling, False),
            inputs.local,
        ),
        answers=answers_of_sets(config, judge_of(config, inputs.reward, inputs.local), inputs.local),
    )


def make_work(config: Config, inputs: Inputs, state: str) -> Work:
    """The work of an added state whose class has none: score the groups, or return them unchanged."""
    states = [added for added in rewarding(config) if added.name == state]
    reward = reward_of(config, inputs)
    if not states or reward is None:
        return unchanged
    from transformers import AutoTokenizer

    tokenizer, at_once = AutoTokenizer.from_pretrained(inputs.model), states[0].concurrency
    scorer = Scorer(tokenizer, reward, threads=at_once, timeout_s=config.reward.timeout_s)
    return RewardWork(scorer)


def torch_backend(config: Config, inputs: Inputs, replica: ReplicaId) -> RolloutBackend:
    """The embedded sampler."""
    import torch

    from engine.rollout.torch.torch_backend import TorchBackend

    r = config.rollout
    device = ("cuda" if torch.cuda.is_available() else "cpu") if r.device == "auto" else r.device
    return TorchBackend(
        inputs.model,
        device=device,
        rows=rows_of(config),
        context=r.context,
        kv=r.kv,
        threads=r.threads,
        deterministic=r.deterministic,
        lora=config.trainer_settings().lora,
    )


def vllm_backend(config: Config, inputs: Inputs, replica: ReplicaId) -> RolloutBackend:
    """vLLM, whose engine runs in separate processes."""
    from engine.rollout.vllm.vllm_backend import VllmBackend

    r = config.rollout
    return VllmBackend(
        inputs.model,
        rows=rows_of(config),
        kv=r.kv,
        threads=r.threads,
        seed=config.run.seed,
        engine_args=r.engine_args,
        receive_bucket_mb=r.receive_bucket_mb,
        install_timeout_s=r.install_timeout_s,
        weight_transfer=r.transport_backend if r.transport == "vllm" else None,
        lora=config.trainer_settings().lora,
    )


def openai_backend(config: Config, inputs: Inputs, replica: ReplicaId) -> RolloutBackend:
    """The replica's server, with the run's initial weights. Raises: `ConfigError` if the environment has no key or the
    server cannot be used."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from engine.rollout.openai.openai_backend import OpenAIBackend

    r = config.rollout
    key = None if r.api_key_env is None else os.environ.get(r.api_key_env)
    if r.api_key_env is not None and not key:
        law = "is not set in the environment, or is empty"
        raise ConfigError("rollout.api_key_env", r.api_key_env, law, "set this environment variable to the key")
    lora = config.trainer_settings().lora
    initial = None if lora is not None else AutoModelForCausalLM.from_pretrained(inputs.model).state_dict()
    return OpenAIBackend(
        r.urls[replica],
        model=inputs.model,
        served_model_name=r.served_model_name,
        key=key,
        weights_dir=r.weights_dir,
        initial=initial,
        sync_mode=r.sync_mode,
        kv=r.kv,
        vocabulary=AutoConfig.from_pretrained(inputs.model).vocab_size,
        encode=AutoTokenizer.from_pretrained(inputs.model).encode,
        timeout_s=r.request_timeout_s,
        install_timeout_s=r.install_timeout_s,
        bucket_mb=r.receive_bucket_mb,
        wait_s=r.connect_timeout_s,
        lora=lora,
    )


BACKENDS: dict[str, Callable[[Config, Inputs, ReplicaId], RolloutBackend]] = {
    "torch": torch_backend,
    "vllm": vllm_backend,
    "openai": openai_backend,
}
"""By `rollout.backend`. Called in the actor, on a thread."""


def rows_of(config: Config) -> int:
    """Maximum number of trajectories that a replica samples at a time."""
    return config.rollout.slots * config.scheduler.samples_per_prompt
