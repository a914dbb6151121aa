"""Rewards: how a bad name is reported, and the built-in ones by hand."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ConfigError, DataFailure
from engine.protocols.named_code import find
from engine.rollout.reward_parts import RewardPart
from engine.rollout.scoring import Reward, call_part
from engine.tasks.reward_forms import bind
from engine.tasks.rewards import boxed_answer, exact_match, final_number, multiple_choice
from engine.trajectory import Prompt, Trajectory


def prompt(answer: object = None) -> Prompt:
    return Prompt(row=3, text="?", fields={} if answer is None else {"answer": answer})


def said(text: str) -> Trajectory:
    return Trajectory(text=text, finish_reason="stop")


MODULE = """
import asyncio
limit = 3
class Judge:
    def __call__(self, prompt, trajectory): return 2
judge = Judge()
def good(prompt, trajectory): return 1
def one(prompt): return 1
def extra(prompt, trajectory, strict=True): return 0.5
async def later(prompt, trajectory):
    await asyncio.sleep(0)
    return 1
async def later_one(prompt): return 1
class Asks:
    async def __call__(self, prompt, trajectory): return 3
asks = Asks()
"""


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    yield tmp_path
    for name in ("my_rewards", "needs_more", "broken"):
        sys.modules.pop(name, None)


def load(spec: str) -> Reward:
    """A reward as a configuration names it."""
    reward: Reward = bind(find(spec, None, "reward.function"), {}, spec, "reward.function").call
    return reward


def test_rewards_in_the_working_directory_are_found(working_directory: Path) -> None:
    assert load("my_rewards:good")(prompt(), said("")) == 1.0
    assert load("my_rewards:extra")(prompt(), said("")) == 0.5
    assert load("my_rewards:judge")(prompt(), said("")) == 2.0
    assert load("engine.tasks.rewards:exact_match") is exact_match


def test_coroutine_functions_run_to_their_end(working_directory: Path) -> None:
    for spec, value in {"my_rewards:later": 1.0, "my_rewards:asks": 3.0}.items():
        assert call_part(RewardPart(function=load(spec)), [prompt()], [said("")], None) == [value]


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("good", "module:function"),
        (":good", "module:function"),
        ("nowhere_to_be_found:good", "no module named 'nowhere_to_be_found'"),
        ("engine.tasks.nowhere:good", "no module named 'engine.tasks.nowhere'"),
        ("needs_more:good", "itself imports 'not_there_at_all'"),
        ("broken:good", "ZeroDivisionError"),
        ("my_rewards:goood", "did you mean good"),
        ("my_rewards:limit", "is of type int, which cannot be called"),
        ("my_rewards:Judge", "is a class"),
        ("my_rewards:one", "cannot be called with (prompt, trajectory)"),
        ("my_rewards:later_one", "cannot be called with (prompt, trajectory)"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(working_directory: Path, spec: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(spec)
    assert fault in str(caught.value) and caught.value.details["field"] == "reward.function"


@pytest.mark.parametrize(
    ("reward", "answer", "text", "expected"),
    [
        (exact_match, "yes", " yes\n", 1.0),
        (exact_match, "yes", "yes.", 0.0),
        (multiple_choice, "B", "It is not A. The answer is (B).", 1.0),
        (multiple_choice, "B", "The answer is A", 0.0),
        (multiple_choice, "C", "Certainly not", 0.0),
        (multiple_choice, "B", "B. A triangle has three sides.", 1.0),
        (multiple_choice, "A", "A triangle has three sides.", 0.0),
        (multiple_choice, "A", "Not B: A is right", 1.0),
        (multiple_choice, "A", "(A) a triangle", 1.0),
        (multiple_choice, "C", "C, because I'm sure", 1.0),
        (exact_match, 4, "4", 1.0),
        (final_number, "72", "6 * 12 = 72", 1.0),
        (final_number, "... #### 72", "the answer is 72.", 1.0),
        (final_number, 1200, "so 1,200.00 dollars", 1.0),
        (final_number, "72", "72 or 73", 0.0),
        (final_number, "72", "none", 0.0),
        (boxed_answer, "1/2", r"so \boxed{ 1 / 2 }", 1.0),
        (boxed_answer, r"\boxed{\frac{1}{2}}", r"\boxed{3} no, \boxed{\frac{1}{2}}", 1.0),
        (boxed_answer, "1", "1", 0.0),
        (boxed_answer, "1", r"\boxed{1", 0.0),
    ],
)
def test_built_in_rewards(reward: Reward, answer: object, text: str, expected: float) -> None:
    assert reward(prompt(answer), said(text)) == expected


def test_a_row_without_an_answer_is_the_datas_fault() -> None:
    for reward in (exact_match, final_number, boxed_answer):
        with pytest.raises(DataFailure, match="answer"):
            reward(prompt(), said("4"))
    with pytest.raises(DataFailure, match="no number"):
        final_number(prompt("none"), said("4"))
