"""How long attempts take: one that takes too long is parked, and a replica that does not park it is hung.

Called by `scheduler.py`, where `Limits.group_timeout_s` is set. One timer serves all groups: it is set for the attempt
that will have taken too long first, and looked at when it fires.
"""

from engine.commands import CancelTimer, ParkGroup, SetTimer
from engine.scheduling.orders import Orders
from engine.scheduling.rollout import RolloutScheduling
from engine.scheduling.training import TIMER_SLACK_S
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
        state, timeout = self.state, self.state.limits.group_timeout_s
        due = [at for replica in state.fleet.replicas.values() if (at := self._due(replica)) is not None]
        if due and timeout is not None:
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
        timer, state.live.group_timer = state.live.group_timer, None
        if timer is not None:
            self.orders.add(CancelTimer(timer=timer, cause=self.orders.cause))

    def on_timer(self) -> None:
        """Park what has run too long; give up a replica that was told to and did not."""
        state, timeout = self.state, self.state.limits.group_timeout_s
        state.live.group_timer = None
        if timeout is None:
            return
        for replica in list(state.fleet.replicas.values()):
            for id in list(replica.groups):
                group = state.groups[id]
                late_s = state.now - group.seated_at - timeout + TIMER_SLACK_S
                if late_s < 0:
                    continue
                if not group.parking:
                    group.parking = True
                    state.touch(group)
                    self.orders.add(
                        ParkGroup(group=id, attempt=group.attempt, replica=replica.id, incarnation=replica.incarnation,
                                  cause=self.orders.cause)
                    )  # fmt: skip
                elif late_s >= PARKING_S:
                    reason = f"it is hung: group {id} was to be parked, and was not within {PARKING_S:g} s"
                    self.rollout.stop_replica(replica, reason)
                    break

    def _due(self, replica: Replica) -> float | None:
        """When something on a replica will have taken too long. Its groups need not be in the order of their times:
        where attempts were timed for another reason before, those that began earlier count from later (`begin`)."""
        timeout, groups = self.state.limits.group_timeout_s, self.state.groups
        if timeout is None:
            return None
        running = (groups[id] for id in replica.groups)
        due = (group.seated_at + timeout + (PARKING_S if group.parking else 0.0) for group in running)
        return min(due, default=None)
