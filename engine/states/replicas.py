"""The replicas of a run: the registry of all, and the index of those that can take a group.

Dispatch policies ask the index once for each start. Everything else visits the replicas, at most once in each tick.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from engine.ids import NO_VERSION, GroupId, ReplicaId, Version
from engine.states.orders import Order, OrderBook
from engine.states.paces import Paces
from engine.states.replica import Replica


class _SameVersion:
    """The replicas with a free slot at one version."""

    __slots__ = ("heap", "replicas")

    def __init__(self) -> None:
        self.heap: list[tuple[float, ReplicaId]] = []
        """(load, id) at every change; outdated entries are skipped."""
        self.replicas: dict[ReplicaId, None] = {}


class Contribution(NamedTuple):
    """What one replica adds to the figures of all."""

    open_at: Version = NO_VERSION
    """Its version, if it can take a group."""
    load: float = 0.0
    """Share of its slots that a validation takes or the trajectories of its groups need, if it can take a group."""
    idle: int = 0
    """Free slots, if it is not slow and does not leave."""
    freed: int = 0
    movable: int = 0
    """Groups that may continue on another replica, because this one is slow."""
    slow: bool = False


NOTHING = Contribution()


class Replicas:
    """Every replica ever seen; those that can take a group, by version and load; and the sums of their slots.

    The indexes follow from the replicas and the open orders for groups and rows, which the book reports. Call `update`
    after every change of a replica's state, version, slots or limit, and when it leaves. A call costs O(log replicas).
    """

    by_id: dict[ReplicaId, Replica]
    """All replicas, lost ones included."""
    launched: int = 0
    launching: int = 0
    """Number of replicas that are wanted. Those with ids below `launched` were started if they were gone."""

    def __init__(self, orders: OrderBook, straggler_factor: float | None) -> None:
        self._orders, self._rows = orders, orders.open("rows")
        self.by_id = {}
        self.rebuild(straggler_factor)

    def rebuild(self, straggler_factor: float | None) -> None:
        """Make the indexes from the replicas and the orders."""
        self.paces = Paces(self.by_id, straggler_factor)
        self.freed = 0
        """Slots that running groups no longer need: one for each `samples` trajectories that have ended."""
        self.idle = 0
        """Free slots of replicas that can take a group, are not slow and do not leave."""
        self.seats_on_slow = 0
        """Counts changes after which a slow replica had more groups that may continue on another."""
        self.unrewarded: dict[GroupId, None] = {}
        """Running groups whose trajectories have all ended, but not their rewards. A dict for its order."""
        self._finished: dict[ReplicaId, int] = {}
        """By replica: ended trajectories of the groups that run on it. Each `samples` of them free a slot."""
        self._known: dict[ReplicaId, Contribution] = {}
        self._at: dict[Version, _SameVersion] = {}
        for replica in self.by_id.values():
            for id, order in self.running(replica).items():
                self._finished[replica.id] = self._finished.get(replica.id, 0) + order.finished
                if order.finished == replica.samples:
                    self.unrewarded[id] = None
            self.update(replica)
        self.compare_paces(*self.by_id.values())

    def note_order(self, order: Order, more: int) -> None:
        """An order for a group or rows has opened or closed, or `more` trajectories of a group have ended."""
        replica = self.by_id[int(order.owner)]
        if more:
            self._finished[replica.id] = self._finished.get(replica.id, 0) + more
            if more > 0 and order.finished == replica.samples:
                self.unrewarded[order.id] = None
            elif more < 0:
                self.unrewarded.pop(order.id, None)
        self.update(replica)

    def update(self, replica: Replica) -> None:
        """Update the indexes after a change of a replica."""
        id, samples, ready = replica.id, replica.samples, replica.state == "ready"
        before = self._known.get(id, NOTHING)
        running, taken, finished = len(self.running(replica)), self.taken(replica), self._finished.get(id, 0)
        freed = finished // samples
        free = self._free_slots(replica, taken + running - freed) if ready else 0
        leaves, slow = replica.process.leaves, before.slow
        now = self._known[id] = Contribution(
            replica.version if free else NO_VERSION,
            ((running + taken) * samples - finished) / (replica.slots * samples) if free else 0.0,
            0 if slow or leaves else free,
            freed,
            running if slow and ready and not leaves else 0,
            slow,
        )
        if now.open_at != before.open_at:
            self._close(id, before.open_at)
        if free:
            self._open(id, now)
        self.freed += now.freed - before.freed
        self.idle += now.idle - before.idle
        self.seats_on_slow += now.movable > before.movable

    def _open(self, id: ReplicaId, known: Contribution) -> None:
        """Note that a replica can take a group, and its load."""
        at = self._at.setdefault(known.open_at, _SameVersion())
        at.replicas[id] = None
        heappush(at.heap, (known.load, id))
        if len(at.heap) > 64 + 8 * len(at.replicas):
            at.heap = sorted((self._known[one].load, one) for one in at.replicas)

    def _close(self, id: ReplicaId, version: Version) -> None:
        """Take a replica out of those that can take a group at a version."""
        if version == NO_VERSION:
            return
        at = self._at[version]
        del at.replicas[id]
        if not at.replicas:
            del self._at[version]

    def compare_paces(self, *changed: Replica) -> None:
        """Determine anew which replicas are slow. Call it after a change of a pace, and after a loss."""
        for replica in self.paces.compare(changed):
            known, slow = self._known.get(replica.id, NOTHING), self.paces.is_slow(replica)
            if known.slow != slow:
                self._known[replica.id] = known._replace(slow=slow)
                self.update(replica)

    def use(self, straggler_factor: float | None) -> None:
        """Compare paces with another factor from now on."""
        self.paces.factor = straggler_factor
        self.compare_paces()

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
        return self._known.get(id, NOTHING).open_at

    @property
    def newest_version(self) -> Version:
        """Newest version among replicas that can take a group; `NO_VERSION` if none can."""
        return max(self._at, default=NO_VERSION)

    @property
    def newest_idle(self) -> Version:
        """Newest version among replicas with a free slot that are not slow and do not leave; `NO_VERSION` if there is
        none."""
        known, newest_first = self._known, sorted(self._at, reverse=True)
        return next((at for at in newest_first if any(known[id].idle for id in self._at[at].replicas)), NO_VERSION)

    def least_loaded(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the smallest share of busy slots (then the smallest id) among those at version `oldest` or
        newer; `avoid` only if no other will do."""
        found = [self._best(at, avoid) for version, at in self._at.items() if version >= oldest]
        return self.by_id[min(found)[2]] if found else None

    def newest(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the newest weights, then the least loaded, among those at version `oldest` or newer;
        `avoid` only if no other will do."""
        versions = sorted((version for version in self._at if version >= oldest), reverse=True)
        found = [self._best(self._at[version], avoid) for version in versions]
        return self.by_id[min(found, key=itemgetter(0))[2]] if found else None

    def _best(self, at: _SameVersion, avoid: ReplicaId) -> tuple[bool, float, ReplicaId]:
        """The least loaded replica at one version, as (whether it is the one to avoid, its load, its id)."""
        heap, avoided = at.heap, None
        while heap:
            load, id = heap[0]
            if id not in at.replicas or self._known[id].load != load:
                heappop(heap)
            elif id == avoid:
                avoided = heappop(heap)
            else:
                break
        best = (False, *heap[0]) if heap else None
        if avoided is not None:
            heappush(heap, avoided)
        if best is None:
            assert avoided is not None  # every replica that can take a group is in the heap
            best = (True, *avoided)
        return best

    def anew(self) -> "Replicas":
        """The same replicas with the indexes made anew, for comparison."""
        other = Replicas(self._orders, self.paces.factor)
        other.by_id = self.by_id
        other.rebuild(self.paces.factor)
        return other

    def figures(self) -> tuple[object, ...]:
        """Everything that the index of free slots knows, for comparison."""
        known = {id: one for id, one in self._known.items() if one != NOTHING}
        finished = {id: count for id, count in self._finished.items() if count}
        open_at = {version: set(at.replicas) for version, at in self._at.items()}
        return known, finished, set(self.unrewarded), open_at
