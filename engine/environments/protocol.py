"""The protocol of an environment: one object per episode, with `reset`, tools and `step`.

Users derive from `Environment`; `rollout.agents.environment_program` plays episodes with it. Every method may be
`async`, or a plain function, which runs on a thread of its episode. An environment must never see tokens: the engine
renders and captures them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from engine.tasks.chat import Message
from engine.trajectory import Prompt

Messages: TypeAlias = str | Sequence[Message]
"""Messages in OpenAI's form. A text is one message of the user."""

Tool: TypeAlias = Callable[..., Any] | Mapping[str, Any]
"""A Python function, whose signature and docstring become the schema and which the engine calls; or a JSON schema in
OpenAI's form, whose calls `step` answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the model."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    result: str | None = None
    """What the model reads; None if the tool is only a schema, so `step` must answer the call."""
    failed: bool = False
    """Whether the result is an error: an unknown tool, wrong arguments, or a tool that raised or took too long."""

    def answer(self, content: str) -> Message:
        """The message that answers this call."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer of the model, after the engine has called the tools in it."""

    number: int
    """Number of the turn, counted from 1."""
    text: str
    """The answer without its tool calls."""
    calls: Sequence[ToolCall] = ()
    messages: Sequence[Message] = ()
    """The whole conversation, ending with this answer and the results of its tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """How an environment continues after a turn."""

    messages: Messages = ()
    """What the model reads next, after the results of its tools. Not needed if `done`."""
    reward: float | None = None
    """The reward of an episode is the sum of these. If no step has one, `reward.function` judges the episode."""
    turn_reward: float | None = None
    """An additional part of that sum, which this turn alone has earned: later answers get no credit for it."""
    done: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    """Additional figures by name, added up over the episode: the metrics `agent_<name>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How an episode begins."""

    messages: Messages | None = None
    """None: those of the prompt."""
    shown: str = ""
    """What samples show as the prompt; empty: the row's prompt."""


class Environment:
    """One episode. The engine makes an object for each, with `environment.arguments`, and calls `reset`, then `step`
    after each answer of the model, and always `close`.

    After an abort, the episode is played again from `reset`, with the answers that were already sampled: an environment
    should respond to the same answers in the same way. Draw random numbers from `seed`.
    """

    package: ClassVar[str] = ""
    """The package that an adapter needs; `engine check` notes a version that it was not tested with."""
    tried: ClassVar[str] = ""
    """The beginning of the versions that it was tested with, such as `0.4`."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools that the model may call; read once, after `reset`."""
        return ()

    def reset(self, prompt: Prompt, seed: int) -> Messages | Opening | Awaitable[Messages | Opening | None] | None:
        """Begin the episode of a prompt. Returns the first messages, also as an `Opening` with the prompt that samples
        show; None: use the messages of the prompt."""
        return None

    def step(self, turn: Turn) -> StepResult | Awaitable[StepResult]:
        """Take an answer. By default the episode ends with the first answer without a tool call."""
        return StepResult(done=not turn.calls)

    def close(self) -> Awaitable[None] | None:
        """Release all resources."""
