"""Reports how much of a replica's KV cache is in use, while groups run.

The worker of a replica uses it. It must not report while no group runs, except once after the last group has ended.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.events import CacheMeasured
from engine.ids import Incarnation, ReplicaId
from engine.protocols import MeasuresCache
from engine.workers.threads import contained

log = logging.getLogger(__name__)

CACHE_EVERY_S = 2.0
"""Seconds between two reports of a configured run."""


class CacheReports:
    """Reports every `every_s` seconds while `running()` is above 0; never if `every_s` is 0 or the generator does not
    implement `protocols.MeasuresCache`."""

    def __init__(
        self, replica: ReplicaId, incarnation: Incarnation, generator: object, every_s: float,
        running: Callable[[], int], emit: Callable[[CacheMeasured], None],
    ) -> None:  # fmt: skip
        self._who: dict[str, Any] = {"kind": "replica", "index": replica, "incarnation": incarnation}
        self._source = generator if every_s and isinstance(generator, MeasuresCache) else None
        self._every_s = every_s
        self._running = running
        self._emit = emit
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Call when a group starts."""
        if self._timer is None and self._source is not None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._report)

    def close(self) -> None:
        """Stop reporting."""
        self._source = None
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        self._timer = None
        try:
            used = contained(self._used)
        except Exception:
            log.exception(
                "replica %d no longer reports its KV cache: correct cache_used() of its generator", self._who["index"]
            )
            self._source = None
            return
        self._emit(CacheMeasured(**self._who, used=used))
        if self._running():
            self.begin()

    def _used(self) -> float:
        assert self._source is not None  # `close` cancels the timer
        used = float(self._source.cache_used())
        if not 0.0 <= used <= 1.0:
            raise ValueError(f"cache_used() must return a share from 0 to 1, not {used}")
        return used
