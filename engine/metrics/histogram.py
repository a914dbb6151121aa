"""A histogram with fixed buckets, exact smallest and largest value, and nothing else.

Ours rather than the client library's, so that it costs nothing until it is exported, and can be read without parsing
text.
"""

from bisect import bisect_left


class Histogram:
    """Counts values by the smallest bucket bound they do not exceed."""

    __slots__ = ("bounds", "count", "counts", "largest", "smallest", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.total = 0.0
        self.smallest: float | None = None
        self.largest: float | None = None

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.total += value
        self.smallest = value if self.smallest is None else min(self.smallest, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last bound being `+Inf`: the form Prometheus takes."""
        pairs, running = [], 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs
