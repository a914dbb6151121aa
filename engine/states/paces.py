"""Which replicas are slow: an index of replicas by pace, used if `Limits.straggler_factor` is set.

A replica's pace is the seconds per token of the groups that it generates. `scheduling/stragglers.py` measures it, and
moves groups from slow replicas.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable

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

    def __init__(self, replicas: dict[ReplicaId, Replica], factor: float | None, mark: Callable[[Replica, bool], None]):
        """`mark(replica, slow)` is called for each replica that may have become slow, or no longer be."""
        self._replicas, self._factor, self._mark = replicas, factor, mark
        self._paces: list[Pace] = []
        """Paces of the replicas whose pace counts, ascending."""
        self._listed: dict[ReplicaId, Pace] = {}
        """The same by replica."""
        self._first_slow = NO_PACE
        """The lowest pace that is slow."""
        self.compare(replicas.values())

    def use(self, factor: float | None) -> None:
        """Compare with another factor from now on."""
        self._factor = factor
        self.compare(())

    def compare(self, changed: Iterable[Replica]) -> None:
        """Mark replicas that are slower than the factor times the median of the others. Call it after a change of a
        pace, and after a loss. The paces are sorted, so this visits only replicas that changed and those between the
        old and the new threshold."""
        paces, changed = self._paces, list(changed)
        for replica in changed:
            self._list(replica)
        before, first = self._first_slow, self._find_first_slow()
        self._first_slow = paces[first] if first < len(paces) else NO_PACE
        for replica in changed:
            known = self._listed.get(replica.id)
            self._mark(replica, known is not None and known >= self._first_slow)
        passed = sorted((bisect_left(paces, before), first))
        for pace in paces[slice(*passed)]:
            self._mark(self._replicas[pace[1]], pace >= self._first_slow)

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
        factor, paces, others = self._factor, self._paces, len(self._paces) - 1
        if factor is None or others < 1:
            return len(paces)
        middle = others // 2
        if others % 2:
            return bisect_right(paces, (factor * paces[middle][0], MOST_ID))
        below, here, above = (pace for pace, _ in paces[middle - 1 : middle + 2])
        if here > factor * ((below + above) / 2):
            return middle
        return max(middle + 1, bisect_right(paces, (factor * ((below + here) / 2), MOST_ID)))
