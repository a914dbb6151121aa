"""The parts of a configured run that produce rollouts: sampling backends, generators, the gateway, rewards in a state.

`configured_plan` uses this module for checks in the launching process; the processes of a run make their parts with it.
Torch is imported only with a backend.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.config.episodes import parser_of, settings_of
from engine.config.model_description import describes_experts
from engine.config.pools import rewarding
from engine.config.prompts import renderer_of, stop_ids_of, text_ends_of
from engine.control.proxies import exempt_own_servers
from engine.errors import ConfigError
from engine.gateway.agents import GatewayParts
from engine.gateway.openai_format import MOST_TOP_LOGPROBS
from engine.gateway.runners import CommandRunner, FunctionRunner, Runner
from engine.gateway.sessions import SessionBounds
from engine.ids import ReplicaId
from engine.plans.custom_generator import make_custom_rollout
from engine.plans.run_inputs import Inputs, reward_of
from engine.plans.validation_sets import answers_of_sets, judge_of, ways_of_sets
from engine.protocols import Generator
from engine.protocols.named_code import NO_LOCAL, Local
from engine.rollout.agents.agent_generator import AgentGenerator
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.environment_program import EnvironmentGenerator
from engine.rollout.agents.program_generator import ProgramGenerator
from engine.rollout.backend import RolloutBackend, SamplingParams
from engine.rollout.generator import TRAINING, ModelGenerator, Way
from engine.rollout.scoring import Grader
from engine.rollout.vllm.engine_args import head_args, memory_args, warmup_args
from engine.runtime.process_port import source_of
from engine.states.process import REPLICA
from engine.tasks.rewards import load_coroutine
from engine.workers.plan import Rollout, Work

AGENT = ("base_url", "api_key", "prompt")


PROGRAM = ("client", "prompt")


def check_agent(config: Config, local: Local = NO_LOCAL) -> None:
    """Check that the agent in the configuration can be imported or started. Raises: `ConfigError`."""
    if config.agent.function is not None:
        _agent_function(config, local)
    if config.agent.rollout is not None:
        _agent_rollout(config, local)
    if config.agent.command is not None:
        places = config.agent.environment().get("PATH")
        if config.cluster.joined() is None:  # in a cluster, another machine runs it
            _check_program(config.agent.command[0], config.run.code_dir or os.getcwd(), places)
    if config.agent.on_gateway:
        parser_of(config.agent.tool_parser, config.run.code_dir, "agent.tool_parser")


def _check_program(program: str, directory: str, places: str | None) -> None:
    """Raises: `ConfigError` if no such program can be started in a directory. `places`: the PATH; None: the run's."""
    path = os.path.join(directory, program) if os.path.dirname(program) else program
    if shutil.which(path, path=places) is None:
        law = f"is no program on the PATH, nor an executable file seen from {directory}"
        raise ConfigError("agent.command", program, law, "install it, or give its path")


def _agent_function(config: Config, local: Local) -> Callable[..., Any]:
    name, field = config.agent.function or "", "agent.function"
    return load_coroutine(name, AGENT, config.run.code_dir, config_field=field, local=local)


def _agent_rollout(config: Config, local: Local) -> Callable[..., Any]:
    name, field = config.agent.rollout or "", "agent.rollout"
    return load_coroutine(name, PROGRAM, config.run.code_dir, config_field=field, local=local)


def make_gateway(config: Config, model: str, local: Local = NO_LOCAL) -> GatewayParts:
    """Make the gateway's parts, in its actor."""
    from transformers import AutoConfig, AutoTokenizer

    agent = config.agent
    exempt_own_servers(agent.host)  # before the agent's module is imported, which may make a client
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    context = config.rollout.context or getattr(
        AutoConfig.from_pretrained(model, trust_remote_code=False), "max_position_embeddings", None
    )
    return GatewayParts(
        chat=Chat(
            tokenizer,
            stop_ids_of(config, tokenizer, model),
            config.data.chat_settings().template_kwargs,
            text_ends_of(config, tokenizer, model),
        ),
        runner=_runner(config, local),
        bounds=SessionBounds(
            max_tokens=config.rollout.max_tokens,
            context=context,
            timeout_s=agent.timeout_s,
            top_logprobs=0 if config.rollout.served else MOST_TOP_LOGPROBS,
            forced_calls=agent.forced_calls(config.rollout.backend),
        ),
        model=agent.served_model_name or config.model.path or "model",
        parser=parser_of(agent.tool_parser, config.run.code_dir, "agent.tool_parser"),
        max_body_bytes=agent.max_body_mb << 20,
        host=agent.host,
        port=agent.port,
    )


def _runner(config: Config, local: Local) -> Runner:
    if config.agent.command is not None:
        agent = config.agent
        return CommandRunner(
            list(config.agent.command), config.run.code_dir, environment=agent.environment(), fields=agent.fields
        )
    return FunctionRunner(_agent_function(config, local))


def make_generator(
    config: Config,
    backend: RolloutBackend,
    tokenizer: Any,
    ways: Mapping[str, Way],
    most_prompt_tokens: int | None = None,
    local: Local = NO_LOCAL,
) -> Generator:
    """A replica's generator: for agents on the gateway, for rollouts in Python, or for single responses, whose prompts
    have at most `most_prompt_tokens`."""
    agent, seed = config.agent, config.run.seed
    if not config.several_turns:
        return ModelGenerator(backend, renderer_of(config, tokenizer, most_prompt_tokens), ways, seed=seed)
    if agent.on_gateway:
        name = agent.function.replace(":", ".") if agent.function is not None else (agent.command or [""])[0]
        return AgentGenerator(backend, ways, seed=seed, name=f"agent {name}")
    way, arguments = ways[TRAINING], config.data.chat_settings().template_kwargs
    chat = Chat(tokenizer, way.params.stop_ids, arguments, way.grader.ends)
    if config.environment.class_name is not None:
        settings, timeout_s = settings_of(config, local), config.environment.timeout_s
        return EnvironmentGenerator(backend, chat, ways, settings, seed=seed, timeout_s=timeout_s)
    return ProgramGenerator(backend, chat, ways, _agent_rollout(config, local), seed=seed, timeout_s=agent.timeout_s)


def make_rollout(config: Config, inputs: Inputs, replica: ReplicaId) -> Rollout:
    """A replica: a generator, which also answers validation prompts."""
    if config.rollout.custom:
        return make_custom_rollout(config, inputs, replica)
    from transformers import AutoTokenizer

    r = config.rollout
    tokenizer = AutoTokenizer.from_pretrained(inputs.model, trust_remote_code=False)
    reward = reward_of(config, inputs)
    backend = BACKENDS[r.backend](config, inputs, replica)
    stop_ids = stop_ids_of(config, tokenizer, inputs.model)
    params = SamplingParams(temperature=r.temperature, top_p=r.top_p, max_tokens=r.max_tokens, stop_ids=stop_ids)
    ends = text_ends_of(config, tokenizer, inputs.model)
    grader = Grader(tokenizer, reward, timeout_s=config.reward.timeout_s, later=bool(rewarding(config)), ends=ends)
    ways = {TRAINING: Way(params, grader), **ways_of_sets(config, tokenizer, stop_ids, ends, reward, inputs.local)}
    generator = make_generator(config, backend, tokenizer, ways, inputs.most_prompt_tokens, inputs.local)
    return Rollout(
        generator=generator,
        evaluator=generator,
        answers=answers_of_sets(config, judge_of(config, inputs.reward, inputs.local), inputs.local),
    )


def make_sharing_rollout(config: Config, inputs: Inputs, replica: ReplicaId, gpu_part: float) -> Rollout:
    """`make_rollout` for a replica that has a part of a GPU."""
    return make_rollout(config, replace(inputs, gpu_part=gpu_part), replica)


def make_work(config: Config, inputs: Inputs, state: str) -> Work | None:
    """The work that scores groups, if the added state rewards them; None for any other state."""
    states = [added for added in rewarding(config) if added.name == state]
    reward = reward_of(config, inputs)
    if not states or reward is None:
        return None
    from transformers import AutoTokenizer

    tokenizer, at_once = AutoTokenizer.from_pretrained(inputs.model, trust_remote_code=False), states[0].concurrency
    ends = text_ends_of(config, tokenizer, inputs.model)
    return Grader(tokenizer, reward, threads=at_once, timeout_s=config.reward.timeout_s, ends=ends)


def torch_backend(config: Config, inputs: Inputs, replica: ReplicaId) -> RolloutBackend:
    """The embedded sampler."""
    from engine.rollout.torch.torch_backend import TorchBackend
    from engine.training.device import device_named

    r = config.rollout
    device = device_named("auto").type if r.device == "auto" else r.device
    return TorchBackend(
        inputs.model,
        device=device,
        rows=rows_of(config),
        context=r.context,
        kv=r.kv,
        threads=r.threads,
        deterministic=r.deterministic,
        lora=config.trainer_settings.lora,
        notes_routes=config.trainer_settings.router_replay,
        fp32_head=config.trainer_settings.fp32_head,
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
        engine_args=vllm_args(config, inputs),
        bucket_mb=r.bucket_mb,
        install_timeout_s=r.install_timeout_s,
        check_weights=r.check_weights,
        weight_transfer=r.transport_backend if r.transport == "vllm" else None,
        structures=config.agent.on_gateway and config.agent.tool_choice == "constrain",
        notes_routes=config.trainer_settings.router_replay,
        lora=config.trainer_settings.lora,
        measures_cache=config.measures_cache,
        log=None if inputs.logs is None else inputs.logs / f"{source_of(REPLICA, replica)}.vllm.log",
    )


def vllm_args(config: Config, inputs: Inputs) -> dict[str, Any]:
    """The user's engine arguments, the memory of a replica that shares a GPU, what vLLM compiles at its start, and the
    type of the trainer's logits."""
    given, dense = config.rollout.engine_args, not describes_experts(Path(inputs.model))
    changed = {**warmup_args(dense, given), **head_args(config.trainer_settings.fp32_head, given)}
    return {**memory_args(inputs.gpu_part, given), **given, **changed}


def openai_backend(config: Config, inputs: Inputs, replica: ReplicaId) -> RolloutBackend:
    """The replica's server, with the run's initial weights. Raises: `ConfigError` if the variable of the key holds no
    usable one, or the server cannot be used."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from engine.rollout.openai.openai_backend import OpenAIBackend
    from engine.tasks.http_client import problem_of_key

    r = config.rollout
    wrong_key = None if r.api_key_env is None else problem_of_key(r.api_key_env)
    if wrong_key is not None:
        raise ConfigError("rollout.api_key_env", r.api_key_env, *wrong_key)
    lora = config.trainer_settings.lora
    initial = (
        None
        if lora is not None
        else AutoModelForCausalLM.from_pretrained(inputs.model, trust_remote_code=False).state_dict()
    )
    return OpenAIBackend(
        r.urls[replica],
        model=inputs.model,
        served_model_name=r.served_model_name,
        key=None if r.api_key_env is None else os.environ[r.api_key_env],
        weights_dir=r.weights_dir,
        initial=initial,
        sync_mode=r.sync_mode,
        kv=r.kv,
        vocabulary=AutoConfig.from_pretrained(inputs.model, trust_remote_code=False).vocab_size,
        encode=AutoTokenizer.from_pretrained(inputs.model, trust_remote_code=False).encode,
        timeout_s=r.request_timeout_s,
        install_timeout_s=r.install_timeout_s,
        bucket_mb=r.bucket_mb,
        wait_s=r.connect_timeout_s,
        lora=lora,
        api=r.backend,
    )


BACKENDS: dict[str, Callable[[Config, Inputs, ReplicaId], RolloutBackend]] = {
    "torch": torch_backend,
    "vllm": vllm_backend,
    "openai": openai_backend,
    "sglang": openai_backend,
}
"""Makers of built-in backends, by `rollout.backend`. They are called in the actor, on a thread."""


def rows_of(config: Config) -> int:
    """Maximum number of trajectories that a replica samples at once."""
    return config.rollout.slots * config.scheduler.samples_per_prompt
