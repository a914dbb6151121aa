"""The replicas of a run: the registry of all, and the indexes of those that can take a group, and of their paces.

Dispatch policies ask once for each start. What only groups cause asks the indexes; everything else visits the replicas,
at most once in each tick.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from engine.ids import NO_VERSION, GroupId, ReplicaId, Version
from engine.states.orders import Order, OrderBook
from engine.states.replica import Replica

SAMPLES = 4
"""Groups that a replica must have generated in this incarnation before its pace counts."""
CLOSED: tuple[Version, float, int] = (NO_VERSION, 0.0, 0)
"""In the index: a replica that can take no group."""


class Replicas:
    """Every replica ever seen; those that can take a group, by version and load; the slots that groups free early; and
    the replicas by pace.

    The indexes follow from the replicas and the open orders for groups and rows, which the book reports. Call `update`
    after every change of a replica's state, version, slots or limit, and `compare_pace` after one of its state or pace.
    A call costs O(log replicas).
    """

    by_id: dict[ReplicaId, Replica]
    """All replicas, lost ones included."""
    launched: int = 0
    launching: int = 0
    """Number of replicas that are wanted. Those with ids below `launched` were started if they were gone."""

    def __init__(self, orders: OrderBook) -> None:
        self._orders, self._rows = orders, orders.open["rows"]
        self.by_id = {}
        self.rebuild()

    def rebuild(self) -> None:
        """Make the indexes from the replicas and the orders."""
        self.freed = 0
        """Slots that running groups no longer need: one for each `samples` trajectories that have ended."""
        self.unrewarded: dict[GroupId, None] = {}
        """Running groups whose trajectories have all ended, but not their rewards. A dict for its order."""
        self._finished: dict[ReplicaId, int] = {}
        """By replica: ended trajectories of the groups that run on it. Each `samples` of them free a slot."""
        self._open: dict[ReplicaId, tuple[Version, float, int]] = {}
        """By replica that can take a group: its version; its load, the share of its slots that a validation takes or
        the trajectories of its groups need; and the number of its slots that are free for groups."""
        self.free_slots = 0
        """Slots of all these replicas that are free for groups."""
        self._heaps: dict[Version, list[tuple[float, ReplicaId]]] = {}
        """By version of these replicas: (load, replica) at every change; outdated entries are skipped."""
        self._members: dict[Version, int] = {}
        """Number of these replicas, by version."""
        self._paces: list[tuple[float, ReplicaId]] = []
        """The replicas whose pace counts, the fastest first."""
        self._paced: dict[ReplicaId, float] = {}
        """Their pace in this list."""
        for replica in self.by_id.values():
            for order in self.running(replica).values():
                if order.finished:
                    self._count_finished(replica, order, order.finished)
            self.update(replica)
            self.compare_pace(replica)

    def note_order(self, order: Order, more: int) -> None:
        """An order for a group or rows has opened or closed, or `more` trajectories of a group have ended."""
        replica = self.by_id[int(order.owner)]
        if more:
            self._count_finished(replica, order, more)
        self.update(replica)

    def _count_finished(self, replica: Replica, order: Order, more: int) -> None:
        before = self._finished.get(replica.id, 0)
        self._finished[replica.id] = before + more
        self.freed += (before + more) // replica.samples - before // replica.samples
        if more > 0 and order.finished == replica.samples:
            self.unrewarded[order.id] = None
        elif more < 0:
            self.unrewarded.pop(order.id, None)

    def update(self, replica: Replica) -> None:
        """Update the indexes of those that can take a group, after a change of a replica."""
        id, samples, finished = replica.id, replica.samples, self._finished.get(replica.id, 0)
        used = len(self.running(replica)) + self.taken(replica)
        before, _, free_before = self._open.get(id, CLOSED)
        free = self._free_slots(replica, used - finished // samples) if replica.state == "ready" else 0
        self.free_slots += free - free_before
        version = replica.version if free else NO_VERSION
        if version != before:
            self._move(before, version)
        if not free:
            self._open.pop(id, None)
            return
        load = (used * samples - finished) / (replica.slots * samples)
        self._open[id] = version, load, free
        heap = self._heaps[version]
        heappush(heap, (load, id))
        if len(heap) > 64 + 8 * len(self._open):
            heap[:] = sorted((load, one) for one, (at, load, _) in self._open.items() if at == version)

    def _move(self, before: Version, version: Version) -> None:
        """Count a replica that can take a group at another version than before. `NO_VERSION`: it could or can take
        none."""
        if version != NO_VERSION:
            self._members[version] = self._members.get(version, 0) + 1
            self._heaps.setdefault(version, [])
        if before != NO_VERSION:
            self._members[before] -= 1
            if not self._members[before]:
                del self._members[before], self._heaps[before]

    def compare_pace(self, replica: Replica) -> None:
        """Update the index of paces after a change of a replica's pace or state."""
        before = self._paced.pop(replica.id, None)
        if before is not None:
            del self._paces[bisect_left(self._paces, (before, replica.id))]
        if replica.paced >= SAMPLES and replica.state != "down":
            self._paced[replica.id] = replica.pace
            insort(self._paces, (replica.pace, replica.id))

    # reading

    @property
    def rollouts(self) -> list[Replica]:
        """Replicas for groups, lost ones included: all but those that only validate."""
        return [replica for replica in list(self.by_id.values()) if not replica.validator]

    def running(self, replica: Replica) -> Mapping[GroupId, Order]:
        """The orders for the groups that run on it, by group, oldest first."""
        return self._orders.of(replica.id, "group")

    def of_group(self, group: GroupId) -> Replica | None:
        """The replica that a group runs on."""
        order = self._orders.find("group", group)
        return None if order is None else self.by_id[int(order.owner)]

    def occupied(self, replica: Replica) -> int:
        """Slots that its groups need, by the number of their trajectories that have not ended."""
        return len(self.running(replica)) - self._finished.get(replica.id, 0) // replica.samples

    def measuring(self, replica: Replica) -> int:
        """Slots in which it measures a chunk of a validation."""
        return len(self._orders.of(replica.id, "rows")) if self._rows else 0

    def taken(self, replica: Replica) -> int:
        """Slots that groups cannot have: all slots of a validator, and those that a validation takes."""
        return replica.slots if replica.validator else self.measuring(replica)

    def for_groups(self, replica: Replica) -> int:
        """Free slots that groups may have under the limit of the concurrency policy."""
        return self._free_slots(replica, self.taken(replica) + self.occupied(replica))

    def _free_slots(self, replica: Replica, used: int) -> int:
        """What is left of the slots that groups may have, if `used` of them are in use."""
        free = (replica.slots if replica.slots < replica.limit else replica.limit) - used
        return free if free > 0 else 0

    def is_limited(self, replica: Replica) -> bool:
        """Whether a replica has free slots, but the concurrency policy allows it no more groups."""
        return replica.state == "ready" and self.for_chunks(replica) > 0 and not self.for_groups(replica)

    def for_chunks(self, replica: Replica) -> int:
        """Slots that neither a group nor a chunk of a validation needs."""
        return replica.slots - self.measuring(replica) - self.occupied(replica)

    def open_version(self, id: ReplicaId) -> Version:
        """The version of a replica that can take a group; `NO_VERSION` for any other."""
        return self._open.get(id, CLOSED)[0]

    @property
    def newest_version(self) -> Version:
        """Newest version among replicas that can take a group; `NO_VERSION` if none can."""
        return max(self._heaps, default=NO_VERSION)

    def least_loaded(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the smallest share of busy slots (then the smallest id) among those at version `oldest` or
        newer; `avoid` only if no other will do."""
        found = [self._best(version, avoid) for version in self._heaps if version >= oldest]
        return self.by_id[min(found)[2]] if found else None

    def newest(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the newest weights, then the least loaded, among those at version `oldest` or newer;
        `avoid` only if no other will do."""
        newest_first = sorted((version for version in self._heaps if version >= oldest), reverse=True)
        found = [self._best(version, avoid) for version in newest_first]
        return self.by_id[min(found, key=itemgetter(0))[2]] if found else None

    def _best(self, version: Version, avoid: ReplicaId) -> tuple[bool, float, ReplicaId]:
        """The least loaded replica that can take a group at a version, as (whether it is the one to avoid, its load,
        its id)."""
        heap, avoided = self._heaps[version], None
        while heap:
            load, id = heap[0]
            if self._open.get(id, CLOSED)[:2] != (version, load):
                heappop(heap)
            elif id == avoid:
                avoided = heappop(heap)
            else:
                break
        best = (False, *heap[0]) if heap else None
        if avoided is not None:
            heappush(heap, avoided)
            best = best or (True, *avoided)
        assert best is not None  # the heap has every replica that can take a group at the version
        return best

    def room_beside(self, slow: Sequence[Replica]) -> tuple[Version, int]:
        """The newest version, and the number of free slots, of the replicas that can take a group and are not
        `slow`."""
        own = [self._open.get(replica.id, CLOSED) for replica in slow]
        at = Counter(version for version, _, _ in own)
        versions = [version for version, members in list(self._members.items()) if members > at[version]]
        return max(versions, default=NO_VERSION), self.free_slots - sum(free for _, _, free in own)

    def slow(self, factor: float | None) -> list[Replica]:
        """Replicas that take more than `factor` times as long for a token as the median of the others, in the order of
        their ids. Visits these replicas only: a faster one has a higher median of others."""
        found: list[ReplicaId] = []
        paces = list(self._paces)  # other threads may ask
        if factor is None or len(paces) < 2:
            return []
        for place in reversed(range(len(paces))):
            pace, id = paces[place]
            if pace <= factor * _median_of_others(paces, place):
                break
            found.append(id)
        return [self.by_id[id] for id in sorted(found)]

    def anew(self) -> "Replicas":
        """The same replicas with the indexes made anew, for comparison."""
        other = Replicas(self._orders)
        other.by_id = self.by_id
        other.rebuild()
        return other

    def figures(self) -> tuple[object, ...]:
        """Everything that the indexes know, for comparison."""
        finished = {id: count for id, count in self._finished.items() if count}
        return self._open, self.free_slots, self._members, finished, self.freed, set(self.unrewarded), self._paces


def _median_of_others(paces: Sequence[tuple[float, ReplicaId]], place: int) -> float:
    """The median of ascending paces, without the one at a place."""
    others = len(paces) - 1
    low, high = (middle + (middle >= place) for middle in ((others - 1) // 2, others // 2))
    return (paces[low][0] + paces[high][0]) / 2
