"""The configuration of multi-turn rollouts: whose code runs them, and what bounds it. Part of `schema.Config`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config.section import Section
from engine.errors import ConfigError

NAMED = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""module:function"""


class AgentSection(Section):
    """Multi-turn rollouts (docs/AGENTS.md): name an agent, or none. Tokens of an answer are rollout.max_tokens."""

    function: str | None = Field(
        None, pattern=NAMED, description="Agent on the gateway: async module:function(base_url, api_key, prompt)."
    )
    command: list[str] | None = Field(
        None, min_length=1, description="Agent on the gateway: a program, with OPENAI_BASE_URL and OPENAI_API_KEY."
    )
    rollout: str | None = Field(
        None, pattern=NAMED, description="Rollout in Python, without HTTP: async module:function(client, prompt)."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Listen address of the gateway.")
    port: int = Field(0, ge=0, le=65_535, description="Its port; 0: any free one.")
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="Maximum seconds of a group's agents while it runs.")
    tool_parser: Literal["hermes", "json", "none"] = Field("hermes", description="How the model writes tool calls.")
    max_body_mb: int = Field(16, ge=1, le=1024, description="Maximum size of a request to the gateway, in MiB.")

    @model_validator(mode="after")
    def _laws(self) -> Self:
        named = {"function": self.function, "command": self.command, "rollout": self.rollout}
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                f"agent.{given[1]}", named[given[1]], f"agent.{given[0]} is set too", "remove one of them"
            )
        return self

    @property
    def on_gateway(self) -> bool:
        """Whether agents reach the model over HTTP."""
        return self.function is not None or self.command is not None
