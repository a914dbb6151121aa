"""The replicas and who of them is least loaded.

Kept by `states/state.py`; asked by dispatch policies once per start. Replicas that can take a group lie in one heap for
each weights version, of (load, id); outdated entries are skipped when they surface, so that a change costs O(log
replicas). Versions that such replicas have are few: replicas follow the newest.
"""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from operator import itemgetter

from engine.ids import ReplicaId, Version
from engine.states.replica import Replica


def load_of(replica: Replica) -> float:
    """Share of its slots that a validation has or the trajectories of its groups need."""
    samples = replica.samples
    return ((len(replica.groups) + replica.taken) * samples - replica.finished) / (replica.slots * samples)


class _Open:
    """The replicas at one version that can take a group."""

    __slots__ = ("heap", "replicas")

    def __init__(self) -> None:
        self.heap: list[tuple[float, ReplicaId]] = []
        self.replicas: dict[ReplicaId, None] = {}


class Fleet:
    """Every replica ever seen, lost ones included."""

    replicas: dict[ReplicaId, Replica]

    def __init__(self, note: Callable[[], None]) -> None:
        """`note` is called after every change of a replica or its process."""
        self._note = note
        self.replicas = {}
        self.order: list[ReplicaId] = []
        """Ids in the order first seen: a replica's `place` is its index here."""
        self.touched: dict[ReplicaId, None] = {}
        """Replicas of which a field changed since `Census` last looked."""
        self.room: dict[ReplicaId, None] = {}
        """Replicas that a validation holds and that may have a free slot for it."""
        self.freed = 0
        """Slots that running groups do not need any more: `samples` of their trajectories have ended for each."""
        self.idle_slots = 0
        """Free slots of replicas that can take a group, are not slow and do not leave."""
        self.idle_at: dict[Version, int] = {}
        """How many such replicas there are at each version."""
        self.slow: dict[ReplicaId, None] = {}
        """Replicas that are slower than the others by more than may be."""
        self.seats_on_slow = 0
        """Counts what may have given a slow replica a group that can be moved."""
        self._idle: dict[ReplicaId, tuple[Version, int]] = {}
        self._open: dict[Version, _Open] = {}
        self._open_at: dict[ReplicaId, Version] = {}

    def add(self, id: ReplicaId, *, validator: bool) -> Replica:
        """A replica that was never seen before."""
        replica = self.replicas[id] = Replica(id, validator=validator)
        replica.process.index = id
        self._watch(replica)
        return replica

    def _watch(self, replica: Replica) -> None:
        """Give a replica its place, and note every change of it from now on."""
        replica.place = len(self.order)
        self.order.append(replica.id)
        replica.watch(partial(self._changed, replica.id))
        self.touched[replica.id] = None

    def _changed(self, id: ReplicaId) -> None:
        self.touched[id] = None
        self._note()

    def changed(self, replica: Replica) -> None:
        """To be called after every change of a replica's state or load."""
        id, version = replica.id, replica.version
        free = replica.free_slots if replica.state == "ready" else 0
        before = self._open_at.get(id)
        if free > 0:
            if before != version:
                self._close(id, before)
                self._open.setdefault(version, _Open()).replicas[id] = None
                self._open_at[id] = version
            at = self._open[version]
            heappush(at.heap, (load_of(replica), id))
            if len(at.heap) > 64 + 8 * len(at.replicas):
                at.heap = sorted((load_of(self.replicas[one]), one) for one in at.replicas)
        elif before is not None:
            self._close(id, before)
        if replica.held >= 0:
            self.room[id] = None
        self._count_freed(replica)
        self._count_idle(replica, free)

    def mark_slow(self, replica: Replica, slow: bool) -> None:
        """A replica is slower than the others by more than may be, or is not any more."""
        if replica.slow == slow:
            return
        replica.slow = slow
        if slow:
            self.slow[replica.id] = None
        else:
            del self.slow[replica.id]
        self.seats_on_slow += 1
        self.changed(replica)

    def leave_changed(self, replica: Replica) -> None:
        """To be called after a replica was told to leave, or to stay."""
        self.seats_on_slow += replica.slow
        self.changed(replica)

    def _close(self, id: ReplicaId, version: Version | None) -> None:
        """A replica cannot take a group any more, at that version."""
        if version is None:
            return
        at = self._open[version]
        del at.replicas[id], self._open_at[id]
        if not at.replicas:
            del self._open[version]

    def _count_freed(self, replica: Replica) -> None:
        freed = replica.finished // replica.samples
        self.freed += freed - replica.freed
        replica.freed = freed

    def _count_idle(self, replica: Replica, free: int) -> None:
        idle = free if not replica.slow and not replica.process.leaves else 0
        version, before = self._idle.get(replica.id, (-1, 0))
        if idle == before and version == replica.version:
            return
        self.idle_slots += idle - before
        if before:
            self.idle_at[version] -= 1
            if not self.idle_at[version]:
                del self.idle_at[version]
        if idle:
            self.idle_at[replica.version] = self.idle_at.get(replica.version, 0) + 1
        self._idle[replica.id] = (replica.version, idle)

    def rebuild(self) -> None:
        """Make everything that follows from the replicas anew."""
        self.idle_slots = self.freed = 0
        books = (self.room, self.slow, self.idle_at, self._idle, self._open, self._open_at)
        for book in (self.order, *books):
            book.clear()
        for replica in self.replicas.values():
            self._watch(replica)
            replica.freed = 0
            if replica.slow:
                self.slow[replica.id] = None
            self.changed(replica)

    def open(self) -> list[Replica]:
        """Replicas that can take a group now, in the order they first joined."""
        return [r for r in self.replicas.values() if r.state == "ready" and r.free_slots > 0]

    def least_loaded(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the smallest share of busy slots (then the smallest id) among those at version `oldest` or
        newer; `avoid` only if no other will do."""
        found = [self._best(at, avoid) for version, at in self._open.items() if version >= oldest]
        return self.replicas[min(found)[2]] if found else None

    def newest(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the newest weights, then the least loaded, among those at version `oldest` or newer;
        `avoid` only if no other will do."""
        versions = sorted((version for version in self._open if version >= oldest), reverse=True)
        found = [self._best(self._open[version], avoid) for version in versions]
        return self.replicas[min(found, key=itemgetter(0))[2]] if found else None

    def _best(self, at: _Open, avoid: ReplicaId) -> tuple[bool, float, ReplicaId]:
        """The least loaded replica at one version, as (whether it is the one to avoid, its load, its id)."""
        heap, avoided = at.heap, None
        while heap:
            load, id = heap[0]
            if id not in at.replicas or load_of(self.replicas[id]) != load:
                heappop(heap)
            elif id == avoid:
                avoided = heappop(heap)
            else:
                break
        best = (False, *heap[0]) if heap else None
        if avoided is not None:
            heappush(heap, avoided)
        if best is None:
            assert avoided is not None  # whoever can take a group is in the heap
            best = (True, *avoided)
        return best

    def rollouts(self) -> list[Replica]:
        """Replicas that groups run on, lost ones included: all but those that only validate."""
        return [r for r in self.replicas.values() if not r.validator]

    @property
    def alive(self) -> int:
        return sum(1 for r in self.replicas.values() if r.state != "down" and not r.validator)

    def newest_open_version(self) -> Version:
        """Newest version among replicas that can take a group; -1 when none can."""
        return max(self._open, default=-1)
