"""Plays the episodes of an environment: `EnvironmentGenerator` plays one per sample.

The model answers, the engine calls the tools in the answer, and the environment says how the episode continues. If a
tool call of the model fails, the model reads why, and the failure is counted. If the environment raises or returns an
invalid value, the attempt fails and the error names the environment.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.environments.calls import CallTimeout, EpisodeCalls, Toolbox, ToolError
from engine.environments.protocol import Environment, Opening, StepResult, ToolCall, Turn
from engine.errors import DataFailure, EngineError, describe_error, message_of
from engine.protocols.user_code import HangingCalls
from engine.protocols.user_values import result_in
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.program_generator import (
    ProgramFailure,
    ProgramGenerator,
    RolloutClient,
    Sampled,
)
from engine.rollout.agents.tool_calls import ParsedCall, Parser
from engine.rollout.backend import RolloutBackend
from engine.rollout.generator import Way
from engine.rollout.scoring import first_failure
from engine.tasks.chat import Message, problem_of
from engine.trajectory import MAX_TURNS, Prompt, RolloutResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """Limits and names of every episode."""

    name: str
    """`module:Class`, for errors."""
    make: Callable[[], Environment]
    parser: Parser
    call_mark: str = ""
    """Text that begins a tool call; an answer in which it is left over has a call that cannot be parsed."""
    max_turns: int = 16
    max_tokens: int | None = None
    """Response tokens of the whole episode, sampled and inserted; None: only the model's context limits them."""
    call_timeout_s: float = 60.0
    """Maximum seconds of one call of `reset`, `step` or a tool."""
    system_prompt: str | None = None


class MethodFailure(ProgramFailure):
    """A method of an environment raised, or took too long."""


class Episode:
    """One episode, from `reset` to `close`."""

    def __init__(self, settings: EpisodeSettings, calls: EpisodeCalls, prompt: Prompt) -> None:
        self._settings = settings
        self._calls = calls
        self._prompt = prompt
        self._environment: Environment | None = None
        self._messages: list[Message] = []
        self._shown = ""
        self._tools = Toolbox(())
        self._rewards: list[float] = []
        self._turn_rewards: list[float | None] = []
        self._figures: dict[str, float] = {"tool_calls": 0.0, "tool_errors": 0.0}

    async def play(self, client: RolloutClient) -> RolloutResult:
        """Play to the end: done, or out of turns or tokens. Without any reward, an episode that was cut off has 0,
        unless a function judges it."""
        finish_reason = await self._play(client)
        rewards = self._rewards + [reward for reward in self._turn_rewards if reward is not None]
        unjudged = 0.0 if finish_reason != "stop" and not client.is_judged else None
        return RolloutResult(
            reward=sum(rewards) if rewards else unjudged,
            turn_rewards=self._turn_rewards,
            finish_reason=finish_reason,
            figures=self._figures,
            shown_prompt=self._shown,
        )

    async def _play(self, client: RolloutClient) -> str:
        """Returns the finish reason."""
        settings = self._settings
        await self.reset(client.seed)
        for number in range(1, settings.max_turns + 1):
            left = None if settings.max_tokens is None else settings.max_tokens - client.response_tokens
            if left is not None and left <= 0:
                return "length"
            try:
                answer = await client.sample(
                    self._messages, tools=self._tools.schemas, max_tokens=left, parser=settings.parser
                )
            except DataFailure as error:
                if number > 1 and "context_tokens" in error.details:
                    return "length"
                raise
            self._messages.append(answer.message)
            if answer.finish_reason == "length":
                return "length"
            if await self._take(number, answer):
                return "stop"
        return MAX_TURNS

    async def reset(self, seed: int) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """Begin the episode. Returns the first messages and the schemas of the tools."""
        settings, prompt = self._settings, self._prompt
        environment = self._environment = await self._called("__init__", settings.make)
        given = await self._called("reset", environment.reset, prompt, seed)
        if isinstance(given, Opening):
            if not isinstance(given.shown, str):
                raise self._failure(f"reset returned a prompt to show of type {type(given.shown).__name__}, not a text")
            self._shown, given = given.shown, given.messages
        if given is None:
            given = prompt.fields.get("messages") or prompt.text
        self._messages = self._checked("reset", given)
        if not self._messages:
            raise self._failure("reset returned no message")
        system = settings.system_prompt
        if system is not None and self._messages[0]["role"] not in ("system", "developer"):
            self._messages.insert(0, {"role": "system", "content": system})
        try:
            self._tools = Toolbox(await self._called("tools", lambda: environment.tools))
        except ProgramFailure:
            raise
        except (EngineError, TypeError) as error:
            raise self._failure(f"tools returned a value that cannot be used: {message_of(error)}") from error
        return self._messages, self._tools.schemas

    async def close(self) -> None:
        """Close the environment. An error is only logged: the episode is over, and its tokens are good."""
        try:
            if self._environment is not None:
                await self._called("close", self._environment.close)
        except ProgramFailure as error:
            log.warning("%s", error)
        finally:
            self._calls.end()

    async def _take(self, number: int, answer: Sampled) -> bool:
        """Call the tools of an answer and let the environment take it. Returns whether the episode is done."""
        calls = [await self._call(f"{answer.name}_{place}", call) for place, call in enumerate(answer.calls, 1)]
        if self._settings.call_mark and self._settings.call_mark in answer.text:
            law = "the tool call cannot be read: write it in the form that the tools are described with, and close it"
            calls.append(ToolCall(id=f"{answer.name}_0", name="", arguments={}, result=f"Error: {law}", failed=True))
        self._figures["tool_calls"] += len(calls)
        self._figures["tool_errors"] += sum(call.failed for call in calls)
        results = [call.answer(call.result) for call in calls if call.result is not None]
        self._messages += results
        assert self._environment is not None
        turn = Turn(number=number, text=answer.text, calls=tuple(calls), messages=tuple(self._messages))
        step = await self._called("step", self._environment.step, turn)
        if not isinstance(step, StepResult):
            raise self._failure(f"step returned a {type(step).__name__}, but must return a StepResult")
        added = self._checked("step", step.messages)
        self._count(step)
        if not step.done and not results and not added:
            law = "return a message that the model can answer, or StepResult(done=True)"
            raise self._failure(f"step returned neither a message nor done after turn {number}; {law}")
        self._messages += added
        return step.done

    async def _call(self, id: str, parsed: ParsedCall) -> ToolCall:
        arguments = json.loads(parsed.arguments)
        call = ToolCall(id=id, name=parsed.name, arguments=arguments)
        try:
            return replace(call, result=await self._tools.call(parsed.name, arguments, self._calls.call))
        except ToolError as error:
            return replace(call, result=f"Error: {error}", failed=True)

    def _count(self, step: StepResult) -> None:
        found = result_in(RolloutResult(reward=step.reward, turn_rewards=[step.turn_reward], figures=step.figures))
        if isinstance(found, str):
            raise self._failure(f"step returned {found.replace(' WHERE', '')}")
        if found.reward is not None:
            self._rewards.append(found.reward)
        self._turn_rewards += found.turn_rewards
        for name, value in found.figures.items():
            self._figures[name] = self._figures.get(name, 0.0) + value

    def _checked(self, method: str, given: Any) -> list[Message]:
        """Messages that a method returned."""
        if isinstance(given, Sequence) and not given:
            return []
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        messages = list(given) if isinstance(given, Sequence) else given
        problem = problem_of(messages, "messages")
        if problem:
            raise self._failure(f"{method} returned messages that cannot be used: {problem}")
        return messages

    async def _called(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await self._calls.call(function, *args)
        except CallTimeout as error:
            limit = self._settings.call_timeout_s
            story = f"{method} took longer than environment.call_timeout_s = {limit:g} s"
            raise self._failure(story, MethodFailure) from error
        except Exception as error:
            raise self._failure(f"{method} raised {describe_error(error)}", MethodFailure) from error

    def _failure(self, story: str, kind: type[ProgramFailure] = ProgramFailure) -> ProgramFailure:
        row = self._prompt.row
        return kind(f"environment {self._settings.name} failed on prompt row {row}: {story}", row=row)


class EnvironmentGenerator(ProgramGenerator):
    """A `ProgramGenerator` whose rollouts are the episodes of an environment."""

    LIMIT = "environment.timeout_s"

    def __init__(
        self,
        backend: RolloutBackend,
        chat: Chat,
        ways: Mapping[str, Way],
        settings: EpisodeSettings,
        *,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._hanging = HangingCalls()
        self._settings = settings
        name = f"environment {settings.name}"
        super().__init__(backend, chat, ways, self._play, seed=seed, timeout_s=timeout_s, name=name)

    async def _play(self, client: RolloutClient, prompt: Prompt) -> RolloutResult:
        """A `Program`. Raises: `ProgramFailure`, which names the environment, if it fails."""
        episode = Episode(self._settings, EpisodeCalls(self._settings.call_timeout_s, self._hanging), prompt)
        try:
            return await episode.play(client)
        finally:
            await episode.close()

    async def failed(self) -> str:
        """As `ProgramGenerator.failed`, or too many calls of environments hang."""
        return await first_failure(super().failed(), self._hanging.failed())
