"""Reports that a run has not changed for long, and what it waits for.

The scheduler actor calls `look` at the times that it asks for: one timer, so an event costs nothing here. It reports
after `after_s` seconds, then after twice as many, and so on.
"""

import logging

from engine.metrics.collector import RunMetrics
from engine.states.waiting import waits

log = logging.getLogger(__name__)

SHOWN = 8
"""Number of waits in a report, the most important first."""


class Silence:
    """Watches for silence. `after_s`: seconds without a change before the first report."""

    def __init__(self, metrics: RunMetrics, after_s: float) -> None:
        self._metrics = metrics
        self._after_s = after_s
        self._patience_s = self._interval_s = after_s
        self._seen = metrics.changes
        self._since = metrics.at
        """Time of the newest event that changed something, seconds since the run began."""

    def look(self, now: float) -> float:
        """Report a silence if it is due. Returns the seconds until the next call."""
        metrics = self._metrics
        if metrics.changes != self._seen:
            self._seen, self._since = metrics.changes, metrics.at
            self._patience_s = self._interval_s = self._after_s
        silent = now - self._since
        if silent < self._patience_s:
            return self._patience_s - silent
        found = [wait.sentence(now) for wait in waits(metrics.state, metrics.since)]
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        told = "; ".join(found[:SHOWN]) + more or "nothing: no order is open"
        text = f"nothing has changed for {silent:.0f} s; waited for is {told}"
        log.warning(text)
        metrics.silence = (metrics.changes, text)
        self._interval_s *= 2
        self._patience_s = silent + self._interval_s
        return self._interval_s
