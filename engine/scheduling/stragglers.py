"""Slow replicas: who they are, and which of their groups continue elsewhere.

Called by `scheduler.py` if `Limits.straggler_factor` is set. A replica's pace is the seconds per token of the groups it
generates, from the start of their attempts. A replica slower than the others by the factor still gets groups while it
has slots. But once a faster replica is idle, it takes over the slow one's groups, earliest deadline first. A move costs
no attempt; the group continues from its prefixes.
"""

from bisect import bisect_left, bisect_right, insort

from engine.commands import ParkGroup
from engine.ids import ReplicaId, Version
from engine.scheduling.issued_commands import Orders
from engine.states.group import Group
from engine.states.replica import Replica
from engine.states.state import State

SAMPLES = 4
"""Groups that a replica must have generated in this incarnation before its pace counts."""
WEIGHT = 0.2
"""Weight of the newest group in a replica's pace, a moving average."""
Pace = tuple[float, ReplicaId]
"""(seconds per token, replica)."""
MOST_ID = 2**63
"""Above every id of a replica."""
NO_PACE: Pace = (float("inf"), MOST_ID)
"""Above every pace."""


class PaceScheduling:
    """Compares the paces of replicas, and moves groups from slow ones to idle fast ones."""

    def __init__(self, state: State, orders: Orders) -> None:
        self.state = state
        self.orders = orders
        self._paces: list[Pace] = []
        """Paces of the replicas whose pace counts, ascending."""
        self._listed: dict[ReplicaId, Pace] = {}
        """The same by replica."""
        self._first_slow = NO_PACE
        """The lowest pace that is slow."""
        self._scanned: tuple[int, Version] | None = None
        """`Fleet.seats_on_slow` and the newest idle version when no group was left to move."""

    def measure(self, group: Group, replica: Replica) -> None:
        """Measure a finished group. Called before it leaves its slot."""
        tokens = group.tokens - group.seated_tokens
        if tokens <= 0:
            return
        pace = (self.state.now - group.seated_at) / tokens
        replica.pace = pace if not replica.paced else (1 - WEIGHT) * replica.pace + WEIGHT * pace
        replica.paced += 1
        self._judge()

    def _judge(self) -> None:
        """Mark replicas that are slower than the factor times the median of the others. The paces are sorted, so this
        visits only replicas that changed and those between the old and the new threshold."""
        state, paces = self.state, self._paces
        changed = state.census.take_unjudged()
        for replica in changed:
            self._list(replica)
        before, first = self._first_slow, self._find_first_slow()
        self._first_slow = paces[first] if first < len(paces) else NO_PACE
        for replica in changed:
            known = self._listed.get(replica.id)
            state.fleet.mark_slow(replica, known is not None and known >= self._first_slow)
        passed = sorted((bisect_left(paces, before), first))
        for pace in paces[slice(*passed)]:
            state.fleet.mark_slow(state.fleet.replicas[pace[1]], pace >= self._first_slow)

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
        factor, paces, others = self.state.limits.straggler_factor, self._paces, len(self._paces) - 1
        if factor is None or others < 1:
            return len(paces)
        middle = others // 2
        if others % 2:
            return bisect_right(paces, (factor * paces[middle][0], MOST_ID))
        below, here, above = (pace for pace, _ in paces[middle - 1 : middle + 2])
        if here > factor * ((below + above) / 2):
            return middle
        return max(middle + 1, bisect_right(paces, (factor * ((below + here) / 2), MOST_ID)))

    def advance(self) -> None:
        """If a fast replica has slots that nothing else needs, park groups of slow replicas, earliest deadline first.
        They resume on a fast replica, because dispatch avoids the replica they come from."""
        state = self.state
        wanted = state.waiting and state.capacity
        if wanted or state.draining or state.limits.straggler_factor is None:
            return
        fleet = state.fleet
        parking = state.orders.open("park")
        free = fleet.idle_slots - state.ledger.parked - len(parking)
        if free <= 0:
            return
        newest = max(fleet.idle_at)
        if self._scanned == (fleet.seats_on_slow, newest):
            return  # every group that can be moved is being moved
        slow = [replica for id in fleet.slow if (replica := fleet.replicas[id]).state == "ready"]
        groups = [state.groups[id] for r in slow if not r.process.leaves for id in r.groups]
        movable = [g for g in groups if g.id not in parking and not g.moved and g.resumes_from <= newest]
        if len(movable) <= free:
            self._scanned = (fleet.seats_on_slow, newest)
        for group in sorted(movable, key=lambda g: (g.deadline, g.id))[:free]:
            replica = fleet.replicas[group.replica]
            self.orders.add(
                ParkGroup(group=group.id, attempt=group.attempt, replica=replica.id, incarnation=replica.incarnation,
                          cause=self.orders.cause)
            )  # fmt: skip
