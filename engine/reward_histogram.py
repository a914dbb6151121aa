"""Histograms of rewards, in fixed buckets: one form for `metrics.jsonl`, Prometheus, the sinks and the report.

The trainer's worker makes one of each train step for the reward and for each reward function; readers draw or add them.
Every step has the same buckets, so the histograms of several steps can be added.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

HISTOGRAMS = "reward_histograms"
"""The key of a train step's histograms, among its metrics: by `reward` or `reward_NAME`."""
REWARD = "reward"

_POSITIVE = (*(tenths / 10 for tenths in range(1, 11)), 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1e3, 1e6)
BOUNDS = (*(-bound for bound in reversed(_POSITIVE)), 0.0, *_POSITIVE)
"""Upper bounds of all buckets but the last, which has none."""

Bucket = Sequence[float]
"""(low, high, count) of the values above `low` and up to `high`. In the first bucket of a histogram, `low` is the
smallest value; in the last one, `high` is the largest. Empty buckets are left out."""
Histograms = Mapping[str, Sequence[Bucket]]


def histogram_of(values: Sequence[float]) -> list[Bucket]:
    """The histogram of finite values; empty without any."""
    if not values:
        return []
    least, most = min(values), max(values)
    counts: dict[int, int] = {}
    for value in values:
        place = bisect_left(BOUNDS, value)
        counts[place] = counts.get(place, 0) + 1
    lows, highs = (least, *BOUNDS), (*BOUNDS, most)
    return [(max(least, lows[place]), min(most, highs[place]), counts[place]) for place in sorted(counts)]


def value_range(row: Mapping[str, object]) -> tuple[float, float] | None:
    """The smallest and the largest reward of a train step, from its row; None if the row has no histogram."""
    histograms = row.get(HISTOGRAMS)
    buckets = histograms.get(REWARD) if isinstance(histograms, Mapping) else None
    return (buckets[0][0], buckets[-1][1]) if buckets else None


def edges_and_counts(buckets: Sequence[Bucket]) -> tuple[list[float], list[int]]:
    """Adjoining bins that have a width, with the empty ones between: edges, one more than counts."""
    edges: list[float] = []
    counts: list[int] = []
    for low, high, count in buckets:
        start = low if low < high else max((bound for bound in BOUNDS if bound < high), default=high - 1.0)
        if not edges:
            edges.append(start)
        elif edges[-1] < start:
            edges.append(start)
            counts.append(0)
        edges.append(high)
        counts.append(int(count))
    return edges, counts
