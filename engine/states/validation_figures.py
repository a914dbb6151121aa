"""What the responses of a validation set say: avg@n, pass@k, maj@k and the mean reward, with the value for each prompt.

The scheduler reads them when a validation ends, because the best checkpoint is kept by one of them. `metrics.intervals`
adds 95 % confidence intervals. Pure: the same responses give the same figures in every process, so a replay computes
those of the run. Every figure is a mean over prompts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, prod
from typing import NamedTuple

from engine.events import NO_ANSWER
from engine.states.limits import ValidationSet


class Response(NamedTuple):
    """A measured response: its reward, a number that stands for its answer (`NO_ANSWER`: it has none), whether it is
    right, and the values of reward parts by their places in `ValidationSet.parts`, for those that apply to it."""

    reward: float
    answer: int
    right: bool
    parts: Mapping[int, float] = {}


class Figure(NamedTuple):
    """A figure of a validation set."""

    set: str
    metric: str
    """`avg@4`, `pass@4`, `maj@4`, `reward_mean`, or `reward_NAME` of a part of the reward."""
    prompts: tuple[float, ...]
    """The value for each prompt with enough measured responses; at least one."""
    responses: int
    """Number of measured responses to all prompts of the set."""

    @property
    def value(self) -> float:
        return mean(self.prompts)


def mean(values: Sequence[float]) -> float:
    return fsum(value / len(values) for value in values)


def metric_names(sets: Iterable[ValidationSet]) -> list[str]:
    """The names of all figures: `accuracy` and `reward_mean` of all rows, then those of each set as `SET/METRIC`."""
    return ["accuracy", "reward_mean", *(f"{one.name}/{metric}" for one in sets for metric in _metrics(one))]


def figures(sets: Sequence[ValidationSet], responses: Mapping[int, Response]) -> tuple[Figure, ...]:
    """The figures of each set. `responses`: by row, in the order of `ValidationLimits.place`; rows that could not be
    measured are missing. A figure for which no prompt has enough responses is left out."""
    found, first = [], 0
    for one in sets:
        prompts = []
        for prompt in range(one.prompts):
            start = first + prompt * one.samples
            prompts.append([responses[row] for row in range(start, start + one.samples) if row in responses])
        first += one.prompts * one.samples
        found += _figures_of(one, [measured for measured in prompts if measured])
    return tuple(found)


def _metrics(one: ValidationSet) -> list[str]:
    votes = [f"maj@{k}" for k in one.k] if one.majority else []
    parts = [f"reward_{name}" for name in one.parts]
    return [f"avg@{one.samples}", *(f"pass@{k}" for k in one.k), *votes, "reward_mean", *parts]


def _figures_of(one: ValidationSet, prompts: Sequence[Sequence[Response]]) -> list[Figure]:
    values: dict[str, list[float]] = {f"avg@{one.samples}": [fsum(map(_right, p)) / len(p) for p in prompts]}
    for k in one.k:
        enough = [p for p in prompts if len(p) >= k]
        values[f"pass@{k}"] = [pass_at(len(p), int(fsum(map(_right, p))), k) for p in enough]
        if one.majority:
            values[f"maj@{k}"] = [majority_at(p, k) for p in enough]
    values["reward_mean"] = [mean([response.reward for response in p]) for p in prompts]
    for place, name in enumerate(one.parts):
        applies = [[response.parts[place] for response in p if place in response.parts] for p in prompts]
        values[f"reward_{name}"] = [mean(each) for each in applies if each]
    responses = sum(map(len, prompts))
    return [Figure(one.name, metric, tuple(each), responses) for metric, each in values.items() if each]


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
