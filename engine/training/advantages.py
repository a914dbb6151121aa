"""Advantages of a batch: how much better each trajectory did than its siblings on the same prompt.

Called by `shaping.set_advantages` once a batch, before it is cut into minibatches. To add an estimator, write a
function of the whole batch's rewards and enter it in `ADVANTAGES`. It must never look at anything but rewards: what is
done token by token (KL, the normalisation of REINFORCE++) is `shaping.py`'s affair.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

AdvantageFunction: TypeAlias = Callable[[Sequence[Sequence[float]]], list[list[float]]]
"""Rewards [groups][rollouts] to advantages of the same shape; every token of a rollout gets its rollout's."""

EQUAL_REWARDS = 1e-6
"""Rewards that spread no further than this are equal: their group teaches nothing, and dividing by a spread of rounding
errors would make noise of it."""

STD_EPS = 1e-6
"""Added to the standard deviation before dividing."""


def grpo(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Group Relative Policy Optimization, arXiv 2402.03300 section 4.1.2: A_i = (r_i - mean(r)) / (std(r) + eps).

    `std` is the sample standard deviation (divisor n - 1), which the paper leaves open and published trainers use.
    """
    advantages = []
    for group in rewards:
        centred = _centred(group)
        spread = math.sqrt(math.fsum(a * a for a in centred) / max(1, len(group) - 1))
        advantages.append([a / (spread + STD_EPS) for a in centred])
    return advantages


def dr_grpo(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """GRPO done right, arXiv 2503.20783 section 3.2: A_i = r_i - mean(r).

    Without the division, prompts that are nearly always or nearly never solved are not blown up. The paper pairs it
    with the `constant` aggregation.
    """
    return [_centred(group) for group in rewards]


def rloo(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """REINFORCE leave-one-out, arXiv 2402.14740 section 2.2 (Kool et al., 2019): A_i = r_i - mean of the others.

    That is n / (n - 1) of `dr_grpo`: a baseline that the trajectory itself has no part in, so without bias.
    """
    return [[a * len(group) / max(1, len(group) - 1) for a in _centred(group)] for group in rewards]


def reinforce_pp(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """REINFORCE++, arXiv 2501.03262: A_i = r_i, without any baseline of the prompt's own.

    `shaping.set_advantages` then takes off each token's KL to go and normalises over the tokens of the whole batch.
    """
    return [[r if math.isfinite(r) else math.nan for r in group] for group in rewards]


def reinforce_pp_baseline(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """REINFORCE++ with baseline, arXiv 2501.03262: A_i = r_i - mean(r), then normalised over the tokens of the batch.

    The paper has its KL as a loss, by k2 (`kl_loss`).
    """
    return [_centred(group) for group in rewards]


def _centred(group: Sequence[float]) -> list[float]:
    """Rewards less their mean: exact zeros where they are equal, so also for a trajectory without siblings; NaN where a
    reward is not finite, so that the train step sees it and skips the minibatch."""
    if not all(math.isfinite(reward) for reward in group):
        return [math.nan] * len(group)
    if not group or max(group) - min(group) <= EQUAL_REWARDS:
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    return [reward - mean for reward in group]


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
"""Estimators by the name that `TrainerSettings.advantage` takes."""
