"""The replicas of a run, and the slots that groups can take on them.

Dispatch policies ask `FreeSlots` once for each start. It is made from the replicas in each tick that starts groups;
everything else visits the replicas when it is asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import itemgetter

from engine.ids import NO_VERSION, GroupId, ReplicaId, Version
from engine.states.groups import Groups
from engine.states.orders import Order, OrderBook
from engine.states.replica import Replica

SAMPLES = 4
"""Groups that a replica must have generated in this life before its pace counts."""


@dataclass(eq=False, slots=True)
class OpenReplica:
    """A replica that can take a group."""

    replica: Replica
    free: int
    """Slots that groups can take."""
    needed: int
    """Trajectories that have a place on it, those of validations included."""

    @property
    def load(self) -> float:
        """The share of its places that are needed."""
        return self.needed / (self.replica.slots * self.replica.samples)


class FreeSlots:
    """The replicas that can take a group, by version and load. `take` is called for each start."""

    def __init__(self, replicas: Iterable[OpenReplica]) -> None:
        self._open = {one.replica.id: one for one in replicas}
        self._heaps: dict[Version, list[tuple[float, ReplicaId]]] = {}
        """(load, replica) of each, by version."""
        for id, one in self._open.items():
            self._heaps.setdefault(one.replica.version, []).append((one.load, id))
        for heap in self._heaps.values():
            heapify(heap)

    def take(self, replica: Replica) -> None:
        """A group starts on a replica."""
        one, heap = self._open[replica.id], self._heaps[replica.version]
        if heap[0][1] == replica.id:
            heappop(heap)
        else:
            heap.remove((one.load, replica.id))
            heapify(heap)
        one.free -= 1
        one.needed += replica.samples
        if one.free:
            heappush(heap, (one.load, replica.id))
            return
        del self._open[replica.id]
        if not heap:
            del self._heaps[replica.version]

    def version_of(self, id: ReplicaId) -> Version:
        """The version of a replica that can take a group; `NO_VERSION` for any other."""
        one = self._open.get(id)
        return NO_VERSION if one is None else one.replica.version

    @property
    def newest_version(self) -> Version:
        """Newest version among replicas that can take a group; `NO_VERSION` if none can."""
        return max(self._heaps, default=NO_VERSION)

    def least_loaded(self, oldest: Version = 0, avoid: ReplicaId = -1) -> ReplicaId | None:
        """The replica with the smallest share of busy slots (then the smallest id) among those at version `oldest` or
        newer; `avoid` only if no other will do."""
        found = [self._best(version, avoid) for version in self._heaps if version >= oldest]
        return min(found)[2] if found else None

    def newest(self, oldest: Version = 0, avoid: ReplicaId = -1) -> ReplicaId | None:
        """The replica with the newest weights, then the least loaded, among those at version `oldest` or newer;
        `avoid` only if no other will do."""
        newest_first = sorted((version for version in self._heaps if version >= oldest), reverse=True)
        found = [self._best(version, avoid) for version in newest_first]
        return min(found, key=itemgetter(0))[2] if found else None

    def _best(self, version: Version, avoid: ReplicaId) -> tuple[bool, float, ReplicaId]:
        """The least loaded replica at a version, as (whether it is the one to avoid, its load, its id). The two
        smallest entries of a heap are among its first three."""
        return min([(id == avoid, load, id) for load, id in self._heaps[version][:3]])


class Replicas:
    """Every replica ever seen. What runs on each is in the order book."""

    def __init__(self, by_id: dict[ReplicaId, Replica], orders: OrderBook, groups: Groups) -> None:
        self.by_id = by_id
        """All replicas, lost ones included."""
        self._orders, self._rows, self._groups = orders, orders.open["rows"], groups
        self.starting: FreeSlots | None = None
        """The slots that are left while groups start in a tick; None otherwise."""

    @property
    def free_slots(self) -> FreeSlots:
        """The slots that groups can take now."""
        return FreeSlots(self._open_to_groups()) if self.starting is None else self.starting

    def start_on(self) -> FreeSlots:
        """The slots that groups can take, made once for all starts of a tick."""
        self.starting = self.free_slots
        return self.starting

    def _open_to_groups(self) -> list[OpenReplica]:
        """The replicas that can take a group, in the order of `by_id`."""
        found, ended = [], self._groups.ended
        for replica in list(self.by_id.values()):  # other threads may ask
            if replica.state == "ready":
                used, finished = len(self.running(replica)) + self.taken(replica), ended[replica.id]
                free = self._free(replica, used - finished // replica.samples)
                if free:
                    found.append(OpenReplica(replica, free, used * replica.samples - finished))
        return found

    @property
    def freed(self) -> int:
        """Slots that running groups no longer need: one for each `samples` trajectories that have ended on a
        replica."""
        return sum([count // self.by_id[id].samples for id, count in list(self._groups.ended.items())])

    def is_unrewarded(self, id: GroupId) -> bool:
        """Whether the trajectories of a running group have all ended, but not their rewards."""
        group, replica = self._groups.live.get(id), self.of_group(id)
        return group is not None and replica is not None and group.finished == replica.samples

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
        running = list(self.running(replica))
        groups = [group for id in running if (group := self._groups.live.get(id)) is not None]
        return len(running) - sum(group.finished for group in groups) // replica.samples

    def measuring(self, replica: Replica) -> int:
        """Slots in which it measures a chunk of a validation."""
        return len(self._orders.of(replica.id, "rows")) if self._rows else 0

    def taken(self, replica: Replica) -> int:
        """Slots that groups cannot have: all slots of a validator, and those that a validation takes."""
        return replica.slots if replica.validator else self.measuring(replica)

    def for_groups(self, replica: Replica) -> int:
        """Free slots that groups may have under the limit of the concurrency policy."""
        return self._free(replica, self.taken(replica) + self.occupied(replica))

    def _free(self, replica: Replica, used: int) -> int:
        """What is left of the slots that groups may have, if `used` of them are in use."""
        free = (replica.slots if replica.slots < replica.limit else replica.limit) - used
        return free if free > 0 else 0

    def is_limited(self, replica: Replica) -> bool:
        """Whether a replica has free slots, but the concurrency policy allows it no more groups."""
        return replica.state == "ready" and self.for_chunks(replica) > 0 and not self.for_groups(replica)

    def for_chunks(self, replica: Replica) -> int:
        """Slots that neither a group nor a chunk of a validation needs."""
        return replica.slots - self.measuring(replica) - self.occupied(replica)

    def room_beside(self, slow: Sequence[Replica]) -> tuple[Version, int]:
        """The newest version, and the number of free slots, of the replicas that can take a group and are not
        `slow`."""
        beside = [one for one in self._open_to_groups() if one.replica not in slow]
        return max((one.replica.version for one in beside), default=NO_VERSION), sum(one.free for one in beside)

    def slow(self, factor: float | None) -> list[Replica]:
        """Replicas that take more than `factor` times as long for a token as the median of the others, in the order of
        their ids. Looks at these replicas only: a faster one has a higher median of others."""
        if factor is None:
            return []
        paces = sorted(
            (replica.pace, replica.id)
            for replica in list(self.by_id.values())  # other threads may ask
            if replica.paced >= SAMPLES and replica.state != "down"
        )
        found: list[ReplicaId] = []
        for place in reversed(range(len(paces) if len(paces) > 1 else 0)):
            pace, id = paces[place]
            if pace <= factor * _median_of_others(paces, place):
                break
            found.append(id)
        return [self.by_id[id] for id in sorted(found)]


def _median_of_others(paces: Sequence[tuple[float, ReplicaId]], place: int) -> float:
    """The median of ascending paces, without the one at a place."""
    others = len(paces) - 1
    low, high = (middle + (middle >= place) for middle in ((others - 1) // 2, others // 2))
    return (paces[low][0] + paces[high][0]) / 2
