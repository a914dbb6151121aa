"""Policy losses per token, and the weights that make one number of them.

Called by `gradients.py` for each micro-batch. Everything is flat: [tokens] runs over the trainable tokens of all
trajectories of a micro-batch, prompts, padding and tool output left out. A loss must return per-token values and
never average them: the average is over the optimizer minibatch, which a micro-batch does not see.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.training.corrections import CORRECTIONS, Weights, bounded_log_ratio
from engine.training.settings import TrainerSettings


class TokenTerms(NamedTuple):
    """What a loss may read; each is [tokens]."""

    current: Tensor
    """Log-probs under the weights being trained; carries the gradient."""
    behaviour: Tensor
    """Log-probs under the distribution each token was drawn from."""
    proximal: Tensor
    """Log-probs under the weights before the train step; `current` without gradient where nothing else was computed."""
    advantages: Tensor


class TokenLosses(NamedTuple):
    """A loss before aggregation, with what its diagnostics need; each is [tokens], all but `losses` without
    gradient."""

    losses: Tensor
    log_ratio: Tensor
    """Log of the ratio that was clipped."""
    weights: Weights
    """Importance weights after the correction: of current / behaviour or of proximal / behaviour, as the loss uses
    them."""
    clipped_low: Tensor
    """True where the lower bound took the gradient away: ratio < 1 - clip_low with a negative advantage."""
    clipped_high: Tensor
    """True where the upper bound did: ratio > 1 + clip_high with a positive advantage."""


LossFunction: TypeAlias = Callable[[TokenTerms, TrainerSettings], TokenLosses]


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [tokens].

    PPO, arXiv 1707.06347 eq. 7, with the bounds decoupled as in DAPO's clip-higher, arXiv 2503.14476 section 3.1.
    """
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def ppo_clip(terms: TokenTerms, settings: TrainerSettings) -> TokenLosses:
    """PPO clip whose old policy is the behaviour policy: r = current / behaviour.

    With `token_tis` the factor r of the gradient r A ∇log π becomes min(r, C): it bounds the one side that the clip
    leaves open, r far above 1 with a negative advantage. (TIS over a recomputed old policy is `decoupled_ppo` with
    `token_tis`.)
    """
    log_ratio = bounded_log_ratio(terms.current, terms.behaviour)
    weights = CORRECTIONS[settings.correction](log_ratio, settings.correction_cap)
    surrogate = clipped_surrogate(log_ratio, terms.advantages, settings.clip_low, settings.clip_high)
    losses = surrogate * (weights.used / log_ratio.detach().exp())
    return _with_clip_marks(losses, log_ratio, weights, terms.advantages, settings)


def decoupled_ppo(terms: TokenTerms, settings: TrainerSettings) -> TokenLosses:
    """PPO whose clip centre is not the policy that sampled: w · clip-loss(current / proximal), w = proximal /
    behaviour.

    Hilton et al., "Batch size-invariance for policy optimization", arXiv 2110.00641; in asynchronous training of
    language models AReaL, arXiv 2505.24298. The clip range bounds this step's move alone, however stale the
    trajectories are; w carries the rest, truncated by the correction.
    """
    log_ratio = bounded_log_ratio(terms.current, terms.proximal)
    importance = bounded_log_ratio(terms.proximal, terms.behaviour)
    weights = CORRECTIONS[settings.correction](importance, settings.correction_cap)
    surrogate = clipped_surrogate(log_ratio, terms.advantages, settings.clip_low, settings.clip_high)
    return _with_clip_marks(surrogate * weights.used, log_ratio, weights, terms.advantages, settings)


def _with_clip_marks(
    losses: Tensor, log_ratio: Tensor, weights: Weights, advantages: Tensor, settings: TrainerSettings
) -> TokenLosses:
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    low = (ratio < 1 - settings.clip_low) & (advantages < 0)
    high = (ratio > 1 + settings.clip_high) & (advantages > 0)
    return TokenLosses(losses, log_ratio, weights, low, high)


def token_weights(lengths: Sequence[int], aggregation: str, constant_tokens: int) -> list[float]:
    """The weight of each token of each trajectory, so that the minibatch's loss is Σ weight · token loss.
    [trajectories]

    `lengths` are trainable tokens per trajectory of one optimizer minibatch, each at least 1. A rollout of several
    segments counts as one trajectory.

    - `token_mean`, 1 / Σ lengths: every token counts the same (DAPO, arXiv 2503.14476 section 3.3).
    - `sequence_mean`, 1 / (n · length): every trajectory counts the same (GRPO, arXiv 2402.03300 eq. 3).
    - `constant`, 1 / (n · constant_tokens): no length bias either way (Dr.GRPO, arXiv 2503.20783 section 3.2).
    """
    count = len(lengths)
    if aggregation == "sequence_mean":
        return [1.0 / (count * length) for length in lengths]
    total = count * constant_tokens if aggregation == "constant" else sum(lengths)
    return [1.0 / total] * count


LOSSES: dict[str, LossFunction] = {"ppo_clip": ppo_clip, "decoupled_ppo": decoupled_ppo}
"""Losses by the name that `TrainerSettings.loss` takes."""
