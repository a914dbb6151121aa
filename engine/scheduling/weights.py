"""Brings weights to replicas: join, stage, pause, install. Called by `scheduler.py`.

A replica always works towards the newest version: stage its bytes while it generates, pause by the sync mode, swap,
continue. Any failure on the way puts it back to generating with its old weights.
"""

from dataclasses import dataclass

from engine.commands import (
    CancelTimer,
    InstallWeights,
    PauseReplica,
    ResumeReplica,
    RetireWeights,
    SetTimer,
    StageWeights,
)
from engine.events import ProcessUp, ReplicaPaused, SyncFailed, WeightsInstalled, WeightsStaged
from engine.ids import ReplicaId, Version
from engine.scheduling.decisions import Decisions
from engine.scheduling.groups import RolloutScheduling
from engine.scheduling.issued_commands import Orders
from engine.states.census import IN_SYNC
from engine.states.laws import require
from engine.states.replica import Replica
from engine.states.state import State

EMPTYING = ("yielding", "draining")
"""States of a replica that is paused, but not for new weights."""


@dataclass(eq=False)
class SyncScheduling:
    """Brings every replica to the newest version."""

    state: State
    decisions: Decisions
    orders: Orders
    rollout: RolloutScheduling

    # replicas come and go

    def join(self, replica: Replica, event: ProcessUp) -> None:
        """The process of a replica is up."""
        state = self.state
        require(
            0 <= event.version <= state.latest_version and event.slots > 0 and event.samples > 0,
            "law 6: a replica must join with a published version and at least one slot of one trajectory",
            replica=replica.id, version=event.version, latest=state.latest_version, slots=event.slots,
            samples=event.samples,
        )  # fmt: skip
        if not replica.validator:
            self._forget_none_left()
        replica.incarnation = event.incarnation
        replica.slots, replica.samples = event.slots, event.samples
        replica.count_taken()
        replica.version = event.version
        replica.sync_attempt = replica.sync_failures = 0
        state.fleet.mark_slow(replica, False)
        replica.pace, replica.paced = 0.0, 0
        state.fire_replica(replica, "join")

    def note_none_left(self, lost: Replica, reason: str) -> None:
        """Called after a replica is gone. If it was the last, the run waits for another for `give_up_s`, then ends."""
        state = self.state
        if lost.validator or state.census.rollouts_left:
            return
        self.state.none_left = f"no replica is left; the last one was lost: {reason}"
        if state.limits.give_up_s and state.give_up_timer is None:
            state.give_up_timer = state.new_timer()
            delay = state.limits.give_up_s
            self.orders.add(SetTimer(timer=state.give_up_timer, delay_s=delay, cause=self.orders.cause))

    def _forget_none_left(self) -> None:
        self.state.none_left = ""
        timer, self.state.give_up_timer = self.state.give_up_timer, None
        if timer is not None:
            self.orders.add(CancelTimer(timer=timer, cause=self.orders.cause))

    # one replica's way to a version

    def on_weights_staged(self, event: WeightsStaged) -> None:
        replica = self.state.fleet.replicas[event.replica]
        replica.staged, replica.staging = replica.staging, None

    def on_replica_paused(self, event: ReplicaPaused) -> None:
        replica = self.state.fleet.replicas[event.replica]
        if replica.state == "draining":
            self.state.fire_replica(replica, "drained")
            return
        if replica.state == "yielding":
            self.state.fire_replica(replica, "sleep")
            return
        assert replica.staged is not None  # a pause for new weights needs staged weights
        self.state.fire_replica(replica, "install")
        self.orders.add(InstallWeights(**replica.address(self.orders.cause), version=replica.staged))

    def on_weights_installed(self, event: WeightsInstalled) -> None:
        replica = self.state.fleet.replicas[event.replica]
        assert replica.staged is not None  # the order was to install the staged weights
        replica.version, replica.staged = replica.staged, None
        replica.sync_failures = 0
        self.state.fire_replica(replica, "installed")
        self.orders.add(ResumeReplica(**replica.address(self.orders.cause), number=self.orders.number))

    def on_sync_failed(self, event: SyncFailed) -> None:
        replica = self.state.fleet.replicas[event.replica]
        replica.staging = replica.staged = None
        replica.sync_failures += 1
        if replica.sync_failures >= self.state.limits.infrastructure_attempts:
            self._give_up(replica, event)
        elif replica.state in (*IN_SYNC, *EMPTYING):
            self.state.fire_replica(replica, "revert")
            self.orders.add(ResumeReplica(**replica.address(self.orders.cause), number=self.orders.number))

    def _give_up(self, replica: Replica, event: SyncFailed) -> None:
        """A replica has spent its install budget: stop it, so that its next incarnation can try. A version that no
        replica can install ends the run."""
        state = self.state
        reason = f"version {event.version} could not be installed; last error: {event.reason}"
        run = state.validations.runs.get(replica.held)
        if run is not None:
            run.refused += 1
        self.rollout.stop_replica(replica, reason)
        version = state.versions.get(event.version)
        if version is None or replica.validator or state.validations.closing:
            return  # only validations need it there, and they have their own count
        version.refused += 1
        taken = max(state.census.rollouts.seen.by, default=-1) >= event.version
        if version.refused >= state.limits.infrastructure_attempts and not taken:
            spent = f"{reason}; {version.refused} replicas were stopped for it and none has installed it"
            self.orders.end_run("failed", spent)

    # orders

    def advance(self) -> None:
        """Stage the newest version on replicas without it, pause replicas to install it, retire superseded versions."""
        state = self.state
        latest = state.latest_version
        if state.draining:
            return
        if latest not in state.versions:  # retired by a resume, which publishes another
            return
        for replica in state.census.unstaged():
            self._stage(replica, state.target_of(replica))
        self._pause()
        version = state.versions[latest]
        if version.state != "live":
            alive = state.census.rollouts.alive
            if alive.total and alive.by.get(latest) == alive.total:
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
        self.orders.add(StageWeights(**replica.address(self.orders.cause), version=version))

    def _pause(self) -> None:
        census = self.state.census
        for replica in census.staged_validators():  # no groups run there, so the order does not matter
            self._pause_one(replica)
        staged, busy = census.staged(), census.busy
        if not staged:
            return

        def unlawful(ids: tuple[ReplicaId, ...]) -> str:
            if all(map(census.is_staged, ids)) and len(set(ids)) == len(ids) and (ids or busy):
                return ""
            return f"it must choose from {list(staged)}, and at least one if no replica is in a sync"

        for id in self.decisions.ask("sync", (staged, busy), (tuple,), unlawful):
            self._pause_one(self.state.fleet.replicas[id])

    def _pause_one(self, replica: Replica) -> None:
        assert replica.staged is not None  # only replicas with staged weights are paused
        self.state.fire_replica(replica, "pause")
        mode = self.state.limits.sync_mode
        self.orders.add(PauseReplica(**replica.address(self.orders.cause), version=replica.staged, mode=mode))

    def _retire(self, latest: Version) -> None:
        state = self.state
        validated = {run.version for run in state.validations.runs.values()}
        for id in [id for id in state.versions if id < latest and id not in validated]:
            if not state.census.is_wanted(id):
                state.fire_version(state.versions[id], "retire")
                self.orders.add(RetireWeights(version=id, number=self.orders.number, cause=self.orders.cause))
