"""What the responses of a validation set say: avg@n, pass@k, maj@k and the mean reward, with the value for each prompt.

The scheduler reads them when a validation ends, because the best checkpoint is kept by one of them. `metrics.intervals`
adds 95 % confidence intervals. Pure: the same responses give the same figures in every process, so a replay computes
those of the run. Every figure is a mean over prompts. A failed response counts as wrong, and has no reward.
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


FAILED = Response(0.0, NO_ANSWER, False)
"""What a failed response counts as in all figures but those of rewards."""


class Figure(NamedTuple):
    """A figure of a validation set."""

    set: str
    metric: str
    """`avg@4`, `pass@4`, `maj@4`, `reward_mean`, or `reward_NAME` of a part of the reward."""
    prompts: tuple[float, ...]
    """The value for each prompt, of rewards for each prompt with one; at least one."""
    responses: int
    """Number of responses to all prompts of the set, those that failed or were dropped included."""
    failed: int = 0
    """Number of responses that failed or were dropped."""
    ends: tuple[float, float] = (0.0, 1.0)
    """The smallest and the largest value of a response, or 0."""

    @property
    def value(self) -> float:
        return mean(self.prompts)

    def rating(self, mode: str) -> float:
        """The value that is compared with others; `mode`: the best is the max or the min. In a mean reward, a failed
        response has the worst known reward, or 0 if that is worse: its failure must not make the mean the best."""
        share = self.failed / self.responses if self.metric.startswith("reward_") else 0.0
        return self.value + share * (self.ends[mode == "min"] - self.value)


def mean(values: Sequence[float]) -> float:
    return fsum(value / len(values) for value in values)


def metric_names(sets: Iterable[ValidationSet]) -> list[str]:
    """The names of all figures: `accuracy` and `reward_mean` of all rows, then those of each set as `SET/METRIC`."""
    return ["accuracy", "reward_mean", *(f"{one.name}/{metric}" for one in sets for metric in _metrics(one))]


def figures(sets: Sequence[ValidationSet], responses: Mapping[int, Response]) -> tuple[Figure, ...]:
    """The figures of each set; none if no response was measured. `responses`: by row, in the order of
    `ValidationLimits.place`; rows that failed are missing. A figure of rewards that no response has is left out."""
    found, first = [], 0
    for one in sets if responses else ():
        prompts = []
        for prompt in range(one.prompts):
            start = first + prompt * one.samples
            prompts.append([responses.get(row) for row in range(start, start + one.samples)])
        first += one.prompts * one.samples
        found += _figures_of(one, prompts)
    return tuple(found)


def _metrics(one: ValidationSet) -> list[str]:
    votes = [f"maj@{k}" for k in one.k] if one.majority else []
    parts = [f"reward_{name}" for name in one.parts]
    return [f"avg@{one.samples}", *(f"pass@{k}" for k in one.k), *votes, "reward_mean", *parts]


def _figures_of(one: ValidationSet, prompts: Sequence[Sequence[Response | None]]) -> list[Figure]:
    """`prompts`: the responses to each prompt that was not dropped; None for those that failed."""
    all_of = [[FAILED if response is None else response for response in p] for p in prompts]
    all_of += [[FAILED] * one.samples] * one.dropped
    values: dict[str, list[float]] = {f"avg@{one.samples}": [fsum(map(_right, p)) / one.samples for p in all_of]}
    for k in one.k:
        values[f"pass@{k}"] = [pass_at(one.samples, int(fsum(map(_right, p))), k) for p in all_of]
        if one.majority:
            values[f"maj@{k}"] = [majority_at(p, k) for p in all_of]
    measured = [[response for response in p if response is not None] for p in prompts]
    rewards = {"reward_mean": [[response.reward for response in p] for p in measured]}
    for place, name in enumerate(one.parts):
        rewards[f"reward_{name}"] = [[r.parts[place] for r in p if place in r.parts] for p in measured]
    responses = len(all_of) * one.samples
    counts = responses, responses - sum(map(len, measured))
    found = [Figure(one.name, metric, tuple(each), *counts) for metric, each in values.items()]
    for metric, of_prompts in rewards.items():
        known = [each for each in of_prompts if each]
        if known:
            ends = min(0.0, *map(min, known)), max(0.0, *map(max, known))
            found.append(Figure(one.name, metric, tuple(map(mean, known)), *counts, ends))
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
