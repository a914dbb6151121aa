"""Confidence intervals of the figures of validations."""

from math import sqrt

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.metrics.intervals import estimates, share_interval
from engine.states.validation_figures import Figure


def test_a_share_stays_within_0_and_1_and_a_reward_has_no_bounds() -> None:
    figures = [Figure("math", metric, (0.0, 1.0, 1.0), 3) for metric in ("avg@1", "reward_mean")]
    share, reward = estimates(figures)
    assert (share.set, share.metric, share.prompts) == ("math", "avg@1", 3)
    assert share.value == reward.value == pytest.approx(2 / 3)
    assert share.low is not None and share.high is not None and 0 < share.low < share.high < 1
    assert reward.high == pytest.approx(2 / 3 + 1.959963984540054 / 3)


@pytest.mark.parametrize(("right", "prompts"), [(0, 30), (30, 30), (15, 31), (3, 101)])
def test_the_interval_of_single_responses_is_wilson_s(right: int, prompts: int) -> None:
    """With n - 1 instead of n between 0 and 1: the variance is estimated."""
    share, z = right / prompts, 1.959963984540054
    n = prompts if right in (0, prompts) else prompts - 1
    center, half = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    expected = [(center + sign * half) / (1 + z * z / n) for sign in (-1, 1)]
    assert share_interval([float(i < right) for i in range(prompts)], prompts) == pytest.approx((share, *expected))


@example([1.0, 0.9999999999999999], 1)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.integers(1, 8))
def test_an_interval_stays_within_0_and_1_around_its_share(values: list[float], samples: int) -> None:
    share, low, high = share_interval(values, len(values) * samples)
    if low is not None and high is not None:
        assert 0 <= low <= share <= high <= 1 and low < high
    else:
        assert len(values) == 1


def test_alike_responses_to_a_prompt_do_not_narrow_the_interval() -> None:
    few, alike = share_interval([0.0, 1.0] * 10, 20), share_interval([0.0, 1.0] * 10, 20 * 64)
    assert few == alike and share_interval([1.0] * 20, 20) == share_interval([1.0] * 20, 20 * 64)
    mixed = share_interval([0.4, 0.6] * 10, 20 * 64)
    assert mixed[2] - mixed[1] < few[2] - few[1]  # type: ignore[operator]
