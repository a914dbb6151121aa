"""Makes the gateway's parts and the replicas' generators for multi-turn rollouts, from a configuration.

Called by `models.py`; the functions run in the actors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.config import Config
from engine.gateway.parts import GatewayParts
from engine.gateway.runners import CommandRunner, FunctionRunner, Runner
from engine.gateway.sessions import Bounds
from engine.gateway.tool_calls import PARSERS
from engine.roles import Generator
from engine.rollout.agent import AgentGenerator
from engine.rollout.backend import RolloutBackend, SamplingParams
from engine.rollout.chat import Chat
from engine.rollout.generator import ModelGenerator, Reward
from engine.rollout.program import ProgramGenerator
from engine.rollout.scoring import Scorer
from engine.tasks.rewards import load_coroutine

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
