"""How long attempts take: one that takes too long is parked, and a replica that does not park it is hung.

Called by `scheduler.py`, where `Limits.group_timeout_s` is set. One timer serves all groups: it is set for the attempt
that will have taken too long first, and looked at when it fires.
"""

from engine.commands import CancelTimer, ParkGroup, SetTimer
from engine.ids import ReplicaId
from engine.scheduling.orders import Orders
from engine.scheduling.rollout import RolloutScheduling
from engine.scheduling.training import TIMER_SLACK_S
from engine.states.group import Group
from engine.states.replica import Replica
from engine.states.state import State

PARKING_S = 60.0
"""How long a replica may take to park a group; its host cancels one that is not given up long before."""
SHORTEST_LOOK_S = 1.0
"""While a group is being parked, attempts that may take less than this are looked at this often."""


class AttemptTiming:
    """Sets the timer, and acts when it fires."""

    def __init__(self, state: State, orders: Orders, rollout: RolloutScheduling) -> None:
        self.state = state
        self.orders = orders
        self.rollout = rollout

    def watch(self) -> None:
        """Set the timer, while a group runs and it is not set."""
        state = self.state
        timeout = state.limits.group_timeout_s
        if timeout is None:
            return
        due = [group.seated_at + timeout + (PARKING_S if group.parking else 0.0) for group in state.attempts.first()]
        if due:
            timer = state.live.group_timer = state.new_timer()
            # A group that is being parked is due later than an attempt that begins while it is.
            delay = min(max(0.0, min(due) - state.now), max(timeout, SHORTEST_LOOK_S))
            self.orders.add(SetTimer(timer=timer, delay_s=delay, cause=self.orders.cause))

    def begin(self) -> None:
        """Attempts are timed from now on, those under way as well, or are timed otherwise."""
        state = self.state
        for replica in state.fleet.replicas.values():
            for id in replica.groups:
                group = state.groups[id]
                group.seated_at = group.seated_at or state.now
                state.touch(group)
        state.attempts.rebuild(state.fleet, state.groups, timed=state.limits.group_timeout_s is not None)
        timer, state.live.group_timer = state.live.group_timer, None
        if timer is not None:
            self.orders.add(CancelTimer(timer=timer, cause=self.orders.cause))

    def on_timer(self) -> None:
        """Park what has run too long; give up a replica that was told to and did not."""
        state, timeout = self.state, self.state.limits.group_timeout_s
        state.live.group_timer = None
        if timeout is None:
            return
        parked = []
        for replica in self._late(timeout):
            for id in list(replica.groups):
                group = state.groups[id]
                late_s = self._late_s(group, timeout)
                if late_s < 0:
                    continue
                if not group.parking:
                    group.parking = True
                    parked.append(group)
                    state.touch(group)
                    self.orders.add(
                        ParkGroup(group=id, attempt=group.attempt, replica=replica.id, incarnation=replica.incarnation,
                                  cause=self.orders.cause)
                    )  # fmt: skip
                elif late_s >= PARKING_S:
                    reason = f"it is hung: group {id} was to be parked, and was not within {PARKING_S:g} s"
                    self.rollout.stop_replica(replica, reason)
                    break
        state.attempts.park(group for group in parked if group.parking)

    def _late(self, timeout: float) -> list[Replica]:
        """The replicas on which something is late, in their order."""
        attempts = self.state.attempts
        found: dict[ReplicaId, None] = {}
        for groups, more_s in ((attempts.running, 0.0), (attempts.parking, PARKING_S)):
            for group in groups.values():
                if self._late_s(group, timeout) < more_s:
                    break  # those that follow began later
                found[group.replica] = None
        return sorted((self.state.fleet.replicas[id] for id in found), key=lambda replica: replica.place)

    def _late_s(self, group: Group, timeout: float) -> float:
        """How long a group has run beyond what it may."""
        return self.state.now - group.seated_at - timeout + TIMER_SLACK_S
