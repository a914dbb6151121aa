"""From a configuration to a plan: the built-in generator on the configured backend, and the built-in trainer.

`plan_of` runs in the process that launches and finds out what is wrong with files and rewards before any actor
starts; the functions behind it run in the actors, where torch is.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.actors.transports import DistributedTransport, ObjectStoreTransport, Transport, VllmTransport, Wire
from engine.config import Config, check_backend
from engine.config.inputs import model_directory, object_store_bytes, warm_start_of
from engine.config.pools import rewarding, threads_of_scorers
from engine.config.rollout import RolloutSection
from engine.errors import ConfigError
from engine.gateway.agents import GatewayParts
from engine.gateway.runners import CommandRunner, FunctionRunner, Runner
from engine.gateway.sessions import Bounds
from engine.gateway.tool_calls import PARSERS
from engine.ids import ReplicaId
from engine.metrics.address_files import FOLDER
from engine.protocols import Closable, Generator
from engine.protocols import Scorer as RoleScorer
from engine.rollout.agents.agent_generator import AgentGenerator
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.program_generator import ProgramGenerator
from engine.rollout.backend import RolloutBackend, SamplingParams
from engine.rollout.generator import ModelGenerator, Reward
from engine.rollout.scoring import Rewarding, Scorer
from engine.rollout.vllm.engine_args import built_for_cpu, workers_of
from engine.runtime.plan import Plan, Restore, Rollout
from engine.runtime.prompts import CountedPrompts, Prompts
from engine.storage.durable_trajectories import StorePolicy
from engine.tasks.dataset import Dataset, PromptSource
from engine.tasks.quickstart import prepare
from engine.tasks.rewards import load_coroutine, load_reward
from engine.tasks.warm_start import load_answers, warm_started
from engine.trajectory import Prompt
from engine.workers.stage import Work, unchanged

# -- multi-turn rollouts -----------------------------------------------------------------------------------------------


AGENT = ("base_url", "api_key", "prompt")
PROGRAM = ("client", "prompt")

MakeGenerator = Callable[[RolloutBackend, Any, Reward | None, SamplingParams, bool], Generator]
"""(backend, tokenizer, reward, sampling parameters, whether rewards are assigned later) → a replica's generator."""


def check_agent(config: Config) -> None:
    """Check that the functions in the configuration can be imported. Raises: `ConfigError`."""
    if config.agent.function is not None:
        _agent_function(config)
    if config.agent.rollout is not None:
        _agent_rollout(config)


def _agent_function(config: Config) -> Callable[..., Any]:
    return load_coroutine(config.agent.function or "", AGENT, config.run.code_dir, config_field="agent.function")


def _agent_rollout(config: Config) -> Callable[..., Any]:
    return load_coroutine(config.agent.rollout or "", PROGRAM, config.run.code_dir, config_field="agent.rollout")


def gateway_of(config: Config, model: str, stop_ids: Callable[[Any, str, list[str]], tuple[int, ...]]) -> Any:
    """The value of `Plan.make_gateway`; None if no agent uses the gateway."""
    return partial(make_gateway, config, model, stop_ids) if config.agent.on_gateway else None


def make_gateway(
    config: Config, model: str, stop_ids: Callable[[Any, str, list[str]], tuple[int, ...]]
) -> GatewayParts:
    """Make the gateway's parts, in its actor."""
    from transformers import AutoConfig, AutoTokenizer

    agent = config.agent
    tokenizer = AutoTokenizer.from_pretrained(model)
    context = config.rollout.context or getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    return GatewayParts(
        chat=Chat(tokenizer, stop_ids(tokenizer, model, config.rollout.stop)),
        runner=_runner(config),
        bounds=Bounds(max_tokens=config.rollout.max_tokens, context=context, timeout_s=agent.timeout_s),
        model=config.model.path or "model",
        parser=PARSERS[agent.tool_parser],
        max_body_bytes=agent.max_body_mb << 20,
        host=agent.host,
        port=agent.port,
    )


def _runner(config: Config) -> Runner:
    if config.agent.command is not None:
        return CommandRunner(list(config.agent.command), config.run.code_dir)
    return FunctionRunner(_agent_function(config))


def generator_maker(config: Config) -> MakeGenerator:
    """The factory of the replicas' generators: for agents on the gateway, for rollouts in Python, or for single
    responses."""
    agent, seed, timeout_s = config.agent, config.run.seed, config.reward.timeout_s

    def on_gateway(
        backend: RolloutBackend, tokenizer: Any, reward: Reward | None, params: SamplingParams, later: bool = False
    ) -> Generator:
        scorer = Scorer(tokenizer, reward, timeout_s=timeout_s, later=later)
        return AgentGenerator(backend, scorer, params=params, seed=seed)

    def program(
        backend: RolloutBackend, tokenizer: Any, reward: Reward | None, params: SamplingParams, later: bool = False
    ) -> Generator:
        rollout = _agent_rollout(config)
        scorer = Scorer(tokenizer, reward, timeout_s=timeout_s, later=later)
        chat = Chat(tokenizer, params.stop_ids)
        return ProgramGenerator(backend, chat, scorer, rollout, params=params, seed=seed, timeout_s=agent.timeout_s)

    def single(
        backend: RolloutBackend, tokenizer: Any, reward: Reward | None, params: SamplingParams, later: bool = False
    ) -> Generator:
        assert reward is not None  # the configuration was checked
        return ModelGenerator(
            backend, tokenizer, reward, params=params, seed=seed, reward_timeout_s=timeout_s, rewards_later=later
        )

    return on_gateway if agent.on_gateway else program if agent.rollout is not None else single


# -- the plan ----------------------------------------------------------------------------------------------------------


Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a configuration names outside itself."""

    model: str
    training: str
    held_out: str | None
    reward: str | None
    prompt_field: str


def plan_of(config: Config, run_dir: Path, progress: Progress | None = None) -> Plan:
    """The plan of a configured run. Makes the quickstart's model and data where the configuration asks for them.

    Raises: `ConfigError` for a file, a model directory, a reward or a rollout backend that cannot be used.
    """
    check_backend(config)
    inputs = inputs_of(config, progress)
    check_agent(config)
    if inputs.reward is not None:
        load_reward(inputs.reward, config.run.code_dir)
    Dataset.load(inputs.training, prompt_field=inputs.prompt_field)
    settings, limits = config.trainer_settings(), config.limits()
    held_out = _held_out(inputs, limits.validation.rows) if limits.validation is not None else []
    if limits.validation is not None:  # the file may have fewer rows than were asked for
        limits = replace(limits, validation=replace(limits.validation, rows=len(held_out)))
    return Plan(
        limits=limits,
        samples=config.scheduler.samples_per_prompt,
        replicas=config.rollout.replicas,
        slots=config.rollout.slots,
        prefix_every_tokens=config.durability.prefix_every_tokens,
        snapshot_every=config.durability.snapshot_every,
        make_rollout=partial(make_rollout, config, inputs),
        make_trainer=partial(make_trainer, inputs.model, settings, limits.scored_apart),
        make_work=partial(make_work, config, inputs),
        state_timeout_s=config.scheduler.state_timeout_s,
        reward_timeout_s=config.reward.timeout_s,
        make_scorer=partial(make_scorer, inputs.model, settings),
        restore_trainer=restore_trainer,
        make_gateway=gateway_of(config, inputs.model, stop_ids_of),
        make_prompts=partial(make_prompts, config, inputs),
        transport=TRANSPORTS[config.rollout.transport](config.rollout),
        policies=config.policies().names,
        run_dir=run_dir.resolve(),
        config=config.model_dump(mode="json"),
        held_out=held_out,
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
    """GPUs that Ray sets aside for a replica; 0: whatever share there is."""
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
        # A worker that waits in vain must give up while the install may still be undone.
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
    """Where model, data and reward are; made on the spot with `model.make`."""
    if config.model.make is not None:
        made = Path(config.run.dir) / ".made"
        ready = prepare(made, config.model.arithmetic.quickstart(config.run.seed), progress)
        return Inputs(ready.model_path, ready.training_path, ready.validation_path, ready.reward, "prompt")
    path, data, reward = config.model.path, config.data, config.reward
    if path is None or data.path is None:
        raise ConfigError("model.path", path, "model.path and data.path are required", "set them, or use model.make")
    model = path if config.model.warm_start.path is None else _warm_started(config, path, progress)
    return Inputs(model, data.path, data.validation_path, reward.function, data.prompt_field)


def _warm_started(config: Config, model: str, progress: Progress | None) -> str:
    """The model after its supervised warm start, which happens here unless it is found."""
    from transformers import AutoConfig, AutoTokenizer

    from engine.rollout.generator import prompt_ids_of

    tokenizer = AutoTokenizer.from_pretrained(model)
    end = stop_ids_of(tokenizer, model, config.rollout.stop)[0] if tokenizer.eos_token_id is None else None

    def encode(prompt: Prompt, answer: str) -> tuple[list[int], list[int]]:
        ids = tokenizer.encode(answer, add_special_tokens=False)
        return prompt_ids_of(tokenizer, prompt), [*ids, tokenizer.eos_token_id if end is None else end]

    wanted = warm_start_of(config)
    data, answers = load_answers(wanted, config.data.prompt_field)
    settings = replace(
        config.trainer_settings(), kl_loss_coef=0.0, kl_reward_coef=0.0, reference_path=None, publish_dtype="float32"
    )
    return warm_started(
        Path(config.run.dir) / ".made", model, wanted,
        [(data.prompt(row), answer) for row, answer in enumerate(answers)],
        encode=encode, longest=AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings,
        learner=lambda: make_trainer(model, settings),
        close=lambda trainer: trainer.close() if isinstance(trainer, Closable) else None,
        progress=progress or (lambda done, text: None),
    )  # fmt: skip


def _held_out(inputs: Inputs, count: int) -> list[Prompt]:
    if inputs.held_out is None:
        return []
    data = Dataset.load(inputs.held_out, prompt_field=inputs.prompt_field, config_field="data.validation_path")
    return [data.prompt(row) for row in range(min(count, len(data)))]


def make_prompts(config: Config, inputs: Inputs) -> Prompts:
    """The training prompts, in the order of the run's seed."""
    data = Dataset.load(inputs.training, prompt_field=inputs.prompt_field)
    source = PromptSource(data, seed=config.run.seed, epochs=config.run.epochs, shuffle=config.data.shuffle)
    return CountedPrompts(source.total, source.prompt)


def make_trainer(model: str, settings: Any, scored_apart: Sequence[str] = ()) -> Any:
    if settings.ranks > 1:
        from engine.training.ranked_trainer import RankedTrainer

        return RankedTrainer(model, settings, scored_apart=scored_apart)
    from engine.training.model_trainer import ModelTrainer

    return ModelTrainer(model, settings, scored_apart=scored_apart)


def make_scorer(model: str, settings: Any, tasks: Sequence[str]) -> RoleScorer:
    from engine.training.model_scorer import ModelScorer

    return ModelScorer(model, settings, tasks)


def restore_trainer(trainer: Any, restore: Restore) -> None:
    """From a checkpoint to the bit; from published weights with an optimizer whose moments begin anew."""
    if restore.checkpoint is not None:
        trainer.load(restore.checkpoint)
    else:
        trainer.start_from(restore.weights, restore.optimizer_steps)


def make_rollout(config: Config, inputs: Inputs, replica: ReplicaId) -> Rollout:
    """A replica: its backend under the run's sampling parameters, and once more for held-out prompts."""
    from transformers import AutoTokenizer

    r = config.rollout
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    reward = None if inputs.reward is None else load_reward(inputs.reward, config.run.code_dir)
    backend = BACKENDS[r.backend](config, inputs, replica)
    stop_ids = stop_ids_of(tokenizer, inputs.model, r.stop)
    params = SamplingParams(temperature=r.temperature, top_p=r.top_p, max_tokens=r.max_tokens, stop_ids=stop_ids)
    likeliest = SamplingParams(max_tokens=r.max_tokens, stop_ids=stop_ids, temperature=0.0)
    make = generator_maker(config)
    return Rollout(
        generator=make(backend, tokenizer, reward, params, bool(rewarding(config))),
        evaluator=make(backend, tokenizer, reward, likeliest if config.validation.greedy else params, False),
    )


def make_work(config: Config, inputs: Inputs, state: str) -> Work:
    """What is done in a state without work of its own: groups are rewarded, or only pass."""
    states = [added for added in rewarding(config) if added.name == state]
    if not states or inputs.reward is None:
        return unchanged
    from transformers import AutoTokenizer

    tokenizer, at_once = AutoTokenizer.from_pretrained(inputs.model), states[0].concurrency
    reward = load_reward(inputs.reward, config.run.code_dir)
    scorer = Scorer(tokenizer, reward, threads=at_once, timeout_s=config.reward.timeout_s)
    return Rewarding(scorer)


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
    )


def vllm_backend(config: Config, inputs: Inputs, replica: ReplicaId) -> RolloutBackend:
    """vLLM, its engine in processes of its own."""
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
    )


def openai_backend(config: Config, inputs: Inputs, replica: ReplicaId) -> RolloutBackend:
    """The replica's server, given the run's initial weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from engine.rollout.openai.openai_backend import OpenAIBackend

    r = config.rollout
    key = None if r.api_key_env is None else os.environ.get(r.api_key_env)
    if r.api_key_env is not None and not key:
        raise ConfigError("rollout.api_key_env", r.api_key_env, "no such environment variable", "set it to the key")
    model = AutoModelForCausalLM.from_pretrained(inputs.model)
    return OpenAIBackend(
        r.urls[replica],
        model=inputs.model,
        served_model_name=r.served_model_name,
        key=key,
        weights_dir=r.weights_dir,
        initial=model.state_dict(),
        sync_mode=r.sync_mode,
        kv=r.kv,
        vocabulary=model.config.vocab_size,
        encode=AutoTokenizer.from_pretrained(inputs.model).encode,
        timeout_s=r.request_timeout_s,
        install_timeout_s=r.install_timeout_s,
        bucket_mb=r.receive_bucket_mb,
        wait_s=r.connect_timeout_s,
    )


BACKENDS: dict[str, Callable[[Config, Inputs, ReplicaId], RolloutBackend]] = {
    "torch": torch_backend,
    "vllm": vllm_backend,
    "openai": openai_backend,
}
"""By `rollout.backend`. Called in the actor, on a thread."""


def rows_of(config: Config) -> int:
    """Trajectories that a replica samples at once."""
    return config.rollout.slots * config.scheduler.samples_per_prompt


def stop_ids_of(tokenizer: Any, model: str, stop: list[str]) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's and the model's own ends, and the configured strings.

    Raises: `ConfigError` for a string that is not one token, and where there is no end at all.
    """
    from transformers import GenerationConfig

    found: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        ends = None
    found += [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    for text in stop:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            law = f"must be single tokens, and this model's tokenizer splits {text!r} into {len(ids)}"
            raise ConfigError("rollout.stop", stop, law, "use strings of one token each")
        found += ids
    if not found:
        law = "neither the tokenizer nor the model names a token that ends a response"
        raise ConfigError("rollout.stop", stop, law, "name one")
    return tuple(dict.fromkeys(found))
