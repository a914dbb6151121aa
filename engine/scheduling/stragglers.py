"""Groups of slow replicas continue on faster ones.

Used if `Limits.straggler_factor` is set. A replica slower than the others by the factor still gets groups while it has
slots. But once a faster replica is idle, it takes over the slow one's groups, earliest deadline first. A move costs no
attempt; the group continues from its prefixes.
"""

from engine.commands import ParkGroup, ResumeGroup
from engine.scheduling.core import Core
from engine.states.group import Group
from engine.states.orders import Order
from engine.states.replica import Replica

WEIGHT = 0.2
"""Weight of the newest group in a replica's pace, a moving average."""


def measure_pace(core: Core, group: Group, replica: Replica, attempt: Order) -> None:
    """Measure a finished group from the start of its attempt, unless it was resumed while paces were not compared."""
    before = group.resumed_tokens
    tokens = group.tokens - before
    if tokens <= 0 or (isinstance(attempt.command, ResumeGroup) and not before):
        return
    pace = (core.state.facts.now - attempt.at) / tokens
    replica.pace = pace if not replica.paced else (1 - WEIGHT) * replica.pace + WEIGHT * pace
    replica.paced += 1


def move_groups_off_slow_replicas(core: Core) -> None:
    """If a fast replica has slots that nothing else needs, park groups of slow replicas, earliest deadline first.
    They resume on a fast replica, because dispatch avoids the replica they come from."""
    state, replicas = core.state, core.state.replicas
    factor = state.limits.straggler_factor
    if state.ending.draining or (state.groups.waiting and state.capacity):
        return
    slow = replicas.slow(factor)
    if not slow:
        return
    newest, free = replicas.room_beside(slow)
    parking = state.orders.open["park"]
    room = free - state.groups.ledger.parked - len(parking)
    if room <= 0:
        return
    movable = [
        (group, replica)
        for replica in slow
        if replica.state == "ready" and not replica.process.leaves
        for group in map(state.groups.live.__getitem__, replicas.running(replica))
        if group.id not in parking and not group.moved and group.resumes_from <= newest
    ]
    for group, replica in sorted(movable, key=lambda pair: (pair[0].deadline, pair[0].id))[:room]:
        core.state.orders.add(ParkGroup(**replica.address_of(group)))
