"""Weights to replicas: joining, staging, pausing, installing, losing. Called by `scheduler.py`.

A replica always works towards the newest version: stage its bytes while it generates, pause by the sync mode, swap,
go on. Any failure on the way puts it back to generating with its old weights.
"""

from engine.commands import InstallWeights, PauseReplica, ResumeReplica, RetireWeights, StageWeights, StopReplica
from engine.events import ReplicaJoined, ReplicaLost, ReplicaPaused, SyncFailed, WeightsInstalled, WeightsStaged
from engine.ids import Version
from engine.policies.registry import PolicySet
from engine.scheduling.orders import Orders, ask, refuse
from engine.scheduling.rollout import RolloutScheduling
from engine.states.replica import Replica
from engine.states.state import State
from engine.states.view import View

SyncEvent = WeightsStaged | ReplicaPaused | WeightsInstalled | SyncFailed
IN_SYNC = ("pausing", "paused", "installing")


class SyncScheduling:
    """Brings every replica to the newest version."""

    def __init__(
        self, state: State, policies: PolicySet, orders: Orders, view: View, rollout: RolloutScheduling
    ) -> None:
        self.state = state
        self.policies = policies
        self.orders = orders
        self.view = view
        self.rollout = rollout
        self.failure: str | None = None

    # replicas come and go

    def on_replica_joined(self, event: ReplicaJoined) -> None:
        state = self.state
        replica = state.fleet.replicas.get(event.replica)
        if replica is None:
            replica = state.fleet.replicas[event.replica] = Replica(event.replica)
        elif event.incarnation <= replica.incarnation:
            state.stale_echoes += 1
            return
        elif replica.state != "lost":
            self._lose(replica)
            state.fire_replica(replica, "return")
        else:
            state.fire_replica(replica, "return")
        replica.incarnation = event.incarnation
        replica.slots = event.slots
        replica.version = event.version
        replica.sync_attempt = replica.sync_failures = 0
        replica.returns = False
        state.fire_replica(replica, "join")

    def on_replica_lost(self, event: ReplicaLost) -> None:
        replica = self.state.fleet.replicas.get(event.replica)
        if replica is None:
            replica = self.state.fleet.replicas[event.replica] = Replica(event.replica)
        elif event.incarnation < replica.incarnation:
            self.state.stale_echoes += 1
            return
        replica.incarnation = event.incarnation
        replica.returns = event.returns
        if replica.state != "lost":
            self._lose(replica)
        if not self.state.fleet.alive and not any(r.returns for r in self.state.fleet.replicas.values()):
            self.failure = f"no replica is left; the last was lost because: {event.reason}"

    def _lose(self, replica: Replica) -> None:
        """Park what ran there: each group loses an attempt of the infrastructure budget, not its place."""
        state = self.state
        replica.staged = replica.staging = None
        state.fire_replica(replica, "lose")
        for id in list(replica.groups):
            group = state.groups[id]
            state.unseat(group)
            self.rollout.park_after_failure(group, "infrastructure")

    # one replica's way to a version

    def _current(self, event: SyncEvent, *states: str) -> Replica | None:
        """The replica an answer is about, if it answers the sync under way there; None, counted, for an echo."""
        replica = self.state.fleet.replicas.get(event.replica)
        if (
            replica is not None
            and replica.state in states
            and (replica.incarnation, replica.sync_attempt) == (event.incarnation, event.attempt)
        ):
            return replica
        self.state.stale_echoes += 1
        return None

    def on_weights_staged(self, event: WeightsStaged) -> None:
        replica = self._current(event, "ready")
        if replica is not None and replica.staging is not None:
            replica.staged, replica.staging = replica.staging, None

    def on_replica_paused(self, event: ReplicaPaused) -> None:
        replica = self._current(event, "pausing")
        if replica is None or replica.staged is None:
            return
        self.state.fire_replica(replica, "paused")
        self.state.fire_replica(replica, "install")
        self.orders.add(InstallWeights(**self._address(replica), version=replica.staged))

    def on_weights_installed(self, event: WeightsInstalled) -> None:
        replica = self._current(event, "installing")
        if replica is None or replica.staged is None:
            return
        replica.version, replica.staged = replica.staged, None
        replica.sync_failures = 0
        self.state.fire_replica(replica, "installed")
        self.orders.add(ResumeReplica(**self._address(replica)))

    def on_sync_failed(self, event: SyncFailed) -> None:
        replica = self._current(event, "ready", *IN_SYNC)
        if replica is None or (replica.staging is None and replica.staged is None):
            return
        replica.staging = replica.staged = None
        replica.sync_failures += 1
        if replica.state in IN_SYNC:
            self.state.fire_replica(replica, "revert")
            self.orders.add(ResumeReplica(**self._address(replica)))
        if replica.sync_failures >= self.state.limits.infrastructure_attempts:
            replica.returns = True
            self._lose(replica)
            reason = f"version {event.version} could not be installed, at last: {event.reason}"
            self.orders.add(
                StopReplica(replica=replica.id, incarnation=replica.incarnation, reason=reason, cause=self.orders.cause)
            )

    def _address(self, replica: Replica) -> dict[str, int]:
        """What every order of a sync carries."""
        return {
            "replica": replica.id,
            "incarnation": replica.incarnation,
            "attempt": replica.sync_attempt,
            "cause": self.orders.cause,
        }

    # orders

    def advance(self) -> None:
        """Stage the newest version where it is missing, pause who may take it, retire what is superseded."""
        state = self.state
        if state.latest_version == 0 or state.outcome is not None:
            return
        latest = state.latest_version
        behind = [r for r in state.fleet.replicas.values() if r.state != "lost" and r.version < latest]
        if behind:
            for replica in behind:
                if replica.state == "ready" and replica.staging is None and replica.staged != latest:
                    self._stage(replica, latest)
            self._pause(behind, latest)
        else:
            version = state.versions[latest]
            if version.state != "live" and state.fleet.alive:
                state.fire_version(version, "live")
        if len(state.versions) > 1:
            self._retire(latest)

    def _stage(self, replica: Replica, version: Version) -> None:
        state = self.state
        if state.versions[version].state == "published":
            state.fire_version(state.versions[version], "transfer")
        replica.staged = None
        replica.staging = version
        replica.sync_attempt += 1
        self.orders.add(StageWeights(**self._address(replica), version=version))

    def _pause(self, behind: list[Replica], latest: Version) -> None:
        staged = [r.id for r in behind if r.state == "ready" and r.staged == latest]
        if not staged:
            return
        busy = sum(1 for r in behind if r.state in IN_SYNC)
        chosen = ask(self.policies, "sync", lambda: tuple(self.policies.sync.pause(self.view, tuple(staged), busy)))
        if any(id not in staged for id in chosen) or not (chosen or busy):
            raise refuse(
                self.policies,
                "sync",
                chosen,
                f"it must be some of {staged}, and not none while no replica is in a sync",
            )
        for id in chosen:
            replica = self.state.fleet.replicas[id]
            self.state.fire_replica(replica, "pause")
            self.orders.add(PauseReplica(**self._address(replica), version=latest, mode=self.state.limits.sync_mode))

    def _retire(self, latest: Version) -> None:
        state = self.state
        wanted = {v for r in state.fleet.replicas.values() for v in (r.staging, r.staged)}
        for id in [id for id in state.versions if id < latest and id not in wanted]:
            state.fire_version(state.versions[id], "retire")
            self.orders.add(RetireWeights(version=id, cause=self.orders.cause))
