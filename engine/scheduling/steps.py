"""Train steps: collecting a batch under the deadline rule, scoring, training, publishing, checkpoints.

Called by `scheduler.py`. `policies/built_in.py` states the rule that makes the staleness bound hard. This module checks
every batch against it, whichever policy chose the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine.commands import CancelTimer, DeleteCheckpoint, PublishWeights, SaveCheckpoint, SetTimer, TruncateGroup
from engine.events import (
    BatchScored,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointSaved,
    OrderDone,
    PublishFailed,
    StepFailed,
    StepTrained,
    TimerFired,
    WeightsPublished,
)
from engine.ids import GroupId, StepId, Version
from engine.policies.built_in import DECISIONS
from engine.scheduling.decisions import Decisions
from engine.scheduling.groups import RolloutScheduling
from engine.scheduling.issued_commands import Orders
from engine.scheduling.pools import PoolScheduling
from engine.states.group import Group
from engine.states.laws import check_batch, check_room
from engine.states.state import State
from engine.states.step import Step
from engine.states.view import view_group

TIMER_SLACK_S = 0.001
"""A timer may fire this much early, because of rounding."""
ASKED_AGAIN_S = 1.0
"""Minimum seconds before the deadline policy is asked about the same step again."""


@dataclass(eq=False)
class TrainingScheduling:
    """Trains one step at a time. Forms the next batch when the previous step is finished, or earlier if a scoring task
    has its own pool."""

    state: State
    decisions: Decisions
    orders: Orders
    rollout: RolloutScheduling
    pools: PoolScheduling

    # collecting

    def advance(self) -> None:
        """Form the next batch if one is wanted and the rule allows it."""
        state = self.state
        if not state.started or state.outcome is not None or state.draining or not self._wants_batch():
            return
        step = state.steps.get(state.steps_batched)
        if step is None or state.all_batched:
            return
        if step.state == "waiting":
            state.fire_step(step, "collect")
        ready, full = len(state.ready), state.limits.train_batch_size
        closing = state.no_more_prompts and not state.ledger.running and not state.ledger.parked
        if ready >= full or (ready and (closing or step.short)):
            size = min(ready, full)
            chosen = self.decisions.ask(
                "batching", (size,), (tuple, type(None)), lambda chosen: self._unlawful(chosen, size)
            )
            if chosen is not None:
                self._form(step, chosen)

    def _wants_batch(self) -> bool:
        """Whether a task of the next step could begin now."""
        state = self.state
        formed = state.formed_steps if len(state.steps) > 1 else ()
        if not formed:
            return not state.publishing
        return len(formed) == 1 and self.pools.scores_ahead(formed[0])

    def _form(self, step: Step, chosen: tuple[GroupId, ...]) -> None:
        state = self.state
        groups = [state.groups[id] for id in chosen]
        staleness = tuple(state.staleness(group, step.id) for group in groups)
        check_batch(state, step.id, staleness, chosen)
        step.take(chosen, staleness)
        for group in groups:
            state.fire_group(group, "batch")
        if step.timer is not None:
            self.orders.add(CancelTimer(timer=step.timer, cause=self.orders.cause))
            step.timer = None
        state.fire_step(step, "form")
        if state.deadlines.surplus:
            self._drop_surplus(step)
        state.steps_batched += 1
        state.next_step(state.steps_batched)
        check_room(state)
        step.attempt = 1

    def _drop_surplus(self, step: Step) -> None:
        """Drop the groups for which this was the last step. With over-sampling, as many may be left as were started
        beyond the bound. Unready groups are dropped first, the last started first."""
        state = self.state
        if not state.deadlines.due(step.id):
            return
        unready = state.deadlines.unready(step.id)
        ready = sorted(id for id in state.ready if state.groups[id].deadline <= step.id)
        for id in (*reversed(unready), *reversed(ready)):
            self.rollout.drop(state.groups[id])

    def _unlawful(self, chosen: tuple[GroupId, ...] | None, size: int) -> str:
        """The law that a batch breaks; empty if it breaks none."""
        state = self.state
        if chosen is None:
            return ""
        if len(chosen) != size or len(set(chosen)) != size or any(id not in state.ready for id in chosen):
            return f"it must return {size} different ready groups"
        for deadline, must, _ in state.deadlines.requirements(state.steps_batched, state.limits.train_batch_size):
            taken = sum(1 for id in chosen if state.groups[id].deadline <= deadline)
            if taken < must:
                return f"step {state.steps_batched} must take {must} groups due by step {deadline}"
        return ""

    # stragglers

    def stragglers(self) -> list[Group]:
        """The unready groups that keep the next step from forming: for every binding deadline as many as are missing,
        first started first."""
        state = self.state
        needs = state.deadlines.needs(state.steps_batched, state.limits.train_batch_size)
        chosen: dict[GroupId, None] = {}
        for deadline, missing in needs:
            due = (id for id in state.deadlines.unready(deadline) if id not in chosen)
            chosen.update(dict.fromkeys(islice(due, missing)))
        return [state.groups[id] for id in sorted(chosen)]

    def watch(self) -> None:
        """Set the deadline policy's timer once only stragglers keep the next batch from forming."""
        state = self.state
        step = state.steps.get(state.steps_batched)
        if not self.decisions.policies.deadline.acts or step is None or step.state != "collecting":
            return
        if state.draining:
            return
        if step.timer is not None or step.acts >= state.limits.max_drops:
            return
        needs = state.deadlines.needs(step.id, state.limits.train_batch_size)
        if not needs:
            return
        missing = sum(count for _, count in needs)
        unready = state.ledger.running + state.ledger.parked
        others_come = unready > missing or not state.no_more_prompts
        if len(state.ready) + missing >= state.limits.train_batch_size or not others_come:
            patience = state.limits.deadline_timeout_s
            self._set_timer(step, max(patience, ASKED_AGAIN_S) if step.acts else patience)

    def _set_timer(self, step: Step, delay_s: float) -> None:
        state = self.state
        step.timer = state.new_timer()
        self.orders.add(SetTimer(timer=step.timer, delay_s=delay_s, cause=self.orders.cause))

    def on_timer_fired(self, event: TimerFired) -> None:
        state = self.state
        step = state.steps[state.steps_batched]
        step.timer = None
        if state.draining:
            return  # the drain parked them, so they are not late
        if not self.decisions.policies.deadline.acts:
            return  # this policy replaced another after the timer was set
        stragglers = self.stragglers()
        if not stragglers:
            return
        patience = state.limits.deadline_timeout_s
        late = [group for group in stragglers if state.now - group.started_at >= patience - TIMER_SLACK_S]
        if not late:  # they started after the timer was set, and each gets the whole timeout
            self._set_timer(step, patience - (state.now - min(group.started_at for group in stragglers)))
            return
        snapshots = tuple(view_group(group) for group in late)
        law = f"it must return one of {', '.join(DECISIONS)}"
        decision = self.decisions.ask("deadline", (snapshots,), (str,), lambda said: "" if said in DECISIONS else law)
        if decision == "wait":
            self._set_timer(step, max(patience, ASKED_AGAIN_S))
            return
        step.acts += 1
        if decision == "shrink" and state.ready:
            step.short = True
        if decision == "truncate":
            self._truncate(late)
        else:
            for group in late:
                self.rollout.drop(group)

    def _truncate(self, stragglers: Sequence[Group]) -> None:
        state = self.state
        for group in stragglers:
            if group.state in state.stages.by_name:
                continue  # it is generated already: there is nothing to truncate
            state.update(group, truncate=True)
            if group.replica >= 0:
                replica = state.fleet.replicas[group.replica]
                self.orders.add(
                    TruncateGroup(group=group.id, attempt=group.attempt, replica=replica.id,
                    incarnation=replica.incarnation,
                                  cause=self.orders.cause)
                )  # fmt: skip
            elif not group.kept:
                self.rollout.drop(group)

    # scoring and training

    def on_batch_scored(self, event: BatchScored) -> None:
        step = self.state.steps[event.step]
        step.done = (*step.done, self.state.limits.scoring_tasks.index(event.task))
        self.pools.release(step.id, event.task)

    def on_step_failed(self, event: StepFailed) -> None:
        self.fail_step(event.step, event.reason)

    def fail_step(self, id: StepId, reason: str, *, charged: bool = True) -> None:
        """An attempt to score or train a step failed. It counts only if `charged`."""
        step = self.state.steps[id]
        for task in self.state.scoring(step):
            self.state.orders.withdraw("score", (id, task))
        step.failures += charged
        if charged and step.failures >= self.state.limits.infrastructure_attempts:
            self.orders.end_run("failed", f"train step {id} failed {step.failures} times; last error: {reason}")
            return
        self.begin_again(step)
        self.pools.release(id)

    def on_step_trained(self, event: StepTrained) -> None:
        state = self.state
        step = state.steps[event.step]
        state.checkpoints.train(step.id, step.groups, step.staleness)
        state.step_reward = sum(state.groups[id].reward_mean for id in step.groups) / len(step.groups)
        for id in step.groups:
            state.fire_group(state.groups[id], "consume")
        if not state.limits.keeps_batches:
            self.orders.discard(*step.groups)
        state.updates_in[step.id + 1] = state.updates_in[step.id] + event.updates
        state.steps_trained += 1
        if not state.limits.checkpoint_every:
            state.forget_updates()
        if state.steps_trained % state.limits.sync_every == 0 or self.nothing_left():
            state.fire_step(step, "publish")
            self.publish()
        else:
            state.fire_step(step, "finish")
            self._finish(step)
        every = state.limits.checkpoint_every
        if every and state.steps_trained % every == 0:
            self.checkpoint()

    def begin_again(self, step: Step) -> None:
        """Score and train a formed batch again."""
        if step.state in ("scoring", "training"):
            self.state.fire_step(step, "retry")
            step.attempt += 1
            step.done = ()

    def _finish(self, step: Step) -> None:
        """A step is trained and, if it publishes, published."""
        del self.state.steps[step.id]
        self.pools.release(step.id)

    def nothing_left(self) -> bool:
        """Whether no step is left to train: all steps are done, or all prompts have ended and no more come."""
        state = self.state
        if state.steps_trained < state.steps_batched:
            return False
        if state.all_batched:
            return True
        return state.no_more_prompts and not state.ledger.unconsumed

    # publishing

    def publish(self) -> None:
        """Order the next version: after every k-th step, at the end of the run for unpublished steps, and after a
        resume or a failed publication."""
        state = self.state
        state.publishing_attempt += 1
        self.orders.add(
            PublishWeights(version=state.latest_version + 1, attempt=state.publishing_attempt,
            steps=state.steps_trained,
                           cause=self.orders.cause)
        )  # fmt: skip

    def on_weights_published(self, event: WeightsPublished) -> None:
        self.take_published(event.version)

    def take_published(self, published: Version) -> None:
        """A version is in the weights store."""
        state = self.state
        state.publish_failures = 0
        state.publish(published)
        state.forget_versions()
        step = state.training_step
        if step is not None and step.state == "publishing":
            state.fire_step(step, "published")
            self._finish(step)

    def on_publish_failed(self, event: PublishFailed) -> None:
        self.fail_publication(event.version, event.reason)

    def fail_publication(self, version: Version, reason: str) -> None:
        """An attempt to publish a version failed."""
        state = self.state
        state.publish_failures += 1
        if state.publish_failures >= state.limits.infrastructure_attempts:
            self.orders.end_run("failed", f"version {version} could not be published; last error: {reason}")
            return
        self.publish()

    # a new trainer

    def beginning(self) -> dict[str, Any] | None:
        """The starting point of a new trainer, as fields of `StartProcess`: the newest checkpoint, with later steps
        retrained from their batches, or published weights that contain every step. None: steps would be lost."""
        state = self.state
        saved, trained = state.checkpoints.newest, state.steps_trained
        redo = tuple(range(saved, trained))
        kept = state.checkpoints.stored_batches
        if all(step in kept for step in redo):
            return {"steps": saved, "updates": state.updates_in[saved], "redo": redo}
        if state.steps_in[state.latest_version] == trained and state.latest_version in state.versions:
            updates = state.updates_in[trained]
            return {"steps": trained, "version": state.latest_version, "updates": updates}
        return None

    def why_no_beginning(self) -> str:
        """Why `beginning` returned None."""
        state = self.state
        trained, saved = state.steps_trained, state.checkpoints.newest
        return (
            f"the weights after {trained} train steps are lost: the last checkpoint is after {saved}, and neither "
            "published weights nor batches of the later steps exist"
        )

    # checkpoints

    def checkpoint(self) -> None:
        """Order a checkpoint of the weights as they are now."""
        state = self.state
        state.checkpoint_ordered = state.steps_trained
        self.orders.add(SaveCheckpoint(steps=state.steps_trained, number=self.orders.number, cause=self.orders.cause))

    def on_checkpoint(self, event: CheckpointSaved | CheckpointFailed) -> None:
        if isinstance(event, CheckpointSaved):
            self.take_saved(event.steps)
            self.delete_checkpoints()
        elif self.nothing_left():
            self.orders.end_run(
                "failed", f"the last checkpoint, after {event.steps} train steps, could not be written: {event.reason}"
            )

    def take_saved(self, steps: int) -> None:
        """A checkpoint is complete."""
        state = self.state
        self.orders.discard(*state.checkpoints.save(steps))
        state.forget_updates()

    def delete_checkpoints(self) -> None:
        """Order the deletion of checkpoints that the limits do not keep."""
        state = self.state
        for steps in state.surplus_checkpoints():
            if state.orders.find("delete", steps) is None:
                self.orders.add(DeleteCheckpoint(steps=steps, number=self.orders.number, cause=self.orders.cause))

    def on_order_done(self, event: OrderDone) -> None:
        """Note deleted checkpoints. Other orders answered by `OrderDone` need nothing more."""
        state = self.state
        for order in state.orders.matched:
            if isinstance(order.command, DeleteCheckpoint):
                state.checkpoints.remove(order.command.steps)

    def on_checkpoint_damaged(self, event: CheckpointDamaged) -> None:
        """Forget the checkpoint, and withdraw deletions of older ones that replace it. None has begun, because no
        trainer runs."""
        state = self.state
        state.checkpoints.remove(event.steps)
        state.checkpoint_ordered = min(state.checkpoint_ordered, state.checkpoints.newest)
        surplus = state.surplus_checkpoints()
        for steps in [steps for steps in state.orders.open("delete") if steps not in surplus]:
            state.orders.withdraw("delete", steps)
