"""A histogram with fixed buckets and the exact smallest and largest value.

It replaces the client library's class because it costs nothing until it is exported and can be read without parsing
text.
"""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by the smallest bucket bound that they do not exceed, and keeps an exemplar for each bucket."""

    __slots__ = ("bounds", "count", "counts", "examples", "largest", "smallest", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.examples: list[tuple[float, int] | None] = [None] * (len(bounds) + 1)
        """(value, group) of the newest value in each bucket, if given."""
        self.count = 0
        self.total = 0.0
        self.smallest: float | None = None
        self.largest: float | None = None

    def observe(self, value: float, whose: int | None = None) -> None:
        """Count a value. `whose`: the group it belongs to, as exemplar."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        if whose is not None:
            self.examples[bucket] = (value, whose)
        self.count += 1
        self.total += value
        if self.smallest is None or value < self.smallest:
            self.smallest = value
        if self.largest is None or value > self.largest:
            self.largest = value

    def observe_all(self, values: Sequence[float], whose: Sequence[int]) -> None:
        """Count many values, oldest first. Faster than one by one, with the same result."""
        if not values:
            return
        bounds, counts, newest = self.bounds, self.counts, dict[int, int]()
        for place, value in enumerate(values):
            bucket = bisect_left(bounds, value)
            counts[bucket] += 1
            newest[bucket] = place
        for bucket, place in newest.items():
            self.examples[bucket] = (values[place], whose[place])
        self.count += len(values)
        self.total += sum(values)
        least, most = min(values), max(values)
        self.smallest = least if self.smallest is None else min(self.smallest, least)
        self.largest = most if self.largest is None else max(self.largest, most)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def cumulative(self) -> list[tuple[str, float, tuple[float, int] | None]]:
        """(upper bound, number of values up to it, exemplar) of each bucket, as Prometheus counts; the last bound is
        `+Inf`."""
        rows, running = [], 0
        for bound, count, example in zip((*map(repr, self.bounds), "+Inf"), self.counts, self.examples, strict=True):
            running += count
            rows.append((bound, float(running), example))
        return rows
