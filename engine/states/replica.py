"""The replica: one rollout engine, its weights and its slots; and the index of replicas that can take a group.

Driven by `scheduling/weights.py` and `scheduling/groups.py`. `State.replicas` holds every replica ever seen. Dispatch
policies ask `FreeSlots` once for each start. Everything else visits the replicas, at most once in each tick.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, NamedTuple

from engine.ids import NO_VERSION, GroupId, Incarnation, ReplicaId, Version
from engine.states.group import Group
from engine.states.machine import Table, transitions
from engine.states.orders import OrderBook
from engine.states.process import REPLICA as REPLICA_KIND
from engine.states.process import Process

REPLICA = Table(
    name="replica",
    states=("down", "ready", "pausing", "installing", "yielding", "asleep", "draining", "drained"),
    transitions=transitions(
        ("join", "down", "ready", "its process is up, with the weights it says"),
        ("pause", "ready", "pausing", "a newer version is staged"),
        ("yield", "ready", "yielding", "a task of the trainer wants the pool it stands in"),
        ("sleep", "yielding", "asleep", "its groups are parked, its memory is given back"),
        ("wake", "asleep", "ready", "rollout has the pool again, and there are no newer weights"),
        ("install", "pausing asleep", "installing", "it samples no token: the swap is ordered"),
        ("installed", "installing", "ready", "it samples from the new version"),
        ("drain", "ready", "draining", "it leaves, or the run comes to rest: what runs there is parked"),
        ("drained", "draining", "drained", "nothing runs there"),
        ("keep", "drained", "ready", "it is wanted after all"),
        (
            "revert",
            "pausing installing yielding draining",
            "ready",
            "it failed: the replica keeps its old weights",
        ),
        (
            "lose",
            "ready pausing installing yielding asleep draining drained",
            "down",
            "its process ended, or is to end",
        ),
    ),
    terminal=(),
)


IN_SYNC = ("pausing", "installing")
GONE = ("down", "draining", "drained")
"""A replica in one of these states gets no weights and serves no validation, and training does not wait for it."""
AT_REST = ("drained", "asleep", "down")
"""Nothing runs on a replica in one of these states."""


@dataclass(eq=False, slots=True)
class Replica:
    """What the scheduler knows of one replica."""

    id: ReplicaId
    validator: bool = False
    """It does nothing but validate: no group ever runs on it."""
    process: Process = field(default_factory=lambda: Process(REPLICA_KIND))
    """Its lifetimes."""
    state: str = REPLICA.initial
    slots: int = 0
    samples: int = 1
    """Trajectories that a slot holds: those of one group."""
    finished: int = 0
    """Trajectories that have ended, of the groups that run here. Each `samples` of them free a slot."""
    version: Version = 0
    next_version: Version | None = None
    """The version that it is to install: in host memory, or being brought there while a `StageWeights` is open."""
    sync_attempt: int = 0
    """Syncs begun on this incarnation; its sync orders and their answers carry it."""
    sync_failures: int = 0
    exceeded: int = 0
    """How often orders about it exceeded their time limit since one was answered."""
    failed_groups: int = 0
    """Different groups in a row whose attempt failed here for infrastructure, none finished in between."""
    failed_group: GroupId = -1
    """The last of them."""
    pace: float = 0.0
    """Seconds that a token of the groups it generates takes, a moving mean; where paces are compared."""
    paced: int = 0
    """Groups in it, of this life."""
    slow: bool = False
    """It is slower than the others by more than may be."""
    groups: dict[GroupId, None] = field(default_factory=dict)
    """Running here, in the order they started; a dict for its order."""

    @property
    def incarnation(self) -> Incarnation:
        """Its newest life, which may not be up yet."""
        return self.process.incarnation

    @property
    def condition(self) -> str:
        """Its state; while it is down, the state of its process."""
        return self.process.state if self.state == "down" else self.state

    @property
    def lost(self) -> bool:
        """It is wanted, and down since a life of it ended by itself."""
        process = self.process
        return self.state == "down" and process.wanted and (process.state == "gone" or process.deaths > 0)

    @property
    def occupied(self) -> int:
        """Slots that its groups need, by the number of their trajectories that have not ended."""
        return len(self.groups) - self.finished // self.samples

    @property
    def heading(self) -> Version:
        """The newest version it has or is about to have."""
        return max(self.version, self.next_version or 0)

    def address(self) -> dict[str, int]:
        """What every order of a sync carries."""
        return {"replica": self.id, "incarnation": self.incarnation, "attempt": self.sync_attempt}

    def address_of(self, group: Group) -> dict[str, Any]:
        """What every order about a group on this replica carries."""
        return {"group": group.id, "attempt": group.attempt, "replica": self.id, "incarnation": self.incarnation}

    @property
    def present(self) -> bool:
        """It may serve a validation."""
        return self.state not in GONE and not self.process.leaves

    @property
    def coming(self) -> bool:
        """It is down, and its next life is on its way."""
        return self.state == "down" and self.process.coming


class _SameVersion:
    """The replicas with a free slot at one version."""

    __slots__ = ("heap", "replicas")

    def __init__(self) -> None:
        self.heap: list[tuple[float, ReplicaId]] = []
        """(load, id) at every change; outdated entries are skipped."""
        self.replicas: dict[ReplicaId, None] = {}


class Contribution(NamedTuple):
    """What one replica adds to the figures of `FreeSlots`."""

    open_at: Version = NO_VERSION
    """Its version, if it can take a group."""
    idle: int = 0
    """Free slots, if it is not slow and does not leave."""
    freed: int = 0
    movable: int = 0
    """Groups that may continue on another replica, because this one is slow."""


NOTHING = Contribution()


class FreeSlots:
    """The replicas that can take a group, by version and load, and the sums of their slots.

    Everything here follows from the replicas and the open orders to measure rows. Call `update` after every change of a
    replica's state, version, slots, groups or these orders, when it becomes slow or is no longer slow, and when it
    leaves. A call costs O(log replicas).
    """

    def __init__(self, replicas: dict[ReplicaId, Replica], orders: OrderBook) -> None:
        self._orders, self._rows = orders, orders.open("rows")
        self.rebuild(replicas)

    def rebuild(self, replicas: dict[ReplicaId, Replica]) -> None:
        """Make everything anew for these replicas."""
        self._replicas = replicas
        self.freed = 0
        """Slots that running groups do not need any more: `samples` of their trajectories have ended for each."""
        self.idle = 0
        """Free slots of replicas that can take a group, are not slow and do not leave."""
        self.idle_at: dict[Version, int] = {}
        """How many such replicas there are at each version."""
        self.seats_on_slow = 0
        """Counts changes after which a slow replica had more groups that may continue on another."""
        self._known: dict[ReplicaId, Contribution] = {}
        self._at: dict[Version, _SameVersion] = {}
        for replica in replicas.values():
            self.update(replica)

    def update(self, replica: Replica) -> None:
        """A replica has changed."""
        id, version = replica.id, replica.version
        free = self.for_groups(replica) if replica.state == "ready" else 0
        before = self._known.get(id, NOTHING)
        if free > 0:
            if before.open_at != version:
                self._close(id, before.open_at)
                self._at.setdefault(version, _SameVersion()).replicas[id] = None
            at = self._at[version]
            heappush(at.heap, (self._load(replica), id))
            if len(at.heap) > 64 + 8 * len(at.replicas):
                at.heap = sorted((self._load(self._replicas[one]), one) for one in at.replicas)
        else:
            self._close(id, before.open_at)
        leaves = replica.process.leaves
        now = self._known[id] = Contribution(
            version if free > 0 else NO_VERSION,
            0 if replica.slow or leaves else free,
            replica.finished // replica.samples,
            len(replica.groups) if replica.slow and replica.state == "ready" and not leaves else 0,
        )
        self.freed += now.freed - before.freed
        self.idle += now.idle - before.idle
        self.seats_on_slow += now.movable > before.movable
        if before.idle:
            self._count_idle_at(before.open_at, -1)
        if now.idle:
            self._count_idle_at(now.open_at, 1)

    def _count_idle_at(self, version: Version, more: int) -> None:
        count = self.idle_at.get(version, 0) + more
        if count:
            self.idle_at[version] = count
        else:
            del self.idle_at[version]

    def _close(self, id: ReplicaId, version: Version) -> None:
        """A replica cannot take a group any more, at that version."""
        if version == NO_VERSION:
            return
        at = self._at[version]
        del at.replicas[id]
        if not at.replicas:
            del self._at[version]

    def _load(self, replica: Replica) -> float:
        """Share of its slots that a validation takes or the trajectories of its groups need."""
        samples = replica.samples
        return ((len(replica.groups) + self.taken(replica)) * samples - replica.finished) / (replica.slots * samples)

    # reading

    def measuring(self, replica: Replica) -> int:
        """Slots in which it measures a chunk of a validation."""
        return len(self._orders.of(replica.id, "rows")) if self._rows else 0

    def taken(self, replica: Replica) -> int:
        """Slots that groups cannot have: all slots of a validator, and those that a validation takes."""
        return replica.slots if replica.validator else self.measuring(replica)

    def for_groups(self, replica: Replica) -> int:
        """Slots that are free for groups."""
        return replica.slots - self.taken(replica) - replica.occupied

    def for_chunks(self, replica: Replica) -> int:
        """Slots that neither a group nor a chunk of a validation needs."""
        return replica.slots - self.measuring(replica) - replica.occupied

    @property
    def newest_version(self) -> Version:
        """Newest version among replicas that can take a group; `NO_VERSION` if none can."""
        return max(self._at, default=NO_VERSION)

    def least_loaded(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the smallest share of busy slots (then the smallest id) among those at version `oldest` or
        newer; `avoid` only if no other will do."""
        found = [self._best(at, avoid) for version, at in self._at.items() if version >= oldest]
        return self._replicas[min(found)[2]] if found else None

    def newest(self, oldest: Version = 0, avoid: ReplicaId = -1) -> Replica | None:
        """The replica with the newest weights, then the least loaded, among those at version `oldest` or newer;
        `avoid` only if no other will do."""
        versions = sorted((version for version in self._at if version >= oldest), reverse=True)
        found = [self._best(self._at[version], avoid) for version in versions]
        return self._replicas[min(found, key=itemgetter(0))[2]] if found else None

    def _best(self, at: _SameVersion, avoid: ReplicaId) -> tuple[bool, float, ReplicaId]:
        """The least loaded replica at one version, as (whether it is the one to avoid, its load, its id)."""
        heap, avoided = at.heap, None
        while heap:
            load, id = heap[0]
            if id not in at.replicas or self._load(self._replicas[id]) != load:
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

    def figures(self) -> tuple[object, ...]:
        """Everything that the index knows, for comparison."""
        known = {id: one for id, one in self._known.items() if one != NOTHING}
        return known, {version: set(at.replicas) for version, at in self._at.items()}, self.idle_at
