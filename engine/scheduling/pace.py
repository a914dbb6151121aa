"""Slow replicas: who they are, and which of their groups continue elsewhere.

Called by `scheduler.py`, where `Limits.straggler_factor` is set. A replica's pace is what a token of the groups that it
generates takes, from the start of their attempt. One that is slower than the others by the factor keeps getting groups,
as it has slots; but once a faster one has nothing else to do, that takes over what will hold a step first. A move costs
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
"""Groups a replica must have generated in this life before its pace counts."""
WEIGHT = 0.2
"""Of the newest group in a replica's pace, which forgets older ones."""
Pace = tuple[float, ReplicaId]
"""Seconds that a token takes, and where."""
MOST_ID = 2**63
"""Above every id of a replica."""
NOBODY: Pace = (float("inf"), MOST_ID)
"""Above every pace."""


class PaceScheduling:
    """Measures replicas against one another, and moves groups from slow ones to idle fast ones."""

    def __init__(self, state: State, orders: Orders) -> None:
        self.state = state
        self.orders = orders
        self._paces: list[Pace] = []
        """Of the replicas whose pace counts, in order."""
        self._listed: dict[ReplicaId, Pace] = {}
        """The same by replica."""
        self._first_slow = NOBODY
        """The lowest pace that is slow."""
        self._scanned: tuple[int, Version] | None = None
        """When nothing that could be moved was left: see `Fleet.seats_on_slow`; and the newest idle version."""

    def generated(self, group: Group, replica: Replica) -> None:
        """To be told of a group before it leaves its slot."""
        tokens = group.tokens - group.seated_tokens
        if tokens <= 0:
            return
        pace = (self.state.now - group.seated_at) / tokens
        replica.pace = pace if not replica.paced else (1 - WEIGHT) * replica.pace + WEIGHT * pace
        replica.paced += 1
        self._judge()

    def _judge(self) -> None:
        """Which replicas are slower than the median of all the others allows. Paces are kept in their order, so that
        only replicas that changed, and those that the median has passed, are looked at."""
        state, paces = self.state, self._paces
        changed = state.census.take_unjudged()
        for replica in changed:
            self._list(replica)
        before, first = self._first_slow, self._find_first_slow()
        self._first_slow = paces[first] if first < len(paces) else NOBODY
        for replica in changed:
            known = self._listed.get(replica.id)
            state.fleet.mark_slow(replica, known is not None and known >= self._first_slow)
        passed = sorted((bisect_left(paces, before), first))
        for pace in paces[slice(*passed)]:
            state.fleet.mark_slow(state.fleet.replicas[pace[1]], pace >= self._first_slow)

    def _list(self, replica: Replica) -> None:
        """Put the pace of a replica in its place among the others, if it counts."""
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
        """From which place on replicas are slow. For those above the middle the median of all the others is the same;
        the one in the middle has its own, and none below it can be slow."""
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
        """Where a fast replica has slots that nothing else wants: park what a slow one has, the earliest deadline
        first. It resumes on the fast one, as the least loaded that is not the one it comes from."""
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
            return  # whatever can be moved is on its way
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
