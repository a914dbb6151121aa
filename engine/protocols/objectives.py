"""What a user's own objective gets and returns (docs/OBJECTIVES.md#custom-objectives).

The train step calls the functions that `trainer.loss`, `trainer.advantage`, `trainer.correction` and `trainer.masks`
name. A call sees whole trajectories, but never a whole batch: which of them share a pass depends on
`micro_batch_tokens` and on the ranks. So no function may average over its tokens; the engine does, over the optimizer
minibatch. Everything lies flat: [tokens] runs over the trainable tokens of all trajectories of the pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Tensor: TypeAlias = Any
"""A `torch.Tensor`. This module does not import torch."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Which group each item is of, such as the trajectory of each token."""

    of: Tensor
    """[items] int64, from 0 to count - 1"""
    count: int

    def sums(self, values: Tensor) -> Tensor:
        """[items] to [groups]"""
        return values.new_zeros(self.count).index_add(0, self.of, values)

    def means(self, values: Tensor) -> Tensor:
        """[items] to [groups]; 0 for a group without items."""
        lengths = self.of.bincount(minlength=self.count)
        return self.sums(values) / lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[groups] to [items]: every item gets the value of its group."""
        return values[self.of]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    """What a loss gets. It returns the loss of each token, [tokens], in the type of `current`; or a pair of that and
    metrics: {name: [tokens]}."""

    current: Tensor
    """Log-probs under the weights that are trained. They carry the gradient. [tokens] float32"""
    old: Tensor
    """Log-probs under the old policy: `behavior`, or with `old_policy: proximal` the weights before the train step.
    [tokens] float32"""
    behavior: Tensor
    """Log-probs under the distribution that the tokens were sampled from. [tokens] float32"""
    advantages: Tensor
    """[tokens] float32"""
    trajectories: Grouping
    """The trajectory of each token."""
    reference: Tensor | None = None
    """Log-probs under the reference model, if `reference_path` or a KL term asks for them. [tokens] float32"""
    entropies: Tensor | None = None
    """Entropy of the distribution of each token, in nats, if the function `needs` it. Carries the gradient. [tokens]
    float32"""

    @property
    def log_ratio(self) -> Tensor:
        """log(current / old), which carries the gradient. [tokens] float32"""
        return self.current - self.old


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportanceTerms:
    """What a correction and a mask get; nothing here carries a gradient. A correction returns the weight that replaces
    `weights`, [tokens]. A mask returns its measure of each token, [tokens], which is compared with `low` and `high`."""

    log_ratio: Tensor
    """log ρ, the log of the importance ratio, not bounded. [tokens] float32"""
    weights: Tensor
    """The importance weights that the loss would use, bounded: ρ, or what `gspo` and `cispo` make of it. [tokens]
    float32"""
    current: Tensor
    """Log-probs under the weights that are trained. [tokens] float32"""
    behavior: Tensor
    """[tokens] float32"""
    advantages: Tensor
    """[tokens] float32"""
    trajectories: Grouping
    """The trajectory of each token."""
    entropies: Tensor | None = None
    """As in `LossTerms`. [tokens] float32"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageTerms:
    """What an advantage function gets: the whole batch. It returns the advantage of each rollout, [rollouts], or a pair
    of that and metrics: {name: [rollouts]}."""

    rewards: Tensor
    """After the length penalty and the KL in the reward; a reward that is not finite is NaN. [rollouts] float64"""
    groups: Grouping
    """The prompt group of each rollout."""
    tokens: Tensor
    """Number of trained tokens. [rollouts] int64"""
    response_tokens: Tensor
    """Number of tokens of the responses, those of tools included. [rollouts] int64"""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a function needs beyond its terms. See `needs`."""

    zero_advantages: bool = False
    entropies: bool = False


def needs(*, zero_advantages: bool = False, entropies: bool = False) -> Callable[[Function], Function]:
    """A decorator for a function of an objective. `zero_advantages`: the loss has a gradient also where the advantage
    is 0, so no trajectory may be skipped. `entropies`: it reads `entropies`, which cost a pass over all logits."""

    def decorated(function: Function) -> Function:
        function.needs = Needs(zero_advantages, entropies)  # type: ignore[attr-defined]
        return function

    return decorated


def needs_of(function: Any) -> Needs:
    """What a function declares; nothing by default."""
    found = getattr(function, "needs", None)
    return found if isinstance(found, Needs) else Needs()
