"""The JSON requests that a running run accepts; anything else is refused.

Read by `server.py`, made by `client.py`. Strict: no unknown field, no other type, everything bounded.
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
    """Come to rest and end resumably; or, with `replica`, let that one go, which will be taken away."""

    operation: Literal["drain"] = "drain"
    reason: Reason
    replica: int | None = Field(None, ge=0, lt=1 << 31)


class Stop(Asked):
    """End resumably, at once."""

    operation: Literal["stop"] = "stop"
    reason: Reason


class Scale(Asked):
    """Have so many replicas that generate."""

    operation: Literal["scale"] = "scale"
    replicas: int = Field(ge=1, le=MOST_REPLICAS)


class Setting(Asked):
    """One figure or policy of the scheduler, by the name it has there."""

    setting: str = Field(min_length=1, max_length=200)
    value: str = Field(max_length=200)


class Set(Asked):
    """Change settings, in this order: all of them or none."""

    operation: Literal["set"] = "set"
    settings: tuple[Setting, ...] = Field(min_length=1, max_length=MOST_SETTINGS, strict=False)


class Look(Asked):
    """Say what the run does and what it waits for."""

    operation: Literal["state"] = "state"


Operation = Drain | Stop | Scale | Set | Look
_ADAPTER: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="operation")])


def parse(body: bytes) -> Operation:
    """Raises: ValueError, in one line that names the first field which is wrong, and never its value."""
    try:
        return _ADAPTER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise ValueError(f"{where}: {first['msg']}") from None
