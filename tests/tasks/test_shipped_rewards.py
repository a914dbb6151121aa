"""Built-in rewards with arguments: math-verify, regular expressions, JSON schemas; and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest

from engine.config.reward import NamedReward, RewardSection
from engine.config.reward_functions import reward_of_section
from engine.errors import ConfigError, DataFailure, RewardFailure
from engine.tasks.format_rewards import json_schema, regular_expression
from engine.tasks.math_rewards import math_verify
from engine.trajectory import NoAnswer, Prompt, Trajectory

SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


def value(function: Any, response: str, fields: dict[str, Any] | None = None, **arguments: Any) -> float:
    return function(Prompt(row=3, text="?", fields=fields or {}), Trajectory(text=response), **arguments)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"$x = 3$, so $\sqrt{9} = 3$", r"\sqrt{9}", 1.0),
        (r"\boxed{(1, 2)}", "$(1,2)$", 1.0),
        (r"\boxed{4}", "5", 0.0),
        ("I do not know", "5", 0.0),
    ],
)
def test_math_is_compared_by_value(response: str, answer: str, expected: float) -> None:
    assert value(math_verify, response, {"answer": answer}) == expected
    assert value(math_verify, response, {"solution": answer}, answer="solution") == expected


def test_a_row_without_an_expression_is_named() -> None:
    with pytest.raises(DataFailure, match="the column 'answer' of row 3 has no mathematical expression: ''"):
        value(math_verify, "4", {"answer": ""})


def test_a_pattern_may_match_a_part_or_the_whole() -> None:
    assert value(regular_expression, "so\n<answer>\n4</answer>", pattern="<answer>.*</answer>") == 1.0
    assert value(regular_expression, "so <answer>4</answer>", pattern="<answer>.*</answer>", whole=True) == 0.0
    assert value(regular_expression, "no", pattern="<answer>") == 0.0


def test_a_pattern_that_backtracks_without_end_is_stopped() -> None:
    with pytest.raises(DataFailure, match=r"took longer than 0\.05 s on a response of 41 characters; use one that"):
        value(regular_expression, "a" * 40 + "b", pattern="^(a|aa)+$", limit_s=0.05)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"name": "x"}', 1.0),
        ('Here:\n```json\n{"name": 1}\n```\nno:\n```json\n{"name": "x"}\n```', 1.0),
        ('```JSON\n{"name": "x"}\n```', 1.0),
        ('<think>A name, as in {"name": 1}.</think>\n\n{"name": "x"}', 1.0),
        ('So.\n```json\n{"name": 1}\n```\n</think>\n{"name": "x"}', 1.0),
        ('{"name": 1}', 0.0),
        ('{"name": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("text", 0.0),
    ],
)
def test_json_must_match_its_schema(response: str, expected: float) -> None:
    assert value(json_schema, response, schema=SCHEMA) == expected
    assert value(json_schema, response, {"schema": SCHEMA}) == expected
    assert value(json_schema, response, {"own": '{"$ref": "#/$defs/a", "$defs": {"a": {}}}'}, column="own") == float(
        expected or '"name": 1' in response
    )


@pytest.mark.parametrize(
    ("schema", "story"),
    [
        (
            {"$ref": "http://127.0.0.1:9/schema"},
            "the schema of row 3 cannot be used: .*Unresolvable: http://127.0.0.1:9/schema",
        ),
        ({"type": "odd"}, "the schema of row 3 cannot be used: UnknownType"),
        ("{", "the column 'schema' of row 3 is not JSON"),
    ],
)
def test_a_schema_that_cannot_be_used_is_named(schema: Any, story: str) -> None:
    with pytest.raises(DataFailure, match=story):
        value(json_schema, '{"name": 1}', {"schema": schema})


REFUSED = [
    ("format_rewards:regular_expression", {"pattern": "("}, "arguments.pattern is '(', but|'(' is not a regular"),
    ("format_rewards:regular_expression", {}, "arguments {} cannot be passed to"),
    ("format_rewards:regular_expression", {"patern": "a"}, "did you mean pattern?"),
    ("format_rewards:json_schema", {"schema": {"type": "odd"}}, "is not a JSON schema"),
    ("code_rewards:python_tests", {"limit_s": 0}, "arguments.limit_s is 0, but must be a number of seconds above 0"),
    ("math_rewards:math_verify", {"limit_s": 0.5}, "must be a whole number of seconds from 1 to 3600"),
    (
        "judge:llm_judge",
        {"url": "judge", "model": "m"},
        "arguments.url is 'judge', but must be an http or https address",
    ),
    (
        "judge:llm_judge",
        {"url": "http://127.0.0.1:9/v1", "model": "m"},
        "http://127.0.0.1:9/v1' cannot be used: http://127.0.0.1:9/v1/models cannot be reached",
    ),
    (
        "judge:llm_judge",
        {"url": "http://127.0.0.1:9", "model": "m", "api_key_env": "NO_SUCH_KEY"},
        "is not set in the environment",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "story"), REFUSED)
def test_arguments_are_checked_before_a_run(function: str, arguments: dict[str, Any], story: str) -> None:
    part = NamedReward(name="part", function=f"engine.tasks.{function}", arguments=arguments)
    with pytest.raises(ConfigError) as caught:
        reward_of_section(RewardSection(functions=[part]), None, check=True)
    assert str(caught.value.details["field"]).startswith("reward.functions.0")
    assert any(one in str(caught.value) for one in story.split("|"))


def test_a_judge_is_named_by_its_model_or_by_the_name_of_its_reward() -> None:
    spec, asked = "engine.tasks.judge:llm_judge", {"url": "http://127.0.0.1:9/v1", "model": "big"}
    named = RewardSection(functions=[NamedReward(name="quality", function=spec, arguments=asked)])
    reward = reward_of_section(named, None)
    assert reward is not None and reward.parts[0].title == "judge quality"
    assert replace(reward.parts[0], name="").title == "judge big"


@pytest.mark.parametrize("function", ["math_rewards:math_verify", "format_rewards:json_schema"])
def test_a_reward_that_may_hang_has_its_own_process_unless_set_otherwise(function: str) -> None:
    for processes, limited in ((None, True), (0, False), (3, True)):
        part = NamedReward(name="own", function=f"engine.tasks.{function}", processes=processes)
        parts = reward_of_section(RewardSection(functions=[part]), None)
        assert parts is not None and parts.parts[0].limits_itself == limited
        assert parts.parts[0].concurrency == (processes or (1 if limited else None))


def test_a_schema_whose_pattern_backtracks_without_end_fails_one_call() -> None:
    schema = {"type": "string", "pattern": "^(a|a)*$"}
    part = NamedReward(
        name="form", function="engine.tasks.format_rewards:json_schema", arguments={"schema": schema}, timeout_s=1.0
    )
    reward = reward_of_section(RewardSection(functions=[part]), None)
    assert reward is not None
    with pytest.raises(RewardFailure, match="took longer than 1 s; its process was killed"):
        reward.parts[0].function([Prompt(row=3, text="?")], [Trajectory(text='"' + "a" * 40 + 'b"')])
    reward.close()


def test_no_answer_is_not_a_wrong_answer() -> None:
    assert isinstance(value(math_verify, "I do not know", {"answer": "5"}), NoAnswer)
    assert not isinstance(value(math_verify, "It is 4", {"answer": "5"}), NoAnswer)
    assert isinstance(value(json_schema, "I do not know", schema=SCHEMA), NoAnswer)
    assert not isinstance(value(json_schema, "[4]", schema=SCHEMA), NoAnswer)
