"""Counts generated groups in batches: their tokens, lengths and times.

Nearly every event of a run is a `GroupGenerated`. `collector.RunMetrics` only appends them; they are counted when
`BATCH` of them wait or when somebody reads the figures. The figures are the same as if each were counted at once.
"""

import threading
from collections import deque

from engine.events import GroupGenerated
from engine.metrics.histogram import Histogram
from engine.metrics.labels import GROUP_BUCKETS, TOKEN_BUCKETS
from engine.metrics.replicas import Replicas

BATCH = 256
TOKEN_RATE_WINDOW_S = 15.0
TOKEN_SAMPLE_S = 0.25


class GeneratedGroups:
    """Figures of generated groups. `catch_up` counts the ones in `waiting`, on any thread."""

    def __init__(self, replicas: Replicas) -> None:
        self.waiting: deque[tuple[GroupGenerated, float | None]] = deque()
        """(event, time of the group's first start; None if the group was released at once)."""
        self.groups = 0
        self.tokens = 0
        self.response_tokens = Histogram(TOKEN_BUCKETS)
        self.seconds = Histogram(GROUP_BUCKETS)
        self._replicas = replicas
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=256)
        self._counting = threading.Lock()

    def catch_up(self, *, blocking: bool = True) -> None:
        """Count the waiting groups. Never blocks: if another thread counts, it returns at once."""
        if not self._counting.acquire(blocking=blocking):
            return
        try:
            waiting = self.waiting
            batch = [waiting.popleft() for _ in range(len(waiting))]
            if batch:
                self._count(batch)
        finally:
            self._counting.release()

    def tokens_per_s(self, now: float) -> float:
        """Response tokens per second, over the newest seconds; 0 before the first."""
        samples = self._samples
        while len(samples) > 2 and samples[1][0] < now - TOKEN_RATE_WINDOW_S:
            samples.popleft()
        if now <= samples[0][0]:
            return 0.0
        return (self.tokens - samples[0][1]) / (now - samples[0][0])

    def _count(self, batch: list[tuple[GroupGenerated, float | None]]) -> None:
        tokens, sampled_at = self.tokens, self._samples[-1][0]
        lengths, times, ids, timed = [], [], [], []
        groups_of, tokens_of = dict[int, int](), dict[int, int]()
        for event, began in batch:
            here, replica, group, at = event.tokens, event.replica, event.group, event.at
            tokens += here
            groups_of[replica] = groups_of.get(replica, 0) + 1
            tokens_of[replica] = tokens_of.get(replica, 0) + here
            lengths.append(here / (event.live or 1))
            ids.append(group)
            if began is not None:
                times.append(at - began)
                timed.append(group)
            if at - sampled_at >= TOKEN_SAMPLE_S:
                sampled_at = at
                self._samples.append((at, tokens))
        self.tokens = tokens
        self.groups += len(batch)
        for replica, groups in groups_of.items():
            self._replicas.generated(replica, groups, tokens_of[replica])
        self.response_tokens.observe_all(lengths, ids)
        self.seconds.observe_all(times, timed)
