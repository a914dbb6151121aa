"""Reports how long the calls of the user's functions take, and how many groups wait for them, while groups wait.

The workers of replicas and of added states use it. It must never report while nothing is called, nor more often than
once in `LONGEST_S`, except at the beginning of a wait.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace

from engine.events import CallsMeasured
from engine.protocols import CallFigures, MeasuresCalls
from engine.record.codec import event_of
from engine.workers.threads import contained
from engine.workers.worker import Worker

log = logging.getLogger(__name__)

FIRST_S, LONGEST_S = 1.0, 10.0
"""Seconds from the first change until the first report. The intervals between later ones double up to the longest."""


class CallReports:
    """Reports the figures of those of `sources` that implement `protocols.MeasuresCalls`. Functions with one name count
    as one."""

    def __init__(self, worker: Worker, sources: Sequence[object]) -> None:
        self._worker = worker
        self._sources = [source for source in sources if isinstance(source, MeasuresCalls)]
        self._reported: dict[str, CallFigures] = {}
        self._interval_s = FIRST_S
        for source in self._sources:
            source.watch_calls(self._changed)

    def _changed(self) -> None:
        if self._sources:
            self._worker.reports.within(self._interval_s, self._report)

    def _report(self) -> None:
        try:
            reported = contained(self._report_changes)
        except Exception:
            log.exception("%s no longer reports its calls: correct call_figures() of its generator", self._worker.name)
            self._sources.clear()
            return
        self._interval_s = min(2 * self._interval_s, LONGEST_S) if reported else FIRST_S
        if reported:
            self._changed()

    def _report_changes(self) -> bool:
        """Report what has changed; whether anything has. Raises: `CodecError` for figures that are no such numbers."""
        reported, worker = False, self._worker
        who = {"kind": worker.kind, "index": worker.index, "life": worker.life}
        for figures in self._figures().values():
            before = self._reported.get(figures.function)
            calls, seconds, held_s = figures.calls, figures.seconds, figures.held_s
            if before is not None:
                calls, seconds, held_s = calls - before.calls, seconds - before.seconds, held_s - before.held_s
            if not (calls or figures.groups or (before is not None and before.groups)):
                continue
            reported = True
            self._reported[figures.function] = figures
            since = {"calls": calls, "seconds": seconds, "held_s": held_s}
            worker.peers.emit(event_of(CallsMeasured, who | asdict(figures) | since))
        return reported

    def _figures(self) -> dict[str, CallFigures]:
        found: dict[str, CallFigures] = {}
        for source in self._sources:
            for new in source.call_figures():
                old = found.get(new.function)
                found[new.function] = new if old is None else replace(
                    new, groups=old.groups + new.groups, queued=old.queued + new.queued,
                    at_once=max(old.at_once, new.at_once), calls=old.calls + new.calls,
                    seconds=old.seconds + new.seconds, running_s=max(old.running_s, new.running_s),
                    held_s=old.held_s + new.held_s,
                )  # fmt: skip
        return found
