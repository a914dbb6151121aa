"""Off-policy corrections: what is done to importance weights before they multiply a loss.

Called by `losses.py` with the log importance ratio of each token: proximal / behaviour for `decoupled_ppo`, current /
behaviour for `ppo_clip`. Ratios of 1 mean on-policy; they leave 1 as the weights move on (staleness) and because the
sampler and the trainer round differently. It must never pass gradients: a weight is a constant of the objective.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are held within ± this, so that exp stays finite; the loss has no gradient beyond it."""


class Weights(NamedTuple):
    """Importance weights of a micro-batch's tokens, without gradient."""

    used: Tensor
    """What multiplies the loss. [tokens]"""
    truncated: Tensor
    """True where the correction changed the ratio. [tokens]"""


CorrectionFunction: TypeAlias = Callable[[Tensor, float], Weights]
"""Log importance ratios [tokens] and the cap to weights."""


def no_correction(log_ratio: Tensor, cap: float) -> Weights:
    """The plain importance ratio: unbiased, and of unbounded variance."""
    ratio = log_ratio.detach().exp()
    return Weights(ratio, torch.zeros_like(ratio, dtype=torch.bool))


def token_tis(log_ratio: Tensor, cap: float) -> Weights:
    """Token-level truncated importance sampling: w = min(ratio, cap).

    Ionides, "Truncated Importance Sampling" (J. Comput. Graph. Stat. 2008); per action as in IMPALA's c and rho
    (arXiv 1802.01561 section 4); for a sampler that is not quite the trainer's policy, Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (2025). The bias is bounded by what is cut off, the variance
    by the cap.
    """
    ratio = log_ratio.detach().exp()
    return Weights(ratio.clamp(max=cap), ratio > cap)


def bounded_log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(numerator / denominator) of log-probs [tokens], within ± `MAX_LOG_RATIO`; NaN stays NaN."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def effective_sample_share(weights: float, squares: float, tokens: float) -> float:
    """Kish's effective sample size over the sample size: (Σ w)² / (n Σ w²), from 1/n to 1 where all weights are
    equal."""
    return weights * weights / (tokens * squares) if squares > 0 else 0.0


CORRECTIONS: dict[str, CorrectionFunction] = {"none": no_correction, "token_tis": token_tis}
"""Corrections by the name that `TrainerSettings.correction` takes."""
