"""Runs the agent of a configuration once, on the first prompt, before a run: `engine check` calls it.

A scripted model gives the same answer to every call, so no weights are loaded. An agent that fails before it has an
answer would fail every attempt of the run, and is refused by name. It must never leave a process or a server behind.
"""

import asyncio
import shlex
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.config import Config
from engine.config.dry_run import MADE_ANSWER
from engine.config.prompts import load_tokenizer, stop_ids_of, text_ends_of
from engine.errors import ConfigError, EngineError, counted, message_of
from engine.gateway.gateway_server import GatewayServer
from engine.ids import Version
from engine.plans.rollouts import check_agent, make_gateway, make_generator
from engine.protocols import Generator, GroupWork
from engine.rollout.agents.agent_generator import AgentCall, OpenGroup
from engine.rollout.backend import SampleRequest, SampleResult, SamplingParams
from engine.rollout.generator import TRAINING, Way
from engine.rollout.scoring import Grader
from engine.trajectory import Prompt, Span

LONGEST_S = 30.0
"""Maximum seconds of a rehearsal."""


@dataclass(slots=True)
class ScriptedModel:
    """A rollout backend that gives the same answer to every call."""

    answer: Sequence[int]
    calls: int = 0

    async def sample(self, request: SampleRequest | AgentCall) -> SampleResult:
        self.calls += 1
        ids = list(self.answer)
        return SampleResult(
            token_ids=ids, logprobs=[0.0] * len(ids), spans=[Span(0, len(ids), 0)], finish_reason="stop"
        )

    async def abort(self, ids: Sequence[str]) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def stage(self, version: Version, weights: Any) -> None: ...

    async def install(self, version: Version) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...

    async def failed(self) -> str:
        return await asyncio.Event().wait() and ""

    def tokens_sampled(self) -> int:
        return 0

    def cache_used(self) -> float:
        return 0.0


def rehearse_agent(config: Config, prompt: Prompt) -> Iterator[str]:
    """Lines like those of `check_inputs`. Raises: `ConfigError` for an agent that cannot be started, or that fails
    before the model has answered."""
    check_agent(config)
    field, path = config.agent.given or "", config.model.path
    spec = getattr(config.agent, field.removeprefix("agent."))
    shown = f"{field} {shlex.join(spec) if isinstance(spec, list) else spec}"
    if path is None:
        yield f"ok: {shown} can be started"
        return
    tokenizer = load_tokenizer(path)
    stops = stop_ids_of(tokenizer, path, config.rollout.stop, config.data.chat_settings())
    text = tokenizer.encode(MADE_ANSWER, add_special_tokens=False)[: config.rollout.max_tokens - 1]
    model = ScriptedModel([*text, stops[0]])
    if config.agent.on_gateway:
        run = _on_gateway(config, path, model, prompt)
    else:
        params = SamplingParams(max_tokens=config.rollout.max_tokens, stop_ids=stops)
        ways = {TRAINING: Way(params, Grader(tokenizer, None, later=True, ends=text_ends_of(config, tokenizer, path)))}
        run = _in_python(make_generator(config, model, tokenizer, ways), prompt)
    try:
        asyncio.run(_bounded(run))
        outcome = "ends"
    except TimeoutError:
        outcome = f"has not ended after {LONGEST_S:g} s"
    except EngineError as error:
        if isinstance(error, ConfigError):
            raise
        outcome = message_of(error)
        if not model.calls:
            raise ConfigError(field, spec, f"fails before the model has answered: {outcome}", "correct it") from error
    calls = counted(model.calls, "call")
    if outcome != "ends":
        yield f"note: {shown}, to whose {calls} a scripted model answered {MADE_ANSWER!r}: {outcome}"
    elif not model.calls:
        yield f"note: {shown} ends without a call of the model: there is nothing to train on"
    else:
        yield f"ok: {shown} ends after {calls} of a scripted model"


async def _bounded(run: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(LONGEST_S):
        await run


async def _on_gateway(config: Config, path: str, model: ScriptedModel, prompt: Prompt) -> None:
    server = GatewayServer(make_gateway(config, path, partial(stop_ids_of, chat=config.data.chat_settings())))
    await server.start("127.0.0.1", 0)
    try:
        await server.agents.open(OpenGroup(group=0, attempt=1, prompt=prompt, samples=1, version=0), model)
    finally:
        await server.close()


async def _in_python(generator: Generator, prompt: Prompt) -> None:
    try:
        await generator.generate(GroupWork(group=0, attempt=1, prompt=prompt, samples=1))
    finally:
        await generator.close()
