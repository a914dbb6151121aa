"""Train steps: collecting a batch under the deadline rule, scoring, training, publishing, checkpoints.

Called by `scheduler.py`. `policies/built_in.py` states the rule that makes the staleness bound hard. This module checks
every batch against it, whichever policy chose the batch.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine.commands import DeleteCheckpoint, EnterState, InspectStep, PublishWeights, SaveCheckpoint, TruncateGroup
from engine.errors import counted
from engine.events import (
    BatchScored,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointSaved,
    InspectionFailed,
    OrderDone,
    StateFailed,
    StepInspected,
    StepTrained,
)
from engine.ids import NO_VERSION, GroupId, StepId, Version
from engine.policies.built_in import DECISIONS
from engine.scheduling.core import Core
from engine.scheduling.groups import drop_group, on_state_failed, put_back_in_state
from engine.scheduling.inspections import inspect_weights, inspect_weights_again, publishing_step
from engine.scheduling.pools import release_pools, scores_ahead
from engine.scheduling.timers import cancel_timer, limit_timer, set_timer
from engine.states.group import Group
from engine.states.laws import check_batch, check_room
from engine.states.limits import PUBLISHING, SCORING
from engine.states.orders import DEADLINE
from engine.states.process import ADDED_STATES, SCORER
from engine.states.step import Step
from engine.states.view import view_group

TIMER_SLACK_S = 0.001
"""A timer may fire this much early, because of rounding."""
ASKED_AGAIN_S = 1.0
"""Minimum seconds before the deadline policy is asked about the same step again."""


# collecting


def form_batches(core: Core) -> None:
    """Form the next batches, as long as one is wanted and the batching rule allows it."""
    while _form_next(core):
        pass


def _form_next(core: Core) -> bool:
    """Form the next batch. False if none is wanted, or none can be formed."""
    state = core.state
    groups = state.groups
    step = state.training.steps.get(state.training.steps_batched)
    if not state.takes_work or step is None or state.all_batched:
        return False
    if step.state == "waiting":
        if not _wants_batch(core):
            return False
        state.fire_step(step, "collect")
    ready, full = len(groups.ready), state.limits.train_batch_size
    if not ready or (ready < full and not step.short and not _no_group_comes(core)) or not _wants_batch(core):
        return False
    size = min(ready, full)
    chosen = core.decisions.ask(
        "batching", (size,), (tuple, type(None)), lambda chosen: _why_unlawful(core, chosen, size)
    )
    if chosen is not None:
        _form_batch(core, step, chosen)
    return chosen is not None


def _no_group_comes(core: Core) -> bool:
    """Whether the ready groups are the last."""
    ledger = core.state.groups.ledger
    return not ledger.running and not ledger.parked and core.state.no_more_prompts


def _wants_batch(core: Core) -> bool:
    """Whether a task of the next step could begin now."""
    state = core.state
    formed = state.training.formed_steps if len(state.training.steps) > 1 else ()
    if not formed:
        return not state.publishing
    return len(formed) == 1 and scores_ahead(core, formed[0])


def _form_batch(core: Core, step: Step, chosen: tuple[GroupId, ...]) -> None:
    state = core.state
    training = state.training
    groups = [state.groups.live[id] for id in chosen]
    staleness = tuple(state.staleness(group, step.id) for group in groups)
    check_batch(state, step.id, staleness, chosen)
    step.take(groups, staleness)
    for group in groups:
        state.groups.fire(group, "batch")
    cancel_timer(core, DEADLINE)
    state.fire_step(step, "form")
    if state.groups.deadlines.surplus:
        _drop_surplus(core, step)
    training.next_step(step.id + 1, core.state.facts.now)
    check_room(state)
    step.attempt = 1


def _drop_surplus(core: Core, step: Step) -> None:
    """Drop the groups for which this was the last step. With over-sampling, as many may be left as were started
    beyond the bound. Unready groups are dropped first, the last started first."""
    state = core.state
    groups = state.groups
    if not groups.deadlines.due(step.id):
        return
    ready = [groups.live[id] for id in sorted(groups.ready) if groups.live[id].deadline <= step.id]
    for group in (*reversed(groups.unready(step.id)), *reversed(ready)):
        drop_group(core, group)


def _why_unlawful(core: Core, chosen: tuple[GroupId, ...] | None, size: int) -> str:
    """The law that a batch breaks; empty if it breaks none."""
    state = core.state
    groups = state.groups
    if chosen is None:
        return ""
    if len(chosen) != size or len(set(chosen)) != size or any(id not in groups.ready for id in chosen):
        return f"it must return {size} different ready groups"
    for deadline, must, _ in groups.deadlines.requirements(state.training.steps_batched, state.limits.train_batch_size):
        taken = sum(1 for id in chosen if groups.live[id].deadline <= deadline)
        if taken < must:
            return f"step {state.training.steps_batched} must take {must} groups due by step {deadline}"
    return ""


# stragglers


def find_stragglers(core: Core) -> list[Group]:
    """The unready groups that keep the next batch from forming. Each binding deadline adds as many as it lacks, those
    that started first."""
    state = core.state
    groups = state.groups
    needs = groups.deadlines.needs(state.training.steps_batched, state.limits.train_batch_size)
    unready = groups.unready(needs[-1][0]) if needs else []
    chosen: dict[GroupId, Group] = {}
    for deadline, missing in needs:
        due = ((group.id, group) for group in unready if group.deadline <= deadline and group.id not in chosen)
        chosen.update(islice(due, missing))
    return [chosen[id] for id in sorted(chosen)]


def set_deadline_timer(core: Core) -> None:
    """Set the deadline policy's timer once only stragglers keep the next batch from forming."""
    state = core.state
    groups = state.groups
    step = state.training.steps.get(state.training.steps_batched)
    if step is None or step.state != "collecting":
        return
    if state.ending.draining:
        return
    if state.timer_is_set(DEADLINE) or step.acts >= state.limits.max_drops:
        return
    needs = groups.deadlines.needs(step.id, state.limits.train_batch_size)
    if not needs:
        return
    missing = sum(count for _, count in needs)
    unready = groups.ledger.running + groups.ledger.parked
    others_come = unready > missing or not state.no_more_prompts
    if len(groups.ready) + missing >= state.limits.train_batch_size or not others_come:
        patience = state.limits.deadline_timeout_s
        set_timer(core, DEADLINE, max(patience, ASKED_AGAIN_S) if step.acts else patience)


def limit_stragglers(core: Core, before_s: float) -> None:
    """The deadline policy's timeout was `before_s` until now: its timer is due so much earlier or later."""
    timer: Any = core.state.orders.find("timer", DEADLINE)
    if timer is not None:
        since = timer.at + timer.command.delay_s - before_s
        limit_timer(core, DEADLINE, since, core.state.limits.deadline_timeout_s)


def act_on_stragglers(core: Core) -> None:
    """Stragglers have kept a batch from forming for long enough: ask the deadline policy."""
    state = core.state
    step = state.training.steps[state.training.steps_batched]
    if state.ending.draining:
        return  # the drain parked them, so they are not late
    if not core.decisions.policies.deadline.acts or step.acts >= state.limits.max_drops:
        return  # these settings replaced others after the timer was set
    stragglers = find_stragglers(core)
    if not stragglers:
        return
    patience = state.limits.deadline_timeout_s
    late = [group for group in stragglers if state.facts.now - group.started_at >= patience - TIMER_SLACK_S]
    if not late:  # they started after the timer was set, and each gets the whole timeout
        set_timer(core, DEADLINE, patience - (state.facts.now - min(group.started_at for group in stragglers)))
        return
    snapshots = tuple(view_group(group) for group in late)
    law = f"it must return one of {', '.join(DECISIONS)}"
    decision = core.decisions.ask("deadline", (snapshots,), (str,), lambda said: "" if said in DECISIONS else law)
    if decision == "wait":
        set_timer(core, DEADLINE, max(patience, ASKED_AGAIN_S))
        return
    step.acts += 1
    if decision == "shrink" and state.groups.ready:
        step.short = True
    if decision == "truncate":
        _truncate(core, late)
    else:
        for group in late:
            drop_group(core, group)


def _truncate(core: Core, stragglers: Sequence[Group]) -> None:
    state = core.state
    for group in stragglers:
        if group.state in state.groups.state_queues.by_name:
            continue  # it is generated already: there is nothing to truncate
        group.truncate = True
        replica = state.replicas.of_group(group.id)
        if replica is not None:
            core.state.orders.add(TruncateGroup(**replica.address_of(group)))
        elif not group.tokens:
            drop_group(core, group)


# scoring and training


def on_batch_scored(core: Core, event: BatchScored) -> None:
    for index, tasks in enumerate(core.state.limits.scorers()):
        if event.task in tasks:
            core.state.process(SCORER, index).deaths = 0  # progress
    step = core.state.training.steps[event.step]
    step.done = (*step.done, core.state.limits.scoring_tasks.index(event.task))
    release_pools(core, step.id, event.task)


def fail_step(core: Core, id: StepId, reason: str, *, charged: bool = True) -> None:
    """An attempt to score, inspect or train a step failed. It counts only if `charged`."""
    step = core.state.training.steps[id]
    core.state.orders.withdraw("inspect", (NO_VERSION, id))
    for task in core.state.scoring(step):
        core.state.orders.withdraw("score", (id, task))
    step.failures += charged
    if charged and step.failures >= core.state.limits.infrastructure_attempts:
        core.state.end_run("failed", f"train step {id} failed {step.failures} times; last error: {reason}")
        return
    begin_step_again(core, step)
    release_pools(core, id)


def on_step_trained(core: Core, event: StepTrained) -> None:
    state = core.state
    training = state.training
    groups = state.groups
    step = training.steps[event.step]
    state.checkpoints.train(step.id, step.groups, step.staleness)
    training.step_reward = step.reward_mean
    for id in step.groups:
        groups.fire(groups.live[id], "consume")
    if not state.limits.keeps_batches:
        core.discards += step.groups
    training.updates_in[step.id + 1] = training.updates_in[step.id] + event.updates
    if not state.limits.checkpoint_every:
        state.forget_updates()
    if training.steps_trained % state.limits.sync_every == 0 or no_step_left(core):
        state.fire_step(step, "publish")
        order_publication(core)
    else:
        state.fire_step(step, "finish")
        _finish_step(core, step)
    every = state.limits.checkpoint_every
    if every and training.steps_trained % every == 0:
        order_checkpoint(core)


def begin_step_again(core: Core, step: Step) -> None:
    """Score, inspect and train a formed batch again; publish the weights of a trained one again."""
    state = core.state
    if step.state in state.limits.states_at(PUBLISHING):
        state.fire_step(step, "republish")
    elif step.state in ("scoring", "training", *state.limits.states_at(SCORING)):
        state.fire_step(step, "retry")
        step.attempt += 1
        step.done = ()


def _finish_step(core: Core, step: Step) -> None:
    """A step is trained and, if it publishes, published."""
    core.state.training.finish(step, core.state.count_setbacks())
    release_pools(core, step.id)


def no_step_left(core: Core) -> bool:
    """Whether no step is left to train: all steps are done, or all prompts have ended and no more come."""
    state = core.state
    if state.training.steps_trained < state.training.steps_batched:
        return False
    if state.all_batched:
        return True
    return not state.groups.ledger.unconsumed and state.no_more_prompts


# publishing


def order_publication(core: Core) -> None:
    """Order the next version: after every k-th step, at the end of the run for unpublished steps, and after a
    resume or a failed publication."""
    state = core.state
    training = state.training
    training.publishing_attempt += 1
    version, attempt = training.latest_version + 1, training.publishing_attempt
    core.state.orders.add(PublishWeights(version=version, attempt=attempt, steps=training.steps_trained))


def on_weights_stored(core: Core, version: Version) -> None:
    """A version is in the weights store. Replicas get it once every added state has let it pass."""
    core.state.training.publish_failures = 0
    if not inspect_weights(core, version):
        _take_published(core, version)


def on_step_inspected(core: Core, event: StepInspected) -> None:
    """A batch or a version may pass, or the run ends: the same weights and batch would be refused again."""
    state = core.state
    state.process(ADDED_STATES, 0).deaths = 0  # progress
    if event.refused:
        subject = f"the batch of train step {event.step}"
        if event.version != NO_VERSION:
            subject = f"weights version {event.version}, after {counted(event.step + 1, 'train step')}"
        core.state.end_run("failed", f"state {event.state} refused {subject}: {event.refused}")
    elif event.version != NO_VERSION:  # `pools.py` continues with a batch
        state.training.publish_failures = 0
        if not inspect_weights(core, event.version, event.state):
            _take_published(core, event.version)


def fail_inspection(core: Core, failed: InspectionFailed, *, charged: bool = True) -> None:
    """An attempt to inspect a batch or a version failed. It counts only if `charged`."""
    state = core.state
    training = state.training
    reason = f"state {failed.state}: {failed.reason}"
    if failed.version == NO_VERSION:
        fail_step(core, failed.step, reason, charged=charged)
        return
    training.publish_failures += charged
    if charged and training.publish_failures >= state.limits.infrastructure_attempts:
        tried = f"version {failed.version} could not be inspected in {counted(training.publish_failures, 'attempt')}"
        core.state.end_run("failed", f"{tried}; last error: {reason}")
        return
    inspect_weights_again(core, failed.version, failed.state)


def fail_state_work(core: Core, order: EnterState | InspectStep, reason: str, *, charged: bool = True) -> None:
    """An attempt to do the work of an added state has no answer. It counts only if `charged`."""
    about: dict[str, Any] = {"attempt": order.attempt, "state": order.state, "reason": reason}
    if isinstance(order, InspectStep):
        failed = InspectionFailed(step=order.step, version=order.version, **about)
        fail_inspection(core, failed, charged=charged)
        return
    if charged:
        on_state_failed(core, StateFailed(group=order.group, cause="infrastructure", **about))
    else:
        put_back_in_state(core, order.state, core.state.groups.live[order.group])


def _take_published(core: Core, published: Version) -> None:
    """A version is in the weights store, and replicas may have it."""
    state = core.state
    state.training.publish(published)
    state.forget_versions()
    step = publishing_step(core)
    if step is not None:
        state.fire_step(step, "published")
        _finish_step(core, step)


def fail_publication(core: Core, version: Version, reason: str) -> None:
    """An attempt to publish a version failed."""
    state = core.state
    state.training.publish_failures += 1
    if state.training.publish_failures >= state.limits.infrastructure_attempts:
        core.state.end_run("failed", f"version {version} could not be published; last error: {reason}")
        return
    order_publication(core)


# a new trainer


def beginning_of_trainer(core: Core) -> dict[str, Any] | None:
    """The starting point of a new trainer, as fields of `StartProcess`: the newest checkpoint, with later steps
    retrained from their batches, or published weights that contain every step. None: steps would be lost."""
    state = core.state
    training = state.training
    saved, trained = state.checkpoints.newest, training.steps_trained
    redo = tuple(range(saved, trained))
    kept = state.checkpoints.stored_batches
    if all(step in kept for step in redo):
        return {"steps": saved, "updates": training.updates_in[saved], "redo": redo}
    inspected, latest = state.inspected_version, training.latest_version
    if inspected is None and (training.steps_in[latest] != trained or latest not in training.versions):
        return None
    version = latest if inspected is None else inspected
    return {"steps": trained, "version": version, "updates": training.updates_in[trained]}


def why_trainer_cannot_begin(core: Core) -> str:
    """Why `beginning` returned None."""
    state = core.state
    trained, saved = state.training.steps_trained, state.checkpoints.newest
    return (
        f"the weights after {trained} train steps are lost: the last checkpoint is after {saved}, and neither "
        "published weights nor batches of the later steps exist"
    )


# checkpoints


def order_checkpoint(core: Core) -> None:
    """Order a checkpoint of the weights as they are now."""
    state = core.state
    training = state.training
    if state.checkpoints.ordered != training.steps_trained:
        state.checkpoints.ordered, state.checkpoints.failures = training.steps_trained, 0
    core.state.orders.add(SaveCheckpoint(steps=training.steps_trained))


def is_unsaved(core: Core) -> bool:
    """Whether no checkpoint has all train steps, and none is being written."""
    state = core.state
    saved = state.checkpoints.newest >= state.training.steps_trained
    return bool(state.limits.checkpoint_every) and not saved and not state.checkpoint_pending


def on_checkpoint(core: Core, event: CheckpointSaved | CheckpointFailed) -> None:
    """Only the last checkpoint is repeated, by the code that ends the run: a newer one follows every other."""
    state = core.state
    if isinstance(event, CheckpointSaved):
        take_saved(core, event.steps)
        delete_checkpoints(core)
        return
    state.checkpoints.failures += 1
    last = no_step_left(core) or (state.ending.draining and not state.training.formed_steps)
    if last and state.checkpoints.failures >= state.limits.infrastructure_attempts:
        core.state.end_run(
            "failed",
            f"the last checkpoint, after {event.steps} train steps, could not be written; "
            f"it failed {state.checkpoints.failures} times; last error: {event.reason}",
        )


def take_saved(core: Core, steps: int) -> None:
    """A checkpoint is complete."""
    state = core.state
    core.discards += state.checkpoints.save(steps)
    state.forget_updates()


def delete_checkpoints(core: Core) -> None:
    """Order the deletion of checkpoints that the limits do not keep."""
    state = core.state
    for steps in state.surplus_checkpoints():
        if state.orders.find("delete", steps) is None:
            core.state.orders.add(DeleteCheckpoint(steps=steps))


def on_order_done(core: Core, event: OrderDone) -> None:
    """Note deleted checkpoints. Other orders answered by `OrderDone` need nothing more."""
    state = core.state
    for order in state.orders.matched[event.id]:
        if isinstance(order.command, DeleteCheckpoint):
            state.checkpoints.remove(order.command.steps)


def on_checkpoint_damaged(core: Core, event: CheckpointDamaged) -> None:
    """Forget the checkpoint, and withdraw deletions of older ones that replace it. None has begun, because no
    trainer runs."""
    state = core.state
    state.checkpoints.remove(event.steps)
    state.checkpoints.ordered = min(state.checkpoints.ordered, state.checkpoints.newest)
    surplus = state.surplus_checkpoints()
    for steps in [steps for steps in state.orders.open["delete"] if steps not in surplus]:
        state.orders.withdraw("delete", steps)
