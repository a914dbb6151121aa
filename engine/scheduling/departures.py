"""Draining: replicas that leave, the number of replicas wanted, and a run that drains as a whole.

Called by `scheduler.py`. A replica that leaves gets no more groups. Its groups are parked with their prefixes and
resume on another replica or, if the whole run drains, when the run is resumed. No group is charged an attempt.
"""

from dataclasses import dataclass

from engine.commands import PauseReplica, ResumeReplica, SetTimer, StopMeasuring
from engine.events import DrainRequested, ReplicaLeaves, ReplicasWanted
from engine.scheduling.lifetimes import REASON_LENGTH, Lifetimes
from engine.scheduling.orders import Orders
from engine.scheduling.pools import PoolScheduling
from engine.scheduling.rollout import RolloutScheduling
from engine.scheduling.sync import SyncScheduling
from engine.states.replica import Replica
from engine.states.state import State


@dataclass(eq=False)
class DepartureScheduling:
    """Drains replicas, one or all."""

    state: State
    orders: Orders
    lifetimes: Lifetimes
    rollout: RolloutScheduling
    pools: PoolScheduling
    sync: SyncScheduling

    # requests

    def on_drain_requested(self, event: DrainRequested) -> None:
        state = self.state
        if self.state.draining:
            return
        self.state.draining = event.reason[:REASON_LENGTH] or "a drain was requested"
        if state.limits.drain_s is not None:
            self.state.drain_timer = state.new_timer()
            delay = state.limits.drain_s
            self.orders.add(SetTimer(timer=self.state.drain_timer, delay_s=delay, cause=self.orders.cause))

    def on_drain_timer(self) -> None:
        """The drain has exceeded its time limit: stop the run without waiting for the rest."""
        self.state.drain_timer = None
        self.orders.end_run("stopped", f"the drain exceeded durability.drain_s = {self.state.limits.drain_s:g}")

    def on_replica_leaves(self, event: ReplicaLeaves) -> None:
        replica = self.state.fleet.replicas[event.replica]
        if not replica.process.excused:
            replica.process.excused, replica.process.reason = True, event.reason
            self.state.fleet.leave_changed(replica)

    def on_replicas_wanted(self, event: ReplicasWanted) -> None:
        """Replicas with the highest ids leave, or missing ones are started."""
        for replica in self.state.fleet.rollouts():
            self._want(replica, replica.id < event.replicas, f"{event.replicas} replicas are wanted")
        self.lifetimes.launch(event.replicas)
        self.state.none_left = ""

    def _want(self, replica: Replica, wanted: bool, reason: str) -> None:
        process = replica.process
        process.wanted = wanted
        if not process.excused:
            process.reason = "" if wanted else reason
        if wanted and process.state == "gone":
            process.deaths = 0
        self.state.fleet.leave_changed(replica)

    # orders

    def advance(self) -> None:
        """Drain replicas that must leave, and stop those that have drained."""
        for replica in self.state.census.take_unexamined():
            if replica.process.leaves:
                self._let_leave(replica)
                continue
            pooled = self.state.pools.of_replica(replica.id) is not None
            if replica.state == "drained" and (pooled or not self.state.draining):  # it was to leave, but stays
                self.state.fire_replica(replica, "keep")
                self.orders.add(ResumeReplica(**replica.address(self.orders.cause), number=self.orders.number))
            if self.state.draining:
                self._bring_to_rest(replica)

    def _let_leave(self, replica: Replica) -> None:
        """Drain a replica that leaves, or stop it once it has drained."""
        process = replica.process
        if process.state == "up" and replica.state not in ("drained", "asleep"):
            self._bring_to_rest(replica, alone=True)
        elif process.state == "up":
            self._stop(replica)
        elif process.state == "starting" and not process.wanted:
            self._stop(replica)  # it is not up yet

    def _stop(self, replica: Replica) -> None:
        """Stop a replica on which nothing runs."""
        reason = replica.process.reason
        if replica.state != "down":
            self.rollout.lose_replica(replica, reason)
        if replica.process.state != "stopping":
            replica.process.excused = True
        self.lifetimes.stop(replica.process, reason)
        self.sync.note_none_left(replica, reason)

    def _bring_to_rest(self, replica: Replica, *, alone: bool = False) -> None:
        """Park what runs on a ready replica. Does nothing during a sync: it is called again after that."""
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
