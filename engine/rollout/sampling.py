"""How a row of logits becomes a token and the log-prob of the distribution it was drawn from.

Called by `rollout.batch_sampler` once per decoded token, for all rows at once. Must never keep state between calls: the
draw for response position i is a function of (seed, i), so who else is in the batch and how often a request was resumed
change nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.rollout.seeds import FIRST_MULTIPLIER, GOLDEN, SECOND_MULTIPLIER

_DRAW_BITS = 52  # u <= 1 - 2^-52, so that u * total stays below total in float64 whatever total is


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How each row samples, on the model's device. Rebuilt only when a row joins or leaves.

    `temperature` [rows] float32, 1 where the row is greedy; `greedy` [rows] bool, None while no row is; `top_p` [rows]
    float64, None while every row keeps all tokens.
    """

    temperature: torch.Tensor
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None

    @classmethod
    def of(cls, temperature: np.ndarray, top_p: np.ndarray, device: torch.device) -> "RowSettings":
        """From what the requests asked for, both [rows]."""
        greedy = temperature == 0.0
        return cls(
            temperature=torch.from_numpy(np.where(greedy, 1.0, temperature).astype(np.float32)).to(device),
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            top_p=torch.from_numpy(top_p.astype(np.float64)).to(device) if (top_p < 1.0).any() else None,
        )


def uniform_draws(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, a function of (seed, position) only. `seeds` [rows] uint64, `positions` [rows]
    int64.

    `seeds` come out of `seeds.derive_seed`, so that neighbouring seeds do not give shifted copies of one stream.
    """
    state = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(FIRST_MULTIPLIER)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(SECOND_MULTIPLIER)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(64 - _DRAW_BITS)).astype(np.float64) * 2.0**-_DRAW_BITS


def choose(logits: torch.Tensor, settings: RowSettings, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] int64 and their behavior log-probs [rows] float32, from `logits` [rows, vocabulary].

    Draws by inverting the cumulative distribution in vocabulary order. The log-prob is that of the distribution
    sampled: after temperature, and renormalised over the nucleus. A greedy row samples a point mass, so its log-prob is
    0. Logits that are not finite come back as a NaN log-prob, for the caller to refuse.
    """
    logprobs = torch.log_softmax(logits.float() / settings.temperature[:, None], dim=-1)
    weights = logprobs.double().exp_()
    if settings.top_p is not None:
        weights = weights * nucleus(weights, settings.top_p)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    chosen = logprobs.gather(1, tokens)
    if settings.top_p is not None:
        mass = torch.where(settings.top_p[:, None] < 1.0, total, 1.0)  # a row that keeps all is as it is without others
        chosen = chosen - mass.log().float()
    if settings.greedy is not None:
        chosen = torch.where(settings.greedy[:, None], chosen - chosen, chosen)
    return tokens[:, 0], chosen[:, 0]


def nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens [rows, vocabulary] (bool) the nucleus keeps: the fewest whose probability reaches `top_p` [rows].

    Holtzman et al.: The Curious Case of Neural Text Degeneration, ICLR 2020. Equal probabilities are taken in
    vocabulary order; the likeliest token is always kept, and a row with `top_p` 1 keeps all.
    """
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, index, kept)
