"""Figures of each replica: tokens, groups, pauses. `collector.RunMetrics` updates them in O(1) for each event and
command.

A replica keeps its figures when its process restarts, so the number of series is the number of replicas.
"""

from engine.commands import Command, PauseReplica, ResumeGroup, ResumeReplica
from engine.events import GroupAborted, GroupFailed, ProcessLost, SyncFailed, WeightsInstalled
from engine.ids import ReplicaId
from engine.metrics.histogram import Histogram
from engine.metrics.labels import REPLICA_GROUP_ENDS, SYNC_BUCKETS
from engine.states.limits import SYNC_MODES


class ReplicaFigures:
    """The figures of one replica over all its restarts."""

    __slots__ = ("ended", "pause_s", "resumed", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.resumed = 0
        self.ended = dict.fromkeys(REPLICA_GROUP_ENDS, 0)
        self.pause_s = dict.fromkeys(SYNC_MODES, 0.0)


class Replicas:
    """Figures by replica, and the duration of weight syncs."""

    def __init__(self) -> None:
        self.of: dict[ReplicaId, ReplicaFigures] = {}
        self.sync_s = {mode: Histogram(SYNC_BUCKETS) for mode in SYNC_MODES}
        self._pausing: dict[ReplicaId, tuple[float, str]] = {}

    def joined(self, replica: ReplicaId) -> None:
        """Add a replica, with all figures 0."""
        self._figures(replica)

    def generated(self, replica: ReplicaId, groups: int, tokens: int) -> None:
        figures = self._figures(replica)
        figures.tokens += tokens
        figures.ended["generated"] += groups

    def aborted(self, event: GroupAborted) -> None:
        self._figures(event.replica).ended["aborted"] += 1

    def failed(self, event: GroupFailed) -> None:
        self._figures(event.replica).ended["failed"] += 1

    def ordered(self, command: Command, at: float) -> None:
        """Note an order to a replica."""
        if type(command) is ResumeGroup:
            self._figures(command.replica).resumed += 1
        elif type(command) is ResumeReplica:
            self._pausing.pop(command.replica, None)  # it was paused for something else than weights
        elif type(command) is PauseReplica and command.mode != "sleep":  # the time asleep is in the idle slots' books
            self._pausing[command.replica] = (at, command.mode)

    def installed(self, event: WeightsInstalled) -> None:
        paused = self._unpause(event.replica, event.at)
        if paused is not None:
            mode, seconds = paused
            self.sync_s[mode].observe(seconds)

    def reverted(self, event: SyncFailed) -> None:
        self._unpause(event.replica, event.at)

    def lost(self, event: ProcessLost) -> None:
        self._pausing.pop(event.index, None)

    def _unpause(self, replica: ReplicaId, at: float) -> tuple[str, float] | None:
        began = self._pausing.pop(replica, None)
        if began is None:
            return None
        since, mode = began
        self._figures(replica).pause_s[mode] += at - since
        return mode, at - since

    def _figures(self, replica: ReplicaId) -> ReplicaFigures:
        figures = self.of.get(replica)
        if figures is None:
            figures = self.of[replica] = ReplicaFigures()
        return figures
