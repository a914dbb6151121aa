"""Brings weights to replicas: join, stage, pause, install. Called by `scheduler.py`.

A replica always works towards the newest version: stage its bytes while it generates, pause by the sync mode, swap,
continue. Any failure on the way puts it back to generating with its old weights.
"""

from engine.commands import InstallWeights, PauseReplica, ResumeReplica, RetireWeights, StageWeights
from engine.events import ProcessUp, ReplicaPaused, SyncFailed, WeightsInstalled
from engine.ids import ReplicaId, Version
from engine.scheduling.core import Core
from engine.scheduling.groups import limit_replica, stop_replica
from engine.scheduling.timers import cancel_timer, limit_timer
from engine.states.laws import require
from engine.states.orders import GIVE_UP
from engine.states.replica import IN_SYNC, Replica

EMPTYING = ("yielding", "draining")
"""States of a replica that is paused, but not for new weights."""


# replicas come and go


def join_replica(core: Core, replica: Replica, event: ProcessUp) -> None:
    """The process of a replica is up."""
    state = core.state
    require(
        0 <= event.version <= state.training.latest_version and event.slots > 0 and event.samples > 0,
        "law 6: a replica must join with a published version and at least one slot of one trajectory",
        replica=replica.id, version=event.version, latest=state.training.latest_version, slots=event.slots,
        samples=event.samples,
    )  # fmt: skip
    replica.slots, replica.samples = event.slots, event.samples
    replica.version, replica.limit, replica.cache_used = event.version, 0, 0.0
    if not replica.validator:
        _forget_none_left(core)
        limit_replica(core, replica)
    replica.sync_attempt = replica.sync_failures = 0
    replica.pace, replica.paced = 0.0, 0
    state.fire_replica(replica, "join")


def note_none_left(core: Core, lost: Replica, reason: str) -> None:
    """Called after a replica is gone. If it was the last, the run waits for another for `give_up_s`, then ends."""
    state = core.state
    if lost.validator or state.rollouts_left:
        return
    ending = state.ending
    ending.none_left_since = ending.none_left_since if ending.none_left else state.facts.now
    ending.none_left = f"no replica is left; the last one was lost: {reason}"
    limit_wait_for_replicas(core)


def limit_wait_for_replicas(core: Core) -> None:
    """Limit the wait for another replica, if there is none left."""
    ending = core.state.ending
    if ending.none_left:
        limit_timer(core, GIVE_UP, ending.none_left_since, core.state.limits.give_up_s or None)


def _forget_none_left(core: Core) -> None:
    core.state.ending.none_left = ""
    cancel_timer(core, GIVE_UP)


# one replica's way to a version


def on_replica_paused(core: Core, event: ReplicaPaused) -> None:
    replica = core.state.replicas.by_id[event.replica]
    if replica.state == "draining":
        core.state.fire_replica(replica, "drained")
        return
    if replica.state == "yielding":
        core.state.fire_replica(replica, "sleep")
        return
    assert replica.next_version is not None  # a pause for new weights needs staged weights
    core.state.fire_replica(replica, "install")
    core.state.orders.add(InstallWeights(**replica.address(), version=replica.next_version))


def on_weights_installed(core: Core, event: WeightsInstalled) -> None:
    replica = core.state.replicas.by_id[event.replica]
    assert replica.next_version is not None  # the order was to install the staged weights
    replica.version, replica.next_version = replica.next_version, None
    replica.sync_failures = 0
    core.state.fire_replica(replica, "installed")
    core.state.orders.add(ResumeReplica(**replica.address()))


def on_sync_failed(core: Core, event: SyncFailed) -> None:
    replica = core.state.replicas.by_id[event.replica]
    replica.next_version = None
    replica.sync_failures += 1
    if replica.sync_failures >= core.state.limits.infrastructure_attempts:
        _give_up_on_version(core, replica, event)
    elif replica.state in (*IN_SYNC, *EMPTYING):
        core.state.fire_replica(replica, "revert")
        core.state.orders.add(ResumeReplica(**replica.address()))


def _give_up_on_version(core: Core, replica: Replica, event: SyncFailed) -> None:
    """A replica has spent its install budget: stop it, so that its next life can try. A version that no
    replica can install ends the run."""
    state = core.state
    reason = f"version {event.version} could not be installed; last error: {event.reason}"
    validation = state.validations.holding(replica)
    if validation is not None:
        validation.refused += 1
    stop_replica(core, replica, reason)
    version = state.training.versions.get(event.version)
    if version is None or replica.validator or state.validations.facts.closing:
        return  # only validations need it there, and they have their own count
    version.refused += 1
    taken = any(one.version >= event.version for one in state.replicas.rollouts)
    if version.refused >= state.limits.infrastructure_attempts and not taken:
        spent = f"{reason}; {version.refused} replicas were stopped for it and none has installed it"
        core.state.end_run("failed", spent)


# orders


def sync_weights(core: Core) -> None:
    """Stage the newest version on replicas without it, pause replicas to install it, retire superseded versions."""
    state = core.state
    training = state.training
    latest = training.latest_version
    if state.ending.draining:
        return
    if latest not in training.versions:  # retired by a resume, which publishes another
        return
    behind = [
        replica for replica in state.replicas.by_id.values()
        if replica.version < latest and replica.state in ("ready", "asleep") and not replica.process.leaves
    ]  # fmt: skip
    staged = []
    for replica in behind:
        target = state.target_of(replica)
        if replica.version == target or state.is_staging(replica):
            continue  # a validation keeps it at its version, or it has an order
        if replica.next_version != target:
            _stage_version(core, replica, target)
        elif replica.state == "ready":
            staged.append(replica)
    if staged:
        _pause_staged(core, staged)
    version = training.versions[latest]
    if version.state != "live":
        up = [replica for replica in state.replicas.rollouts if replica.state != "down"]
        if up and all(replica.version == latest for replica in up):
            state.fire_version(version, "live")
    if len(training.versions) > 1:
        _retire_versions(core, latest)


def _stage_version(core: Core, replica: Replica, version: Version) -> None:
    state = core.state
    if state.training.versions[version].state == "published":
        state.fire_version(state.training.versions[version], "transfer")
    replica.next_version = version
    replica.sync_attempt += 1
    core.state.orders.add(StageWeights(**replica.address(), version=version))


def _pause_staged(core: Core, staged: list[Replica]) -> None:
    """Pause validators that have staged their target version, and of the other replicas those that the sync policy
    chooses."""
    state = core.state
    for replica in staged:
        if replica.validator:  # no groups run there
            _pause_replica(core, replica)
    ids = tuple([replica.id for replica in staged if not replica.validator])
    if not ids:
        return
    busy = sum(
        replica.state in IN_SYNC and not replica.process.leaves and replica.version < state.target_of(replica)
        for replica in state.replicas.rollouts
    )
    among = {*ids}

    def unlawful(chosen: tuple[ReplicaId, ...]) -> str:
        if among.issuperset(chosen) and len({*chosen}) == len(chosen) and (chosen or busy):
            return ""
        return f"it must choose from {list(ids)}, and at least one if no replica is in a sync"

    for id in core.decisions.ask("sync", (ids, busy), (tuple,), unlawful):
        _pause_replica(core, state.replicas.by_id[id])


def _pause_replica(core: Core, replica: Replica) -> None:
    assert replica.next_version is not None  # only replicas with staged weights are paused
    core.state.fire_replica(replica, "pause")
    order = replica.address()
    core.state.orders.add(PauseReplica(**order, version=replica.next_version, mode=core.state.limits.sync_mode))


def _retire_versions(core: Core, latest: Version) -> None:
    state = core.state
    needed = {validation.version for validation in state.validations.live.values()}
    needed.update(replica.next_version for replica in state.replicas.by_id.values() if replica.next_version)
    for id in list(state.training.versions):
        if id < latest and id not in needed:
            state.fire_version(state.training.versions[id], "retire")
            core.state.orders.add(RetireWeights(version=id))
