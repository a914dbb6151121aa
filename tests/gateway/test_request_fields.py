"""What the gateway honors and refuses: the table, and requests that go by it."""

from typing import Any

import openai
import pytest
from gateway_rig import CONTEXT, FixedAnswers, model, one_group, run
from openai import AsyncOpenAI
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from engine.gateway.openai_format import ChatRequest, CompletionRequest, RequestError, parse
from engine.gateway.request_fields import CHAT, COMPLETIONS, refusal_of
from engine.rollout.agents.tool_calls import PARSERS, structure_of_calls
from engine.rollout.torch.torch_backend import TorchBackend
from engine.trajectory import Prompt

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


def test_the_table_has_every_field_of_openais_own_types() -> None:
    """A field that OpenAI adds must get a rule: none is ignored by accident."""
    assert sorted({*chat_params.CompletionCreateParamsBase.__annotations__} - {*CHAT}) == []
    assert sorted({*CompletionCreateParamsBase.__annotations__} - {*COMPLETIONS}) == []


def test_every_field_that_a_request_reads_is_honored_in_the_table() -> None:
    for kind, rules in ((ChatRequest, CHAT), (CompletionRequest, COMPLETIONS)):
        for name in kind.model_fields:
            assert rules[name].treatment == "honored", name


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n", 2, "1"),
        ("n", True, "1"),
        ("tool_choice", "any", "auto, none, required or a named function"),
        ("response_format", {"type": "json_object"}, '{"type": "text"}'),
        ("response_format", SCHEMA, '{"type": "text"}'),
        ("logit_bias", {"5": 100}, "{}"),
        ("frequency_penalty", 0.5, "0"),
        ("parallel_tool_calls", False, "true"),
        ("functions", [{"name": "add"}], "[]"),
        ("reasoning_effort", "low", "null"),
        ("min_tokens", 5, "0"),
        ("stop_token_ids", [7], "[]"),
        ("guided_grammar", "root ::= x", "null"),
        ("ignore_eos", True, "false"),
        ("bad_words", ["no"], "[]"),
        ("continue_final_message", True, "false"),
        ("skip_special_tokens", True, "false"),
        ("chat_template", "{{ messages }}", "null"),
    ],
)
def test_what_would_change_an_answer_and_cannot_be_honored_is_refused(name: str, value: Any, allowed: str) -> None:
    refused = refusal_of(CHAT, {"messages": HELLO, name: value})
    assert refused is not None
    assert refused[0] == name
    assert f"{name} is {value!r:.80}, but must be {allowed}, or left out (" in refused[1]
    assert refusal_of(CHAT, {name: None}) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me", "seed": 3},
        {"tool_choice": "auto", "tools": [ADD], "parallel_tool_calls": True, "temperature": 0.3},
        {"tool_choice": "none", "response_format": {"type": "text"}, "metadata": {"a": "b"}, "some_new_field": 1},
        {"min_tokens": 0, "stop_token_ids": [], "ignore_eos": False, "skip_special_tokens": False, "bad_words": []},
    ],
)
def test_values_without_an_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert refusal_of(CHAT, fields) is None


def test_top_logprobs_need_logprobs_and_have_a_bound() -> None:
    for body, place in ((b'{"messages":[{"role":"user","content":"x"}],"top_logprobs":2}', "top_logprobs"),
                        (b'{"prompt":"x","logprobs":21}', "logprobs")):  # fmt: skip
        with pytest.raises(RequestError, match=place) as refused:
            parse(ChatRequest if b"messages" in body else CompletionRequest, body)
        assert (refused.value.status, refused.value.body["error"]["param"]) == (400, place)


def test_an_error_names_the_position_of_a_part_that_is_not_text() -> None:
    body = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}'
    with pytest.raises(RequestError, match=r"^messages\.0\.content\.parts\.0\.type: Input should be 'text'$"):
        parse(ChatRequest, body)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_treated_as_auto_or_constrains_the_answer(choice: Any) -> None:
    async def forcing(client: AsyncOpenAI, prompt: Prompt) -> float:
        create: Any = client.chat.completions.create
        done = await create(model="tiny", messages=HELLO, tools=[ADD], tool_choice=choice)
        assert done.choices[0].message.content == "no call"
        with pytest.raises(openai.BadRequestError, match="tools has no such function"):
            await create(model="tiny", messages=HELLO, tool_choice=choice)
        return 1.0

    structures = []
    for forced_calls in ("as_auto", "constrain"):
        backend = FixedAnswers("no call<end>")
        run(one_group(forcing, backend, max_tokens=40, forced_calls=forced_calls))
        structures.append(backend.asked[0].params.structure)
    assert structures[0] == "" and "add" in structures[1]


def test_a_forced_call_that_cannot_be_honored_names_the_setting() -> None:
    async def forcing(client: AsyncOpenAI, prompt: Prompt) -> float:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match=r"agent\.tool_choice: as_auto treats it as auto"):
            await create(model="tiny", messages=HELLO, tools=[ADD], tool_choice="required")
        await create(model="tiny", messages=HELLO)
        return 1.0

    run(one_group(forcing, FixedAnswers("x<end>"), forced_calls="refuse"))
    run(one_group(forcing, FixedAnswers("x<end>"), forced_calls="constrain", parser="glm"))


@pytest.mark.parametrize(
    ("parser", "begin", "end"),
    [
        ("hermes", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
        ("json", '{"name": "NAME", "parameters": ', "}"),
    ],
)
def test_only_calls_match_the_structure_of_a_forced_call(parser: str, begin: str, end: str) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="vLLM brings it")
    matches = pytest.importorskip("xgrammar.testing")._is_grammar_accept_string
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": numbers}} for name in ("add", "sub")]
    calls = {name: f'{begin.replace("NAME", name)}{{"a": 1}}{end}' for name in ("add", "sub", "own")}
    for name, matching in (("", ["add", "sub"]), ("sub", ["sub"])):
        grammar = xgrammar.Grammar.from_structural_tag(structure_of_calls(PARSERS[parser], tools, name))
        assert [one for one, text in calls.items() if matches(grammar, text)] == matching
        assert not matches(grammar, "no call") and not matches(grammar, calls["sub"].replace("1", '"x"'))
        assert [call.name for call in PARSERS[parser](calls["sub"])[1]] == ["sub"]


def test_top_logprobs_are_those_of_the_distribution_that_was_sampled() -> None:
    seen: list[Any] = []

    async def curious(client: AsyncOpenAI, prompt: Prompt) -> float:
        many = await client.chat.completions.create(model="model", messages=HELLO, logprobs=True, top_logprobs=3)
        few = await client.completions.create(model="model", prompt="count", logprobs=1)
        plain = await client.chat.completions.create(model="model", messages=HELLO, logprobs=True)
        seen.extend([many.choices[0].logprobs, few.choices[0].logprobs, plain.choices[0].logprobs])
        return 1.0

    run(one_group(curious, TorchBackend(model(), rows=8)))
    many, few, plain = seen
    for token in many.content:
        values = [other.logprob for other in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert all(value <= values[0] + 1e-5 for value in [token.logprob])
        same = [other.logprob for other in token.top_logprobs if other.token == token.token]
        assert same in ([], [pytest.approx(token.logprob, abs=1e-5)])
    assert all(len(top) == 1 for top in few.top_logprobs)
    assert all(token.top_logprobs == [] for token in plain.content)
    assert CONTEXT > len(many.content) > 0
