"""Parses and checks agents' requests in OpenAI's format; faults become OpenAI error objects.

Called by `gateway_server.py`. `request_fields.py` says which fields are honored, and refuses values that cannot be.
Unknown fields are ignored, as on other servers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.gateway.request_fields import CHAT, COMPLETIONS, Rule, named_function, refusal_of
from engine.rollout.agents.tool_calls import ParsedCall

# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """The log-prob of a token, and the likeliest tokens at its place with theirs, the likeliest first."""

    text: str
    logprob: float
    top: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answered call."""

    id: str
    created: int
    model: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tool_calls: list[ParsedCall] = field(default_factory=list)
    logprobs: list["TokenFigures"] | None = None
    """The figures of each sampled token, if requested."""

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message. A later call must send it back unchanged."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        calls = [
            {"id": f"{self.id}-{n}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for n, call in enumerate(self.tool_calls)
        ]
        return {"role": "assistant", "content": self.text or None, "tool_calls": calls}

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def chat_body(answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer of `/v1/chat/completions`."""
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": _finish(answer),
        "logprobs": _chat_logprobs(answer),
    }
    return {**answer.head("chat.completion"), "choices": [choice], "usage": answer.usage}


def text_body(answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer of `/v1/completions`."""
    choice = {
        "index": 0,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": _text_logprobs(answer),
    }
    return {**answer.head("text_completion"), "choices": [choice], "usage": answer.usage}


def chat_events(answer: ChatAnswer, with_usage: bool) -> Iterator[bytes]:
    """The server-sent events of a streamed chat."""
    message = answer.message
    pieces: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
    if answer.text:
        pieces.append(({"content": answer.text}, None))
    for place, call in enumerate(message.get("tool_calls", ())):
        pieces.append(({"tool_calls": [{"index": place, **call}]}, None))
    pieces.append(({}, _finish(answer)))
    head = answer.head("chat.completion.chunk")
    for place, (delta, finish) in enumerate(pieces):
        logprobs = _chat_logprobs(answer) if place == 1 else None  # the first after the role, whatever it holds
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        yield _event({**head, "choices": [choice]})
    yield from _ending(answer, head, with_usage)


def text_events(answer: ChatAnswer, with_usage: bool) -> Iterator[bytes]:
    """The server-sent events of a streamed completion."""
    head = answer.head("text_completion")
    for text, finish, logprobs in ((answer.text, None, _text_logprobs(answer)), ("", answer.finish_reason, None)):
        yield _event({**head, "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}]})
    yield from _ending(answer, head, with_usage)


def _ending(answer: ChatAnswer, head: dict[str, Any], with_usage: bool) -> Iterator[bytes]:
    if with_usage:
        yield _event({**head, "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def _finish(answer: ChatAnswer) -> str:
    return "tool_calls" if answer.tool_calls else answer.finish_reason


def _chat_logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    content = [
        {**_chat_token(token.text, token.logprob), "top_logprobs": [_chat_token(*other) for other in token.top]}
        for token in answer.logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text_logprobs(answer: ChatAnswer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    tops = [dict(token.top) for token in answer.logprobs]
    return {
        "tokens": [token.text for token in answer.logprobs],
        "token_logprobs": [token.logprob for token in answer.logprobs],
        "text_offset": [],
        "top_logprobs": tops if any(tops) else None,
    }


# -- requests ----------------------------------------------------------------------------------------------------------


MOST_TOP_LOGPROBS = 20


class RequestError(Exception):
    """A request that is answered with an error: an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 404: "not_found_error"}.get(status)
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class AgentRequest(BaseModel):
    """Fields that both endpoints accept."""

    model_config = ConfigDict(extra="ignore")

    RULES: ClassVar[Mapping[str, Rule]] = {}

    model: str | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, said: Any) -> Any:
        refused = refusal_of(cls.RULES, said) if isinstance(said, dict) else None
        if refused is not None:
            raise PydanticCustomError("refused", "{law}", {"field": refused[0], "law": refused[1]})
        return said

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    @property
    def usage_in_stream(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ContentPart(BaseModel):
    """A part of a message's content. Only text is accepted."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


def _form(content: Any) -> str:
    return "parts" if isinstance(content, list) else "text"


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[ContentPart], Tag("parts")], Discriminator(_form)]
"""With the discriminator, an error is about the form that was given, text or parts, and not about both."""


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: Function


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: Content | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatRequest(AgentRequest):
    """A request to `/v1/chat/completions`."""

    RULES = CHAT

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _logprobs_of_top(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            law = f"top_logprobs is {self.top_logprobs}, but needs logprobs: true"
            raise PydanticCustomError("refused", "{law}", {"field": "top_logprobs", "law": law})
        return self

    @model_validator(mode="after")
    def _forced_call_of_a_tool(self) -> "ChatRequest":
        names = [tool.get("function", tool).get("name") for tool in self.tools or ()]
        if self.forces_call and (not names or named_function(self.tool_choice) not in ("", *names)):
            law = f"tool_choice is {self.tool_choice!r:.80}, but tools has no such function"
            raise PydanticCustomError("refused", "{law}", {"field": "tool_choice", "law": law})
        return self

    @property
    def figures(self) -> int | None:
        """How many of the likeliest tokens to return with each token's log-prob; None: no log-probs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_none=True) for message in self.messages]

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


class CompletionRequest(AgentRequest):
    """A request to `/v1/completions`: a text, or token ids."""

    RULES = COMPLETIONS

    prompt: str | Annotated[list[int], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)

    @property
    def figures(self) -> int | None:
        """See `ChatRequest.figures`."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return self.max_tokens


Kind = TypeVar("Kind", bound=AgentRequest)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Parse a request body. Raises: `RequestError` that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = _path(first["loc"]) or str(first.get("ctx", {}).get("field", ""))
        if first["type"] == "refused":
            raise RequestError(400, first["msg"], code="unsupported_value", param=place) from None
        problem = first["msg"].removeprefix("Value error, ")
        raise RequestError(400, f"{place}: {problem}" if place else problem, param=place or None) from None


def _path(parts: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in parts)
