"""Figures of validation sets: against the definitions, written out by brute force."""

from dataclasses import replace
from itertools import combinations
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.states.limits import ValidationLimits, ValidationSet
from engine.states.validation_figures import Response, figures, majority_at, metric_names, pass_at

MATH = ValidationSet(name="math", prompts=3, samples=4, k=(2, 4), majority=True)
EASY = ValidationSet(name="easy", prompts=2)
RIGHT, WRONG = Response(1.0, 7, True), Response(0.0, 8, False)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(right: list[bool], k: int) -> None:
    if k <= len(right):
        chosen = list(combinations(right, k))
        assert isclose(pass_at(len(right), sum(right), k), sum(map(any, chosen)) / len(chosen), abs_tol=1e-12)


def votes(text: str) -> list[Response]:
    """`a` is right; `.` has no answer."""
    return [Response(float(one == "a"), 0 if one == "." else ord(one), one == "a") for one in text]


@pytest.mark.parametrize(
    ("text", "k", "value"),
    [
        ("aab", 3, 1.0),
        ("abb", 3, 0.0),
        ("ab", 2, 1.0),
        ("ba", 2, 0.0),
        ("..a", 3, 1.0),
        ("...", 3, 0.0),
        ("aabbbba", 3, 0.5),
        ("ab", 1, 0.5),
    ],
)
def test_the_most_frequent_answer_of_each_block_counts_the_first_of_equal_ones(text: str, k: int, value: float) -> None:
    assert majority_at(votes(text), k) == value


def test_the_figures_of_each_set_come_from_its_own_rows() -> None:
    limits = ValidationLimits(rows=14, sets=(MATH, EASY))
    rows = {row: RIGHT if limits.place(row).prompt == 0 else WRONG for row in range(14)}
    rows[4] = RIGHT  # one of four for the second prompt
    found = {(one.set, one.metric): (one.value, len(one.prompts)) for one in figures(limits.measured_sets, rows)}
    assert found == {
        ("math", "avg@4"): (pytest.approx((1 + 0.25 + 0) / 3), 3),
        ("math", "pass@2"): (pytest.approx((1 + 0.5 + 0) / 3), 3),
        ("math", "pass@4"): (pytest.approx(2 / 3), 3),
        ("math", "maj@2"): (pytest.approx((1 + 0.5 + 0) / 3), 3),
        ("math", "maj@4"): (pytest.approx(1 / 3), 3),
        ("math", "reward_mean"): (pytest.approx((1 + 0.25 + 0) / 3), 3),
        ("easy", "avg@1"): (0.5, 2),
        ("easy", "reward_mean"): (0.5, 2),
    }
    assert {f"{set}/{metric}" for set, metric in found} == {*metric_names(limits.measured_sets)} - {
        "accuracy",
        "reward_mean",
    }


def test_a_response_that_failed_is_wrong_and_has_no_reward() -> None:
    """The first prompt has two responses, the second none, the third all."""
    rows = {row: RIGHT if row < 8 else WRONG for row in (0, 1, 8, 9, 10, 11)}
    found = {one.metric: (one.value, len(one.prompts), one.failed, one.responses) for one in figures([MATH], rows)}
    assert found["avg@4"] == (pytest.approx(1 / 6), 3, 6, 12) and found["pass@4"] == (pytest.approx(1 / 3), 3, 6, 12)
    assert found["reward_mean"] == (0.5, 2, 6, 12)
    assert figures([MATH], {}) == ()


@given(st.lists(st.sampled_from("ab.-"), min_size=12, max_size=12), st.integers(0, 3))
def test_shares_are_those_with_a_wrong_response_instead_of_each_failed_one(text: list[str], dropped: int) -> None:
    """`-` failed; without a prompt, it is as if all responses to it failed."""
    answers = {row: one for row, one in enumerate(votes("".join(text).replace("-", "."))) if text[row] != "-"}
    instead = dict(enumerate(votes("".join(text).replace("-", ".") + 4 * dropped * ".")))
    found = figures([replace(MATH, dropped=dropped)], answers)
    whole = {one.metric: one.prompts for one in figures([replace(MATH, prompts=3 + dropped)], instead)}
    assert {one.metric: one.prompts for one in found if one.metric != "reward_mean"} == (
        {metric: prompts for metric, prompts in whole.items() if metric != "reward_mean"} if answers else {}
    )
    assert all(one.failed == text.count("-") + 4 * dropped for one in found)


def test_the_parts_of_a_reward_have_means_over_the_prompts_to_which_they_apply() -> None:
    """What is right does not follow from the reward."""
    one = ValidationSet(name="a", prompts=3, samples=2, k=(2,), parts=("acc", "fmt", "rare"), correct=("acc",))
    of = [Response(2.0, 0, False, {0: 0.0, 1: 2.0}), Response(0.5, 0, True, {0: 1.0, 1: -0.5}), Response(1.0, 0, False)]
    found = {
        e.metric: (e.value, len(e.prompts)) for e in figures([one], {0: of[0], 1: of[1], 2: of[0], 3: of[0], 4: of[2]})
    }
    assert found == {
        "avg@2": (pytest.approx(0.5 / 3), 3),
        "pass@2": (pytest.approx(1 / 3), 3),
        "reward_mean": (pytest.approx((1.25 + 2.0 + 1.0) / 3), 3),
        "reward_acc": (0.25, 2),
        "reward_fmt": (pytest.approx((0.75 + 2.0) / 2), 2),
    }
    assert set(metric_names([one])) == {*(f"a/{name}" for name in found), "a/reward_rare", "accuracy", "reward_mean"}


def test_each_row_has_its_place() -> None:
    limits = ValidationLimits(rows=14, sets=(MATH, EASY))
    places = [(place.set.name, place.prompt, place.sample) for place in map(limits.place, range(14))]
    assert places == [
        *(("math", prompt, sample) for prompt in range(3) for sample in range(4)),
        ("easy", 0, 0), ("easy", 1, 0),
    ]  # fmt: skip
    with pytest.raises(IndexError):
        limits.place(14)
    assert ValidationLimits(rows=3).place(2)[1:] == (2, 0)


@pytest.mark.parametrize("changes", [{"k": (5,)}, {"k": (0,)}, {"samples": 0}, {"prompts": 0}])
def test_sets_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"validation\.sets"):
        ValidationSet(**{"name": "x", "prompts": 2, "samples": 4, **changes})  # type: ignore[arg-type]


def test_limits_refuse_a_name_twice_and_another_number_of_rows() -> None:
    with pytest.raises(ConfigError, match="two sets have this name"):
        ValidationLimits(rows=4, sets=(EASY, EASY))
    with pytest.raises(ConfigError, match="the sets have 2 rows"):
        ValidationLimits(rows=4, sets=(EASY,))
