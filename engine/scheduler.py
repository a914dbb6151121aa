"""`Scheduler.handle(event) → commands`: the only mutator of a run's state, and a pure function of (state, event).

Called by the driver for every event of a run, by the replayer for every event of a record and by the simulation's
world. It never
reads a clock, draws a random number, blocks or imports Ray. One event, one answer; the same events always get the
same answers.
"""

from collections.abc import Callable
from typing import Any

from engine.commands import Command
from engine.errors import PolicyError
from engine.events import (
    BatchScored,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointSaved,
    DrainRequested,
    DrawFailed,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderDone,
    PrefixStored,
    ProcessLost,
    ProcessProbed,
    ProcessUp,
    ProcessWaits,
    PromptsDrawn,
    PublishFailed,
    ReplicaLeaves,
    ReplicaPaused,
    ReplicasWanted,
    RowsFailed,
    RowsMeasured,
    RunResumed,
    RunStarted,
    SchedulerRecovered,
    SettingChanged,
    StateFailed,
    StateLeft,
    StepFailed,
    StepTrained,
    StopRequested,
    SyncFailed,
    TimerFired,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.policies import PolicySet
from engine.scheduling.decisions import Decisions
from engine.scheduling.leaving import LeavingScheduling
from engine.scheduling.lifetimes import Lifetimes
from engine.scheduling.orders import Orders
from engine.scheduling.pace import PaceScheduling
from engine.scheduling.pools import PoolScheduling
from engine.scheduling.processes import ProcessScheduling
from engine.scheduling.resume import resume
from engine.scheduling.rollout import RolloutScheduling
from engine.scheduling.settings import FIGURES, changed_limits, changed_policies
from engine.scheduling.stages import StageScheduling
from engine.scheduling.sync import SyncScheduling
from engine.scheduling.time_limits import TimeLimits
from engine.scheduling.training import TrainingScheduling
from engine.scheduling.validation import ValidationScheduling
from engine.states.invariants import check_event
from engine.states.limits import Limits
from engine.states.state import Observer, State
from engine.states.view import View
from engine.states.waiting import held_up

GROUP_EVENTS = (
    GroupGenerated, PromptsDrawn, GroupAborted, GroupFailed, PrefixStored, StateLeft, StateFailed, OrderDone,
)  # fmt: skip
"""Facts that by themselves change nothing about steps, replicas and versions; nearly all events are of these kinds."""


class Scheduler:
    """Decides everything about one run.

    `observe(machine, record, source, trigger)` is called after every change of state; it must not change anything.
    """

    def __init__(self, limits: Limits, policies: PolicySet | None = None, observe: Observer | None = None) -> None:
        self.state = State(limits, observe)
        self.view = View(self.state)
        self._orders = Orders(self.state)
        policies = policies if policies is not None else PolicySet.from_names({})
        self.decisions = Decisions(policies, self.state, self.view)
        self.stages = StageScheduling(self.state, self.decisions, self._orders)
        self.pace = PaceScheduling(self.state, self._orders)
        self.lifetimes = Lifetimes(self.state, self._orders)
        self.rollout = RolloutScheduling(
            self.state, self.decisions, self._orders, self.view, self.stages, self.pace, self.lifetimes
        )
        self.pools = PoolScheduling(self.state, self._orders)
        self.training = TrainingScheduling(
            self.state, self.decisions, self._orders, self.view, self.rollout, self.pools
        )
        self.sync = SyncScheduling(self.state, self.decisions, self._orders, self.view, self.rollout)
        self.validation = ValidationScheduling(self.state, self.decisions, self._orders)
        self.leaving = LeavingScheduling(self.state, self._orders, self.lifetimes, self.rollout, self.pools, self.sync)
        self.processes = ProcessScheduling(
            self.state, self._orders, self.lifetimes, self.rollout, self.sync, self.training
        )
        self.time_limits = TimeLimits(self.state, self._orders, self.lifetimes, self.rollout, self.validation)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._on_run_started,
            RunResumed: self._on_run_resumed,
            PromptsDrawn: self.rollout.on_prompts_drawn,
            DrawFailed: self.rollout.on_draw_failed,
            GroupGenerated: self.rollout.on_group_generated,
            GroupAborted: self.rollout.on_group_aborted,
            GroupFailed: self.rollout.on_group_failed,
            PrefixStored: self.rollout.on_prefix_stored,
            StateLeft: self.processes.on_state_left,
            StateFailed: self.rollout.on_state_failed,
            ProcessUp: self.processes.on_up,
            ProcessLost: self._on_process_lost,
            ProcessProbed: self.time_limits.on_probed,
            ProcessWaits: self.processes.on_waits,
            WeightsStaged: self.sync.on_weights_staged,
            ReplicaPaused: self.sync.on_replica_paused,
            WeightsInstalled: self.sync.on_weights_installed,
            SyncFailed: self.sync.on_sync_failed,
            BatchScored: self.processes.on_batch_scored,
            StepTrained: self.training.on_step_trained,
            StepFailed: self.training.on_step_failed,
            WeightsPublished: self.training.on_weights_published,
            PublishFailed: self.training.on_publish_failed,
            CheckpointSaved: self.training.on_checkpoint,
            CheckpointFailed: self.training.on_checkpoint,
            CheckpointDamaged: self.training.on_checkpoint_damaged,
            TimerFired: self._on_timer_fired,
            StopRequested: self._on_stop_requested,
            DrainRequested: self.leaving.on_drain_requested,
            ReplicaLeaves: self.leaving.on_replica_leaves,
            ReplicasWanted: self.leaving.on_replicas_wanted,
            SettingChanged: self._on_setting_changed,
            SchedulerRecovered: self.time_limits.on_recovered,
            OrderDone: self._on_order_done,
            RowsMeasured: self.validation.on_rows_measured,
            RowsFailed: self.validation.on_rows_failed,
        }

    @property
    def limits(self) -> Limits:
        """The bounds in force."""
        return self.state.limits

    @property
    def policies(self) -> PolicySet:
        return self.decisions.policies

    @property
    def state_hash(self) -> int:
        """64 bits of the whole state after the last event."""
        return self.state.hash

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Apply one fact and return the orders that follow from it. A stale echo changes nothing.

        Raises: `InvariantViolated` or `IllegalTransition` for a defect, `PolicyError` for a policy that raised or
        decided something illegal. The state is then not to be used any more.
        """
        state = self.state
        state.orders.matched = ()
        if state.outcome is not None and type(event) is not RunResumed:
            return ()
        state.now = event.at
        self._orders.begin(event.id)
        if self._of_an_older_life(event) or not state.orders.match(event):
            state.stale_echoes += 1
            return ()
        kind = type(event)
        if kind not in GROUP_EVENTS:
            state.disturb()
        self._handlers[kind](event)
        if state.outcome is None and (fruitless := self._fruitless()) is not None:
            self._orders.end_run("failed", fruitless)
        if state.outcome is None:
            self._order_what_may_begin()
            self._finish_when_done()
        if state.outcome is None:
            self._orders.add_discards()
            if state.clocks.sooner:
                self.time_limits.watch()
        if state.outcome is not None:
            self.validation.cancel_all(f"the run ended: {state.outcome.reason}")
            state.stages.put_back()  # a resume works on them again
        state.settle()
        if state.live.over:
            state.fewer_over()
        check_event(state)
        return self._orders.take()

    def _of_an_older_life(self, event: Event) -> bool:
        """Whether an event tells of a life of a process that is over, or tells again what is known of it."""
        if isinstance(event, ReplicaLeaves):
            replica = self.state.fleet.replicas.get(event.replica)
            return replica is None or replica.state == "down" or replica.incarnation != event.incarnation
        if not isinstance(event, ProcessUp | ProcessLost):
            return False
        process = self.state.find_process(event.kind, event.index)
        if process is None:
            return False
        if event.incarnation != process.incarnation:
            return event.incarnation < process.incarnation
        return process.state == "gone" or (isinstance(event, ProcessUp) and process.state != "starting")

    def _order_what_may_begin(self) -> None:
        """After every event, and once more under the built-in policies where those of the run have started nothing."""
        state = self.state
        self.training.advance()
        if state.disturbed:
            self._look_after_hardware()
        if state.validations.sendable:
            self.validation.send()
        self.rollout.advance()
        if state.live.slow:
            self.pace.advance()
        if state.stages.waiting:
            self.stages.advance()
        self.training.watch()

    def _look_after_hardware(self) -> None:
        """After anything but a group has changed: which task has which pool, and which version belongs where.
        Validations come first: one that ends here leaves replicas to both."""
        if self.state.live.moved:
            self.leaving.advance()
        self.validation.advance()
        self.pools.advance()
        self.sync.advance()
        self.state.disturbed = False

    def _on_run_started(self, event: RunStarted) -> None:
        if not self.state.started:
            self.state.started = True
            self.processes.begin(event.replicas)

    def _on_run_resumed(self, event: RunResumed) -> None:
        resume(event, self.state, self.rollout, self.training, self.processes, self.validation)

    def _on_process_lost(self, event: ProcessLost) -> None:
        probes = self.state.orders.matched
        self.processes.on_lost(event)
        self.time_limits.on_lost(probes)

    def _on_stop_requested(self, event: StopRequested) -> None:
        self._orders.end_run("stopped", event.reason)

    def _on_order_done(self, event: OrderDone) -> None:
        self.training.on_order_done(event)
        self.validation.on_order_done(event)

    def _on_timer_fired(self, event: TimerFired) -> None:
        live = self.state.live
        if event.timer == live.limit_timer:
            self.time_limits.on_timer(event)
        elif event.timer == live.give_up_timer:
            live.give_up_timer = None
        elif event.timer == live.fill_timer:
            live.fill_timer = None
        elif event.timer == live.drain_timer:
            self.leaving.on_drain_timer()
        else:
            self.training.on_timer_fired(event)

    def _on_setting_changed(self, event: SettingChanged) -> None:
        state, setting, value = self.state, event.setting, event.value
        if setting in FIGURES:
            state.change(changed_limits(state.limits, setting, value))
            self.training.delete_checkpoints()  # fewer may be kept now
        else:
            self.decisions.use(changed_policies(self.policies, setting, value))
        state.live.settings[setting] = value

    def _come_to_rest(self) -> None:
        """End a run that was asked to, resumably, once nothing is under way; with a checkpoint of where it is."""
        state = self.state
        if not self.leaving.at_rest:
            return
        if self.limits.checkpoint_every and state.checkpoint_ordered != state.steps_trained:
            self.training.checkpoint()
        if not state.checkpoint_pending and not state.deletion_pending:
            self._orders.end_run("stopped", state.live.draining)

    def _finish_when_done(self) -> None:
        """End the run once no step can follow: what no version holds is published, a last checkpoint written, the rest
        let go."""
        state = self.state
        if state.live.draining:
            self._come_to_rest()
            return
        if not state.started or len(state.steps) > 1 or state.publishing:
            return
        if not self.training.nothing_left():
            self._require_progress()
            return
        if state.steps_trained > state.steps_in[state.latest_version]:
            self.training.publish()
            return
        unsaved = state.ended.newest < state.steps_trained and not state.checkpoint_pending
        if self.limits.checkpoint_every and unsaved:  # also where it was ordered before, and failed
            self.training.checkpoint()
        barren = self._why_barren()
        if self.limits.validation is not None and not state.validations.closing and not barren:
            self.validation.close()
            self._look_after_hardware()
            self.validation.send()
        if state.checkpoint_pending or state.deletion_pending or state.validations.runs:
            return
        for group in list(state.groups.values()):
            self.rollout.drop(group)
        state.waiting.clear()
        if barren:
            self._orders.end_run("failed", barren)
        else:
            reason = f"{state.steps_trained} train steps"
            self._orders.end_run("finished", reason)

    def _fruitless(self) -> str | None:
        """Why going on would only use up prompts (law 7), if so."""
        state, limits = self.state, self.limits
        if state.failed_in_a_row >= limits.failures_in_a_row:
            return f"{state.failed_in_a_row} prompt groups in a row have failed, at last: {state.last_failure}"
        if state.filtered_in_a_row >= limits.filtered_in_a_row:
            return (
                f"{self._filter} dropped {state.filtered_in_a_row} prompt groups in a row; set a filter that keeps "
                "some, or raise scheduler.max_filtered_in_a_row"
            )
        return None

    def _why_barren(self) -> str:
        """Why nothing came of the prompts of a run that ends without a train step; empty where something did, and where
        there were none."""
        state = self.state
        drawn, filtered = state.ledger.drawn, state.filtered_in_a_row
        if state.steps_trained or not drawn:
            return ""
        causes = []
        if filtered:
            causes.append(f"{self._filter} dropped {f'all {drawn}' if filtered == drawn else f'{filtered} of {drawn}'}")
        if state.last_failure and filtered < drawn:
            causes.append(f"the last that failed: {state.last_failure}")
        return "; ".join(["no group could be trained on", *(causes or [f"all {drawn} were filtered or dropped"])])

    @property
    def _filter(self) -> str:
        return f"the filter {self.policies.names['filter']!r}"

    def _require_progress(self) -> None:
        """Law 7: something is under way whose end will be an event, or the run ends here with a named cause."""
        stuck = self._nothing_moves()
        if stuck is None:
            return
        if self.decisions.policies.on_error == "builtin":
            self.decisions.note(stuck)
            self.decisions.rescuing = True
            self._order_what_may_begin()
            self.decisions.rescuing = False
            stuck = None if self.state.training_step is not None else self._nothing_moves()
        if stuck is not None:
            raise stuck

    def _nothing_moves(self) -> PolicyError | None:
        """The error of policies that start nothing, where nothing is under way; or the end of the run."""
        state = self.state
        if state.ledger.running or state.asked or state.checkpoint_pending or state.validations.out or state.stages.out:
            return None
        if state.live.give_up_timer is not None or state.live.fill_timer is not None:
            return None
        if state.orders.open("stop rows"):
            return None  # rows that were cut short are measured again
        if self.state.none_left:
            self._orders.end_run("failed", self.state.none_left)
            return None
        census, step = state.census, state.steps.get(state.steps_batched)
        if census.under_way or not census.rollouts.alive.total or (step is not None and step.timer is not None):
            return None
        return PolicyError(
            f"nothing is under way and the policies start nothing: {held_up(state)}; they saw {self.decisions.seen()}",
            policies=str(dict(self.policies.names)),
        )
