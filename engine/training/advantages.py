"""From rewards to advantages: length penalty, KL in the reward, baseline, normalisation over the batch.

Called by `model_trainer.ModelTrainer` once a batch, before it is cut into minibatches. The unit is the rollout: its
segments share one reward, one length and one advantage. It must never touch what metrics call the reward: shaping is
for the gradient alone.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import TypeAlias

import torch
from torch import Tensor

from engine.protocols import AdvantageTerms, Grouping
from engine.training.batch import Sample, by_rollout
from engine.training.custom_functions import CustomFunction
from engine.training.custom_results import parts_of
from engine.training.kl import estimate
from engine.training.trainer_settings import TrainerSettings

# -- baselines ---------------------------------------------------------------------------------------------------------


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

    `set_advantages` then takes off each token's KL to go and normalises over the tokens of the whole batch.
    """
    return [[r if math.isfinite(r) else math.nan for r in group] for group in rewards]


def distillation(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """On-policy distillation, arXiv 2306.13649 with the reverse KL: rewards are not read.

    `set_advantages` gives token t the advantage log teacher(t) - log behavior(t), minus its term of KL(behavior ‖
    teacher), so that the gradient of the loss reduces that KL on the policy's own responses.
    """
    return [[0.0 for _ in group] for group in rewards]


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
    "reinforce_pp_baseline": dr_grpo,
    "distillation": distillation,
}
"""Estimators by the name that `TrainerSettings.advantage` takes.

REINFORCE++ with baseline, arXiv 2501.03262, normalises A_i = r_i - mean(r) over the tokens of the batch
(`set_advantages`). The paper has its KL as a loss, by k2 (`kl_loss`).
"""


# -- rewards -----------------------------------------------------------------------------------------------------------


Rollout = list[Sample]


def set_advantages(groups: Sequence[Sequence[Sample]], settings: TrainerSettings) -> dict[str, float]:
    """Give every sample its rollout's advantage; with the KL of each token in the reward, every token its own. Returns
    what the user's function measures: `advantage_*`.

    Reads `reference` of each sample where `kl_reward_coef` is set. A rollout whose reward is not finite gets NaN.
    Raises: `ConfigError` if the user's function returns something of the wrong form.
    """
    rollouts = [by_rollout(group) for group in groups]
    rewards = [[shaped_reward(rollout, settings) for rollout in group] for group in rollouts]
    steps = [centered_steps([_steps_of(rollout) for rollout in group], settings.advantage) for group in rollouts]
    custom, metrics = settings.custom_function("advantage"), dict[str, float]()
    if custom is not None:
        advantages, metrics = _custom_advantages(custom, rollouts, rewards, settings)
    else:
        advantages = ADVANTAGES[settings.advantage](rewards)
    if settings.kl_reward_coef > 0 and not settings.kl_reward_per_token and custom is None:
        advantages = [
            [outcome + kl for outcome, kl in zip(*each, strict=True)]
            for each in zip(advantages, kl_advantages(rollouts, settings), strict=True)
        ]
    for group, values in zip(rollouts, advantages, strict=True):
        for rollout, value in zip(group, values, strict=True):
            for sample in rollout:
                sample.advantage = value
    everything = [rollout for group in rollouts for rollout in group]
    if any(values for group in steps for values in group) and not settings.distills:
        for rollout, values in zip(everything, (values for group in steps for values in group), strict=True):
            _add_steps_to_go(rollout, values)
    if settings.kl_reward_coef > 0 and settings.kl_reward_per_token:
        for rollout in everything:
            _subtract_kl_to_go(rollout, settings)
    if settings.distills:
        for sample in (sample for rollout in everything for sample in rollout if sample.tokens):
            assert sample.reference is not None  # the teacher has scored it
            sample.token_advantages = sample.reference - sample.behavior
            sample.advantage = float(sample.token_advantages.mean())
    if settings.normalises_over_batch:
        _normalise([sample for rollout in everything for sample in rollout])
    return metrics


def _custom_advantages(
    custom: CustomFunction,
    groups: Sequence[Sequence[Rollout]],
    rewards: Sequence[Sequence[float]],
    settings: TrainerSettings,
) -> tuple[list[list[float]], dict[str, float]]:
    """The user's advantages [groups][rollouts] of R - β Σ KL, exactly 0 where they are so up to rounding; and the means
    of what the function measures."""
    if settings.kl_reward_coef > 0:
        penalties = kl_penalties(groups, settings)
        rewards = [[sum(both) for both in zip(*each, strict=True)] for each in zip(rewards, penalties, strict=True)]
    rollouts = [rollout for group in groups for rollout in group]
    counts = torch.tensor([len(group) for group in groups])
    known = torch.tensor([reward for group in rewards for reward in group], dtype=torch.float64)
    terms = AdvantageTerms(
        rewards=torch.where(known.isfinite(), known, math.nan),
        groups=Grouping(torch.arange(len(groups)).repeat_interleave(counts), len(groups)),
        tokens=torch.tensor([sum(sample.tokens for sample in rollout) for rollout in rollouts]),
        response_tokens=torch.tensor([sum(sample.response_tokens for sample in rollout) for rollout in rollouts]),
    )
    with torch.no_grad():
        values, metrics = parts_of(custom, custom.result(terms), terms.rewards)
    values = torch.where(values.abs() <= EQUAL_REWARDS, 0.0, values)
    split = [part.tolist() for part in values.split(counts.tolist())] if rollouts else [[] for _ in groups]
    return split, {f"advantage_{name}": float(metric.double().mean()) for name, metric in metrics.items() if rollouts}


def shaped_reward(rollout: Rollout, settings: TrainerSettings) -> float:
    """The reward of the outcome, less the length penalty."""
    reward = rollout[0].reward - math.fsum(_steps_of(rollout))
    if settings.overlong_cache_tokens:
        reward -= settings.overlong_penalty * overlong_share(
            sum(sample.response_tokens for sample in rollout), settings
        )
    return reward


def kl_advantages(groups: Sequence[Sequence[Rollout]], settings: TrainerSettings) -> list[list[float]]:
    """-β Σ KL of each whole trajectory, less the baseline of the outcomes' estimator. [groups][rollouts]

    `grpo` divides the outcomes by their spread, but not this: GRPO's objective weighs β KL against advantages that are
    divided (arXiv 2402.03300 eq. 3). Divided by the spread of the sum, the noise of the KL would be as large as an
    outcome wherever outcomes are equal, for any β. For the other estimators, which are linear, this and the
    advantages of the outcomes add up to those of R - β Σ KL.
    """
    return (dr_grpo if settings.advantage == "grpo" else ADVANTAGES[settings.advantage])(kl_penalties(groups, settings))


def kl_penalties(groups: Sequence[Sequence[Rollout]], settings: TrainerSettings) -> list[list[float]]:
    """-β Σ KL of each whole trajectory. [groups][rollouts]"""
    return [
        [
            -settings.kl_reward_coef * sum(float(token_kl(sample, settings).sum()) for sample in rollout)
            for rollout in group
        ]
        for group in groups
    ]


def centered_steps(steps: Sequence[Sequence[float]], advantage: str) -> list[list[float]]:
    """Rewards of single tokens [rollouts][steps] less a baseline of all such rewards of the group.

    GRPO with process supervision, arXiv 2402.03300 section 4.1.3: r̃ = (r - mean(R)) / (std(R) + eps) over all of the
    group. `rloo`: less the mean over the other rollouts (PRIME, arXiv 2502.01456 eq. 5, with its average over
    responses). `reinforce_pp`: as they are (arXiv 2501.03262). The others: r - mean(R).
    """
    known = [value for values in steps for value in values]
    if not known or advantage == "reinforce_pp":
        return [list(values) for values in steps]
    if not all(map(math.isfinite, known)):
        return [[math.nan] * len(values) for values in steps]
    total, count = math.fsum(known), len(known)
    centered = []
    for values in steps:
        others = count - len(values)
        if advantage == "rloo" and others:
            mean = (total - math.fsum(values)) / others
        else:
            mean = total / count
        centered.append([value - mean for value in values])
    if max(known) - min(known) <= EQUAL_REWARDS:
        return [[0.0] * len(values) for values in steps]
    if advantage != "grpo":
        return centered
    spread = math.sqrt(math.fsum(value * value for values in centered for value in values) / max(1, count - 1))
    return [[value / (spread + STD_EPS) for value in values] for values in centered]


def _steps_of(rollout: Rollout) -> list[float]:
    return [step.reward for sample in rollout for step in sample.steps]


def _add_steps_to_go(rollout: Rollout, values: Sequence[float]) -> None:
    """A_t = A + Σ r̃ of the rollout's rewards that belong to token t or to later ones, undiscounted: arXiv 2402.03300
    section 4.1.3. `values`: r̃ in the order of the rollout's steps."""
    left = list(values)
    to_come = 0.0
    for sample in reversed(rollout):
        own = [left.pop() for _ in sample.steps][::-1]
        if sample.tokens:
            earned = torch.zeros(sample.response_tokens + 1, dtype=torch.float64)
            for step, value in zip(sample.steps, own, strict=True):
                earned[step.position] += value
            to_go = earned.flip(0).cumsum(0).flip(0)
            places = torch.zeros(sample.tokens, dtype=torch.int64) if sample.places is None else sample.places
            sample.token_advantages = (sample.advantage + to_go[places] + to_come).float()
        to_come += math.fsum(own)
    for sample in rollout:
        if sample.token_advantages is not None:
            sample.advantage = float(sample.token_advantages.mean())


def overlong_share(tokens: int, settings: TrainerSettings) -> float:
    """How much of the length penalty a response of so many tokens gets, those of tools included: from 0 to 1.

    DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13: 0 up to L_max - L_cache, then linear, 1 from L_max on.
    """
    over = tokens - (settings.overlong_max_tokens - settings.overlong_cache_tokens)
    return min(1.0, max(0.0, over / settings.overlong_cache_tokens))


def token_kl(sample: Sample, settings: TrainerSettings) -> Tensor:
    """KL(behavior ‖ reference) estimated at each token: the policy that acted is the one whose reward it is. The sum
    of k1 over a trajectory is log(behavior / reference) of it, RLOO's term (arXiv 2402.14740 eq. 3).
    [tokens] float64"""
    assert sample.reference is not None  # the trainer has scored it
    return estimate(settings.kl_reward, sample.reference.double() - sample.behavior.double())


def _subtract_kl_to_go(rollout: Rollout, settings: TrainerSettings) -> None:
    """A_t = A - β Σ_{i >= t} KL_i, over all segments of the rollout: REINFORCE++, arXiv 2501.03262, whose reward of a
    token is its KL penalty, plus the outcome at the last one; the return is undiscounted."""
    to_come = 0.0
    for sample in reversed(rollout):
        if not sample.tokens:
            continue
        to_go = token_kl(sample, settings).flip(0).cumsum(0).flip(0) + to_come
        to_come = float(to_go[0])
        own = sample.advantage if sample.token_advantages is None else sample.token_advantages
        sample.token_advantages = (own - settings.kl_reward_coef * to_go).float()
        sample.advantage = float(sample.token_advantages.mean())


def _normalise(samples: Sequence[Sample]) -> None:
    """(A - mean) / (std + eps) over all tokens of the batch whose advantage is finite; exact zeros where all are equal.

    REINFORCE++, arXiv 2501.03262: over the global batch, so that the divisor hardly depends on any one advantage, as a
    group's own does. `std` has the divisor n - 1.
    """
    values, counts = [], []
    samples = [sample for sample in samples if sample.tokens]
    for sample in samples:
        own = sample.token_advantages
        values.append(torch.tensor([sample.advantage]).double() if own is None else own.double())
        counts.append(torch.full((len(values[-1]),), sample.tokens if own is None else 1))
    if not values:
        return
    flat, weights = torch.cat(values), torch.cat(counts).double()
    finite = flat.isfinite()
    known, weights = flat[finite], weights[finite]
    if not len(known):
        return
    total = float(weights.sum())
    mean = float((known * weights).sum()) / total
    equal = float(known.max() - known.min()) <= EQUAL_REWARDS
    std = math.sqrt(float(((known - mean).square() * weights).sum()) / max(1.0, total - 1))
    for sample, value in zip(samples, values, strict=True):
        normal = (value - mean) * (0.0 if equal else 1.0 / (std + STD_EPS))
        if sample.token_advantages is not None:
            sample.token_advantages = normal.float()
        sample.advantage = float(normal.mean())


def shaping_metrics(groups: Sequence[Sequence[Sample]], settings: TrainerSettings) -> dict[str, float]:
    """Over rollouts: spread and greatest size of advantages (means over tokens where those differ); what the length
    penalty took off and how many it met; the mean KL, per token, that was taken off."""
    rollouts = [rollout for group in groups for rollout in by_rollout(group)]
    advantages = [rollout[0].advantage for rollout in rollouts if math.isfinite(rollout[0].advantage)]
    metrics = {
        "advantage_std": pstdev(advantages) if advantages else 0.0,
        "advantage_abs_max": max(map(abs, advantages), default=0.0),
    }
    if settings.overlong_cache_tokens and rollouts:
        shares = [overlong_share(sum(s.response_tokens for s in rollout), settings) for rollout in rollouts]
        metrics["overlong_share"] = fmean(share > 0 for share in shares)
        metrics["overlong_penalty_mean"] = settings.overlong_penalty * fmean(shares)
    if settings.kl_reward_coef > 0 and rollouts:
        samples = [sample for rollout in rollouts for sample in rollout]
        taken = sum(float(token_kl(sample, settings).sum()) for sample in samples)
        metrics["kl_reward_mean"] = taken / max(1, sum(sample.tokens for sample in samples))
    return metrics
