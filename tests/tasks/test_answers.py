"""Answers for the majority vote of a validation: what is extracted, and which extraction a reward implies."""

import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.tasks import rewards
from engine.tasks.answers import BUILT_IN, Answer, answer_of, last_boxed, last_number
from engine.trajectory import Prompt, Trajectory

PROMPT = Prompt(row=0, text="?")


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("number", "first 3, then 1,072.50", "1072.5"),
        ("number", "72.0", "72"),
        ("number", "100", "100"),
        ("number", "none", None),
        ("boxed", r"\boxed{1} and \boxed{ x + {y} }", "x+{y}"),
        ("boxed", "12", None),
        ("boxed_or_number", "12", "12"),
        ("boxed_or_number", r"\boxed{a} 12", "a"),
        ("choice", "A or (B).", "B"),
        ("text", " yes \n", "yes"),
        ("text", " ", None),
    ],
)
def test_the_built_in_answers(name: str, text: str, answer: str | None) -> None:
    assert BUILT_IN[name](PROMPT, Trajectory(text=text)) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10-12", "12"),
        ("10 - 12", "12"),
        ("x=-3", "-3"),
        ("(-3)", "-3"),
        ("is −3", "-3"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("12.05.2024", "2024"),
        ("1,2345", "2345"),
        ("costs $1,234,567.50.", "1234567.5"),
        ("5.", "5"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert BUILT_IN["number"](PROMPT, Trajectory(text=text)) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"$\boxed 5$", "5"),
        (r"is \boxed 5.", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{4} \fbox{5}", "5"),
        (r"\boxed", None),
    ],
)
def test_the_last_box_of_a_text(text: str, content: str | None) -> None:
    assert BUILT_IN["boxed"](PROMPT, Trajectory(text=text)) == content


MANY = {"options": list(range(10))}


@pytest.mark.parametrize(
    ("fields", "text", "letter"),
    [
        ({}, "The answer is (J).", "J"),
        ({}, "**Answer: J**", "J"),
        ({}, "**J**", "J"),
        ({}, r"\boxed{J}", "J"),
        ({}, "J", "J"),
        ({}, "J. The tenth", "J"),
        ({}, "B, with N the force and X a variable", "B"),
        ({}, "B. I think so, and I am right", "B"),
        ({}, "B is the answer I would give", "B"),
        ({}, "the answer is I", "I"),
        ({}, "B, as an X-ray or a Z-score shows", "B"),
        (MANY, "it must be J", "J"),
        (MANY, "the answer is I", "I"),
        (MANY, "J, with force (N)", "J"),
        ({"choices": {"text": ["a", "b", "c", "d"], "label": []}}, "D, see (E)", "D"),
        ({"choices": "none"}, "H", "H"),
    ],
)
def test_the_last_choice_of_a_text(fields: dict[str, object], text: str, letter: str) -> None:
    row = Prompt(row=0, text="?", fields={**fields, "answer": letter})
    assert BUILT_IN["choice"](row, Trajectory(text=text)) == letter
    assert rewards.multiple_choice(row, Trajectory(text=text)) == 1.0


def test_auto_follows_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(prompt: Prompt, trajectory: Trajectory) -> float:
        return 1.0

    def found(reward: object) -> object:
        return answer_of("auto", reward, None, config_field="x")

    assert found(rewards.final_number) is last_number and found(rewards.boxed_answer) is last_boxed
    assert found(judge) is BUILT_IN["boxed_or_number"] is found(None)
    judge.extract = last_boxed  # type: ignore[attr-defined]
    assert found(judge) is last_boxed


def test_a_named_function_must_take_a_prompt_and_a_trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = "def own(prompt, trajectory): return 'x'\ndef few(text): ...\nasync def late(prompt, trajectory): ...\n"
    (tmp_path / "my_answers.py").write_text(text)

    def named(name: str) -> Answer:
        return answer_of(f"my_answers:{name}", None, str(tmp_path), config_field="validation.sets.0.answer")

    assert named("own")(PROMPT, Trajectory()) == "x"
    for name in ("few", "late", "none"):
        with pytest.raises(ConfigError, match=r"validation\.sets\.0\.answer"):
            named(name)
