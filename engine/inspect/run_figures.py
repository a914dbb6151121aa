"""Figures and curves of a run, from the rows of its `metrics.jsonl`.

Called by `engine runs`, `show` and `compare`. Pure: it gets the rows. A row may come from any trainer and any engine
version, so a figure that a row lacks, or that is not a number, is left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from engine.reward_histogram import HISTOGRAMS, REWARD

Row = Mapping[str, Any]

CURVES = {
    "reward": "reward_mean",
    "reward std": "reward_std",
    "loss": "loss",
    "tokens": "tokens",
    "truncated": "truncated_share",
    "repeated": "repeated_share",
    "staleness": "staleness_mean",
    "entropy": "entropy_estimate",
    "KL": "approx_kl",
    "log-prob gap": "logprob_gap_max",
    "gradient norm": "grad_norm",
    "learning rate": "lr",
    "no gradient": "zero_advantage_groups",
    "step seconds": "seconds.total",
}
"""Label of each curve, and the figure of a row that it shows."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure over train steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def binned(self, width: int, first: int, last: int) -> list[float | None]:
        """At most `width` means of equal ranges of the steps from `first` to `last`; None for a range without any."""
        width = max(1, min(width, last - first + 1))
        bins: list[list[float]] = [[] for _ in range(width)]
        for step, value in zip(self.steps, self.values, strict=True):
            bins[(step - first) * width // (last - first + 1)].append(value)
        return [fmean(values) if values else None for values in bins]


def number(row: Row, name: str) -> float | None:
    """A finite figure of a row; `seconds.total` is one of its section `seconds`."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """The known curves of the rows of train steps, by label, and one for each of several reward functions; without
    those that have no value."""
    found = {}
    histograms = (row.get(HISTOGRAMS) for row in rows)
    names = dict.fromkeys(name for one in histograms if isinstance(one, Mapping) for name in one if name != REWARD)
    functions = {f"reward {name.removeprefix('reward_')}": name for name in names} if len(names) > 1 else {}
    for label, name in {**CURVES, **functions}.items():
        points = [(int(row["step"]), value) for row in rows if (value := number(row, name)) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            found[label] = Curve(steps, values)
    return found


def figures(rows: Sequence[Row], validations: Sequence[Row]) -> dict[str, float | int | None]:
    """The figures of a run, by name. None: the rows do not have it."""
    rewards = [value for row in rows if (value := number(row, "reward_mean")) is not None]
    seconds = [value for row in rows if (value := number(row, "seconds.total")) is not None]
    staleness = [value for row in rows if (value := number(row, "staleness_max")) is not None]
    mean_staleness = [value for row in rows if (value := number(row, "staleness_mean")) is not None]
    measured = [row for row in validations if row.get("outcome") == "reported" and number(row, "accuracy") is not None]
    tokens, groups = _sum(rows, "tokens"), _sum(rows, "groups")
    elapsed = number(rows[-1], "elapsed_s") if rows else None
    return {
        "train_steps": int(rows[-1]["step"]) + 1 if rows else 0,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "reward_highest": max(rewards, default=None),
        "validation_first": number(measured[0], "accuracy") if measured else None,
        "validation_last": number(measured[-1], "accuracy") if measured else None,
        "validation_failed_share": number(measured[-1], "failed_share") if measured else None,
        "groups_trained": groups,
        "groups_filtered": _sum(rows, "groups_filtered"),
        "groups_failed": _sum(rows, "groups_failed"),
        "staleness_mean": fmean(mean_staleness) if mean_staleness else None,
        "staleness_max": max(staleness, default=None),
        "tokens_trained": tokens,
        "tokens_per_group": tokens / groups if groups else None,
        "seconds": elapsed,
        "seconds_per_step": median(seconds) if seconds else None,
        "tokens_per_second": tokens / elapsed if elapsed else None,
    }


def _sum(rows: Sequence[Row], name: str) -> int:
    return int(math.fsum(number(row, name) or 0 for row in rows))
