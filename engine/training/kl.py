"""Estimators of KL(p ‖ q) from single tokens drawn from p, and how they regularise towards the reference policy.

Called by `losses.py` (KL in the loss), `advantages.py` (in the reward), `corrections.py` (masks) and `diagnostics.py`.
It must never decide which policies p and q are.

Schulman, "Approximating KL Divergence" (2020), with log r = log q - log p:

    k1 = -log r              unbiased, of high variance, of either sign
    k2 = (log r)² / 2        biased, of low variance, never negative
    k3 = r - 1 - log r       unbiased, of low variance, never negative

**A good value is not a good gradient** (arXiv 2510.01555). Differentiated through the sampled token's log-prob alone,
tokens drawn from the current policy π, q the reference:

    k1: E[∇ log π] = 0: noise without effect, whatever the reference is. Refused without the ratio.
    k2: E[log(π / ref) ∇ log π] = ∇ KL(π ‖ ref), exactly; the same as k1 in the reward.
    k3: E[(1 - ref / π) ∇ log π] = ∇ KL(ref ‖ π): to first order the same, weak where π left the reference's support.

With the ratio ρ = π / behavior, gradient included (k3: DeepSeek-V3.2, arXiv 2512.02556, section 3.1), all of the
objective E_behavior[ρ k] is differentiated, and k1 and k3 give ∇ KL(π ‖ ref) exactly, on stale tokens too. k2, whose
value is biased, takes ρ as a constant and then does as well.
"""

import torch
from torch import Tensor


def estimate(name: str, log_ratio: Tensor) -> Tensor:
    """k1, k2 or k3 of KL(p ‖ q) per token, from log(q / p) of tokens drawn from p. [tokens]"""
    if name == "k1":
        return -log_ratio
    if name == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


def kl_losses(name: str, log_reference: Tensor, log_behavior: Tensor | None) -> Tensor:
    """What is added to each token's loss, before its coefficient. [tokens]

    `log_reference` is log(reference / current), `log_behavior` log(current / behavior) where the term is weighed by
    it, both carrying the gradient of `current`.
    """
    values = estimate(name, log_reference)
    if log_behavior is None:
        return values
    ratio = log_behavior.exp()
    return values * (ratio.detach() if name == "k2" else ratio)
