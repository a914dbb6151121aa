"""The sections `agent` and `environment`: which user code runs multi-turn rollouts, and its limits. Part of
`schema.Config`."""

import os
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from engine.errors import ConfigError
from engine.section import NAMED, Section

TOOL_PARSER: Any = Field(
    "hermes",
    pattern=rf"^(hermes|qwen3_coder|glm|json|none|{NAMED[1:-1]})$",
    description="How the model writes tool calls: hermes, qwen3_coder, glm, json, none, or your module:function.",
)
"""A parser of `rollout.agents.tool_calls`, or the user's own."""


class AgentSection(Section):
    """Multi-turn rollouts (docs/AGENTS.md): name at most one agent. rollout.max_tokens limits the tokens of an
    answer."""

    function: str | None = Field(
        None, pattern=NAMED, description="Agent on the gateway: async module:function(base_url, api_key, prompt)."
    )
    command: list[str] | None = Field(
        None, min_length=1, description="Agent on the gateway: a program that reads OPENAI_BASE_URL and OPENAI_API_KEY."
    )
    env: dict[str, str | None] = Field(
        {},
        max_length=256,
        description="Additional environment variables of the command; a value of null is taken from the run's "
        "environment. The command gets no other variables of the run except PATH, HOME and the like.",
    )
    fields: list[str] = Field(
        [],
        max_length=256,
        description="Columns that the command may read in addition to the prompt. The model may read them, too, so do "
        "not name a column that a reward reads.",
    )
    rollout: str | None = Field(
        None, pattern=NAMED, description="Rollout in Python, without HTTP: async module:function(client, prompt)."
    )
    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="Name of the model on the gateway; null: model.path."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Listen address of the gateway.")
    port: int = Field(0, ge=0, le=65_535, description="Port of the gateway; 0: any free one.")
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="Maximum seconds that a group's agents may run.")
    tool_parser: str = TOOL_PARSER
    tool_choice: Literal["constrain", "as_auto"] = Field(
        "constrain",
        description="What tool_choice required, or a named function, does: constrain the answer to calls (backend vllm "
        "with tool_parser hermes or json; others refuse it), or as_auto.",
    )
    max_body_mb: int = Field(16, ge=1, le=1024, description="Maximum size of a request to the gateway, in MiB.")

    @model_validator(mode="after")
    def _laws(self) -> Self:
        named = {"function": self.function, "command": self.command, "rollout": self.rollout}
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                f"agent.{given[1]}", named[given[1]], f"agent.{given[0]} is set too", "remove one of them"
            )
        for field, value in {"agent.env": self.env, "agent.fields": self.fields}.items():
            if value and self.command is None:
                law = "applies only to agent.command"
                raise ConfigError(field, value, law, "remove it; other agents run in the engine's own processes")
        return self

    def environment(self) -> dict[str, str]:
        """The variables of `env`, with their values. Raises: `ConfigError` for one that is not set."""
        for name, value in self.env.items():
            if value is None and name not in os.environ:
                law = "is not set in the environment of the run"
                raise ConfigError("agent.env", name, law, "set this variable before the run starts, or remove it")
        return {name: os.environ[name] if value is None else value for name, value in self.env.items()}

    def forced_calls(self, backend: str) -> str:
        """What the gateway does with a forced tool call: see `gateway.sessions.Bounds`."""
        return "refuse" if self.tool_choice == "constrain" and backend != "vllm" else self.tool_choice

    @property
    def given(self) -> str | None:
        """The field that names the agent; None if there is none."""
        named = {"agent.function": self.function, "agent.command": self.command, "agent.rollout": self.rollout}
        return next((name for name, value in named.items() if value is not None), None)

    @property
    def on_gateway(self) -> bool:
        """Whether agents reach the model over HTTP."""
        return self.function is not None or self.command is not None


class EnvironmentSection(Section):
    """Episodes of an environment with tools (docs/AGENTS.md), instead of an agent."""

    class_name: str | None = Field(
        None,
        pattern=NAMED,
        description="Class of the environment, or a function that returns one, as module:Class; null: none.",
    )
    arguments: dict[str, Any] = Field(
        {}, max_length=256, description="Keyword arguments that the class gets for each episode."
    )
    max_turns: int = Field(16, ge=1, le=10_000, description="Maximum number of model answers in an episode.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=100_000_000,
        description="Maximum response tokens of an episode, both sampled and inserted; null: the context length.",
    )
    tool_parser: str = TOOL_PARSER
    call_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Maximum seconds of one call of reset, step or a tool."
    )
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="Maximum seconds that a group's episodes may run.")
