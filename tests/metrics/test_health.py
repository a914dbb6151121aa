"""The checks of a run's health: each finds what it is for, and nothing in a run that learns."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from engine.metrics.health import CHECKS, findings, replicas_behind, run_findings

Row = dict[str, Any]


def histograms(most: float) -> Row:
    """Rewards from 0 to `most`, of two functions."""
    return {
        "reward": [[0.0, 0.0, 8], [0.9, most, 8]],
        "reward_right": [[0.0, 0.0, 16]],
        "reward_form": [[1.0, 1.0, 16]],
    }


def sound(step: int) -> Row:
    """A row of a run that learns."""
    return {
        "step": step, "groups": 4, "tokens": 400 + 10 * step, "reward_mean": 0.3 + 0.01 * step, "reward_std": 0.4,
        "reward_right": 0.2 + 0.01 * step, "reward_form": 0.8 + 0.001 * step, "reward_histograms": histograms(1.0),
        "zero_advantage_groups": 1.0, "truncated_share": 0.1, "repeated_share": 0.5, "grad_norm": 0.1, "lr": 1e-4,
        "logprob_gap_mean_fresh": 0.01,
    }  # fmt: skip


def rows(change: Callable[[int], Row] = lambda step: {}, steps: int = 20) -> list[Row]:
    return [sound(step) | change(step) for step in range(steps)]


CASES: dict[str, Callable[[int], Row]] = {
    "flat_reward": lambda step: {"zero_advantage_groups": 4.0, "grad_norm": 0.0},
    "reward_scale": lambda step: {"reward_histograms": histograms(2.0**step)},
    "one_reward": lambda step: {"reward_right": 0.0},
    "long_responses": lambda step: {"tokens": 400 * (1 + step)},
    "truncated": lambda step: {"truncated_share": 0.5},
    "repeated": lambda step: {"repeated_share": 1.0},
    "logprob_gap": lambda step: {"logprob_gap_mean_stale": 0.7},
    "no_update": lambda step: {"lr": 0.0},
    "unused_source": lambda step: {"sources": {"math": {"drawn": 4 * step, "groups": 4}, "code": {"drawn": 0}}},
    "never_right": lambda step: {
        "reward_mean": 0.0,
        "accuracy": 0.0,
        "reward_histograms": {"reward": [[0.0, 0.0, 16]]},
    },
    "no_progress": lambda step: {"reward_mean": 0.3},
}
STEPS = {"unused_source": 32, "no_progress": 48}
"""Train steps that a check needs; 20 for the others."""


def test_a_sound_run_has_no_finding() -> None:
    assert findings(rows()) == []
    assert findings(rows(CASES["truncated"], steps=4)) == [], "too few steps"
    bare = [{"step": step, "groups": 4, "loss": None} for step in range(20)]
    assert findings(bare) == [], "a trainer of one's own reports other figures"


def test_equal_positive_rewards_suggest_that_the_prompts_are_solved() -> None:
    (one,) = findings(rows(lambda step: {"reward_mean": 1.0, "reward_histograms": {"reward": [[1.0, 1.0, 16]]}}))
    assert one.check == "flat_reward" and "every response got the reward 1, so" in one.text
    assert "it may already solve these prompts: use harder ones" in one.text


def test_truncated_responses_are_reported_before_zero_rewards() -> None:
    both = findings(rows(lambda step: CASES["never_right"](step) | {"truncated_share": 1.0}))
    assert [one.check for one in both] == ["truncated", "never_right"]


@pytest.mark.parametrize("check", CHECKS)
def test_each_health_check_finds_only_its_own_failure(check: str) -> None:
    (found,) = findings(rows(CASES[check], steps=STEPS.get(check, 20)))
    assert found.check == check
    recovered = [*rows(CASES[check], steps=40), *rows(steps=40)]
    assert findings(recovered) == []


def test_equal_rewards_of_all_responses_are_flat() -> None:
    equal = findings(rows(lambda step: {"reward_histograms": {"reward": [[0.5, 0.5, 16]]}}))
    assert [one.check for one in equal] == ["flat_reward"]
    assert findings(rows(lambda step: {"reward_histograms": {"reward": [[0.4, 0.5, 16]]}})) == []


def test_a_sentence_stays_the_same_while_the_cause_does() -> None:
    for check, change in CASES.items():
        late = STEPS.get(check, 32)
        texts = {findings(rows(change, steps))[0].text for steps in range(late + 1, late + 4)}
        assert len(texts) == 1, check


def rewarded(rewards: Sequence[float], most: float = 1.0, **others: Any) -> list[Row]:
    """Rows with these mean rewards. `most`: the largest reward of a response."""
    return [
        {"step": step, "groups": 4, "zero_advantage_groups": 1.0, "reward_mean": reward,
         "reward_histograms": {"reward": [[0.0, 0.0, 8], [most, most, 8]]}, **others}
        for step, reward in enumerate(rewards)
    ]  # fmt: skip


def names_found(curve: list[Row]) -> list[str]:
    """The checks that find something at the end of a curve, as a live view has its rows: the first and the newest."""
    return [one.check for one in findings(curve[-32:], curve[:8])]


def noisy(source: Random, steps: int, start: float, slope: float, noise: float, end: float = 1.0) -> list[float]:
    return [min(end, start + slope * step) + source.gauss(0.0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.08])
def test_a_reward_that_never_rises_is_found_in_noise_and_a_slow_one_rarely(noise: float) -> None:
    source = Random(noise)
    flat = [names_found(rewarded(noisy(source, 60, 0.3, 0.0, noise))) == ["no_progress"] for _ in range(400)]
    slow = [names_found(rewarded(noisy(source, 60, 0.3, noise / 20, noise))) == [] for _ in range(400)]
    plateau = [names_found(rewarded(noisy(source, 60, 0.3, noise, noise, 0.3 + 6 * noise))) for _ in range(400)]
    assert flat.count(True) > 300 and slow.count(True) > 380 and plateau.count([]) > 390
    solved = [names_found(rewarded(noisy(source, 60, 0.9, 0.0, noise / 4))) for _ in range(400)]
    assert solved.count([]) == 400, "nothing is left to learn"


LEARNS, LEARNS_NOT = (
    """
    28 40 26 27 15 9 34 48 30 36 45 45 41 37 44 49 45 61 48 59 59 50 57 40 66 65 66 48 62 62 66 61 52 72 61 60 55 73
    66 60 66 70 68 66 80 67 71 82 58 84 66 84 69 90 64 82 72 74 78 77 82 80 96 78 86 85 75 78 83 91 83 88 86 91 84
    90 91 89 84 87 85 82 96 88 84 93 92 84 95 79 93 93 79 95 86 95 81 92 80 88 94 84 80 88 94 70 90 92 94 91 88 96
    98 91 87 88 80 92 91 89 94 87 95 76 97 93 95 92 96 88 95 97 96 95 90 92 84 91 85 88 88 89 96 92 95 88 91 95 89
    95
    """,
    """
    33 35 20 29 12 5 27 31 20 28 18 30 23 20 18 21 9 26 30 36 30 23 28 8 36 28 38 17 29 21 16 33 12 38 19 33 11 32
    36 28 11 13 31 20 21 20 34 14 20 31 21 23 20 30 15 25 26 19 26 15 27 19 34 25 20 27 21 12 24 41 27 16 21 31 43
    16 32 26 14 38 31 27 23 30 20 9 34 22 20 20 26 23 35 42 30 12 26 30 21 16
    """,
)
"""Mean rewards of real runs, in hundredths: `engine run configs/quickstart.yaml`, and the same with
`trainer.learning_rate=1e-9`, at commit d33cbf88, 2026-11-27."""


def test_recorded_runs_that_learn_and_that_do_not_are_told_apart_at_every_step() -> None:
    learns, learns_not = (rewarded([int(text) / 100 for text in curve.split()]) for curve in (LEARNS, LEARNS_NOT))
    assert not any(names_found(learns[:steps]) for steps in range(len(learns)))
    found = [names_found(learns_not[:steps]) for steps in range(1, len(learns_not) + 1)]
    assert found == [[]] * 47 + [["no_progress"]] * 53


def test_no_progress_is_found_only_from_the_start_of_a_run_on() -> None:
    curve = rewarded([0.3, 0.31] * 40)
    assert names_found(curve[:47]) == [] and names_found(curve) == ["no_progress"]
    assert names_found(curve[1:]) == [], "the rows of the start are lost"
    assert names_found(rewarded([0.3, 0.31] * 20 + [0.6, 0.61] * 20)) == []
    (found,) = findings(curve)
    assert "model.warm_start" in found.text and "docs/BOTTLENECK.md#a-reward-that-does-not-rise" in found.text


def test_only_wrong_responses_are_found_though_some_get_a_small_reward() -> None:
    source = Random(1)
    partial = [names_found(rewarded(noisy(source, 12, 0.06, 0.0, 0.01), most=0.1, accuracy=0.0)) for _ in range(100)]
    assert partial.count(["never_right"]) > 90
    rises = [names_found(rewarded(noisy(source, 12, 0.02, 0.006, 0.01), most=0.1, accuracy=0.0)) for _ in range(100)]
    assert rises.count([]) > 90, "the small reward rises: the model learns"
    some = [0.0] * 5 + [0.01] + [0.0] * 6
    curve = [row | {"accuracy": share} for row, share in zip(rewarded([0.06] * 12, most=0.1), some, strict=True)]
    assert names_found(curve) == [], "one response was right"
    assert names_found(rewarded([0.3] * 12, most=0.9, accuracy=0.0)) == [], "a reward that need not reach 1"
    assert names_found([row | {"accuracy": 0.3} for row in rewarded([0.3] * 20)] + rewarded([0.0] * 10, 0.0)) == [
        "flat_reward"
    ], "it was right before"


def test_a_log_prob_gap_that_grows_is_found_before_it_is_large() -> None:
    grows = findings(rows(lambda step: {"logprob_gap_mean_fresh": 0.01 * (1 + step)}))
    assert [one.check for one in grows] == ["logprob_gap"] and "3 times as much" in grows[0].text
    assert findings(rows(lambda step: {"logprob_gap_mean_fresh": 0.001 * (1 + step)})) == [], "it is still tiny"
    assert findings(rows(lambda step: {"logprob_gap_mean_fresh": 0.2})) == [], "it does not grow"


def test_replicas_with_old_weights_are_named() -> None:
    assert replicas_behind({0: 7, 1: 6}, newest=7, most=2) == []
    (found,) = replicas_behind({0: 7, 1: 4, 2: 3}, newest=7, most=2)
    assert "replicas 1, 2 did not install the newest 2 weights versions" in found.text
    assert run_findings(rows(steps=5), {0: 0}, newest=4, staleness=2) != []
    assert run_findings(rows(steps=4), {0: 0}, newest=4, staleness=2) == [], "a resumed run trains stored steps again"
