"""Replicas that leave, and the way to rest: drains one replica, or all of a run that is to stop.

A drain parks what runs on a replica, so that it costs no attempt.
"""

from engine.commands import PauseReplica, ResumeReplica, StopMeasuring
from engine.events import DrainRequested, ReplicaLeaves, ReplicasWanted
from engine.scheduling.core import Core
from engine.scheduling.groups import lose_replica
from engine.scheduling.lifetimes import REASON_LENGTH, launch_replicas, stop_process
from engine.scheduling.pools import send_to_sleep
from engine.scheduling.timers import limit_timer
from engine.scheduling.weights import note_none_left
from engine.states.orders import DRAIN
from engine.states.replica import AT_REST, Replica

# requests


def on_drain_requested(core: Core, event: DrainRequested) -> None:
    if core.state.ending.draining:
        return
    core.state.ending.draining = event.reason[:REASON_LENGTH] or "a drain was requested"
    core.state.ending.draining_since = event.at
    limit_drain(core)


def limit_drain(core: Core) -> None:
    """Limit the drain that is in progress, if there is one."""
    ending = core.state.ending
    if ending.draining:
        limit_timer(core, DRAIN, ending.draining_since, core.state.limits.drain_s)


def on_drain_timer(core: Core) -> None:
    """The drain has exceeded its time limit: stop the run without waiting for the rest."""
    core.state.end_run("stopped", f"the drain exceeded durability.drain_s = {core.state.limits.drain_s:g}")


def on_replica_leaves(core: Core, event: ReplicaLeaves) -> None:
    replica = core.state.replicas.by_id[event.replica]
    if not replica.process.excused:
        replica.process.excused, replica.process.reason = True, event.reason


def on_replicas_wanted(core: Core, event: ReplicasWanted) -> None:
    """Replicas with the highest ids leave, or missing ones are started."""
    for replica in core.state.replicas.rollouts:
        _set_wanted(core, replica, replica.id < event.replicas, f"{event.replicas} replicas are wanted")
    launch_replicas(core, event.replicas)
    core.state.ending.none_left = ""


def _set_wanted(core: Core, replica: Replica, wanted: bool, reason: str) -> None:
    process = replica.process
    process.wanted = wanted
    if not process.excused:
        process.reason = "" if wanted else reason
    if wanted and process.state == "gone":
        process.deaths = 0


# orders


def drain_replicas(core: Core) -> None:
    """Drain replicas that must leave, and stop those that have drained."""
    draining = bool(core.state.ending.draining)
    for replica in core.state.replicas.by_id.values():
        if replica.process.leaves:
            _let_leave(core, replica)
            continue
        stays = replica.state == "drained" and (not draining or core.state.pools.of_replica(replica.id) is not None)
        if stays:  # it was to leave
            core.state.fire_replica(replica, "keep")
            core.state.orders.add(ResumeReplica(**replica.address()))
        if draining:
            _bring_to_rest(core, replica)


def _let_leave(core: Core, replica: Replica) -> None:
    """Drain a replica that leaves, or stop it once it has drained."""
    process = replica.process
    if process.state == "up" and replica.state not in ("drained", "asleep"):
        _bring_to_rest(core, replica, alone=True)
    elif process.state == "up":
        _stop_replica(core, replica)
    elif process.state == "starting" and not process.wanted:
        _stop_replica(core, replica)  # it is not up yet


def _stop_replica(core: Core, replica: Replica) -> None:
    """Stop a replica on which nothing runs."""
    reason = replica.process.reason
    lose_replica(core, replica, reason)
    if replica.process.state != "stopping":
        replica.process.excused = True
    stop_process(core, replica.process, reason)
    note_none_left(core, replica, reason)


def _bring_to_rest(core: Core, replica: Replica, *, alone: bool = False) -> None:
    """Park what runs on a ready replica. Does nothing during a sync: it is called again after that."""
    state = core.state
    if replica.state != "ready":
        return
    validation = state.validations.holding(replica)
    if validation is not None:
        if state.replicas.measuring(replica):
            core.state.orders.add(StopMeasuring(validation=validation.id, replica=replica.id, life=replica.life))
        state.validations.release(validation, replica)
    if not alone and state.pools.of_replica(replica.id) is not None:
        send_to_sleep(core, replica)  # the batch in training needs the hardware that it frees
        return
    replica.next_version = None
    replica.sync_attempt += 1
    state.fire_replica(replica, "drain")
    order = replica.address()
    core.state.orders.add(PauseReplica(**order, version=replica.version, mode="abort"))


def is_at_rest(core: Core) -> bool:
    """Nothing runs anywhere, no added state works, and no batch is being trained."""
    state = core.state
    return (
        not state.training.formed_steps
        and not state.publishing
        and not state.groups.state_queues.out
        and all(replica.state in AT_REST for replica in state.replicas.by_id.values())
    )
