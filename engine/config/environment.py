"""The section `environment`: the environment of the episodes, and their limits. Part of `schema.Config`."""

from typing import Any

from pydantic import Field

from engine.config.agent import NAMED, TOOL_PARSER
from engine.config.section import Section


class EnvironmentSection(Section):
    """Episodes of an environment with tools (docs/ENVIRONMENTS.md), instead of an agent."""

    class_name: str | None = Field(
        None,
        pattern=NAMED,
        description="Class of the environment, or a function that returns one, as module:Class; null: none.",
    )
    arguments: dict[str, Any] = Field(
        {}, max_length=256, description="Keyword arguments of the class, for every episode."
    )
    max_turns: int = Field(16, ge=1, le=10_000, description="Maximum answers of the model in an episode.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=100_000_000,
        description="Maximum response tokens of an episode, sampled and inserted; null: the context.",
    )
    tool_parser: str = TOOL_PARSER
    call_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Maximum seconds of one call of reset, step or a tool."
    )
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="Maximum seconds of a group's episodes while it runs.")
