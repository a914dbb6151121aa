"""Counts of replicas by situation, and lists of replicas that need action. Both are updated incrementally.

`states/state.py` owns it. `scheduling/` queries it instead of iterating over the fleet, so an event costs the same with
four thousand replicas as with ten. All data here derives from the replicas and their target versions. Each query first
processes the replicas that changed since the last one (`Fleet.touched`). It must never make a decision.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.ids import ReplicaId, Version
from engine.states.pool import PoolLease
from engine.states.replica import Replica

if TYPE_CHECKING:
    from engine.states.state import State

GONE = ("down", "draining", "drained")
"""Replicas in these states get no weights and serve no validation."""
NOT_SYNCED = GONE
"""Training does not wait for replicas in these states."""
IN_SYNC = ("pausing", "installing")
AT_REST = ("drained", "asleep", "down")
"""Nothing runs on a replica in one of these states."""
OUT_OF_THE_WAY = ("asleep", "down")
"""Replicas in these states use no resources of their pool, unless their process is being stopped."""


class Tally:
    """A count of replicas: the total, and by an integer key."""

    __slots__ = ("by", "total")

    def __init__(self) -> None:
        self.total = 0
        self.by: dict[int, int] = {}

    def add(self, key: int) -> None:
        self.total += 1
        self.by[key] = self.by.get(key, 0) + 1

    def remove(self, key: int) -> None:
        self.total -= 1
        left = self.by[key] - 1
        if left:
            self.by[key] = left
        else:
            del self.by[key]


class Kind:
    """Counts for one kind of replica: those that generate, or those that only validate."""

    __slots__ = ("alive", "coming", "present", "seen", "unheld")

    def __init__(self) -> None:
        self.seen = Tally()
        """All replicas, by version."""
        self.alive = Tally()
        """Replicas that are up, by version."""
        self.coming = Tally()
        """Replicas that are down and whose next life is on its way."""
        self.present = Tally()
        """Replicas that may serve a validation."""
        self.unheld = Tally()
        """Replicas in `present` that no validation holds, by the newest version they are about to have."""


Standing = tuple[tuple[Tally, int], ...]
"""The tallies that count a replica, each with its key."""


class Census:
    """Counts replicas and lists those that need action. Every answer reflects the current replicas."""

    def __init__(self, state: "State") -> None:
        self._state = state
        self._fleet = state.fleet
        self.shared: list[PoolLease] = [lease for lease in state.pools.leases if lease.shared]
        """Pools in which replicas and the trainer take turns."""
        self._lease_of = {id: lease for lease in self.shared for id in lease.replicas}
        self._clear()

    def _clear(self) -> None:
        self._latest: Version = self._state.latest_version
        self._standings: dict[ReplicaId, Standing] = {}
        self._rollouts, self._validators = Kind(), Kind()
        self._under_way, self._restless = Tally(), Tally()
        self._to_sync, self._asleep, self._wanted, self._busy = Tally(), Tally(), Tally(), Tally()
        self._in_the_way = {lease.id: Tally() for lease in self.shared}
        self._unstaged: dict[ReplicaId, None] = {}
        self._staged_validators: dict[ReplicaId, None] = {}
        self._staged_places: list[int] = []
        self._staged: tuple[ReplicaId, ...] | None = ()
        self._awake: dict[int, dict[ReplicaId, None]] = {lease.id: {} for lease in self.shared}
        self._wakeable: dict[int, dict[ReplicaId, None]] = {lease.id: {} for lease in self.shared}
        self._unexamined: dict[ReplicaId, None] = {}
        self._unjudged: dict[ReplicaId, None] = {}
        self._examined_for = False
        self._unhashed: dict[ReplicaId, None] = {}
        self._digests: dict[ReplicaId, int] = {}
        self._sum = 0

    def rebuild(self) -> None:
        """Count all replicas anew."""
        self._clear()
        self._fleet.touched.update(dict.fromkeys(self._fleet.order))

    # figures

    @property
    def rollouts(self) -> Kind:
        self._refresh()
        return self._rollouts

    def kind(self, *, validators: bool) -> Kind:
        self._refresh()
        return self._validators if validators else self._rollouts

    @property
    def rollouts_left(self) -> int:
        """Number of replicas that generate and are up or on their way."""
        rollouts, state = self.rollouts, self._state
        to_launch = state.limits.rollouts_among(state.launched, state.launching)
        return rollouts.alive.total + rollouts.coming.total + to_launch

    @property
    def under_way(self) -> int:
        """Number of replicas that generate and will cause an event: they join, return or are in a sync."""
        self._refresh()
        return self._under_way.total

    @property
    def restless(self) -> int:
        """Number of replicas on which work may run."""
        self._refresh()
        return self._restless.total

    @property
    def busy(self) -> int:
        """Number of replicas that generate and are in a sync."""
        self._refresh()
        return self._busy.total

    def behind(self, latest: Version, *, asleep: bool) -> int:
        """Number of replicas that generate, can be synced, are held by no validation and do not have version `latest`.
        `asleep`: count sleeping replicas too."""
        self._refresh()
        tallies = (self._to_sync, self._asleep) if asleep else (self._to_sync,)
        return sum(tally.total - tally.by.get(latest, 0) for tally in tallies)

    def is_wanted(self, version: Version) -> bool:
        """Whether any replica stages a version or has it staged."""
        self._refresh()
        return version in self._wanted.by

    def is_present(self, replica: Replica) -> bool:
        """Whether a replica may serve a validation."""
        return replica.state not in GONE and not replica.process.leaves

    def is_occupied(self, lease: PoolLease) -> bool:
        """Whether any replica uses resources of a pool that it shares with the trainer."""
        self._refresh()
        return self._in_the_way[lease.id].total > 0

    # replicas that need action

    def unstaged(self) -> list[Replica]:
        """Replicas that are behind their target version and stage nothing."""
        self._refresh()
        return self._in_order(self._unstaged)

    def staged_validators(self) -> list[Replica]:
        """Replicas that only validate and have staged their target version."""
        self._refresh()
        return self._in_order(self._staged_validators)

    def staged(self) -> tuple[ReplicaId, ...]:
        """Replicas that generate and have staged their target version."""
        self._refresh()
        if self._staged is None:
            order = self._fleet.order
            self._staged = tuple([order[place] for place in self._staged_places])
        return self._staged

    def is_staged(self, id: ReplicaId) -> bool:
        """Whether a replica is one of `staged`."""
        replica, places = self._fleet.replicas.get(id), self._staged_places
        if replica is None:
            return False
        index = bisect_left(places, replica.place)
        return index < len(places) and places[index] == replica.place

    def awake(self, lease: PoolLease) -> list[Replica]:
        """Replicas of a shared pool that can be put to sleep, in the pool's order."""
        self._refresh()
        return self._in_order_of(lease, self._awake[lease.id])

    def wakeable(self, lease: PoolLease) -> list[Replica]:
        """Replicas of a shared pool that sleep and have installed or staged their target version."""
        self._refresh()
        return self._in_order_of(lease, self._wakeable[lease.id])

    def take_unexamined(self) -> list[Replica]:
        """Replicas that are to leave, or come to rest, or need not any more, and changed since the last call."""
        self._refresh()
        draining = bool(self._state.draining)
        if draining != self._examined_for:
            self._examined_for = draining
            self._unexamined.update(dict.fromkeys(self._fleet.order))
        unexamined, self._unexamined = self._unexamined, {}
        return self._in_order(unexamined)

    def take_unjudged(self) -> list[Replica]:
        """Replicas that changed since the last comparison of paces."""
        self._refresh()
        unjudged, self._unjudged = self._unjudged, {}
        return self._in_order(unjudged)

    def _in_order(self, ids: Iterable[ReplicaId]) -> list[Replica]:
        replicas = [self._fleet.replicas[id] for id in ids]
        replicas.sort(key=lambda replica: replica.place)
        return replicas

    def _in_order_of(self, lease: PoolLease, ids: Iterable[ReplicaId]) -> list[Replica]:
        return [self._fleet.replicas[id] for id in sorted(ids, key=lease.place_of.__getitem__)]

    # the state hash

    @property
    def digests(self) -> int:
        """The replicas' share of the state hash."""
        self._refresh()
        for id in self._unhashed:
            new = self._fleet.replicas[id].digest()
            self._sum += new - self._digests.get(id, 0)
            self._digests[id] = new
        self._unhashed.clear()
        return self._sum

    # incremental update

    def _refresh(self) -> None:
        touched = self._fleet.touched
        if self._latest != self._state.latest_version:
            self._latest = self._state.latest_version
            touched.update(dict.fromkeys(self._fleet.order))
        if not touched:
            return
        for id in touched:
            self._take_in(self._fleet.replicas[id])
        self._unhashed.update(touched)
        self._unjudged.update(touched)
        touched.clear()

    def _take_in(self, replica: Replica) -> None:
        before, now = self._standings.get(replica.id, ()), self._standing(replica)
        if before != now:
            for tally, key in before:
                tally.remove(key)
            for tally, key in now:
                tally.add(key)
            self._standings[replica.id] = now
        self._list(replica)

    def _standing(self, replica: Replica) -> Standing:
        kind = self._validators if replica.validator else self._rollouts
        version = replica.version
        found = [(kind.seen, version)]
        for wanted in (replica.staging, replica.staged):
            if wanted is not None:
                found.append((self._wanted, wanted))
        if replica.state != "down":
            found.append((kind.alive, version))
        elif replica.process.coming:
            found.append((kind.coming, version))
        if replica.state not in AT_REST:
            found.append((self._restless, version))
        leaves = replica.process.leaves
        if self.is_present(replica):
            found.append((kind.present, version))
            if replica.held < 0:
                found.append((kind.unheld, replica.heading))
        lease = self._lease_of.get(replica.id)
        ending = replica.process.state == "stopping"
        if lease is not None and (ending or replica.state not in OUT_OF_THE_WAY):
            found.append((self._in_the_way[lease.id], version))
        if replica.validator:
            return tuple(found)
        under_way = replica.state != "ready" or replica.staging is not None
        if replica.process.coming if replica.state == "down" else under_way:
            found.append((self._under_way, version))
        if replica.held < 0 and replica.state not in NOT_SYNCED:
            found.append((self._asleep if replica.state == "asleep" else self._to_sync, version))
        if replica.state in IN_SYNC and not leaves and version < self._state.target_of(replica):
            found.append((self._busy, version))
        return tuple(found)

    def _list(self, replica: Replica) -> None:
        """Add a replica to the lists it belongs to, and remove it from the others."""
        id, state = replica.id, replica.state
        if replica.process.leaves or state == "drained" or self._examined_for:
            self._unexamined[id] = None
        target = self._state.target_of(replica)
        syncs = replica.version < target and state in ("ready", "asleep") and not replica.process.leaves
        _put(self._unstaged, id, syncs and replica.staging is None and replica.staged != target)
        staged = syncs and state == "ready" and replica.staged == target
        _put(self._staged_validators, id, staged and replica.validator)
        if not replica.validator:
            self._list_staged(replica.place, staged)
        lease = self._lease_of.get(id)
        if lease is not None:
            _put(self._awake[lease.id], id, state == "ready" and not replica.chunks)
            ready = replica.version >= target or replica.staged == target
            _put(self._wakeable[lease.id], id, state == "asleep" and ready)

    def _list_staged(self, place: int, staged: bool) -> None:
        places = self._staged_places
        index = bisect_left(places, place)
        there = index < len(places) and places[index] == place
        if there == staged:
            return
        if staged:
            places.insert(index, place)
        else:
            del places[index]
        self._staged = None


def _put(ids: dict[ReplicaId, None], id: ReplicaId, belongs: bool) -> None:
    if belongs:
        ids[id] = None
    else:
        ids.pop(id, None)


def digest_replicas(state: "State") -> int:
    """The replicas' share of the state hash, recomputed from the records."""
    return sum(replica.digest() for replica in state.fleet.replicas.values())


Compare = Callable[[Census], object]
"""A quantity of a census, for comparison with a rebuilt one."""
EVERY_FIGURE: tuple[Compare, ...] = (
    lambda c: [(t.total, t.by) for k in (c.rollouts, c.kind(validators=True)) for t in (k.seen, k.alive, k.coming)],
    lambda c: [(t.total, t.by) for k in (c.rollouts, c.kind(validators=True)) for t in (k.present, k.unheld)],
    lambda c: [c.under_way, c.restless, c.busy, c._wanted.by, c._to_sync.by, c._asleep.by],
    lambda c: [c.unstaged(), c.staged_validators(), c.staged()],
    lambda c: [(c.is_occupied(lease), c.awake(lease), c.wakeable(lease)) for lease in c.shared],
)
