"""`Scheduler.handle(event) → commands`: the only mutator of a run's state, and a pure function of (state, event).

Called by the driver for every event of a run, by the replayer for every event of a record and by the simulation's
world. It never reads a clock, draws a random number, blocks or imports Ray. One event, one answer; the same events
always get the same answers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.commands import Command, FinishRun
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
    GroupProgressed,
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
    RunInterrupted,
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
from engine.scheduling.completion import Completion, DepartureScheduling
from engine.scheduling.decisions import Decisions
from engine.scheduling.groups import RolloutScheduling, StageScheduling
from engine.scheduling.issued_commands import Orders
from engine.scheduling.lifetimes import REASON_LENGTH, Lifetimes
from engine.scheduling.pools import PoolScheduling
from engine.scheduling.processes import ProcessScheduling
from engine.scheduling.run_resume import resume
from engine.scheduling.settings import FIGURES, changed_limits, changed_policies
from engine.scheduling.steps import TrainingScheduling
from engine.scheduling.stragglers import PaceScheduling
from engine.scheduling.time_limits import TimeLimits
from engine.scheduling.validation import ValidationScheduling
from engine.scheduling.weights import SyncScheduling
from engine.states.laws import check_event
from engine.states.limits import Limits
from engine.states.state import Observer, State
from engine.states.view import View

GROUP_EVENTS = (
    GroupGenerated, PromptsDrawn, GroupAborted, GroupFailed, PrefixStored, GroupProgressed, StateLeft, StateFailed,
    OrderDone,
)  # fmt: skip
"""Facts that by themselves change nothing about steps, replicas and versions; nearly all events are of these kinds."""


class Scheduler:
    """Decides everything about one run.

    `observe(machine, record, source, trigger)` is called after every change of state; it must not change anything.
    """

    def __init__(self, limits: Limits, policies: PolicySet | None = None, observe: Observer | None = None) -> None:
        state = self.state = State(limits, observe)
        orders = self._orders = Orders(state)
        self.view = View(state)
        decisions = self.decisions = Decisions(policies or PolicySet.from_names({}), state, self.view)
        self.stages = StageScheduling(state, decisions, orders)
        self.pace = PaceScheduling(state, orders)
        self.lifetimes = Lifetimes(state, orders)
        self.rollout = RolloutScheduling(state, decisions, orders, self.stages, self.pace, self.lifetimes)
        self.pools = PoolScheduling(state, orders)
        self.training = TrainingScheduling(state, decisions, orders, self.rollout, self.pools)
        self.sync = SyncScheduling(state, decisions, orders, self.rollout)
        self.validation = ValidationScheduling(state, decisions, orders)
        self.departures = DepartureScheduling(state, orders, self.lifetimes, self.rollout, self.pools, self.sync)
        self.processes = ProcessScheduling(state, orders, self.lifetimes, self.rollout, self.sync, self.training)
        self.time_limits = TimeLimits(state, orders, self.lifetimes, self.rollout, self.validation)
        self.completion = Completion(
            state, decisions, orders, self.rollout, self.training, self.validation, self.departures
        )
        self._reactions: tuple[Callable[[], None], ...] = (
            self.completion.end_if_fruitless,
            self._order_what_may_begin,
            partial(self.completion.advance, self._look_after_hardware, self._order_what_may_begin),
            self._orders.add_discards,
            self.time_limits.watch,
        )
        """What follows every event, in this order, until the run is over."""
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._on_run_started,
            RunResumed: self._on_run_resumed,
            RunInterrupted: self._on_run_interrupted,
            PromptsDrawn: self.rollout.on_prompts_drawn,
            DrawFailed: self.rollout.on_draw_failed,
            GroupGenerated: self.rollout.on_group_generated,
            GroupAborted: self.rollout.on_group_aborted,
            GroupFailed: self.rollout.on_group_failed,
            PrefixStored: self.rollout.on_prefix_stored,
            GroupProgressed: self.rollout.on_group_progressed,
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
            DrainRequested: self.departures.on_drain_requested,
            ReplicaLeaves: self.departures.on_replica_leaves,
            ReplicasWanted: self.departures.on_replicas_wanted,
            SettingChanged: self._on_setting_changed,
            SchedulerRecovered: self.time_limits.on_recovered,
            OrderDone: self._on_order_done,
            RowsMeasured: self._on_rows_measured,
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
        if state.outcome is not None and not self._outlasts(state.outcome, event):
            return ()
        state.now = event.at
        self._orders.begin(event.id)
        if self.processes.is_repeated(event) or not state.orders.match(event):
            state.stale_echoes += 1
            return ()
        if type(event) not in GROUP_EVENTS:
            state.changed = True
        self._handlers[type(event)](event)
        for react in self._reactions:
            if state.outcome is None:
                react()
        if state.outcome is not None:
            self.completion.close()
        state.settle()
        check_event(state)
        return self._orders.take()

    @staticmethod
    def _outlasts(outcome: FinishRun, event: Event) -> bool:
        """Whether an event means something to a run that has ended so."""
        return isinstance(event, RunResumed) or (isinstance(event, RunInterrupted) and event.launch and outcome.again)

    def _order_what_may_begin(self) -> None:
        """After every event, and once more under the built-in policies where those of the run have started nothing."""
        self.training.advance()
        if self.state.changed:
            self._look_after_hardware()
        if self.state.validations.runs:
            self.validation.send()
        self.rollout.advance()
        if self.state.fleet.slow:
            self.pace.advance()
        if self.state.stages.waiting:
            self.stages.advance()
        self.training.watch()

    def _look_after_hardware(self) -> None:
        """After anything but a group has changed: which task has which pool, and which version belongs where.
        Validations come first: one that ends here leaves replicas to both."""
        self.departures.advance()
        self.validation.advance()
        self.pools.advance()
        self.sync.advance()
        self.state.changed = False

    def _on_run_started(self, event: RunStarted) -> None:
        if not self.state.started:
            self.state.started = True
            self.processes.begin(event.replicas)

    def _on_run_resumed(self, event: RunResumed) -> None:
        resume(event, self.state, self.rollout, self.training, self.processes, self.validation)

    def _on_run_interrupted(self, event: RunInterrupted) -> None:
        self.state.outcome = None  # it was to begin again, and that failed
        self._orders.end_run("stopped", event.reason[:REASON_LENGTH], again=True)

    def _on_process_lost(self, event: ProcessLost) -> None:
        probes = self.state.orders.matched
        self.processes.on_lost(event)
        self.time_limits.on_lost(probes)

    def _on_stop_requested(self, event: StopRequested) -> None:
        self._orders.end_run("stopped", event.reason)

    def _on_order_done(self, event: OrderDone) -> None:
        self.training.on_order_done(event)
        self.validation.on_order_done(event)

    def _on_rows_measured(self, event: RowsMeasured) -> None:
        self.validation.on_rows_measured(event)
        if self.state.limits.keep_best and event.validation not in self.state.validations.runs:
            self.training.delete_checkpoints()  # another checkpoint may be the best now

    def _on_timer_fired(self, event: TimerFired) -> None:
        state = self.state
        if event.timer == state.limit_timer:
            self.time_limits.on_timer(event)
        elif event.timer == state.give_up_timer:
            state.give_up_timer = None
        elif event.timer == state.fill_timer:
            state.fill_timer = None
            self.lifetimes.continue_launch()
        elif event.timer == state.drain_timer:
            self.departures.on_drain_timer()
        else:
            self.training.on_timer_fired(event)

    def _on_setting_changed(self, event: SettingChanged) -> None:
        state, setting, value = self.state, event.setting, event.value
        if setting in FIGURES:
            state.change(changed_limits(state.limits, setting, value))
            self.training.delete_checkpoints()  # fewer may be kept now
            if not self.training.nothing_left():
                self.validation.reopen()  # there may be more steps now
        else:
            self.decisions.use(changed_policies(self.policies, setting, value))
        state.settings = {**state.settings, setting: value}
