"""Tool calls in chats: each template gets the form that it expects, and nothing of a chat vanishes without a word."""

import json
from typing import Any

import pytest
from chat_tokenizers import Family, made
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataFailure
from engine.tasks.chat import ChatSettings, PromptRenderer, problem_of, render
from engine.trajectory import Prompt

LOOP = "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}BODY{%- endfor -%}"
CALLS = "{%- for c in m.tool_calls or [] -%}CALL{%- endfor -%}"


def template(body: str, call: str = "") -> str:
    return LOOP.replace("BODY", body + CALLS.replace("CALL", call) if call else body)


TEMPLATES = {
    # Qwen2.5, Hermes: a mapping
    "tojson": template("{{- m.content -}}", '{{- c.function.name + "(" + (c.function.arguments | tojson) + ")" -}}'),
    # Qwen3: either; earlier reasoning is left out
    "either": template(
        "{{- m.content.split('</think>')[-1].strip() -}}",
        "{{- c.function.name -}}({%- if c.function.arguments is string -%}{{- c.function.arguments -}}"
        "{%- else -%}{{- c.function.arguments | tojson -}}{%- endif -%})",
    ),
    # DeepSeek R1 and its copies: a text, and calls only where there is no content
    "content is none": template(
        "{%- if m.content is none -%}"
        + CALLS.replace(
            "CALL", "{{- c['type'] + ' ' + c['function']['name'] + '(' + c['function']['arguments'] + ')' -}}"
        )
        + "{%- else -%}{{- m.content.split('</think>')[-1] -}}{%- endif -%}"
    ),
    # a text, without the error of a concatenation
    "printed": template("{{- m.content -}}", "{{- c.function.name -}}({{- c.function.arguments -}})"),
    # Llama 3.1: a mapping, calls instead of content, and results as JSON
    "instead": template(
        "{%- if 'tool_calls' in m -%}{{- m.tool_calls[0].function.name -}}"
        "({{- m.tool_calls[0].function.arguments | tojson -}}){%- elif m.role == 'tool' -%}{{- m.content | tojson -}}"
        "{%- else -%}{{- m.content | trim -}}{%- endif -%}"
    ),
    # GLM, Qwen3-Coder: one argument after the other
    "items": template(
        "{{- m.content or '' -}}",
        "{{- c.function.name -}}({%- for k, v in c.function.arguments | items -%}{{- k -}}={{- v -}};{%- endfor -%})",
    ),
    # name and arguments are not under `function`
    "flat": template("{{- m.content -}}", '{{- c.name + "(" + (c.arguments | tojson) + ")" -}}'),
}
USER, RESULT = {"role": "user", "content": " weather "}, {"role": "tool", "name": "look", "content": 'it is "fine"\n'}


def tokenizer(name: str) -> Any:
    return made(Family(template=TEMPLATES.get(name, name), eos="<end>"))


def calling(arguments: Any, content: Any = None, **call: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [call | {"function": function}]}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", [{"city": "Rome", "days": 2}, '{"city": "Rome", "days": 2}'])
@pytest.mark.parametrize("content", [None, "", "<think>hm</think>"])
def test_a_template_gets_arguments_in_the_form_that_it_writes_well(name: str, arguments: Any, content: Any) -> None:
    text = render(tokenizer(name), [USER, calling(arguments, content), RESULT])
    written = "city=Rome;days=2;" if name == "items" else '{"city": "Rome", "days": 2}'
    assert f"look({written})" in text and "None" not in text
    assert "weather" in text and "fine" in text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", [None, "", "{}", {}, "null"])
def test_a_call_without_arguments_has_one_form(name: str, arguments: Any) -> None:
    assert f"look({'' if name == 'items' else '{}'})" in render(tokenizer(name), [USER, calling(arguments)])


def test_calls_whose_name_is_not_under_function_are_calls() -> None:
    flat = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": '{"city": "Rome"}', "function": None}]}
    assert not problem_of([flat], "messages")
    for name in TEMPLATES:
        assert "Rome" in render(tokenizer(name), [USER, flat])


@pytest.mark.parametrize(
    ("name", "messages", "lost"),
    [
        (template("{{- m.content -}}"), [USER, calling({})], "the call of 'look' in message 2 (assistant)"),
        (template("{{- m.content -}}", "{{- c.function.name -}}"), [calling({"a": 1})], "the argument 'a' of 'look'"),
        ("content is none", [USER, calling({}, "I look.")], "the call of 'look' in message 2 (assistant)"),
        ("instead", [USER, calling({}, "I look.")], "the text of message 2 (assistant)"),
        (template("{%- if m.role != 'tool' -%}{{- m.content -}}{%- endif -%}"), [USER, RESULT], "message 2 (tool)"),
        (template("{%- if loop.last -%}{{- m.content -}}{%- endif -%}"), [USER, USER], "the text of message 1 (user)"),
    ],
)
def test_a_chat_of_which_something_vanishes_is_refused_by_name(name: str, messages: Any, lost: str) -> None:
    prompt = Prompt(row=4, text="not read", fields={"messages": messages})
    with pytest.raises(DataFailure, match="the chat template leaves out") as caught:
        PromptRenderer(tokenizer(name), ChatSettings()).ids(prompt)
    assert lost in str(caught.value) and "prompt row 4" in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(
    name=st.sampled_from([name for name in TEMPLATES if name != "items"]),
    arguments=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    as_text=st.booleans(),
)
def test_arguments_of_any_kind_are_read_as_they_were_given(name: str, arguments: dict[str, Any], as_text: bool) -> None:
    given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    text = RENDERERS[name].text(Prompt(row=0, text="", fields={"messages": [USER, calling(given)]}))
    written = text.partition("look(")[2].rpartition(")")[0]
    assert json.loads(written) == arguments


RENDERERS = {name: PromptRenderer(tokenizer(name)) for name in TEMPLATES}
