"""The JSON requests that a running run accepts. `client.py` creates them, `control_server.py` parses them.

Parsing is strict: unknown fields, other types and values out of bounds are refused.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

MAX_BODY_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 20
MOST_REPLICAS = 4096
MOST_SETTINGS = 64

Reason = Annotated[str, Field(min_length=1, max_length=500)]


class Asked(BaseModel):
    """One operation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Drain(Asked):
    """Park the groups, save a checkpoint and stop the run, resumably. With `replica`: drain only that replica."""

    operation: Literal["drain"] = "drain"
    reason: Reason
    replica: int | None = Field(None, ge=0, lt=1 << 31)


class Stop(Asked):
    """Stop the run at once, resumably."""

    operation: Literal["stop"] = "stop"
    reason: Reason


class Scale(Asked):
    """Set the number of generating replicas."""

    operation: Literal["scale"] = "scale"
    replicas: int = Field(ge=1, le=MOST_REPLICAS)


class Setting(Asked):
    """One setting of a running run, by its path in the configuration."""

    setting: str = Field(min_length=1, max_length=200)
    value: str = Field(max_length=200)


class Set(Asked):
    """Change settings in this order: all or none."""

    operation: Literal["set"] = "set"
    settings: tuple[Setting, ...] = Field(min_length=1, max_length=MOST_SETTINGS, strict=False)


class Look(Asked):
    """Report what the run does and what it waits for."""

    operation: Literal["state"] = "state"


Operation = Drain | Stop | Scale | Set | Look
_ADAPTER: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="operation")])


def parse(body: bytes) -> Operation:
    """Parse a request body. Raises: ValueError, one line that names the first invalid field, never its value."""
    try:
        return _ADAPTER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise ValueError(f"{where}: {first['msg']}") from None
