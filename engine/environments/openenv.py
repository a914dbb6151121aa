"""Plays OpenEnv environments: servers that an `openenv` client reaches over a WebSocket.

    environment:
      class_name: engine.environments.openenv:OpenEnv
      arguments: {url: "http://127.0.0.1:8000", action_field: message}

Needs the package openenv, which is imported when an episode begins. The server holds the state of an episode, so after
an abort the same answers are sent to a new session.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.environments.protocol import Environment, Messages, StepResult, Tool, Turn
from engine.errors import DataFailure
from engine.trajectory import Prompt


class OpenEnv(Environment):
    """One session with a server. The model's whole answer is the field `action_field` of an action. With `tool`, the
    arguments of each call of a tool with this schema (name, description, parameters) are an action.

    `observation_field`: the field of an observation that the model reads; None: all of it, as JSON. `reset_fields`:
    columns of the prompt that are passed to `reset`. Rewards of the server are added up.
    """

    def __init__(
        self,
        url: str,
        action_field: str = "message",
        observation_field: str | None = None,
        tool: Mapping[str, Any] | None = None,
        reset_fields: Sequence[str] = (),
    ) -> None:
        self._url = url
        self._action_field = action_field
        self._observation_field = observation_field
        self._tool = tool
        self._reset_fields = reset_fields
        self._client: Any = None

    @property
    def tools(self) -> Sequence[Tool]:
        return [] if self._tool is None else [{"type": "function", "function": dict(self._tool)}]

    async def reset(self, prompt: Prompt, seed: int) -> Messages:
        """The prompt's messages, then the first observation."""
        try:
            from openenv.core import GenericEnvClient
        except ModuleNotFoundError as error:
            raise DataFailure(f"{error}; install the package: pip install openenv", row=prompt.row) from error

        self._client = GenericEnvClient(base_url=self._url)
        await self._client.connect()
        given = {name: prompt.fields[name] for name in self._reset_fields}
        first = await self._client.reset(seed=seed % 2**31, **given)
        begun = list(prompt.fields.get("messages") or [{"role": "user", "content": prompt.text}])
        shown = self._shown(first.observation)
        return [*begun, {"role": "user", "content": shown}] if shown else begun

    async def step(self, turn: Turn) -> StepResult:
        """Send the actions of an answer. If the server refuses arguments, the model reads a tool error."""
        if self._tool is None:
            result = await self._client.step({self._action_field: turn.text})
            return StepResult(
                messages=self._shown(result.observation) or "ok", reward=_number(result), done=result.done
            )
        rewards, messages, done, wrong = [], [], not turn.calls, 0
        for call in turn.calls:
            if call.failed or done:
                continue
            try:
                result = await self._client.step(dict(call.arguments))
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise
                messages.append(call.answer(f"Error: {error}"))
                wrong += 1
                continue
            rewards.append(_number(result))
            messages.append(call.answer(self._shown(result.observation)))
            done = bool(result.done)
        reward = sum(rewards) if rewards or done else None
        return StepResult(messages=messages, reward=reward, done=done, figures={"tool_errors": wrong})

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _shown(self, observation: Any) -> str:
        """The part of an observation that the model reads. Servers add `metadata` to each, which is mostly empty."""
        if self._observation_field is not None:
            value = observation.get(self._observation_field)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = {name: value for name, value in (observation or {}).items() if value or name != "metadata"}
        return json.dumps(shown, ensure_ascii=False) if shown else ""


def _number(result: Any) -> float:
    return 0.0 if result.reward is None else float(result.reward)
