"""Runs the agents of a configuration for one group, or two turns of its environment, on the first prompt, before a
run: `engine check` calls it.

A scripted model answers every call, so no weights are loaded. An agent that fails before it has an answer, or returns
no result, would fail every attempt of the run, and is refused by name. It must never leave a process or a server
behind.
"""

import asyncio
import shlex
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import Config
from engine.config.dry_run import MADE_ANSWER
from engine.config.episodes import begin_episode, settings_of
from engine.config.prompts import load_tokenizer, stop_ids_of, text_ends_of
from engine.errors import ConfigError, DataFailure, EngineError, counted, message_of
from engine.gateway.agents import Agents
from engine.gateway.gateway_server import GatewayServer
from engine.ids import GroupId, Version
from engine.plans.rollouts import check_agent, make_gateway, make_generator
from engine.protocols import GroupWork
from engine.protocols.user_values import ResultFailure
from engine.rollout.agents.agent_generator import AgentGenerator, GroupOutcome, OpenGroup
from engine.rollout.agents.environment_program import MethodFailure
from engine.rollout.backend import SampleRequest, SampleResult, SamplingParams
from engine.rollout.generator import TRAINING, Way
from engine.rollout.scoring import Grader
from engine.tasks.chat import Message, Tool, render, turn_end
from engine.trajectory import Prompt, Span
from engine.workers.group_reports import Versions, check_generated
from engine.workers.threads import on_a_thread

LONGEST_S = 30.0
"""Maximum seconds of a rehearsal."""
MOST_SAMPLES = 4
"""Maximum number of agents that run at once."""


@dataclass(slots=True)
class ScriptedModel:
    """A rollout backend that gives these answers, the last one to all further calls."""

    answers: Sequence[Sequence[int]]
    calls: int = 0

    async def sample(self, request: SampleRequest) -> SampleResult:
        ids = list(self.answers[min(self.calls, len(self.answers) - 1)])
        self.calls += 1
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
    before the model has answered, or an environment without a second turn."""
    field, path = config.agent.given or "", config.model.path
    if config.environment.class_name is not None:
        yield from _rehearse_environment(config, path, prompt) if path is not None else ()
        return
    check_agent(config)
    spec = getattr(config.agent, field.removeprefix("agent."))
    shown = f"{field} {shlex.join(spec) if isinstance(spec, list) else spec}"
    if path is None:
        yield f"ok: {shown} can be started"
        return
    tokenizer = load_tokenizer(path)
    stops = stop_ids_of(config, tokenizer, path)
    text = tokenizer.encode(MADE_ANSWER, add_special_tokens=False)[: config.rollout.max_tokens - 1]
    model = ScriptedModel([[*text, stops[0]]])
    samples = min(config.scheduler.samples_per_prompt, MOST_SAMPLES)
    try:
        asyncio.run(_bounded(_generate(config, model, tokenizer, stops, prompt, samples)))
        outcome = "ends"
    except TimeoutError:
        outcome = f"has not ended after {LONGEST_S:g} s"
    except EngineError as error:
        if isinstance(error, ConfigError):
            raise
        outcome = message_of(error)
        if isinstance(error, ResultFailure):
            raise ConfigError(field, spec, outcome, "correct it") from error
        if not model.calls:
            raise ConfigError(field, spec, f"fails before the model has answered: {outcome}", "correct it") from error
    calls = counted(-(-model.calls // samples), "call")
    if outcome != "ends":
        yield f"note: {shown}, to whose {calls} a scripted model answered {MADE_ANSWER!r}: {outcome}"
    elif not model.calls:
        yield f"note: {shown} ends without a call of the model: there is nothing to train on"
    else:
        yield f"ok: {shown} ends after {calls} of a scripted model"


async def _bounded(run: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(LONGEST_S):
        await run


async def _generate(
    config: Config, model: ScriptedModel, tokenizer: Any, stops: tuple[int, ...], prompt: Prompt, samples: int = 1
) -> None:
    """Generate a group as a replica does, and check it as its worker does. Raises: `ResultFailure` for what a run would
    not take."""
    path = config.model.path or ""
    grader = Grader(tokenizer, None, later=config.reward.assigned, ends=text_ends_of(config, tokenizer, path))
    ways = {TRAINING: Way(SamplingParams(max_tokens=config.rollout.max_tokens, stop_ids=stops), grader)}
    generator, server = await on_a_thread(make_generator, config, model, tokenizer, ways), None
    work = GroupWork(group=0, attempt=1, prompt=prompt, samples=samples)
    try:
        if isinstance(generator, AgentGenerator):
            server = GatewayServer(make_gateway(config, path))
            await server.start("127.0.0.1", 0)
            generator.connect(Link(server.agents, generator))
        generated = await generator.generate(work)
        try:
            check_generated(work, generated, Versions(admitted=0, oldest=0, newest=0), rewarded=False)
        except EngineError as error:
            raise ResultFailure(message_of(error)) from error
    finally:
        if server is not None:
            await server.close()
        await generator.close()


@dataclass(frozen=True, slots=True)
class Link:
    """A gateway in this process, as its replica sees it."""

    agents: Agents
    generator: AgentGenerator

    async def open(self, work: OpenGroup) -> GroupOutcome:
        return await self.agents.open(work, self.generator)

    async def cut(self, group: GroupId, attempt: int, how: str) -> None:
        self.agents.cut(group, attempt, how)


def _rehearse_environment(config: Config, path: str, prompt: Prompt) -> Iterator[str]:
    """Play two turns of an episode: the model calls the first tool, if its template writes a call that the parser
    reads. Raises: `ConfigError` for what no run could take; a method that raises may do so for this answer only."""
    name, tokenizer, settings = config.environment.class_name, load_tokenizer(path), settings_of(config)
    stops = stop_ids_of(config, tokenizer, path)
    end = turn_end(tokenizer, config.data.chat_template_kwargs)
    call = _written_call(config, tokenizer, *begin_episode(settings, prompt, config.run.seed))
    call = call.removesuffix("" if end is None else end.text)
    first = call if call and settings.parser(call)[1] else MADE_ANSWER
    stop = stops[0] if end is None or end.token is None else end.token
    said = (tokenizer.encode(text, add_special_tokens=False) for text in (first, MADE_ANSWER))
    model = ScriptedModel([[*ids, stop] for ids in said])
    section = config.environment.model_copy(update={"max_turns": min(2, config.environment.max_turns)})
    try:
        asyncio.run(_generate(config.model_copy(update={"environment": section}), model, tokenizer, stops, prompt))
    except MethodFailure as error:
        yield f"note: environment.class_name {name}, given {first!r} of a scripted model: {message_of(error)}"
        return
    except DataFailure as error:
        law = f"fails after {first!r} of a scripted model: {message_of(error)}"
        raise ConfigError("environment.class_name", name, law, "correct it, or use another chat template") from error
    then = "the model reads its second turn" if model.calls > 1 else "ends the episode"
    yield f"ok: environment.class_name {name} takes {first!r} of a scripted model, and {then}"


def _written_call(config: Config, tokenizer: Any, messages: Sequence[Message], schemas: Sequence[Tool]) -> str:
    """A call of the first tool, with texts as arguments, as the chat template writes it; empty if it writes none."""
    if not schemas:
        return ""
    function = schemas[0].get("function", schemas[0])
    names = (function.get("parameters") or {}).get("properties") or ()
    call = {"id": "call_1_1", "function": {"name": function["name"], "arguments": dict.fromkeys(names, "test")}}
    answer, arguments = {"role": "assistant", "tool_calls": [call]}, config.data.chat_template_kwargs
    try:
        before = render(tokenizer, messages, schemas, arguments)
        text = render(tokenizer, [*messages, answer], schemas, arguments, answered=True)
    except DataFailure:
        return ""
    same = next((place for place, letter in enumerate(before) if text[place : place + 1] != letter), len(before))
    return text[same:]
