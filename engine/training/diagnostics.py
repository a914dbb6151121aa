"""What a train step reports about its tokens: clip shares, approximate KL, entropy, truncation, effective sample size.

Fed by `gradients.accumulate_gradient`, read by `trainer.ModelTrainer` once an optimizer minibatch, whose skip it
decides. It must never wait for the device while gradients are being computed.
"""

import torch
from torch import Tensor

from engine.training.corrections import effective_sample_share
from engine.training.losses import TokenLosses, TokenTerms


class Diagnostics:
    """Sums over tokens, added up micro-batch by micro-batch on the device and read once."""

    NAMES = (
        "loss",
        "tokens",
        "nonfinite",
        "clip_low",
        "clip_high",
        "kl",
        "entropy",
        "ratio",
        "truncated",
        "weights",
        "squares",
    )

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, terms: TokenTerms, result: TokenLosses, entropy: Tensor, loss: Tensor) -> None:
        """Take in one micro-batch. Tensors stay on the device; nothing waits for it."""
        ratio = result.log_ratio.exp()
        used = result.weights.used
        finite = (terms.current.detach().isfinite() & terms.behaviour.isfinite() & terms.proximal.isfinite()).sum()
        tokens = torch.full_like(loss, ratio.numel(), requires_grad=False)
        row = (
            loss.detach(),
            tokens,
            tokens - finite,
            result.clipped_low.sum(),
            result.clipped_high.sum(),
            (ratio - 1 - result.log_ratio).sum(),
            entropy.sum(),
            ratio.sum(),
            result.weights.truncated.sum(),
            used.sum(),
            used.square().sum(),
        )
        self._parts.append(torch.stack([value.double() for value in row]))

    def merge(self, other: "Diagnostics") -> None:
        self._parts.extend(other._parts)

    def sums(self) -> dict[str, float]:
        """The sums by name; waits for the device."""
        if not self._parts:
            return dict.fromkeys(self.NAMES, 0.0)
        return dict(zip(self.NAMES, torch.stack(self._parts).sum(0).tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens taken in; all 0 where there were none.

        `approx_kl` is Schulman's k3 estimate r - 1 - log r of the loss's own ratio. `ess` is a share of the tokens.
        """
        sums = self.sums()
        tokens = max(1.0, sums["tokens"])
        return {
            "clip_share_low": sums["clip_low"] / tokens,
            "clip_share_high": sums["clip_high"] / tokens,
            "approx_kl": sums["kl"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "tis_truncated_share": sums["truncated"] / tokens,
            "ess": effective_sample_share(sums["weights"], sums["squares"], tokens),
        }
