"""Slow replicas: who they are, and which of their groups go on elsewhere.

Called by `scheduler.py`, where `Limits.straggler_factor` is set. A replica's pace is what a token of the groups that it
generates takes, from the start of their attempt. One that is slower than the others by the factor keeps getting groups,
as it has slots; but once a faster one has nothing else to do, that takes over what will hold a step first. A move costs
no attempt; the group goes on from its prefixes.
"""

from statistics import median

from engine.commands import ParkGroup
from engine.scheduling.orders import Orders
from engine.states.group import Group
from engine.states.replica import Replica
from engine.states.state import State

SAMPLES = 4
"""Groups a replica must have generated in this life before its pace counts."""
WEIGHT = 0.2
"""Of the newest group in a replica's pace, which forgets older ones."""


class PaceScheduling:
    """Measures replicas against one another, and moves groups from slow ones to idle fast ones."""

    def __init__(self, state: State, orders: Orders) -> None:
        self.state = state
        self.orders = orders

    def generated(self, group: Group, replica: Replica) -> None:
        """To be told of a group before it leaves its slot."""
        tokens = group.tokens - group.seated_tokens
        if tokens <= 0:
            return
        pace = (self.state.now - group.seated_at) / tokens
        replica.pace = pace if not replica.paced else (1 - WEIGHT) * replica.pace + WEIGHT * pace
        replica.paced += 1
        self.state.disturb()
        self._judge()

    def _judge(self) -> None:
        """Which replicas are slower than the median of all the others allows."""
        factor = self.state.limits.straggler_factor
        replicas = self.state.fleet.rollouts()
        known = [r for r in replicas if r.state != "lost" and r.paced >= SAMPLES]
        for replica in replicas:
            replica.slow = False
        for replica in known:
            others = [other.pace for other in known if other is not replica]
            replica.slow = factor is not None and bool(others) and replica.pace > factor * median(others)
        self.state.live.slow = any(replica.slow for replica in known)

    def advance(self) -> None:
        """Where a fast replica has slots that nothing else wants: park what a slow one has, the earliest deadline
        first. It resumes on the fast one, as the least loaded that is not the one it comes from."""
        state = self.state
        wanted = state.waiting and state.capacity
        if wanted or state.live.draining or state.limits.straggler_factor is None:
            return
        fast = [r for r in state.fleet.open() if not r.slow and r.id not in state.live.leaving]
        free = sum(replica.free_slots for replica in fast) - state.ledger.parked - self._moving()
        if free <= 0:
            return
        newest = max(replica.version for replica in fast)
        slow = [r for r in state.fleet.rollouts() if r.slow and r.state == "ready" and r.id not in state.live.leaving]
        groups = [state.groups[id] for replica in slow for id in replica.groups]
        movable = [g for g in groups if not (g.moving or g.parking or g.moved) and g.resumes_from <= newest]
        for group in sorted(movable, key=lambda g: (g.deadline, g.id))[:free]:
            replica = state.fleet.replicas[group.replica]
            group.moving = True
            state.touch(group)
            self.orders.add(
                ParkGroup(group=group.id, attempt=group.attempt, replica=replica.id, incarnation=replica.incarnation,
                          cause=self.orders.cause)
            )  # fmt: skip

    def _moving(self) -> int:
        """Groups that are on their way from a slow replica."""
        groups = self.state.groups
        return sum(groups[id].moving for r in self.state.fleet.rollouts() if r.slow for id in r.groups)
