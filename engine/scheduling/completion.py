"""How a run ends: finished, stopped at rest, or failed with a named cause.

Called by `scheduler.py` after every event. A run that has all its steps ends with a last publication, a last checkpoint
and a last validation, in this order. A run that can make no progress ends with the cause (law 7).
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import PolicyError
from engine.scheduling.decisions import Decisions
from engine.scheduling.departures import DepartureScheduling
from engine.scheduling.orders import Orders
from engine.scheduling.rollout import RolloutScheduling
from engine.scheduling.training import TrainingScheduling
from engine.scheduling.validation import ValidationScheduling
from engine.states.state import State
from engine.states.waiting import held_up


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
        """The run is over: a resume works on what was under way again."""
        outcome = self.state.outcome
        self.validation.cancel_all(f"the run ended: {outcome.reason if outcome is not None else ''}")
        self.state.stages.put_back()

    def _come_to_rest(self) -> None:
        """End a run that was asked to, resumably, once nothing is under way; with a checkpoint of where it is."""
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
            reason = f"{failed} prompt groups in a row have failed, at last: {state.last_failure}"
            self.orders.end_run("failed", reason)
        elif filtered >= limits.filtered_in_a_row:
            reason = (
                f"{self._filter} dropped {filtered} prompt groups in a row; set a filter that keeps some, or raise "
                "scheduler.max_filtered_in_a_row"
            )
            self.orders.end_run("failed", reason)

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
        """Law 7: something is under way whose end will be an event, or the run ends here with a named cause."""
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
        """The error of policies that start nothing, where nothing is under way; or the end of the run."""
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
        return PolicyError(
            f"nothing is under way and the policies start nothing: {held_up(state)}; they saw {self.decisions.seen()}",
            policies=str(dict(self.decisions.policies.names)),
        )
