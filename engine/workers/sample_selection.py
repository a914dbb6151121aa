"""Which responses of a train step, and which validation prompts, a run keeps as samples.

Used by `sample_keeper`. A pure function of the seed, the step and the responses' rewards, lengths and ends: a repeated
step keeps the same samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

WORST, BEST, RANDOM, LONGEST, TRUNCATED = "worst", "best", "random", "longest", "truncated"
REASONS = (WORST, BEST, RANDOM, LONGEST, TRUNCATED)
"""Why a response is selected, in the order in which the reasons choose."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the selection knows of a response."""

    reward: float | None
    tokens: int
    truncated: bool
    """Whether it was cut off, at the token budget or by the deadline policy."""


def select(seed: int, step: int, candidates: Sequence[Candidate], count: int) -> dict[int, tuple[str, ...]]:
    """At most `count` indices into `candidates`, in ascending order, each with its reasons.

    The reasons choose in turn, each the first of its ranking that is not selected yet, until `count` are. A response
    also has the reasons whose ranking it leads. Equal candidates are ranked at random, by the seed and the step.
    """
    rankings = _rankings(candidates, shuffled(seed, f"step {step}", len(candidates)))
    reasons: dict[int, set[str]] = {}
    turns = {reason: iter(ranking) for reason, ranking in rankings.items()}
    while turns and len(reasons) < count:
        for reason in list(turns):
            index = _next(turns[reason], reasons)
            if index is None:
                del turns[reason]
            elif len(reasons) < count:
                reasons[index] = {reason}
    for reason, ranking in rankings.items():
        if ranking and ranking[0] in reasons:
            reasons[ranking[0]].add(reason)
    return {index: tuple(reason for reason in REASONS if reason in reasons[index]) for index in sorted(reasons)}


def shuffled(seed: int, purpose: str, count: int) -> list[int]:
    """The numbers below `count` in a random order: a pure function of its arguments, the same in every Python."""
    random = Random(f"{seed} {purpose}")
    keys = [random.random() for _ in range(count)]  # unlike `shuffle`, Python promises these never to change
    return sorted(range(count), key=keys.__getitem__)


def _rankings(candidates: Sequence[Candidate], order: Sequence[int]) -> dict[str, list[int]]:
    """Indices for each reason, the most fitting first. Nothing is best or worst if all rewards are equal."""
    rewards = {index: reward for index in order if (reward := candidates[index].reward) is not None}
    differ = len(set(rewards.values())) > 1
    return {
        WORST: sorted(rewards, key=lambda index: rewards[index]) if differ else [],
        BEST: sorted(rewards, key=lambda index: -rewards[index]) if differ else [],
        RANDOM: list(order),
        LONGEST: sorted(order, key=lambda index: -candidates[index].tokens),
        TRUNCATED: [index for index in order if candidates[index].truncated],
    }


def _next(ranking: Iterator[int], taken: dict[int, set[str]]) -> int | None:
    return next((index for index in ranking if index not in taken), None)
