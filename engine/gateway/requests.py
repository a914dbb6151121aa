"""Parses and checks agents' requests in OpenAI's format; faults become OpenAI error objects.

Called by `server.py`. Unknown and unused fields are ignored, as other servers do. Temperature, top-p and seed are
always those of the run, because tokens of another distribution would make the log-probs wrong.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class RequestError(Exception):
    """A request that is answered with an error: an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 404: "not_found_error"}.get(status)
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Asking(BaseModel):
    """Fields that both endpoints accept."""

    model_config = ConfigDict(extra="ignore")

    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: int | None = 1
    max_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_answer(self) -> "Asking":
        if self.n not in (None, 1):
            raise ValueError("n must be 1: a rollout has one answer to each call")
        return self

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    @property
    def usage_in_stream(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class Part(BaseModel):
    """A part of a message's content. Only text is accepted."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(pattern="^text$")
    text: str


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] = "{}"


class Called(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: Function


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Called] | None = None


class ChatAsking(Asking):
    """A request to `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in self.messages]

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


class TextAsking(Asking):
    """A request to `/v1/completions`: a text, or token ids."""

    prompt: str | Annotated[list[int], Field(min_length=1)]
    logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens


Kind = TypeVar("Kind", bound=Asking)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Parse a request body. Raises: `RequestError` that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = _path(first["loc"])
        told = first["msg"].removeprefix("Value error, ")
        raise RequestError(400, f"{place}: {told}" if place else told, param=place or None) from None


def _path(parts: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in parts)
