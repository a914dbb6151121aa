"""Parsers for tool calls in models' answers, by the name of the format.

The gateway uses them for requests that offer tools, `environment_program` for every answer. A parser returns the text
without the calls, and the calls. Text that does not parse stays text, so no output of a model can fail a request.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias


class ParsedCall(NamedTuple):
    """A tool call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str


Parser: TypeAlias = Callable[[str], tuple[str, list[ParsedCall]]]
"""Parser: text of an answer → (text without the calls, calls)."""

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def hermes(text: str) -> tuple[str, list[ParsedCall]]:
    """Parses `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes and Qwen."""
    calls: list[ParsedCall] = []

    def take(found: re.Match[str]) -> str:
        call = _call(found.group(1), "arguments")
        if call is None:
            return found.group(0)
        calls.append(call)
        return ""

    left = _HERMES.sub(take, text)
    return (left.strip() if calls else text), calls


def whole_json(text: str) -> tuple[str, list[ParsedCall]]:
    """Parses an answer that is one object, `{"name": ..., "parameters": {...}}`, the format of Llama 3."""
    call = _call(text, "parameters")
    return (text, []) if call is None else ("", [call])


def none(text: str) -> tuple[str, list[ParsedCall]]:
    """Finds no tool calls."""
    return text, []


def _call(text: str, arguments: str) -> ParsedCall | None:
    try:
        said: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    given = said.get(arguments, {})
    return ParsedCall(said["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


PARSERS: dict[str, Parser] = {"hermes": hermes, "json": whole_json, "none": none}
"""Parsers by the value of `agent.tool_parser` and `environment.tool_parser`."""

MARKS: Mapping[str, str] = {"hermes": "<tool_call>"}
"""Text that begins a call, by parser. An answer in which it is left over has a call that does not parse."""
