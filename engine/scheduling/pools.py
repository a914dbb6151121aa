"""Leases pools: orders scoring and training tasks as soon as their inputs exist and their hardware is free.

Called by `scheduler.py` in every tick that may have changed a step, a replica or a version. A task of the trainer
holds one lease, granted when its inputs exist, earliest step first. Replicas in the same pool sleep meanwhile, and wake
once no formed step needs the pool. They also sleep while the trainer starts there, and start when they could wake.
"""

from engine.commands import InstallWeights, PauseReplica, ResumeReplica, ScoreBatch
from engine.ids import NO_VERSION, EventId, StepId
from engine.scheduling.core import Core
from engine.scheduling.inspections import train_or_inspect
from engine.scheduling.lifetimes import order_start
from engine.states.limits import SCORING
from engine.states.pool import ROLLOUT, PoolLease
from engine.states.process import POOL_TAKEN, TRAINER
from engine.states.replica import GONE, Replica
from engine.states.step import Step

TRAIN = "train"
OUT_OF_THE_WAY = ("asleep", "down")
"""Replicas in these states use no resources of their pool, unless their process is being stopped."""


def lease_pools(core: Core) -> None:
    """Lease free pools to the tasks that are ready."""
    state = core.state
    if len(state.training.steps) > 1:
        for step in state.training.formed_steps:
            for task in _tasks_left(core, step):
                lease = core.state.pools.of(task)
                free = lease.task in ("", ROLLOUT) or (lease.task, lease.step) == (task, step.id)
                if free and _inputs_exist(core, step, task) and _make_room(core, lease):
                    _order_task(core, step, task, lease)
    for lease in core.state.pools.shared:
        _sleep_or_wake_replicas(core, lease)


def _sleep_or_wake_replicas(core: Core, lease: PoolLease) -> None:
    """Lease a shared pool to rollout unless it is needed. A replica that joins meanwhile sleeps too."""
    starts = _trainer_starts(core, lease)
    if starts and lease.task == ROLLOUT:
        _make_room(core, lease)
    elif not lease.task and not _needed(core, lease):
        core.state.lease(lease, ROLLOUT)
    wanted = starts or any(
        core.state.pools.of(task) is lease and _inputs_exist(core, step, task)
        for step in core.state.training.formed_steps
        for task in _tasks_left(core, step)
    )
    lease.wanted = lease.task == ROLLOUT and wanted
    if lease.task != ROLLOUT:
        _send_all_to_sleep(core, lease)
    elif not lease.wanted and not core.state.ending.draining:
        _wake_replicas(core, lease)


def release_pools(core: Core, step: StepId, task: str | None = None) -> None:
    """Return the pool of a step's task; with `task` None, the pools of all its tasks."""
    for lease in core.state.pools.leases:
        if lease.step == step and task in (None, lease.task):
            core.state.give_back(lease)


def scores_ahead(core: Core, first: Step) -> bool:
    """Whether a scoring task of the step after `first` could begin now, so that its batch is worth forming."""
    pools = core.state.pools
    return any(
        _needs_no_weights(task) and lease not in pools.shared and not lease.task and lease is not pools.of(TRAIN)
        for task in core.state.limits.scoring_tasks
        if (lease := pools.of(task)) is not None and task not in _tasks_left(core, first)
    )


# deciding


def _needs_no_weights(task: str) -> bool:
    """Whether a scoring task may run before the previous step is trained: the reference model never changes."""
    return task == "ref_logprobs"


def _tasks_left(core: Core, step: Step) -> list[str]:
    """Tasks that are neither done nor ordered, in order; training is last. Added states inspect a batch before."""
    if step.state in core.state.limits.states_at(SCORING):
        return [] if core.state.orders.find("inspect", (NO_VERSION, step.id)) else [TRAIN]
    if step.state != "scoring":
        return []
    names = core.state.limits.scoring_tasks
    ordered = core.state.orders.open["score"]
    left = (name for place, name in enumerate(names) if place not in step.done and (step.id, name) not in ordered)
    return [*left, TRAIN]


def _needed(core: Core, lease: PoolLease) -> bool:
    """Whether the trainer starts there, or a formed step has a task left for it that need not wait for another step."""
    return _trainer_starts(core, lease) or any(
        core.state.pools.of(task) is lease and (step.id == core.state.training.steps_trained or _needs_no_weights(task))
        for step in core.state.training.formed_steps
        for task in _tasks_left(core, step)
    )


def _inputs_exist(core: Core, step: Step, task: str) -> bool:
    state = core.state
    if task == TRAIN:
        scored = len(step.done) == len(state.limits.scoring_tasks)
        return scored and step.id == state.training.steps_trained and not state.publishing and _synced(core)
    return _needs_no_weights(task) or step.id == state.training.steps_trained


def _synced(core: Core) -> bool:
    """Whether training need not wait for replicas to have the newest weights."""
    state = core.state
    out = (*GONE, "asleep") if state.ending.draining else GONE
    return not state.limits.train_after_sync or all(
        replica.version == state.training.latest_version
        for replica in state.replicas.rollouts
        if state.validations.holding(replica) is None and replica.state not in out
    )


def _trainer_starts(core: Core, lease: PoolLease) -> bool:
    """Whether the trainer is to start in a pool. It takes its GPU while it loads and repeats steps."""
    return lease is core.state.pools.of(TRAIN) and core.state.process(TRAINER, 0).coming


def is_empty(core: Core, lease: PoolLease) -> bool:
    """Whether every replica of a pool is out of the way."""
    return all(
        replica.state in OUT_OF_THE_WAY and replica.process.state != "stopping" and not replica.process.loads
        for replica in _replicas_of(core, lease)
    )


def _make_room(core: Core, lease: PoolLease) -> bool:
    """Whether a pool is free for a task. Sends its replicas to sleep first, unless one of them is starting."""
    if lease not in core.state.pools.shared:
        return True
    if any(replica.process.loads for replica in _replicas_of(core, lease)):
        return False  # the others sample meanwhile
    _send_all_to_sleep(core, lease)
    empty = is_empty(core, lease)
    if empty and lease.task == ROLLOUT:
        core.state.give_back(lease)
    return empty


def _replicas_of(core: Core, lease: PoolLease) -> list[Replica]:
    replicas = core.state.replicas.by_id
    return [replicas[id] for id in core.state.pools.sleepers(lease) if id in replicas]


# ordering


def _order_task(core: Core, step: Step, task: str, lease: PoolLease) -> None:
    state = core.state
    if not lease.task:
        state.lease(lease, task, step.id)
    cause = _completed_by(core, step)
    if task == TRAIN:
        train_or_inspect(core, step, cause)
        return
    state.orders.add(ScoreBatch(step=step.id, attempt=step.attempt, groups=step.groups, task=task, cause=cause))


def _completed_by(core: Core, step: Step) -> EventId:
    """The event of this tick that completed the last group of a batch; -1: the batch was complete before."""
    matched, groups = core.state.orders.matched.items(), {*step.groups}
    last = (id for id, orders in matched for one in orders if one.subject in ("group", "state") and one.id in groups)
    return max(last, default=-1)


def _send_all_to_sleep(core: Core, lease: PoolLease) -> None:
    """All that can sleep. In-flight validation rows and an install in progress finish first."""
    for replica in _replicas_of(core, lease):
        if replica.state == "ready" and not core.state.replicas.measuring(replica):
            send_to_sleep(core, replica)


def send_to_sleep(core: Core, replica: Replica) -> None:
    """Park what runs there. Weights being staged are staged again during the sleep, under a new attempt."""
    replica.next_version = None
    replica.sync_attempt += 1
    core.state.fire_replica(replica, "yield")
    core.state.orders.add(PauseReplica(**replica.address(), version=replica.version, mode="sleep"))


def _wake_replicas(core: Core, lease: PoolLease) -> None:
    """Start replicas that wait for the pool, and wake sleeping ones; one with older weights installs the newest first,
    once they are staged."""
    for replica in _replicas_of(core, lease):
        target = core.state.target_of(replica)
        if replica.process.no_room == POOL_TAKEN:
            order_start(core, replica.process)
        if replica.state != "asleep":
            continue
        if replica.version >= target:
            core.state.fire_replica(replica, "wake")
            core.state.orders.add(ResumeReplica(**replica.address()))
        elif replica.next_version == target and not core.state.is_staging(replica):
            core.state.fire_replica(replica, "install")
            core.state.orders.add(InstallWeights(**replica.address(), version=target))
