"""The figures of validation sets as rows of `metrics.jsonl`, lines and tables have them.

A row has `sets`: by the name of the set, each figure with the ends of its 95 % confidence interval.

    {"math": {"prompts": 30, "pass@4": 0.8, "pass@4_low": 0.63, "pass@4_high": 0.9, ...}}
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.states.estimators import Estimate

BOUNDS = {"value": "", "low": "_low", "high": "_high"}
"""Suffix of each estimate of a figure."""
PROMPTS = "prompts"
"""Key of the number of prompts with a measured response."""


def sets_of(estimates: Sequence[Estimate]) -> dict[str, dict[str, Any]]:
    """The figures of each set."""
    sets: dict[str, dict[str, Any]] = {}
    for found in estimates:
        figures = sets.setdefault(found.set, {PROMPTS: found.prompts})
        figures |= {found.metric: found.value, f"{found.metric}_low": found.low, f"{found.metric}_high": found.high}
    return sets


def metrics_in(figures: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None, float | None]]:
    """(metric, value, low, high) of each figure of a set."""
    for name, value in figures.items():
        if f"{name}_low" in figures:
            yield name, value, figures[f"{name}_low"], figures[f"{name}_high"]


def bounds_in(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(metric, estimate, number) of each figure of a set, without unknown ends of intervals."""
    for metric, *ends in metrics_in(figures):
        for bound, number in zip(BOUNDS, ends, strict=True):
            if number is not None:
                yield metric, bound, number


def value_in(row: Mapping[str, Any], metric: str) -> float | None:
    """A figure of a validation's row by its name: `accuracy`, `reward_mean` or `SET/METRIC`."""
    name, slash, own = metric.rpartition("/")
    value = row.get("sets", {}).get(name, {}).get(own) if slash else row.get(metric)
    return float(value) if isinstance(value, int | float) else None
