"""Tool calls as models write them into their answers, by the format's name.

Called by `answers.py` for calls that offer tools. A parser takes the text of an answer and gives what is left of it
with the calls that it holds. What does not parse stays text, so that nothing a model says can fail a call.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias


class ToolCall(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


Parser: TypeAlias = Callable[[str], tuple[str, list[ToolCall]]]
"""The text of an answer → the text without its calls, and the calls."""

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def hermes(text: str) -> tuple[str, list[ToolCall]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        call = _call(found.group(1), "arguments")
        if call is None:
            return found.group(0)
        calls.append(call)
        return ""

    left = _HERMES.sub(take, text)
    return (left.strip() if calls else text), calls


def whole_json(text: str) -> tuple[str, list[ToolCall]]:
    """An answer that is one object, `{"name": ..., "parameters": {...}}`, as Llama 3 writes it."""
    call = _call(text, "parameters")
    return (text, []) if call is None else ("", [call])


def none(text: str) -> tuple[str, list[ToolCall]]:
    """Everything is text."""
    return text, []


def _call(text: str, arguments: str) -> ToolCall | None:
    try:
        said: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    given = said.get(arguments, {})
    return ToolCall(said["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


PARSERS: dict[str, Parser] = {"hermes": hermes, "json": whole_json, "none": none}
"""By `agent.tool_parser`."""
