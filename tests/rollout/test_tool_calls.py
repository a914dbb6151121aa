"""Tool calls in answers: the formats of the model families, as their published templates write them."""

import json
from typing import Any

import pytest
from chat_tokenizers import published
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine.rollout.agents.tool_calls import PARSERS, ParsedCall, calls_of

TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "seats": {"type": "integer"},
                "window": {"type": "boolean"},
                "ids": {"type": "array", "items": {"type": "integer"}},
            },
        },
    },
}
ARGUMENTS = {"code": "007", "note": "two\nlines <b>", "seats": 2, "window": True, "ids": [1, 2]}


def parsed(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    left, calls = calls_of(PARSERS[name], text, [TOOL])
    return left, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("key", ["parameters", "arguments"])
@pytest.mark.parametrize(("name", "form"), [("json", "{}"), ("hermes", "<tool_call>{}</tool_call>")])
def test_the_arguments_of_a_json_call_have_either_name(name: str, form: str, key: str) -> None:
    said = form.replace("{}", json.dumps({"name": "f", key: {"a": 1}}))
    assert parsed(name, said) == ("", [("f", {"a": 1})])


@pytest.mark.parametrize("said", ['{"name": "Ada", "age": 36}', '{"name": "f", "parameters": 3}', '{"name": 3}', "[]"])
def test_an_object_that_is_no_call_stays_an_answer(said: str) -> None:
    assert parsed("json", said) == (said, [])


@pytest.mark.parametrize(
    ("name", "template", "content"),
    [
        ("hermes", "qwen2_5", "I book."),
        ("hermes", "qwen3", "I book."),
        ("qwen3_coder", "qwen3_5_think", "I book."),
        ("qwen3_coder", "qwen3_5_nothink", "I book."),
        ("qwen3_coder", "qwen3_6", "I book."),
        ("qwen3_coder", "nemotron_3_nano", "I book."),
        ("glm", "glm4moe", "I book."),
        ("json", "llama3_1", ""),
    ],
)
def test_calls_are_read_as_the_published_template_writes_them(name: str, template: str, content: str) -> None:
    call = {"type": "function", "function": {"name": "book", "arguments": ARGUMENTS}}
    two = [call] if name == "json" else [call, {"type": "function", "function": {"name": "rest", "arguments": {}}}]
    answer = {"role": "assistant", "content": content, "tool_calls": two}
    left, calls = parsed(name, written(template, answer))
    assert calls == [("book", ARGUMENTS), ("rest", {})][: len(two)]
    assert left == content


def written(template: str, answer: dict[str, Any]) -> str:
    """What a template of the package trl writes for an answer, without its beginning, thinking and end."""
    user = {"role": "user", "content": "QUESTION"}
    arguments = {"chat_template": published(template), "bos_token": "", "eos_token": ""}
    (text,), _ = render_jinja_template([[user, answer]], tools=[TOOL], **arguments)
    for mark in ("QUESTION", "assistant\n", "<|end_header_id|>\n\n", "<|assistant|>", "</think>"):
        text = text.rpartition(mark)[2]
    for end in ("<|im_end|>", "<|eot_id|>"):
        text = text.partition(end)[0]
    return text.strip()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seats", "2", 2),
        ("seats", "two", "two"),
        ("code", "2", "2"),
        ("code", "null", "null"),
        ("note", "None", None),
        ("window", "False", False),
        ("ids", "[1, 2]", [1, 2]),
        ("other", "2", 2),
        ("other", "NaN", "NaN"),
    ],
)
def test_texts_get_the_types_of_the_tool(name: str, text: str, value: Any) -> None:
    said = f"<tool_call>\n<function=book>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert parsed("qwen3_coder", said) == ("", [("book", {name: value})])
    flat = f"<tool_call>book<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert parsed("glm", flat) == ("", [("book", {name: value})])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("json", "[" * 100_000),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f>1</function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        ("glm", "<tool_call></tool_call>"),
    ],
)
def test_what_cannot_be_read_stays_text(name: str, said: str) -> None:
    assert parsed(name, said) == (said, [])


@given(st.sampled_from(sorted(PARSERS)), st.text(alphabet="<>/=tool_calfunction{}\"':1\n"))
def test_no_answer_fails_a_parser(name: str, said: str) -> None:
    for text in (said, f"<tool_call>{said}</tool_call>", f"<tool_call><function=f>{said}</function></tool_call>"):
        _, calls = calls_of(PARSERS[name], text, [TOOL])
        assert all(isinstance(call, ParsedCall) for call in calls)


@pytest.mark.parametrize("name", sorted(PARSERS))
@pytest.mark.parametrize("inner", [" ", "\n", "<tool_call>", "<function=f>", "<parameter=a>", "<arg_key>", "a "])
def test_long_answers_are_parsed_in_linear_time(name: str, inner: str) -> None:
    """A regular expression with cubic time would need hours."""
    said = "<tool_call><function=f>" + inner * 20_000
    assert parsed(name, said) == (said, [])
    assert len(parsed(name, said + "</function></tool_call>")[1]) <= 1


@pytest.mark.parametrize(
    "function",
    [
        {"parameters": []},
        {"parameters": {"properties": []}},
        {"parameters": {"properties": {"a": {"type": None}}}},
        {"parameters": {"properties": {"a": {"anyOf": 3}}}},
        {"parameters": {"properties": {"a": {"oneOf": [1]}}}},
    ],
)
def test_a_tool_whose_schema_is_none_gets_values_as_they_parse(function: dict[str, Any]) -> None:
    said = "<tool_call><function=f><parameter=a>2</parameter></function></tool_call>"
    for tool in ({"type": "function", "function": {"name": "f", **function}}, {"function": 1}):
        assert calls_of(PARSERS["qwen3_coder"], said, [tool]) == ("", [ParsedCall("f", '{"a": 2}')])
