"""The replicas and who of them is least loaded.

Kept by `states/state.py`; asked by dispatch policies once per start. The heap holds (load, id) of replicas that can
take a group; outdated entries are skipped when they surface, so that a change costs O(log replicas).
"""

from heapq import heappop, heappush

from engine.ids import ReplicaId, Version
from engine.states.replica import Replica


def load_of(replica: Replica) -> float:
    """Share of its slots that groups or a validation have."""
    return (len(replica.groups) + replica.taken) / replica.slots


class Fleet:
    """Every replica ever seen, lost ones included."""

    __slots__ = ("_heap", "replicas")

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, Replica] = {}
        self._heap: list[tuple[float, ReplicaId]] = []

    def changed(self, replica: Replica) -> None:
        """To be called after every change of a replica's state or load."""
        busy = len(replica.groups) + replica.taken
        if replica.state == "ready" and busy < replica.slots:
            heappush(self._heap, (busy / replica.slots, replica.id))
            if len(self._heap) > 64 + 8 * len(self.replicas):
                self.rebuild()

    def rebuild(self) -> None:
        """Make the heap anew from the replicas as they are."""
        self._heap = sorted({(load_of(r), r.id) for r in self.open()})

    def open(self) -> list[Replica]:
        """Replicas that can take a group now, in the order they first joined."""
        return [r for r in self.replicas.values() if r.state == "ready" and len(r.groups) + r.taken < r.slots]

    def least_loaded(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the smallest share of busy slots (then the smallest id) among those at version `oldest` or
        newer; `avoid` only if no other will do."""
        heap = self._heap
        while heap:
            load, id = heap[0]
            replica = self.replicas[id]
            if replica.state == "ready" and (len(replica.groups) + replica.taken) / replica.slots == load < 1:
                if replica.version >= oldest and id != avoid:
                    return replica
                fit = [r for r in self.open() if r.version >= oldest]
                return min(fit, key=lambda r: (r.id == avoid, load_of(r), r.id)) if fit else None
            heappop(heap)
        return None

    def rollouts(self) -> list[Replica]:
        """Replicas that groups run on, lost ones included: all but those that only validate."""
        return [r for r in self.replicas.values() if not r.validator]

    @property
    def alive(self) -> int:
        return sum(1 for r in self.replicas.values() if r.state != "lost" and not r.validator)

    def newest_open_version(self) -> Version:
        """Newest version among replicas that can take a group; -1 when none can."""
        return max((r.version for r in self.open()), default=-1)
