"""Checks the user's functions of an objective on synthetic tensors, before a run trains with them.

Called by `engine check` and by every trainer at its start. The tensors are the same each time: trajectories of
different lengths, advantages of both signs and of 0, ratios on both sides of 1.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError, describe_error
from engine.protocols import AdvantageTerms, Grouping, ImportanceTerms, LossTerms
from engine.training.custom_functions import CustomFunction
from engine.training.custom_results import parts_of
from engine.training.trainer_settings import TrainerSettings

LENGTHS = (1, 4, 7, 2)
"""Tokens of the made trajectories; the third has an advantage of 0."""
ADVANTAGES = (1.0, -0.5, 0.0, 1.5)
GROUPS = (4, 1, 3)
"""Rollouts of the made groups; those of the last have equal rewards."""
REWARDS = (1.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.0)
METRIC = re.compile(r"[a-z][a-z0-9_]*")
TAKEN = {"trainer.loss": (), "trainer.advantage": ("std", "abs_max")}
"""Names of metrics that the engine reports itself, without their prefix."""


@dataclass(frozen=True, slots=True)
class CheckedObjective:
    """What the check found."""

    metrics: tuple[str, ...] = ()
    """Names of the metrics of the loss."""
    lines: tuple[str, ...] = ()
    """For `engine check`."""


def check_objective(settings: TrainerSettings) -> CheckedObjective:
    """Call each function of the user. Raises: `ConfigError` that names the function, the law that it breaks and the
    expected signature."""
    metrics, lines = list[str](), list[str]()
    for custom in settings.custom_functions():
        custom.check_signature()
        if custom.field == "trainer.loss":
            metrics = _check_loss(custom, settings)
            lines.append(_described(custom, "a loss for each token", metrics) + _skipping(custom))
        elif custom.field == "trainer.advantage":
            lines.append(_described(custom, "an advantage for each rollout", _check_advantage(custom)))
        else:
            _check_weights(custom, settings)
            lines.append(_described(custom, "a number for each token", []))
    return CheckedObjective(tuple(metrics), tuple(lines))


def _described(custom: CustomFunction, what: str, metrics: list[str]) -> str:
    prefix = custom.field.rpartition(".")[2]
    named = f", and the metrics {', '.join(f'{prefix}_{name}' for name in metrics)}" if metrics else ""
    return f"{custom.field} {custom.spec} returns {what}{named}"


def _skipping(custom: CustomFunction) -> str:
    if custom.needs.zero_advantages:
        return "; it trains every trajectory"
    return "; trajectories with an advantage of 0 are skipped"


# -- the calls ---------------------------------------------------------------------------------------------------------


def _check_loss(custom: CustomFunction, settings: TrainerSettings) -> list[str]:
    """Names of its metrics."""
    terms = _loss_terms(custom, settings)
    losses, metrics = parts_of(custom, _called(custom, terms), terms.current)
    _check_names(custom, metrics)
    _require_finite(custom, losses)
    if not losses.requires_grad:
        raise custom.refuse("returned a loss without a gradient: it must depend on terms.current")
    try:
        (gradient,) = torch.autograd.grad(losses.sum(), terms.current, allow_unused=True)
    except Exception as error:
        raise custom.refuse(f"raised in the backward pass: {describe_error(error)}") from error
    if gradient is None:
        raise custom.refuse("returned a loss without a gradient with respect to terms.current")
    if not gradient.isfinite().all():
        raise custom.refuse(f"has a gradient that is not finite: {_first(gradient, ~gradient.isfinite())}")
    idle = (terms.advantages == 0) & (gradient != 0)
    if idle.any() and not custom.needs.zero_advantages:
        law = f"has a gradient where the advantage is 0 ({_first(gradient, idle)}), but such trajectories are skipped"
        raise ConfigError(
            custom.field, custom.spec, law, "decorate it with @needs(zero_advantages=True) of engine.protocols"
        )
    if not gradient.any() and not _trains_fresh_tokens(custom, terms):
        raise custom.refuse("has a gradient of 0 at every token, also where the ratio is 1: it would train nothing")
    _require_separable(custom, terms, losses)
    return list(metrics)


def _trains_fresh_tokens(custom: CustomFunction, terms: LossTerms) -> bool:
    """Whether the loss has a gradient where the current policy is the old one. Elsewhere it may clip."""
    current = terms.current.detach().requires_grad_()
    fresh = replace(terms, current=current, old=current.detach(), behavior=current.detach())
    losses, _ = parts_of(custom, custom(fresh), current)
    if not losses.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(losses.sum(), current, allow_unused=True)
    return gradient is not None and bool(gradient.any())


def _check_weights(custom: CustomFunction, settings: TrainerSettings) -> None:
    """Of a correction or a mask."""
    loss = _loss_terms(custom, settings)
    terms = ImportanceTerms(
        log_ratio=loss.log_ratio.detach(), weights=loss.log_ratio.detach().exp(), current=loss.current.detach(),
        behavior=loss.behavior, advantages=loss.advantages, trajectories=loss.trajectories,
        entropies=None if loss.entropies is None else loss.entropies.detach(),
    )  # fmt: skip
    values = parts_of(custom, _called(custom, terms), terms.weights)[0]
    if custom.field == "trainer.correction":
        _require_finite(custom, values)
        if (values < 0).any():
            raise custom.refuse(f"returned a negative weight: {_first(values, values < 0)}")
    _require_separable(custom, terms, values)


def _check_advantage(custom: CustomFunction) -> list[str]:
    """Names of its metrics."""
    tokens = torch.arange(1, len(REWARDS) + 1)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    terms = AdvantageTerms(rewards=rewards, groups=_grouping(GROUPS), tokens=tokens, response_tokens=tokens + 1)
    values, metrics = parts_of(custom, _called(custom, terms), rewards)
    _check_names(custom, metrics)
    _require_finite(custom, values)
    return list(metrics)


def _called(custom: CustomFunction, terms: Any) -> Any:
    tensors = list(_tensors(terms))
    before = [value._version for _, value in tensors]
    try:
        found = custom(terms)
    except (Exception, SystemExit) as error:
        law = f"raised on synthetic tensors: {describe_error(error)}"
        missing = [name for name in ("entropies", "reference") if getattr(terms, name, terms) is None]
        if missing and "None" in str(error):
            ways = {"entropies": "@needs(entropies=True)", "reference": "trainer.reference_path"}
            law += "; " + " and ".join(f"terms.{name} is None without {ways[name]}" for name in missing)
        raise custom.refuse(law) from error
    for (name, value), version in zip(tensors, before, strict=True):
        if value._version != version:
            raise custom.refuse(f"changed terms.{name} in place, but the engine reads it later; change a copy")
    return found


# -- what must hold ----------------------------------------------------------------------------------------------------


def _check_names(custom: CustomFunction, metrics: Any) -> None:
    for name in metrics:
        if not METRIC.fullmatch(name):
            raise custom.refuse(f"returned a metric with the name {name!r}; use lower-case letters, digits and _")
        if name in TAKEN[custom.field]:
            raise custom.refuse(f"returned a metric with the name {name!r}, which the engine reports itself")


def _require_finite(custom: CustomFunction, values: Tensor) -> None:
    if not values.isfinite().all():
        raise custom.refuse(f"returned a value that is not finite: {_first(values, ~values.isfinite())}")


def _require_separable(custom: CustomFunction, terms: Any, whole: Tensor) -> None:
    """Each trajectory must get the same values beside others and alone: which ones share a pass is up to the engine."""
    of = _grouping(LENGTHS).of
    for trajectory in range(len(LENGTHS)):
        keep = of == trajectory
        alone, _ = parts_of(custom, custom(_only(terms, keep)), whole[keep])
        if not torch.allclose(alone, whole[keep], rtol=1e-4, atol=1e-5, equal_nan=True):
            law = f"depends on the other trajectories of its pass: trajectory {trajectory} gets different values alone"
            raise custom.refuse(f"{law}; use terms.trajectories.means and .sums, never a mean over all tokens")


def _first(values: Tensor, where: Tensor) -> str:
    index = int(where.nonzero()[0])
    return f"{float(values.detach()[index]):g} at item {index}"


# -- synthetic tensors -------------------------------------------------------------------------------------------------


def _grouping(sizes: tuple[int, ...]) -> Grouping:
    return Grouping(torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), len(sizes))


def _loss_terms(custom: CustomFunction, settings: TrainerSettings) -> LossTerms:
    trajectories = _grouping(LENGTHS)
    places = torch.arange(sum(LENGTHS), dtype=torch.float32)
    current = -0.05 - 0.3 * (places * 7 % 5)
    behavior = current + 0.25 * torch.cos(places)
    return LossTerms(
        current=current.clone().requires_grad_(),
        old=current + 0.1 * torch.sin(places) if settings.needs_proximal else behavior,
        behavior=behavior,
        advantages=trajectories.spread(torch.tensor(ADVANTAGES)),
        trajectories=trajectories,
        reference=current - 0.2 * torch.cos(places) if settings.needs_reference else None,
        entropies=0.5 + 0.1 * (places * 3 % 4) if settings.needs_entropies else None,
    )


def _only(terms: Any, keep: Tensor) -> Any:
    """The terms of one trajectory."""
    changes = {name: value[keep] for name, value in _tensors(terms)}
    return replace(terms, trajectories=Grouping(torch.zeros(int(keep.sum()), dtype=torch.int64), 1), **changes)


def _tensors(terms: Any) -> Iterator[tuple[str, Tensor]]:
    for name in type(terms).__dataclass_fields__:
        value = getattr(terms, name)
        if isinstance(value, Tensor):
            yield name, value
