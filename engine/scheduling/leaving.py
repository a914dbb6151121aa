"""Replicas that are let go, replicas that are wanted, and a run that comes to rest.

Called by `scheduler.py`. A replica that leaves gets no more groups; those it has are parked with what they have, and go
on elsewhere or, where the run comes to rest, when it is resumed. Nothing of that costs an attempt.
"""

from engine.commands import PauseReplica, ResumeReplica, StartReplica, StopMeasuring, StopReplica
from engine.events import DrainRequested, ReplicaLeaves, ReplicasWanted
from engine.scheduling.orders import Orders
from engine.scheduling.pools import PoolScheduling
from engine.scheduling.rollout import REASON_LENGTH, RolloutScheduling
from engine.scheduling.sync import SyncScheduling
from engine.states.replica import Replica
from engine.states.state import State


class LeavingScheduling:
    """Drains replicas, one or all."""

    def __init__(
        self, state: State, orders: Orders, rollout: RolloutScheduling, pools: PoolScheduling, sync: SyncScheduling
    ) -> None:
        self.state = state
        self.live = state.live
        self.orders = orders
        self.rollout = rollout
        self.pools = pools
        self.sync = sync

    # requests

    def on_drain_requested(self, event: DrainRequested) -> None:
        self.live.moved = True
        if not self.live.draining:
            self.live.draining = event.reason[:REASON_LENGTH] or "the run was asked to come to rest"

    def on_replica_leaves(self, event: ReplicaLeaves) -> None:
        replica = self.state.fleet.replicas[event.replica]
        self.live.moved = True
        if not self._taken_away(replica):
            self.state.fleet.let_leave(replica, event.reason, True)

    def on_replicas_wanted(self, event: ReplicasWanted) -> None:
        """Those of the highest ids leave, those that are missing are started."""
        state, wanted = self.state, event.replicas
        state.live.wanted, state.live.moved = wanted, True
        for replica in state.fleet.rollouts():
            if replica.id >= wanted:
                self.let_go(replica)
            elif replica.id in self.live.leaving and not self._taken_away(replica):
                state.fleet.let_stay(replica)
        for id in range(wanted):
            there = state.fleet.replicas.get(id) or self.sync.first_seen(id)
            if there.returns or there.state not in ("lost", "joining"):
                continue
            if state.orders.find("stop", id) is not None:
                continue  # it starts once the life that was let go has ended
            there.returns = True
            self.orders.add(StartReplica(replica=id, cause=self.orders.cause))
        state.none_left = ""

    def let_go(self, replica: Replica) -> None:
        """There are to be fewer replicas: this one is not wanted any more. One that is taken away leaves all the same,
        however many are wanted until then."""
        if (replica.state != "lost" or replica.returns) and not self._taken_away(replica):
            self.state.fleet.let_leave(replica, f"{self.live.wanted} replicas are wanted", False)

    def _taken_away(self, replica: Replica) -> bool:
        return self.live.leaving.get(replica.id, ("", False))[1]

    def _unwanted(self, replica: Replica) -> bool:
        """Whether there are to be fewer replicas than with this one."""
        return self.live.wanted is not None and replica.id >= self.live.wanted and not replica.validator

    # orders

    def advance(self) -> None:
        """Bring to rest who is to leave, and let go who has come to rest."""
        for replica in self.state.census.take_unexamined():
            if replica.id in self.live.leaving:
                self._let_leave(replica)
                continue
            pooled = self.state.pools.of_replica(replica.id) is not None
            if replica.state == "drained" and (pooled or not self.live.draining):  # it was to leave, and stays
                self.state.fire_replica(replica, "keep")
                self.orders.add(ResumeReplica(**replica.address(self.orders.cause), number=self.orders.number))
            if self.live.draining:
                self._bring_to_rest(replica)

    def _let_leave(self, replica: Replica) -> None:
        reason, returns = self.live.leaving[replica.id]
        returns = returns and not self._unwanted(replica)
        if replica.state == "lost" and (returns or not replica.returns):
            self.state.fleet.let_stay(replica)  # it left by itself
        elif replica.state in ("lost", "joining"):
            self._stop(replica, reason, returns=returns)  # it is on its way
        elif replica.state not in ("drained", "asleep"):
            self._bring_to_rest(replica, alone=True)
        else:
            self._stop(replica, reason, returns=returns)

    def _stop(self, replica: Replica, reason: str, *, returns: bool) -> None:
        """Nothing runs there: it need not be there any more."""
        self.state.fleet.let_stay(replica)
        replica.returns = returns
        if replica.state != "lost":
            self.rollout.lose_replica(replica, reason)
        self.orders.add(
            StopReplica(replica=replica.id, incarnation=replica.incarnation, reason=reason[:REASON_LENGTH],
                        returns=returns, cause=self.orders.cause)
        )  # fmt: skip
        self.sync.note_none_left(replica, reason)

    def _bring_to_rest(self, replica: Replica, *, alone: bool = False) -> None:
        """Park what runs on a replica that is in no sync; one that is comes to it at the end of that."""
        state = self.state
        if replica.state != "ready":
            return
        run = state.validations.runs.get(replica.held)
        if run is not None:
            if replica.chunks:
                self.orders.add(
                    StopMeasuring(validation=run.id, replica=replica.id, incarnation=replica.incarnation,
                                  number=self.orders.number, cause=self.orders.cause)
                )  # fmt: skip
            state.validations.release(run, replica)
        if not alone and state.pools.of_replica(replica.id) is not None:
            self.pools.send_to_sleep(replica)  # the batch under way needs what it gives back
            return
        replica.staging = replica.staged = None
        replica.sync_attempt += 1
        state.fire_replica(replica, "drain")
        order = replica.address(self.orders.cause)
        self.orders.add(PauseReplica(**order, version=replica.version, mode="abort"))

    @property
    def at_rest(self) -> bool:
        """Nothing runs anywhere, and no batch is under way."""
        state = self.state
        return not state.formed_steps and not state.publishing and not state.census.restless
