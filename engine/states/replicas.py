"""The replicas of a run: the registry of all, and the index of those that can take a group.

Dispatch policies ask the index once for each start. Everything else visits the replicas, at most once in each tick.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from engine.ids import NO_VERSION, GroupId, ReplicaId, Version
from engine.states.orders import Order, OrderBook
from engine.states.replica import Replica

SAMPLES = 4
"""Groups that a replica must have generated in this incarnation before its pace counts."""
CLOSED: tuple[Version, float] = (NO_VERSION, 0.0)
"""In the index: a replica that can take no group."""


class Replicas:
    """Every replica ever seen; those that can take a group, by version and load; and the slots that groups free early.

    The indexes follow from the replicas and the open orders for groups and rows, which the book reports. Call `update`
    after every change of a replica's state, version, slots or limit. A call costs O(log replicas).
    """

    by_id: dict[ReplicaId, Replica]
    """All replicas, lost ones included."""
    launched: int = 0
    launching: int = 0
    """Number of replicas that are wanted. Those with ids below `launched` were started if they were gone."""

    def __init__(self, orders: OrderBook) -> None:
        self._orders, self._rows = orders, orders.open("rows")
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
        self._open: dict[ReplicaId, tuple[Version, float]] = {}
        """By replica that can take a group: its version, and its load, the share of its slots that a validation takes
        or the trajectories of its groups need."""
        self._heaps: dict[Version, list[tuple[float, ReplicaId]]] = {}
        """By version of these replicas: (load, replica) at every change; outdated entries are skipped."""
        self._members: dict[Version, int] = {}
        """Number of these replicas, by version."""
        for replica in self.by_id.values():
            for order in self.running(replica).values():
                if order.finished:
                    self._count_finished(replica, order, order.finished)
            self.update(replica)

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
        """Update the index after a change of a replica."""
        id, samples, finished = replica.id, replica.samples, self._finished.get(replica.id, 0)
        used = len(self.running(replica)) + self.taken(replica)
        before = self._open.get(id, CLOSED)[0]
        free = replica.state == "ready" and self._free_slots(replica, used - finished // samples) > 0
        version = replica.version if free else NO_VERSION
        if version != before:
            self._move(before, version)
        if not free:
            self._open.pop(id, None)
            return
        load = (used * samples - finished) / (replica.slots * samples)
        self._open[id] = version, load
        heap = self._heaps[version]
        heappush(heap, (load, id))
        if len(heap) > 64 + 8 * len(self._open):
            heap[:] = sorted((load, one) for one, (at, load) in self._open.items() if at == version)

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
            if self._open.get(id) != (version, load):
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

    def idle(self, slow: Sequence[Replica]) -> list[Replica]:
        """Replicas that can take a group, are not `slow` and do not leave."""
        excluded = {replica.id for replica in slow}
        found = [self.by_id[id] for id in list(self._open) if id not in excluded]
        return [replica for replica in found if not replica.process.leaves]

    def slow(self, factor: float | None) -> list[Replica]:
        """Replicas that take more than `factor` times as long for a token as the median of the others, by pace."""
        if factor is None:
            return []
        paced = [
            replica for replica in list(self.by_id.values())
            if replica.paced >= SAMPLES and replica.state != "down" and not replica.validator
        ]  # fmt: skip
        if len(paced) < 2:
            return []
        paces = sorted([replica.pace for replica in paced])
        least = factor * paces[len(paces) // 2 - 1]  # no median of the others is below this pace
        return [one for one in paced if one.pace > least and one.pace > factor * _median_of_others(paces, one.pace)]

    def anew(self) -> "Replicas":
        """The same replicas with the indexes made anew, for comparison."""
        other = Replicas(self._orders)
        other.by_id = self.by_id
        other.rebuild()
        return other

    def figures(self) -> tuple[object, ...]:
        """Everything that the indexes know, for comparison."""
        finished = {id: count for id, count in self._finished.items() if count}
        return self._open, self._members, finished, self.freed, set(self.unrewarded)


def _median_of_others(paces: Sequence[float], pace: float) -> float:
    """The median of ascending paces, without one that is `pace`."""
    place, others = bisect_left(paces, pace), len(paces) - 1
    low, high = (middle + (middle >= place) for middle in ((others - 1) // 2, others // 2))
    return (paces[low] + paces[high]) / 2
