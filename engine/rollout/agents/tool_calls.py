"""Parsers for tool calls in models' answers, by the name of the format.

The gateway uses them for requests that offer tools, `environment_program` for every answer. A parser returns the text
without the calls, and the calls. Text that does not parse stays text, so no output of a model can fail a request.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

# -- calls in texts ----------------------------------------------------------------------------------------------------


class ParsedCall(NamedTuple):
    """A tool call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str
    texts: bool = False
    """The format writes all arguments as texts, without their types; `calls_of` finds these."""


Parser: TypeAlias = Callable[[str], tuple[str, list[ParsedCall]]]
"""Parser: text of an answer → (text without the calls, calls)."""

BEGIN, END = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")


def hermes(text: str) -> tuple[str, list[ParsedCall]]:
    """Parses `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes, Qwen2.5 and Qwen3."""
    return _tagged(text, _json_call)


def qwen3_coder(text: str) -> tuple[str, list[ParsedCall]]:
    """Parses `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, the format of
    Qwen3-Coder, Qwen3.5 and Nemotron 3."""
    return _tagged(text, _qwen_call)


def glm(text: str) -> tuple[str, list[ParsedCall]]:
    """Parses `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, the format of GLM-4.5."""
    return _tagged(text, _glm_call)


def whole_json(text: str) -> tuple[str, list[ParsedCall]]:
    """Parses an answer that is one object, `{"name": ..., "parameters": {...}}`, the format of Llama 3. The arguments
    may also be under `arguments`; an object with neither is no call."""
    call = _json_call(text, required=True)
    return (text, []) if call is None else ("", [call])


def none(text: str) -> tuple[str, list[ParsedCall]]:
    """Finds no tool calls."""
    return text, []


def _tagged(text: str, call_of: Callable[[str], ParsedCall | None]) -> tuple[str, list[ParsedCall]]:
    """The calls between `<tool_call>` and `</tool_call>`. In linear time: a regular expression would not be, for an
    answer of many spaces."""
    calls: list[ParsedCall] = []
    left, place = [], 0
    while (begin := text.find(BEGIN, place)) >= 0 and (end := text.find(END, begin)) >= 0:
        call = call_of(text[begin + len(BEGIN) : end].strip())
        if call is not None:
            calls.append(call)
        left.append(text[place : begin if call is not None else end + len(END)])
        place = end + len(END)
    return ("".join([*left, text[place:]]).strip() if calls else text), calls


def _json_call(text: str, required: bool = False) -> ParsedCall | None:
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    names = [name for name in _ARGUMENTS if name in said]
    given = said[names[0]] if names else None if required else {}
    given = {} if names and given in (None, "") else given
    return ParsedCall(said["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


def _qwen_call(text: str) -> ParsedCall | None:
    name, _, rest = text.removeprefix("<function=").partition(">")
    inner = rest.removesuffix("</function>")
    whole = text.startswith("<function=") and inner != rest
    return _text_call(name, inner, ("<parameter=", "", ">", "</parameter>")) if whole else None


def _glm_call(text: str) -> ParsedCall | None:
    name, begin, rest = text.partition("<arg_key>")
    return _text_call(name, begin + rest, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))


def _text_call(name: str, inner: str, marks: tuple[str, str, str, str]) -> ParsedCall | None:
    """A call from its name and the text of its arguments; None if there is no name, or that text has anything else.
    `marks`: what begins and ends a key, and begins and ends a value."""
    begin, key_end, value_begin, value_end = marks
    given: dict[str, str] = {}
    rest = inner.lstrip()
    while rest:
        argument, closed, rest = rest.partition(value_end)
        head, found, value = argument.partition(value_begin)
        key, rest = head.rstrip(), rest.lstrip()
        if not (closed and found and key.startswith(begin) and key.endswith(key_end)):
            return None
        given[key[len(begin) : len(key) - len(key_end)].strip()] = value.removeprefix("\n").removesuffix("\n")
    name = name.strip()
    if not name or "<" in name:
        return None
    return ParsedCall(name, json.dumps(given, ensure_ascii=False), texts=True)


PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "json": whole_json,
    "none": none,
}
"""Parsers by the value of `agent.tool_parser` and `environment.tool_parser`."""

MARKS: Mapping[str, str] = {"hermes": BEGIN, "qwen3_coder": BEGIN, "glm": BEGIN}
"""Text that begins a call, by parser. An answer in which it is left over has a call that does not parse."""

# -- answers that must be calls ----------------------------------------------------------------------------------------


def _hermes_tag(name: str, schema: Any) -> dict[str, Any]:
    return _tag(f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', schema, f"}}\n{END}")


def _json_tag(name: str, schema: Any) -> dict[str, Any]:
    return _tag(f'{{"name": {json.dumps(name)}, "parameters": ', schema, "}")


def _tag(begin: str, schema: Any, end: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema if isinstance(schema, Mapping) else {"type": "object"}}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS: Mapping[Parser, tuple[Callable[[str, Any], dict[str, Any]], bool]] = {
    hermes: (_hermes_tag, False),
    whole_json: (_json_tag, True),
}
"""For each parser of a format in which calls can be forced: how a call is written, and whether it is always alone."""


def structure_of_calls(parser: Parser, tools: Sequence[Mapping[str, Any]], name: str = "") -> str:
    """A structural tag (https://github.com/mlc-ai/xgrammar) that only answers with calls of these tools match; empty if
    the format has none. `name`: of the only function that may be called, once."""
    make, single = TAGS.get(parser, (None, False))
    if make is None:
        return ""
    functions = [_mapping(tool.get("function", tool)) for tool in tools]
    tags = [make(str(one.get("name")), one.get("parameters")) for one in functions if name in ("", one.get("name"))]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return json.dumps({"type": "structural_tag", "format": form | {"stop_after_first": single or bool(name)}})


# -- the types of arguments --------------------------------------------------------------------------------------------

_PYTHON = {"True": True, "False": False, "None": None}
"""Templates write these values of an argument as Python does."""


def calls_of(parser: Parser, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ParsedCall]]:
    """The text of an answer without its calls, and the calls. Their arguments have the types that the schemas of the
    tools ask for."""
    left, calls = parser(text)
    return left, [_typed(call if call.arguments else call._replace(arguments="{}"), tools) for call in calls]


def _typed(call: ParsedCall, tools: Sequence[Mapping[str, Any]]) -> ParsedCall:
    """A text that is no JSON, and every text for which the schema allows texts, stays a text."""
    if not call.texts:
        return call
    functions = [_mapping(tool.get("function", tool)) for tool in tools]
    function = next((one for one in functions if one.get("name") == call.name), {})
    schemas = _mapping(_mapping(function.get("parameters")).get("properties"))
    given = {name: _value_of(text, schemas.get(name)) for name, text in json.loads(call.arguments).items()}
    return ParsedCall(call.name, json.dumps(given, ensure_ascii=False))


def _value_of(text: str, schema: Any) -> Any:
    types = _types_of(schema)
    try:
        value = _PYTHON[text] if text in _PYTHON else json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value if "string" not in types or (value is None and "null" in types) else text


def _types_of(schema: Any) -> set[str]:
    """The types of JSON that a schema names. Nothing has checked the schema: what is none names no type."""
    known = _mapping(schema)
    stated = known.get("type")
    types = {stated} if isinstance(stated, str) else {str(one) for one in _list(stated)}
    return types.union(*(_types_of(one) for name in ("anyOf", "oneOf") for one in _list(known.get(name))))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
