"""Policy losses per token, and the weights that make one number of them.

Called by `gradients.py` for each micro-batch. Everything is flat: [tokens] runs over the trainable tokens of all
trajectories of a micro-batch, prompts, padding and tool output left out. A loss must return per-token values and
never average them: the average is over the optimizer minibatch, which a micro-batch does not see.

A loss here is a surrogate in the ratio r = current / old. `policy_loss` makes the whole of it: it chooses the old
policy, weighs the surrogate by the corrected importance weights, drops what is masked and adds the KL term.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.protocols import Grouping, ImportanceTerms, LossTerms
from engine.training.corrections import ImportanceWeights, bounded, corrected
from engine.training.custom_functions import CustomFunction
from engine.training.custom_results import parts_of
from engine.training.kl import kl_losses
from engine.training.trainer_settings import TrainerSettings


class TokenTerms(NamedTuple):
    """What a loss may read; each tensor is [tokens]."""

    current: Tensor
    """Log-probs under the weights being trained; carries the gradient."""
    behavior: Tensor
    """Log-probs under the distribution each token was drawn from."""
    proximal: Tensor
    """Log-probs under the weights before the train step; `current` without gradient where nothing else was computed."""
    advantages: Tensor
    rows: Grouping
    """Which trajectory each token is of."""
    reference: Tensor | None = None
    """Log-probs under the reference policy, where a KL term reads them."""
    staleness: Tensor | None = None
    """Index of each token's staleness bucket, for the diagnostics. int64"""
    causes: Tensor | None = None
    """Index of each token's cause in `batch.CAUSES`, for the diagnostics; None: all are fresh. int64"""
    entropy: Tensor | None = None
    """Entropy of each token's distribution in nats, where the objective reads it; carries the gradient."""
    sound: Tensor | None = None
    """False for the tokens of a trajectory that is left out: see `without_unsound`. bool; None: all are sound."""


class Surrogate(NamedTuple):
    """A loss before importance weights; each is [tokens], all but `losses` without gradient."""

    losses: Tensor
    weights: Tensor
    """The ratio that multiplies A ∇ log π where nothing is clipped."""
    clipped_low: Tensor
    """True where the lower bound acted: it took the gradient away, or (`cispo`) raised the weight."""
    clipped_high: Tensor
    """True where the upper bound did."""
    clipped_dual: Tensor | None = None
    """True where the bound of `clip_dual` took the gradient away."""
    metrics: Mapping[str, Tensor] = {}
    """What the user's loss measures."""


class TokenLosses(NamedTuple):
    """A loss before aggregation, with what its diagnostics need; each is [tokens], all but `losses` without
    gradient."""

    losses: Tensor
    log_ratio: Tensor
    """Log of current / old, token by token, bounded."""
    weights: ImportanceWeights
    """Importance weights after correction and masks: of current / behavior or of proximal / behavior, as the loss
    uses them."""
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor | None
    importance: Tensor
    """log ρ, what corrections and masks read; not bounded."""
    metrics: Mapping[str, Tensor] = {}


LossFunction: TypeAlias = Callable[[Tensor, TokenTerms, TrainerSettings], Surrogate]
"""Log of current / old [tokens], not bounded, carrying the gradient; the terms; the settings."""


def without_unsound(terms: TokenTerms) -> TokenTerms:
    """Leave out each trajectory with a log-prob or an advantage that is not finite: its tokens become neutral, of ratio
    1 and advantage 0, and get no gradient. The minibatch's other trajectories are trained."""
    read = [terms.current.detach(), terms.behavior, terms.proximal, terms.advantages]
    read += [] if terms.reference is None else [terms.reference]
    faults = ~torch.stack([values.isfinite() for values in read]).all(0)
    sound = terms.rows.spread(terms.rows.sums(faults.double()) == 0)

    def neutral(values: Tensor | None) -> Any:
        return None if values is None else torch.where(sound, values, 0.0)

    return terms._replace(
        current=neutral(terms.current),
        behavior=neutral(terms.behavior),
        proximal=neutral(terms.proximal),
        advantages=neutral(terms.advantages),
        reference=neutral(terms.reference),
        entropy=neutral(terms.entropy),
        sound=sound,
    )


def policy_loss(terms: TokenTerms, settings: TrainerSettings) -> TokenLosses:
    """The whole loss of each token.

    Old policy `behavior`: one ratio, current / behavior, is both what is clipped and the importance weight, so a
    truncated weight w replaces r: the surrogate is scaled by w / r, and the gradient r A ∇ log π becomes w A ∇ log π.
    With `token_tis` that bounds the one side that the clip leaves open, r far above 1 with a negative advantage.

    Old policy `proximal`: w · surrogate(current / proximal), w = proximal / behavior. Hilton et al., "Batch
    size-invariance for policy optimization", arXiv 2110.00641; in asynchronous training of language models AReaL,
    arXiv 2505.24298. The clip range bounds this step's move alone, however stale the trajectories are; w carries the
    rest, truncated by the correction.
    """
    old = terms.proximal if settings.needs_proximal else terms.behavior
    log_ratio = terms.current - old
    custom = settings.custom_function("loss")
    surrogate = (
        LOSSES[settings.loss](log_ratio, terms, settings) if custom is None else _custom_loss(custom, old, terms)
    )
    log_ratio = log_ratio.detach()
    importance = terms.proximal - terms.behavior if settings.needs_proximal else log_ratio
    raw = bounded(importance).exp() if settings.needs_proximal else surrogate.weights
    weights = corrected(_importance_terms(terms, importance, raw), settings)
    losses = surrogate.losses * (weights.used if settings.needs_proximal else weights.used / raw)
    if settings.kl_loss_coef > 0:
        losses = losses + settings.kl_loss_coef * _kl_term(terms, weights, settings)
    if settings.entropy_coef > 0:
        assert terms.entropy is not None  # `gradients` has computed it
        losses = losses - settings.entropy_coef * _unless_masked(terms.entropy, weights)
    marks = surrogate.clipped_low, surrogate.clipped_high, surrogate.clipped_dual
    return TokenLosses(losses, bounded(log_ratio), weights, *marks, importance, surrogate.metrics)


def _custom_loss(custom: CustomFunction, old: Tensor, terms: TokenTerms) -> Surrogate:
    """The user's loss, 0 where a trajectory is left out. Raises: `ConfigError` for a result of the wrong form."""
    given = LossTerms(
        current=terms.current, old=old, behavior=terms.behavior, advantages=terms.advantages, trajectories=terms.rows,
        reference=terms.reference, entropies=terms.entropy,
    )  # fmt: skip
    losses, metrics = parts_of(custom, custom.result(given), terms.current)
    losses = losses if terms.sound is None else torch.where(terms.sound, losses, 0.0)
    nowhere = torch.zeros_like(losses, dtype=torch.bool)
    return Surrogate(losses, bounded((terms.current - old).detach()).exp(), nowhere, nowhere, None, metrics)


def _importance_terms(terms: TokenTerms, log_ratio: Tensor, weights: Tensor) -> ImportanceTerms:
    return ImportanceTerms(
        log_ratio=log_ratio, weights=weights, current=terms.current.detach(), behavior=terms.behavior,
        advantages=terms.advantages, trajectories=terms.rows,
        entropies=None if terms.entropy is None else terms.entropy.detach(),
    )  # fmt: skip


def _kl_term(terms: TokenTerms, weights: ImportanceWeights, settings: TrainerSettings) -> Tensor:
    """KL(current ‖ reference) of each token that no mask drops."""
    assert terms.reference is not None  # `TrainerSettings.needs_reference` has had it computed
    log_reference = bounded(terms.reference - terms.current)
    log_behavior = bounded(terms.current - terms.behavior) if settings.kl_loss_ratio else None
    return _unless_masked(kl_losses(settings.kl_loss, log_reference, log_behavior), weights)


def _unless_masked(values: Tensor, weights: ImportanceWeights) -> Tensor:
    return values if weights.kept is None else torch.where(weights.kept, values, 0.0)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [tokens].

    PPO, arXiv 1707.06347 eq. 7, with the bounds decoupled as in DAPO's clip-higher, arXiv 2503.14476 section 3.1.
    """
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def ppo_clip(log_ratio: Tensor, terms: TokenTerms, settings: TrainerSettings) -> Surrogate:
    """PPO clip: see `clipped_surrogate`. With `clip_dual`, also for A < 0 at least c A: -max(min(r A, clip(r) A), c A).

    Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv 1912.09729 eq. 5: where
    a stale policy has made r huge, a bad action would push without bound; beyond c it pushes no more.
    """
    log_ratio = bounded(log_ratio)
    losses = clipped_surrogate(log_ratio, terms.advantages, settings.clip_low, settings.clip_high)
    ratio = log_ratio.detach().exp()
    bad = terms.advantages < 0
    low = (ratio < 1 - settings.clip_low) & bad
    high = (ratio > 1 + settings.clip_high) & (terms.advantages > 0)
    if not settings.clip_dual:
        return Surrogate(losses, ratio, low, high)
    losses = torch.where(bad, torch.minimum(losses, -settings.clip_dual * terms.advantages), losses)
    return Surrogate(losses, ratio, low, high, bad & (ratio > settings.clip_dual))


def gspo(log_ratio: Tensor, terms: TokenTerms, settings: TrainerSettings) -> Surrogate:
    """Group Sequence Policy Optimization: PPO clip on the sequence's s = (Π r)^(1/n), the same for all its n tokens.

    arXiv 2507.18071 eq. 5 and 7, in the form of its eq. 14 (GSPO-token): value s, gradient of each token's own log-prob
    times s. For advantages that are equal along the trajectory both forms have the same value and gradient. The paper
    averages per sequence (`aggregation: sequence_mean`) and clips at 3e-4 and 4e-4.
    """
    sequence = terms.rows.spread(terms.rows.means(log_ratio.detach()))
    carried = sequence + (terms.current - terms.current.detach())
    return ppo_clip(carried, terms, settings)


def cispo(log_ratio: Tensor, terms: TokenTerms, settings: TrainerSettings) -> Surrogate:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π: the weight is clipped, and no token loses its gradient.

    MiniMax-M1, arXiv 2506.13585 eq. 4 and 5, which leaves the lower side open in practice (here `clip_low: 1`).
    """
    ratio = bounded(log_ratio.detach()).exp()
    weights = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    low, high = ratio < 1 - settings.clip_low, ratio > 1 + settings.clip_high
    return Surrogate(-weights * terms.advantages * terms.current, weights, low, high)


def token_weights(lengths: Sequence[int], aggregation: str, constant_tokens: int) -> list[float]:
    """The weight of each token of each trajectory, so that the minibatch's loss is Σ weight · token loss.
    [trajectories]

    `lengths` are trainable tokens per trajectory of one optimizer minibatch; a trajectory without any counts in n. A
    rollout of several segments counts as one trajectory.

    - `token_mean`, 1 / Σ lengths: every token counts the same (DAPO, arXiv 2503.14476 section 3.3).
    - `sequence_mean`, 1 / (n · length): every trajectory counts the same (GRPO, arXiv 2402.03300 eq. 3).
    - `constant`, 1 / (n · constant_tokens): no length bias either way (Dr.GRPO, arXiv 2503.20783 section 3.2).
    """
    count = len(lengths)
    if aggregation == "sequence_mean":
        return [1.0 / (count * max(1, length)) for length in lengths]
    total = count * constant_tokens if aggregation == "constant" else max(1, sum(lengths))
    return [1.0 / total] * count


LOSSES: dict[str, LossFunction] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}
"""Surrogates by the name that `TrainerSettings.loss` takes."""
