"""Leases pools: orders scoring and training tasks as soon as their inputs exist and their hardware is free.

Called by `scheduler.py` after every event that may have changed a step, a replica or a version. A task of the trainer
holds one lease, granted when its inputs exist, earliest step first. Replicas in the same pool sleep meanwhile, and wake
once no formed step needs the pool.
"""

from typing import Any

from engine.commands import InstallWeights, PauseReplica, ResumeReplica, ScoreBatch, TrainStep
from engine.ids import StepId
from engine.scheduling.issued_commands import Orders
from engine.states.pool import ROLLOUT, PoolLease
from engine.states.replica import Replica
from engine.states.state import State
from engine.states.step import Step

TRAIN = "train"


class PoolScheduling:
    """Orders the tasks of formed steps, and lets the replicas of shared pools sleep and wake."""

    def __init__(self, state: State, orders: Orders) -> None:
        self.state = state
        self.pools = state.pools
        self.orders = orders
        self._shared = [lease for lease in self.pools.leases if lease.shared]

    def advance(self) -> None:
        """Lease free pools to the tasks that are ready."""
        state = self.state
        if len(state.steps) > 1:
            for step in state.formed_steps:
                for task in self._tasks_left(step):
                    lease = self.pools.of(task)
                    if lease.task in ("", ROLLOUT) and self._inputs_exist(step, task) and self._make_room(lease):
                        self._order(step, task, lease)
        for lease in self._shared:
            self._look_after_replicas(lease)

    def _look_after_replicas(self, lease: PoolLease) -> None:
        """Lease a shared pool to rollout unless a formed step needs it. A replica that joins meanwhile sleeps too."""
        if not lease.task and not self._needed(lease):
            self.state.lease(lease, ROLLOUT)
        wanted = lease.task == ROLLOUT and any(
            self.pools.of(task) is lease and self._inputs_exist(step, task)
            for step in self.state.formed_steps
            for task in self._tasks_left(step)
        )
        if lease.wanted and not wanted:
            self.state.validations.look_again(lease.place_of)
        lease.wanted = wanted
        if lease.task != ROLLOUT:
            self._send_all_to_sleep(lease)
        elif not lease.wanted and not self.state.draining:
            self._wake(lease)

    def release(self, step: StepId, task: str | None = None) -> None:
        """Return the pool of a step's task; with `task` None, the pools of all its tasks."""
        for lease in self.pools.leases:
            if lease.step == step and task in (None, lease.task):
                self.state.give_back(lease)

    def scores_ahead(self, first: Step) -> bool:
        """Whether a scoring task of the step after `first` could begin now, so that its batch is worth forming."""
        tasks = self.state.limits.scoring_tasks
        return any(
            self._needs_no_weights(task) and not lease.shared and not lease.task and lease is not self.pools.of(TRAIN)
            for task in tasks
            if (lease := self.pools.of(task)) is not None and task not in self._tasks_left(first)
        )

    # deciding

    @staticmethod
    def _needs_no_weights(task: str) -> bool:
        """Whether a scoring task may run before the previous step is trained: the reference model never changes."""
        return task == "ref_logprobs"

    def _tasks_left(self, step: Step) -> list[str]:
        """Tasks that are neither done nor ordered, in order; training is last."""
        if step.state != "scoring":
            return []
        names = self.state.limits.scoring_tasks
        ordered = self.state.orders.open("score")
        left = (name for place, name in enumerate(names) if place not in step.done and (step.id, name) not in ordered)
        return [*left, TRAIN]

    def _needed(self, lease: PoolLease) -> bool:
        """Whether a formed step has a task left for this pool that need not wait for another step."""
        return any(
            self.pools.of(task) is lease and (step.id == self.state.steps_trained or self._needs_no_weights(task))
            for step in self.state.formed_steps
            for task in self._tasks_left(step)
        )

    def _inputs_exist(self, step: Step, task: str) -> bool:
        state = self.state
        if task == TRAIN:
            scored = len(step.done) == len(state.limits.scoring_tasks)
            return scored and step.id == state.steps_trained and not state.publishing and self._synced()
        return self._needs_no_weights(task) or step.id == state.steps_trained

    def _synced(self) -> bool:
        """Whether training need not wait for replicas to have the newest weights."""
        state = self.state
        return not state.limits.train_after_sync or not state.census.behind(
            state.latest_version, asleep=not state.draining
        )

    def _make_room(self, lease: PoolLease) -> bool:
        """Whether a pool is free for a task. Sends its replicas to sleep first."""
        if not lease.shared:
            return True
        self._send_all_to_sleep(lease)
        if self.state.census.is_occupied(lease):
            return False
        if lease.task:
            self.state.give_back(lease)
        return True

    # ordering

    def _order(self, step: Step, task: str, lease: PoolLease) -> None:
        state = self.state
        state.lease(lease, task, step.id)
        order: dict[str, Any] = {
            "step": step.id, "attempt": step.attempt, "groups": step.groups, "cause": self.orders.cause,
        }  # fmt: skip
        if task == TRAIN:
            state.fire_step(step, "train")
            self.orders.add(TrainStep(**order, staleness=step.staleness))
        else:
            self.orders.add(ScoreBatch(**order, task=task))

    def _send_all_to_sleep(self, lease: PoolLease) -> None:
        """All that can be; held-out rows are measured to their end first, and an install in progress is finished."""
        for replica in self.state.census.awake(lease):
            self.send_to_sleep(replica)

    def send_to_sleep(self, replica: Replica) -> None:
        """Park what runs there. Weights being staged are staged again during the sleep, under a new attempt."""
        replica.staging = replica.staged = None
        replica.sync_attempt += 1
        self.state.fire_replica(replica, "yield")
        self.orders.add(PauseReplica(**replica.address(self.orders.cause), version=replica.version, mode="sleep"))

    def _wake(self, lease: PoolLease) -> None:
        """Wake sleeping replicas; one with older weights installs the newest first, once they are staged."""
        for replica in self.state.census.wakeable(lease):
            target = self.state.target_of(replica)
            if replica.version >= target:
                self.state.fire_replica(replica, "wake")
                self.orders.add(ResumeReplica(**replica.address(self.orders.cause), number=self.orders.number))
            else:
                self.state.fire_replica(replica, "install")
                self.orders.add(InstallWeights(**replica.address(self.orders.cause), version=target))
