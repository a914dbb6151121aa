"""Builds answers in OpenAI's format: as one body, or as the events of a stream.

`server.py` calls it with the output of `sessions.py`. A stream has the same content as the whole answer, in pieces.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.gateway.tool_calls import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered call. `logprobs`: (token text, log-prob) of each sampled token, if requested."""

    id: str
    created: int
    model: str
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[tuple[str, float]] | None = None

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


def chat_body(answer: Answer) -> dict[str, Any]:
    """The body of an answer of `/v1/chat/completions`."""
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": _finish(answer),
        "logprobs": _chat_logprobs(answer),
    }
    return {**answer.head("chat.completion"), "choices": [choice], "usage": answer.usage}


def text_body(answer: Answer) -> dict[str, Any]:
    """The body of an answer of `/v1/completions`."""
    choice = {
        "index": 0,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": _text_logprobs(answer),
    }
    return {**answer.head("text_completion"), "choices": [choice], "usage": answer.usage}


def chat_events(answer: Answer, with_usage: bool) -> Iterator[bytes]:
    """The server-sent events of a streamed chat."""
    message = answer.message
    pieces: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
    if answer.text:
        pieces.append(({"content": answer.text}, None))
    for place, call in enumerate(message.get("tool_calls", ())):
        pieces.append(({"tool_calls": [{"index": place, **call}]}, None))
    pieces.append(({}, _finish(answer)))
    head = answer.head("chat.completion.chunk")
    for delta, finish in pieces:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        if delta.get("content"):
            choice["logprobs"] = _chat_logprobs(answer)
        yield _event({**head, "choices": [choice]})
    yield from _ending(answer, head, with_usage)


def text_events(answer: Answer, with_usage: bool) -> Iterator[bytes]:
    """The server-sent events of a streamed completion."""
    head = answer.head("text_completion")
    for text, finish in ((answer.text, None), ("", answer.finish_reason)):
        yield _event({**head, "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}]})
    yield from _ending(answer, head, with_usage)


def _ending(answer: Answer, head: dict[str, Any], with_usage: bool) -> Iterator[bytes]:
    if with_usage:
        yield _event({**head, "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.tool_calls else answer.finish_reason


def _chat_logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in answer.logprobs
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    tokens = [token for token, _ in answer.logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [value for _, value in answer.logprobs],
        "text_offset": [],
        "top_logprobs": None,
    }
