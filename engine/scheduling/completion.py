"""How a run ends: finished, stopped at rest, or failed with a named cause.

Called by `scheduler.py` after every event. A run that has all its steps ends with a last publication, a last checkpoint
and a last validation, in this order. A run that can make no progress ends with the cause (law 7).
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.commands import PauseReplica, ResumeReplica, SetTimer, StopMeasuring
from engine.errors import PolicyError
from engine.events import DrainRequested, ReplicaLeaves, ReplicasWanted
from engine.scheduling.decisions import Decisions
from engine.scheduling.groups import RolloutScheduling
from engine.scheduling.issued_commands import Orders
from engine.scheduling.lifetimes import REASON_LENGTH, Lifetimes
from engine.scheduling.pools import PoolScheduling
from engine.scheduling.steps import TrainingScheduling
from engine.scheduling.validation import ValidationScheduling
from engine.scheduling.weights import SyncScheduling
from engine.states.replica import Replica
from engine.states.state import State
from engine.states.waits import held_up

# -- replicas that leave, and the way to rest --------------------------------------------------------------------------


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
            self.pools.send_to_sleep(replica)  # the batch being trained needs what it gives back
            return
        replica.staging = replica.staged = None
        replica.sync_attempt += 1
        state.fire_replica(replica, "drain")
        order = replica.address(self.orders.cause)
        self.orders.add(PauseReplica(**order, version=replica.version, mode="abort"))

    @property
    def at_rest(self) -> bool:
        """Nothing runs anywhere, and no batch is being trained."""
        state = self.state
        return not state.formed_steps and not state.publishing and not state.census.restless


# -- the end of a run --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Completion:
    """Ends the run once no step can follow."""

    state: State
    decisions: Decisions
    orders: Orders
    rollout: RolloutScheduling
    training: TrainingScheduling
    validation: ValidationScheduling
    departures: DepartureScheduling

    def close(self) -> None:
        """The run is over: a resume works on what was running again."""
        outcome = self.state.outcome
        self.validation.cancel_all(f"the run ended: {outcome.reason if outcome is not None else ''}")
        self.state.stages.put_back()

    def _come_to_rest(self) -> None:
        """End a run that was asked to, resumably, once nothing is running; with a checkpoint of where it is."""
        state = self.state
        if not self.departures.at_rest:
            return
        if self.state.limits.checkpoint_every and state.checkpoint_ordered != state.steps_trained:
            self.training.checkpoint()
        if not state.checkpoint_pending and not state.deletion_pending:
            self.orders.end_run("stopped", state.draining)

    def advance(self, look_after_hardware: Callable[[], None], order_again: Callable[[], None]) -> None:
        """End the run once no step can follow: publish steps that no version contains, save a last checkpoint, and
        drop the remaining groups."""
        state = self.state
        if state.draining:
            self._come_to_rest()
            return
        if not state.started or len(state.steps) > 1 or state.publishing:
            return
        if not self.training.nothing_left():
            self._require_progress(order_again)
            return
        if state.steps_trained > state.steps_in[state.latest_version]:
            self.training.publish()
            return
        unsaved = state.checkpoints.newest < state.steps_trained and not state.checkpoint_pending
        if self.state.limits.checkpoint_every and unsaved:  # also if an earlier attempt failed
            self.training.checkpoint()
        untrainable = self._why_untrainable()
        if self.state.limits.validation is not None and not state.validations.closing and not untrainable:
            self.validation.close()
            look_after_hardware()
            self.validation.send()
        if state.checkpoint_pending or state.deletion_pending or state.validations.runs:
            return
        for group in list(state.groups.values()):
            self.rollout.drop(group)
        state.waiting.clear()
        if untrainable:
            self.orders.end_run("failed", untrainable)
        else:
            reason = f"{state.steps_trained} train steps"
            self.orders.end_run("finished", reason)

    def end_if_fruitless(self) -> None:
        """Fail a run that would only use up prompts (law 7)."""
        state, limits = self.state, self.state.limits
        failed, filtered = state.failed_in_a_row, state.filtered_in_a_row
        if failed >= limits.failures_in_a_row:
            reason = f"{failed} prompt groups in a row have failed; last error: {state.last_failure}"
            self.orders.end_run("failed", reason)
        elif state.misjudged > self._most_misjudged():
            reason = (
                f"{state.misjudged} of the latest {state.judged} attempts failed on their reward or their data, more "
                f"than reward.max_failure_share = {limits.max_failure_share:g}: training without them would bias the "
                f"data; last error: {state.last_failure}"
            )
            self.orders.end_run("failed", reason)
        elif filtered >= limits.filtered_in_a_row:
            reason = (
                f"{self._filter} dropped {filtered} prompt groups in a row; set a filter that keeps some, or raise "
                "scheduler.max_filtered_in_a_row"
            )
            self.orders.end_run("failed", reason)

    def _most_misjudged(self) -> float:
        """Attempts that may have failed among the latest. Before there is a window of them, all may."""
        share, judged = self.state.limits.max_failure_share, self.state.judged
        return judged if share is None or judged < self.state.limits.failure_window else share * judged

    def _why_untrainable(self) -> str:
        """Why a run that drew prompts ends without a train step; empty if it had a step or drew no prompt."""
        state = self.state
        drawn, filtered = state.ledger.drawn, state.filtered_in_a_row
        if state.steps_trained or not drawn:
            return ""
        causes = []
        if filtered:
            causes.append(f"{self._filter} dropped {f'all {drawn}' if filtered == drawn else f'{filtered} of {drawn}'}")
        if state.last_failure and filtered < drawn:
            causes.append(f"the last failure: {state.last_failure}")
        return "; ".join(["no group could be trained on", *(causes or [f"all {drawn} were filtered or dropped"])])

    @property
    def _filter(self) -> str:
        return f"the filter {self.decisions.policies.names['filter']!r}"

    def _require_progress(self, order_again: Callable[[], None]) -> None:
        """Law 7: something is in progress whose end will be an event, or the run ends here with a named cause."""
        stuck = self._nothing_moves()
        if stuck is None:
            return
        if self.decisions.policies.on_error == "builtin":
            self.decisions.note(stuck)
            self.decisions.rescuing = True
            order_again()
            self.decisions.rescuing = False
            stuck = None if self.state.training_step is not None else self._nothing_moves()
        if stuck is not None:
            raise stuck

    def _nothing_moves(self) -> PolicyError | None:
        """The error of policies that start nothing, where nothing is running; or the end of the run."""
        state = self.state
        if state.ledger.running or state.asked or state.checkpoint_pending or state.validations.out or state.stages.out:
            return None
        if state.give_up_timer is not None or state.fill_timer is not None:
            return None
        if state.orders.open("stop rows"):
            return None  # rows that were cut short are measured again
        if self.state.none_left:
            self.orders.end_run("failed", self.state.none_left)
            return None
        census, step = state.census, state.steps.get(state.steps_batched)
        if census.under_way or not census.rollouts.alive.total or (step is not None and step.timer is not None):
            return None
        seen = self.decisions.describe_view()
        return PolicyError(
            f"nothing is running and the policies start nothing: {held_up(state)}; they saw {seen}",
            policies=str(dict(self.decisions.policies.names)),
        )
