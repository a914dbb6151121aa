"""The checks of a run's health: each finds what it is for, and nothing in a run that learns."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.metrics.health import CHECKS, findings, replicas_behind

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
}


def test_a_sound_run_has_no_finding() -> None:
    assert findings(rows()) == []
    assert findings(rows(CASES["truncated"], steps=4)) == [], "too few steps"
    bare = [{"step": step, "groups": 4, "loss": None} for step in range(20)]
    assert findings(bare) == [], "a trainer of one's own reports other figures"


@pytest.mark.parametrize("check", CHECKS)
def test_each_health_check_finds_only_its_own_failure(check: str) -> None:
    (found,) = findings(rows(CASES[check], steps=32 if check == "unused_source" else 20))
    assert found.check == check
    recovered = [*rows(CASES[check], steps=40), *rows(steps=40)]
    assert findings(recovered) == []


def test_equal_rewards_of_all_responses_are_flat() -> None:
    equal = findings(rows(lambda step: {"reward_histograms": {"reward": [[0.5, 0.5, 16]]}}))
    assert [one.check for one in equal] == ["flat_reward"]
    assert findings(rows(lambda step: {"reward_histograms": {"reward": [[0.4, 0.5, 16]]}})) == []


def test_a_sentence_stays_the_same_while_the_cause_does() -> None:
    for check, change in CASES.items():
        texts = {findings(rows(change, steps))[0].text for steps in (33, 34, 35)}
        assert len(texts) == 1, check


def test_a_log_prob_gap_that_grows_is_found_before_it_is_large() -> None:
    grows = findings(rows(lambda step: {"logprob_gap_mean_fresh": 0.01 * (1 + step)}))
    assert [one.check for one in grows] == ["logprob_gap"] and "3 times as much" in grows[0].text
    assert findings(rows(lambda step: {"logprob_gap_mean_fresh": 0.001 * (1 + step)})) == [], "it is still tiny"
    assert findings(rows(lambda step: {"logprob_gap_mean_fresh": 0.2})) == [], "it does not grow"


def test_replicas_with_old_weights_are_named() -> None:
    assert replicas_behind({0: 7, 1: 6}, newest=7, most=2) == []
    (found,) = replicas_behind({0: 7, 1: 4, 2: 3}, newest=7, most=2)
    assert "replicas 1, 2 did not install the newest 2 weights versions" in found.text
