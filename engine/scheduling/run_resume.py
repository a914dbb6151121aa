"""A run that continues after its processes have ended: back to the weights there are, and on from there.

Called by `scheduler.py`. The replicas and the weights of every version were lost with their processes. If the
trajectories still exist and the trainer has repeated its steps from them (`kept`), nothing else is lost. Otherwise the
run branches at a checkpoint or at the initial weights, and everything after that is undone. This module updates the
state accordingly and orders the publication of these weights as a new version, which everything else waits for.
"""

from engine.events import RunResumed
from engine.scheduling.core import Core
from engine.scheduling.groups import drop_group, park_group, prepare_groups, resume_key
from engine.scheduling.processes import begin_processes
from engine.scheduling.steps import (
    begin_step_again,
    delete_checkpoints,
    order_checkpoint,
    order_publication,
    take_saved,
)
from engine.scheduling.validation import begin_validations_again
from engine.states.group import Group
from engine.states.laws import require
from engine.states.limits import QUEUED
from engine.states.machine import Phase
from engine.states.state import State


def on_run_resumed(core: Core, event: RunResumed) -> None:
    """Return the run to `event.steps` train steps and continue it. Raises: `InvariantViolated`."""
    state = core.state
    _require_possible(event, state)
    state.groups.state_queues.put_back()
    begin_validations_again(core, event.steps)
    state.orders.clear()
    _lose_replicas(core, event)
    state.begin_again()
    state.groups.facts.exhausted = state.groups.facts.exhausted and not event.changed
    state.recoveries["resumed" if event.kept else "branched"] += 1
    if event.kept:
        if event.checkpoint > state.checkpoints.newest:
            take_saved(core, event.checkpoint)
        _begin_work_again(core, event)
        if state.checkpoints.ordered > state.checkpoints.newest:
            order_checkpoint(core)
    else:
        state.branch(event.steps, event.consumed, event.released)
        prepare_groups(core, list(state.groups.waiting))
    delete_checkpoints(core)
    if not event.again:
        state.ending.restarts, state.ending.restarted_at = 0, event.steps
    begin_processes(core, event.replicas)
    order_publication(core)


def _require_possible(event: RunResumed, state: State) -> None:
    training = state.training
    groups = state.groups
    again = (*event.consumed, *event.released)
    require(
        0 <= event.steps <= training.steps_trained, "law 5: a run cannot resume after steps that it did not train",
        steps=event.steps, trained=training.steps_trained,
    )  # fmt: skip
    require(
        event.steps in training.updates_in, "law 5: a run can resume only after steps in a checkpoint",
        steps=event.steps,
    )  # fmt: skip
    require(
        len(set(again)) == len(again) and all(0 <= id < groups.ledger.drawn and id not in groups.live for id in again),
        "law 5: only a group that has ended can be consumed or released again", groups=again[:8],
    )  # fmt: skip
    if event.kept:
        require(
            event.steps == training.steps_trained and not again, "law 5: a run that loses no step must repeat none",
            steps=event.steps, trained=training.steps_trained, groups=again[:8],
        )  # fmt: skip
    gone = [
        id for id in event.missing if id not in groups.live or groups.phase_of(groups.live[id].state) is Phase.BATCHED
    ]
    require(
        not gone and (event.kept or not event.missing), "law 5: missing trajectories cannot be generated again",
        groups=gone[:8],
    )  # fmt: skip


def _lose_replicas(core: Core, event: RunResumed) -> None:
    """Park all running groups; a branch then queues them again. They are not charged an attempt."""
    state = core.state
    for replica in state.replicas.by_id.values():
        replica.next_version = None
        replica.failed_groups = 0
        if replica.state != "down":
            state.fire_replica(replica, "lose")
    groups = state.groups
    running = [group for group in groups.live.values() if groups.phase_of(group.state) is Phase.RUNNING]
    for group in running if event.kept else ():
        park_group(core, group)


def _prepare_anew(core: Core, group: Group) -> None:
    """Let a group that waits pass through all added states before generation once more."""
    group.prepared = False
    if group.state != QUEUED:
        core.state.groups.fire(group, "prepare")
    prepare_groups(core, [group.id])


def _begin_work_again(core: Core, event: RunResumed) -> None:
    """Let what was running outside the replicas begin again: the work of added states, and a formed batch."""
    state = core.state
    groups = state.groups
    for id in event.missing:
        group = groups.live[id]
        group.forget_tokens()
        if groups.phase_of(group.state) is Phase.WAITING:
            _prepare_anew(core, group)
        elif group.prepared:
            drop_group(core, group)  # its prompt is lost, and a group that has begun cannot be prepared again
        else:
            group.resume_key = resume_key(core, group)
            if group.state != "aborted":
                groups.fire(group, "lose")
    for step in state.training.formed_steps:
        begin_step_again(core, step)
        if step.failures >= state.limits.infrastructure_attempts:
            step.failures = 0  # it ended the run, which continues once the cause is gone
    for lease in state.pools.leases:
        if lease.task:
            state.give_back(lease)
    state.retire_all()
