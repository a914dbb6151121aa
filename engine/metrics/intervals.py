"""95 % confidence intervals of the figures of a validation.

`collector` calls it when a validation ends. Responses to one prompt are alike, so prompts are what is counted as
independent (Miller, Adding Error Bars to Evals, arXiv 2411.00640). The interval of a share is Wilson's (1927) with the
effective sample size p·(1 - p) / SE², SE² being the variance between prompts over their number (Korn and Graubard,
1998). Unlike mean ± 1.96·SE, it stays within 0 and 1 and has a width where every prompt is right. The interval of a
reward, which has no bounds, is mean ± 1.96·SE.
"""

from collections.abc import Iterable, Sequence
from math import fsum, sqrt
from typing import NamedTuple

from engine.states.validation_figures import Figure, mean

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


class Estimate(NamedTuple):
    """A figure of a validation set with its 95 % confidence interval; None: one prompt says nothing of its width."""

    set: str
    metric: str
    """See `Figure.metric`."""
    value: float
    low: float | None
    high: float | None
    prompts: int
    """Number of prompts with a value."""
    failed_share: float
    """Share of the responses that failed or were dropped. They count as wrong, and have no reward."""


def estimates(figures: Iterable[Figure]) -> tuple[Estimate, ...]:
    """The figures with their intervals."""
    return tuple(
        Estimate(one.set, one.metric, *_interval(one), len(one.prompts), one.failed / one.responses) for one in figures
    )


def _interval(one: Figure) -> tuple[float, float | None, float | None]:
    """(value, low, high). Rewards have no bounds, all other figures are shares."""
    if one.metric.startswith("reward_"):
        return mean_interval(one.prompts)
    return share_interval(one.prompts, one.responses)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of values without bounds."""
    middle = mean(values)
    error = _standard_error(values, middle)
    return (middle, None, None) if error is None else (middle, middle - Z * error, middle + Z * error)


def share_interval(values: Sequence[float], responses: int) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of values from 0 to 1 that `responses` responses gave."""
    share = mean(values)
    error = _standard_error(values, share)
    if error is None and 0.0 < share < 1.0:
        return share, None, None
    if not error or share in (
        0.0,
        1.0,
    ):  # no two prompts differ: at 0 and 1 each prompt counts once, in between each response
        size = float(len(values) if share in (0.0, 1.0) else max(responses, len(values)))
    else:
        size = min(share * (1.0 - share) / error**2, float(max(responses, len(values))))
    spread = Z * Z / size
    center = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * sqrt(max(0.0, share * (1.0 - share) / size + spread / (4 * size)))
    return share, min(share, max(0.0, center - half)), max(share, min(1.0, center + half))


def _standard_error(values: Sequence[float], center: float) -> float | None:
    """The standard error of a mean; None for a single value."""
    count = len(values)
    return None if count < 2 else sqrt(fsum((value - center) ** 2 for value in values) / (count - 1) / count)
