"""Reports how much of a replica's KV cache is in use, while groups run.

The worker of a replica uses it. It must not report while no group runs, except once after the last group has ended.
"""

import logging
from collections.abc import Callable

from engine.events import CacheMeasured
from engine.protocols import MeasuresCache
from engine.workers.threads import contained
from engine.workers.worker import Worker

log = logging.getLogger(__name__)

CACHE_EVERY_S = 2.0
"""Seconds between two reports of a configured run."""


class CacheReports:
    """Reports every `Plan.cache_every_s` seconds while `running()` is above 0; never if that is 0 or the generator does
    not implement `protocols.MeasuresCache`."""

    def __init__(self, worker: Worker, generator: object, running: Callable[[], int]) -> None:
        self._worker = worker
        self._every_s = worker.plan.cache_every_s
        self._source = generator if self._every_s and isinstance(generator, MeasuresCache) else None
        self._running = running

    def begin(self) -> None:
        """Call when a group starts."""
        if self._source is not None:
            self._worker.reports.within(self._every_s, self._report)

    def _report(self) -> None:
        worker = self._worker
        try:
            used = contained(self._used)
        except Exception:
            log.exception(
                "replica %d no longer reports its KV cache: correct cache_used() of its generator", worker.index
            )
            self._source = None
            return
        worker.peers.emit(CacheMeasured(kind=worker.kind, index=worker.index, life=worker.life, used=used))
        if self._running():
            self.begin()

    def _used(self) -> float:
        assert self._source is not None  # otherwise nothing is due
        used = float(self._source.cache_used())
        if not 0.0 <= used <= 1.0:
            raise ValueError(f"cache_used() must return a share from 0 to 1, not {used}")
        return used
