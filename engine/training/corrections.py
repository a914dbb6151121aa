"""Off-policy corrections: what is done to importance weights before they multiply a loss.

Called by `losses.py`. One correction truncates weights, then any number of masks drop tokens or trajectories; all of
them read the same log importance ratio of each token, log ρ:

    old policy `proximal`:   ρ = proximal / behavior, the part that the clip around the proximal policy leaves out
    old policy `behavior`:  ρ = current / behavior, the ratio inside the loss itself

Ratios of 1 mean on-policy; they leave 1 as the weights move on (staleness) and because the sampler and the trainer
round differently. A mask takes a token's gradient away and leaves it in the denominator of the mean, as IcePop does:
the others weigh no more for it. It must never pass gradients: a weight is a constant of the objective.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.protocols import Grouping, ImportanceTerms
from engine.training.custom_functions import CustomFunction
from engine.training.custom_results import parts_of
from engine.training.kl import estimate
from engine.training.trainer_settings import Mask, TrainerSettings

MAX_LOG_RATIO = 20.0
"""Log ratios are held within ± this before exp, so that it stays finite; the loss has no gradient beyond it. Sums and
means over a trajectory are of the ratios as they are: they are bounded after the reduction."""


class Dropped(NamedTuple):
    """What one mask dropped, independent of the other masks."""

    measure: str
    tokens: Tensor
    """[tokens] bool"""
    trajectories: Tensor | None
    """Of a mask on whole trajectories. [trajectories] bool"""


class ImportanceWeights(NamedTuple):
    """Importance weights of a micro-batch's tokens, without gradient."""

    used: Tensor
    """What multiplies the loss; 0 where masked. [tokens]"""
    truncated: Tensor
    """True where the correction changed the weight, masks aside. [tokens]"""
    kept: Tensor | None = None
    """False where a mask dropped the token; None without masks. [tokens]"""
    dropped: tuple[Dropped, ...] = ()


CorrectionFunction: TypeAlias = Callable[[Tensor, Tensor, Grouping, float], ImportanceWeights]
"""Raw importance weights [tokens], log ρ [tokens], the trajectories and the cap to weights."""


def no_correction(raw: Tensor, log_ratio: Tensor, rows: Grouping, cap: float) -> ImportanceWeights:
    """The plain importance ratio: unbiased, and of unbounded variance."""
    return ImportanceWeights(raw, torch.zeros_like(raw, dtype=torch.bool))


def token_tis(raw: Tensor, log_ratio: Tensor, rows: Grouping, cap: float) -> ImportanceWeights:
    """Token-level truncated importance sampling: w = min(ratio, cap).

    Ionides, "Truncated Importance Sampling" (J. Comput. Graph. Stat. 2008); per action as in IMPALA's c and rho
    (arXiv 1802.01561 section 4); for a sampler that is not quite the trainer's policy, Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (2025). The bias is bounded by what is cut off, the variance
    by the cap.
    """
    return ImportanceWeights(raw.clamp(max=cap), raw > cap)


def sequence_tis(raw: Tensor, log_ratio: Tensor, rows: Grouping, cap: float) -> ImportanceWeights:
    """Sequence-level truncated importance sampling: w = min(Π ρ, cap) for every token of the trajectory.

    Liu, Li et al., "When Speed Kills Stability" (2025): unbiased for the whole trajectory but for the truncation, where
    a token's own weight neglects that its prefix was off-policy too; of a variance that grows with length.
    """
    ratio = rows.spread(bounded(rows.sums(log_ratio)).exp())
    return ImportanceWeights(ratio.clamp(max=cap), ratio > cap)


CORRECTIONS: dict[str, CorrectionFunction] = {
    "none": no_correction,
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
}
"""Corrections by the name that `TrainerSettings.correction` takes."""


def measured(name: str, log_ratio: Tensor, rows: Grouping) -> Tensor:
    """A mask's measure, of each token [tokens] or of each trajectory [trajectories]; ratios as their log.

    - `token_ratio`: ρ. Masked importance sampling, as IcePop does it on [low, high] (Ring-1T, arXiv 2510.18855).
    - `geometric_ratio`: (Π ρ)^(1/n), `product_ratio`: Π ρ, of a trajectory's n tokens: rejection of whole sequences
      (Liu, Li et al., "When Speed Kills Stability", 2025). The product leaves any range as n grows; bounds of the
      geometric mean are tight, 0.999 to 1.001 say.
    - `token_`, `mean_`, `sum_` with `k1`, `k2`, `k3`: estimates of KL(behavior ‖ ρ · behavior), of a token or over
      a trajectory (Schulman, "Approximating KL Divergence", 2020; on the mean of k1 DeepSeek-V3.2's off-policy
      sequence masking, arXiv 2512.02556, which there spares positive advantages).
    """
    level, _, statistic = name.partition("_")
    values = log_ratio if statistic == "ratio" else estimate(statistic, bounded_for(statistic, log_ratio))
    if level == "token":
        return values
    return rows.means(values) if level in ("mean", "geometric") else rows.sums(values)


def drop(mask: Mask, values: Tensor, rows: Grouping, advantages: Tensor) -> Dropped:
    """What lies outside the mask's [low, high]; also what is not a number. `values`: its measure, of each token or of
    each trajectory. A mask that is `negative_only` spares every token whose advantage is not negative."""
    low, high = (None if bound is None else _on_scale(mask, bound) for bound in (mask.low, mask.high))
    kept = ~values.isnan()
    if low is not None:
        kept &= values >= low
    if high is not None:
        kept &= values <= high
    tokens = rows.spread(~kept) if mask.of_sequences else ~kept
    if mask.negative_only:
        tokens &= advantages < 0
        kept = rows.sums(tokens.double()) == 0 if mask.of_sequences else kept
    return Dropped(mask.name, tokens, ~kept if mask.of_sequences else None)


def _on_scale(mask: Mask, bound: float) -> float:
    """The bound on what `measured` gives."""
    return math.log(bound) if mask.is_ratio else bound


def corrected(terms: ImportanceTerms, settings: TrainerSettings) -> ImportanceWeights:
    """The weights after the correction and the masks of the settings."""
    rows, log_ratio = terms.trajectories, terms.log_ratio
    custom = settings.custom_function("correction")
    if custom is None:
        weights = CORRECTIONS[settings.correction](terms.weights, log_ratio, rows, settings.correction_cap)
    else:
        weights = _custom_correction(custom, terms)
    if not settings.masks:
        return weights
    measures = settings.custom_measures()
    dropped = []
    for mask in settings.masks:
        measure = measures.get(mask.measure)
        values = measured(mask.measure, log_ratio, rows) if measure is None else _custom_measure(measure, terms)
        dropped.append(drop(mask, values, rows, terms.advantages))
    kept = ~torch.stack([each.tokens for each in dropped]).any(0)
    return ImportanceWeights(torch.where(kept, weights.used, 0.0), weights.truncated, kept, tuple(dropped))


def _custom_correction(custom: CustomFunction, terms: ImportanceTerms) -> ImportanceWeights:
    used = _custom_measure(custom, terms)
    return ImportanceWeights(used, used != terms.weights)


def _custom_measure(custom: CustomFunction, terms: ImportanceTerms) -> Tensor:
    """[tokens]. Raises: `ConfigError` for a result of the wrong form."""
    with torch.no_grad():
        return parts_of(custom, custom.result(terms), terms.weights)[0]


def bounded(log_ratio: Tensor) -> Tensor:
    """Within ± `MAX_LOG_RATIO`; NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_for(estimator: str, log_ratio: Tensor) -> Tensor:
    """A log ratio as `kl.estimate` takes it: k3 has an exp, the others may be reduced as they are."""
    return bounded(log_ratio) if estimator == "k3" else log_ratio


def effective_sample_share(weights: float, squares: float, tokens: float) -> float:
    """Kish's effective sample size over the sample size: (Σ w)² / (n Σ w²), from 1/n to 1 where all weights are
    equal."""
    return weights * weights / (tokens * squares) if squares > 0 else 0.0
