"""Which replicas are slow: an index of replicas by pace, used if `Limits.straggler_factor` is set.

A replica's pace is the seconds per token of the groups that it generates. `scheduling/stragglers.py` measures it, and
moves groups from slow replicas.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from engine.ids import ReplicaId
from engine.states.replica import Replica

SAMPLES = 4
"""Groups that a replica must have generated in this incarnation before its pace counts."""
Pace = tuple[float, ReplicaId]
"""(seconds per token, replica)."""
MOST_ID = 2**63
"""Above every id of a replica."""
NO_PACE: Pace = (float("inf"), MOST_ID)
"""Above every pace."""


class Paces:
    """Replicas by pace. Everything here follows from the replicas and the factor, so it is not in a snapshot."""

    def __init__(self, replicas: dict[ReplicaId, Replica], factor: float | None) -> None:
        self._replicas, self.factor = replicas, factor
        self._paces: list[Pace] = []
        """Paces of the replicas whose pace counts, ascending."""
        self._listed: dict[ReplicaId, Pace] = {}
        """The same by replica."""
        self._first_slow = NO_PACE
        """The lowest pace that is slow."""

    def compare(self, changed: Iterable[Replica]) -> list[Replica]:
        """Determine which replicas are slower than the factor times the median of the others, after a change of paces
        or of the factor. Returns those that may have become slow, or no longer be. The paces are sorted, so this visits
        only replicas that changed and those between the old and the new threshold."""
        paces, changed = self._paces, list(changed)
        for replica in changed:
            self._list(replica)
        before, first = self._first_slow, self._find_first_slow()
        self._first_slow = paces[first] if first < len(paces) else NO_PACE
        passed = sorted((bisect_left(paces, before), first))
        return [*changed, *(self._replicas[id] for _, id in paces[slice(*passed)])]

    def is_slow(self, replica: Replica) -> bool:
        """Whether a replica is slower than the factor times the median of the others."""
        known = self._listed.get(replica.id)
        return known is not None and known >= self._first_slow

    @property
    def slow(self) -> list[Replica]:
        """The slow replicas, by pace."""
        return [self._replicas[id] for _, id in self._paces[bisect_left(self._paces, self._first_slow) :]]

    def _list(self, replica: Replica) -> None:
        """Insert the pace of a replica into the sorted list, if it counts."""
        pace = (replica.pace, replica.id)
        counts = replica.state != "down" and replica.paced >= SAMPLES and not replica.validator
        known = self._listed.get(replica.id)
        if counts and known == pace:
            return
        if known is not None:
            del self._paces[bisect_left(self._paces, known)], self._listed[replica.id]
        if counts:
            insort(self._paces, pace)
            self._listed[replica.id] = pace

    def _find_first_slow(self) -> int:
        """Index of the first slow replica in the sorted list. All replicas above the middle have the same median of the
        others; the middle one has its own; none below it can be slow."""
        factor, paces, others = self.factor, self._paces, len(self._paces) - 1
        if factor is None or others < 1:
            return len(paces)
        middle = others // 2
        if others % 2:
            return bisect_right(paces, (factor * paces[middle][0], MOST_ID))
        below, here, above = (pace for pace, _ in paces[middle - 1 : middle + 2])
        if here > factor * ((below + above) / 2):
            return middle
        return max(middle + 1, bisect_right(paces, (factor * ((below + here) / 2), MOST_ID)))
