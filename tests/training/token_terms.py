"""Short ways to make a loss's input from probabilities, for the tests of objectives."""

from collections.abc import Sequence

import torch

from engine.protocols import Grouping
from engine.training.losses import TokenLosses, TokenTerms, policy_loss, without_unsound
from engine.training.trainer_settings import TrainerSettings


def terms(
    current: Sequence[float],
    behavior: Sequence[float],
    advantages: Sequence[float],
    *,
    proximal: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    lengths: Sequence[int] = (),
) -> TokenTerms:
    """Terms from probabilities (not logs), float64; of one trajectory, or of several of these lengths."""
    lengths = lengths or [len(current)]
    log_current = torch.tensor(current, dtype=torch.float64).log().requires_grad_()
    log_proximal = log_current.detach() if proximal is None else torch.tensor(proximal, dtype=torch.float64).log()
    return TokenTerms(
        log_current,
        torch.tensor(behavior, dtype=torch.float64).log(),
        log_proximal,
        torch.tensor(advantages, dtype=torch.float64),
        Grouping(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), len(lengths)),
        None if reference is None else torch.tensor(reference, dtype=torch.float64).log(),
    )


def evaluate(settings: TrainerSettings, given: TokenTerms) -> tuple[TokenLosses, list[float]]:
    """The losses, and the gradient of their sum by the current log-probs."""
    result = policy_loss(given, settings)
    (gradient,) = torch.autograd.grad(result.losses.sum(), given.current)
    return result, gradient.tolist()


def counted(given: TokenTerms, entropy: torch.Tensor) -> TokenTerms:
    """Terms as the diagnostics take them in."""
    return without_unsound(given._replace(entropy=entropy))
