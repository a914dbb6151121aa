"""What the responses of a validation set say: avg@n, pass@k, maj@k and the mean reward, with 95 % confidence intervals.

Called when a validation ends. Pure: the same responses give the same figures in every process, so a replay computes
those of the run.

Every figure is a mean over prompts. Responses to one prompt are alike, so prompts are what is counted as independent
(Miller, Adding Error Bars to Evals, arXiv 2411.00640). The interval of a share is Wilson's (1927) with the effective
sample size p·(1 - p) / SE², SE² being the variance between prompts over their number (Korn and Graubard, 1998). Unlike
mean ± 1.96·SE, it stays within 0 and 1 and has a width where every prompt is right. The interval of a reward, which has
no bounds, is mean ± 1.96·SE.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, prod, sqrt
from typing import NamedTuple

from engine.events import NO_ANSWER
from engine.states.limits import ValidationSet

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


class Response(NamedTuple):
    """A measured response: its reward, a number that stands for its answer (`NO_ANSWER`: it has none), whether it is
    right, and the values of reward parts by their places in `ValidationSet.parts`, for those that apply to it."""

    reward: float
    answer: int
    right: bool
    parts: Mapping[int, float] = {}


class Estimate(NamedTuple):
    """A figure of a validation set with its 95 % confidence interval; None: one prompt says nothing of its width."""

    set: str
    metric: str
    """`avg@4`, `pass@4`, `maj@4`, `reward_mean`, or `reward_NAME` of a part of the reward."""
    value: float
    low: float | None
    high: float | None
    prompts: int
    """Number of prompts with enough measured responses."""


def metric_names(sets: Iterable[ValidationSet]) -> list[str]:
    """The names of all figures: `accuracy` and `reward_mean` of all rows, then those of each set as `SET/METRIC`."""
    return ["accuracy", "reward_mean", *(f"{one.name}/{metric}" for one in sets for metric in _metrics(one))]


def estimates(sets: Sequence[ValidationSet], responses: Mapping[int, Response]) -> tuple[Estimate, ...]:
    """The figures of each set. `responses`: by row, in the order of `ValidationLimits.place`; rows that could not be
    measured are missing. A figure for which no prompt has enough responses is left out."""
    found, first = [], 0
    for one in sets:
        prompts = []
        for prompt in range(one.prompts):
            start = first + prompt * one.samples
            prompts.append([responses[row] for row in range(start, start + one.samples) if row in responses])
        first += one.prompts * one.samples
        found += _estimates_of(one, [measured for measured in prompts if measured])
    return tuple(found)


def _metrics(one: ValidationSet) -> list[str]:
    votes = [f"maj@{k}" for k in one.k] if one.majority else []
    parts = [f"reward_{name}" for name in one.parts]
    return [f"avg@{one.samples}", *(f"pass@{k}" for k in one.k), *votes, "reward_mean", *parts]


def _estimates_of(one: ValidationSet, prompts: Sequence[Sequence[Response]]) -> list[Estimate]:
    total = sum(map(len, prompts))
    values: dict[str, list[float]] = {f"avg@{one.samples}": [fsum(map(_right, p)) / len(p) for p in prompts]}
    for k in one.k:
        enough = [p for p in prompts if len(p) >= k]
        values[f"pass@{k}"] = [pass_at(len(p), int(fsum(map(_right, p))), k) for p in enough]
        if one.majority:
            values[f"maj@{k}"] = [majority_at(p, k) for p in enough]
    found = [Estimate(one.name, name, *share_interval(each, total), len(each)) for name, each in values.items() if each]
    rewards = {"reward_mean": [[response.reward for response in p] for p in prompts]}
    for place, name in enumerate(one.parts):
        applies = [[response.parts[place] for response in p if place in response.parts] for p in prompts]
        rewards[f"reward_{name}"] = [values for values in applies if values]
    for name, of_prompts in rewards.items():
        if of_prompts:
            means = [fsum(value / len(each) for value in each) for each in of_prompts]
            found.append(Estimate(one.name, name, *mean_interval(means), len(means)))
    return found


def _right(response: Response) -> bool:
    return response.right


# -- figures of one prompt ---------------------------------------------------------------------------------------------


def pass_at(responses: int, right: int, k: int) -> float:
    """The probability that at least one of k of these responses, drawn without replacement, is right: the unbiased
    estimator 1 - C(n - c, k) / C(n, k) of Chen et al. (2021, arXiv 2107.03374). `k` is at most `responses`."""
    if responses - right < k:
        return 1.0
    return 1.0 - prod(1.0 - k / size for size in range(responses - right + 1, responses + 1))


def majority_at(responses: Sequence[Response], k: int) -> float:
    """How often the most frequent answer of k responses is right (self-consistency, Wang et al. 2022, arXiv
    2203.11171): the mean over the disjoint blocks of k responses, which is unbiased. What remains is left out.

    Of equally frequent answers the one that appears first wins. Responses without an answer do not vote; a block
    without any answer is wrong."""
    blocks = [responses[first : first + k] for first in range(0, len(responses) - k + 1, k)]
    return fsum(_majority_is_right(block) for block in blocks) / len(blocks)


def _majority_is_right(block: Sequence[Response]) -> bool:
    votes = Counter(response.answer for response in block if response.answer != NO_ANSWER)
    if not votes:
        return False
    winner = max(votes, key=votes.__getitem__)  # of equal ones the first, in the order of appearance
    return next(_right(response) for response in block if response.answer == winner)


# -- means over prompts ------------------------------------------------------------------------------------------------


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of values without bounds."""
    mean, error = _mean_and_error(values)
    return (mean, None, None) if error is None else (mean, mean - Z * error, mean + Z * error)


def share_interval(values: Sequence[float], responses: int) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of values from 0 to 1 that `responses` responses gave."""
    mean, error = _mean_and_error(values)
    if error is None and 0.0 < mean < 1.0:
        return mean, None, None
    if not error:  # no two prompts differ: at 0 and 1 each prompt counts once, in between each response
        size = float(len(values) if mean in (0.0, 1.0) else max(responses, len(values)))
    else:
        size = min(mean * (1.0 - mean) / error**2, float(max(responses, len(values))))
    spread = Z * Z / size
    center = (mean + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * sqrt(max(0.0, mean * (1.0 - mean) / size + spread / (4 * size)))
    return mean, min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None for a single value."""
    count = len(values)
    mean = fsum(value / count for value in values)
    if count < 2:
        return mean, None
    return mean, sqrt(fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
