"""Two published objectives that the engine does not ship, for `custom_objectives.yaml` (docs/OBJECTIVES.md)."""

from math import comb
from typing import Any

import torch

from engine.protocols import AdvantageTerms, LossTerms


def sapo(terms: LossTerms, positive: float = 1.0, negative: float = 1.05) -> Any:
    """Soft Adaptive Policy Optimization, Gao et al. 2025, arXiv 2511.20347: -f(r) A with the gate
    f(r) = 4 / τ · sigmoid(τ (r - 1)) in place of a clip, with τ `positive` for A > 0, else `negative`.

    On-policy the gradient is that of r A. It falls smoothly to both sides, faster for a negative advantage.
    """
    ratio = terms.log_ratio.clamp(-20, 20).exp()
    temperature = torch.where(terms.advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1))
    kept = 4 * gate * (1 - gate)  # the share of r A's gradient that is left
    return -4 / temperature * gate * terms.advantages, {"gate": kept.detach()}


def pass_at_k(terms: AdvantageTerms, k: int = 2) -> torch.Tensor:
    """Pass@K Policy Optimization, Walder and Karkhanis 2025, arXiv 2505.15201: rewards whose policy gradient is that of
    pass@k. Of n rollouts, c of them right (a reward of at least 1), a right one gets k / n, and a wrong one
    k / n · (1 - C(n - 1 - c, k - 1) / C(n - 1, k - 1)). The baseline is the mean of the group; the paper has others.
    """
    right = terms.rewards >= 1
    sizes = terms.groups.sums(torch.ones_like(terms.rewards)).int().tolist()
    counts = terms.groups.sums(right.to(terms.rewards)).int().tolist()
    wrong = []
    for n, c in zip(sizes, counts, strict=True):
        subsets = comb(n - 1, k - 1)
        wrong.append(1 - comb(max(0, n - 1 - c), k - 1) / subsets if subsets else 0.0)
    others = terms.groups.spread(terms.rewards.new_tensor(wrong))
    share = k / terms.groups.spread(terms.rewards.new_tensor(sizes))
    shaped = share * torch.where(right, 1.0, others)
    centered = shaped - terms.groups.spread(terms.groups.means(shaped))
    return torch.where(terms.rewards.isfinite(), centered, torch.nan)
