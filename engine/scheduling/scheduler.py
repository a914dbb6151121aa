"""`Scheduler.tick(events) → commands`: the only mutator of a run's state, and a deterministic state machine.

Called by the driver for the events that have arrived, and by the replayer for those of a record. It never reads a
clock, draws a random number, blocks or imports Ray. The same ticks always get the same answers.

A tick first applies its events in order: each is matched against the order book and handled. Handlers
change the state and give the orders that need no choice. Then the *reactions* decide everything else, in the order of
`_react`.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from engine.commands import Command, FinishRun
from engine.events import (
    BatchScored,
    CacheMeasured,
    CallsMeasured,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointSaved,
    DrainRequested,
    DrawFailed,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    InspectionFailed,
    OrderDone,
    OrderOverdue,
    OrderProgressed,
    PrefixStored,
    ProcessLost,
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
    StepInspected,
    StepTrained,
    StopRequested,
    SyncFailed,
    TimerFired,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.policies import PolicySet
from engine.policies.state_registry import build_state
from engine.scheduling import departures, ending, groups, lifetimes, processes, steps, time_limits, validation, weights
from engine.scheduling.core import Core
from engine.scheduling.decisions import Decisions
from engine.scheduling.reactions import STARTS_WORK, Reaction
from engine.scheduling.run_resume import on_run_resumed
from engine.scheduling.settings import FIGURES, changed_limits, changed_policies
from engine.scheduling.time_limits import give_all_full_time, note_matched
from engine.scheduling.timers import on_timer_fired
from engine.states.laws import check_tick
from engine.states.limits import Limits
from engine.states.machine import Observer
from engine.states.orders import DEADLINE, DRAIN, GIVE_UP
from engine.states.state import RunFacts, State
from engine.states.view import View

ALONE = (RunStarted, RunResumed, RunInterrupted, SchedulerRecovered, SettingChanged, StopRequested)
"""Events that are ticks of their own."""
CHANGE_NO_PROCESS = frozenset((
    GroupGenerated, PromptsDrawn, GroupAborted, GroupFailed, PrefixStored, OrderProgressed, StateLeft, StateFailed,
    OrderDone, CallsMeasured, CacheMeasured,
))  # fmt: skip
"""Events that do not themselves change steps, replicas or versions. Nearly all events are of these kinds."""


def _on_run_started(core: Core, event: RunStarted) -> None:
    if not core.state.facts.started:
        core.state.facts.started = True
        processes.begin_processes(core, event.replicas)


def _on_run_interrupted(core: Core, event: RunInterrupted) -> None:
    core.state.ending.outcome = None  # it was to begin again, and that failed
    core.state.end_run("stopped", event.reason[: lifetimes.REASON_LENGTH], again=True)


def _on_stop_requested(core: Core, event: StopRequested) -> None:
    core.state.end_run("stopped", event.reason)


def _on_rows_measured(core: Core, event: RowsMeasured) -> None:
    validation.on_rows_measured(core, event)
    if core.state.limits.keep_best and event.validation not in core.state.validations.live:
        steps.delete_checkpoints(core)  # another checkpoint may be the best now


def _on_setting_changed(core: Core, event: SettingChanged) -> None:
    state, setting, value = core.state, event.setting, event.value
    if setting in FIGURES:
        before_s = state.limits.deadline_timeout_s
        state.change(changed_limits(state.limits, setting, value))
        if setting.startswith("timeouts."):
            give_all_full_time(state)
        elif setting == "durability.drain_s":
            departures.limit_drain(core)
        elif setting == "rollout.give_up_s":
            weights.limit_wait_for_replicas(core)
        elif setting == "scheduler.deadline_timeout_s":
            steps.limit_stragglers(core, before_s)
        steps.delete_checkpoints(core)  # fewer may be kept now
        if not steps.no_step_left(core):
            state.validations.facts.closing = False  # there may be more steps now
    else:
        core.decisions.use(changed_policies(core.decisions.policies, setting, value))
    state.facts.settings = {**state.facts.settings, setting: value}


HANDLERS: Mapping[type[Event], Callable[[Core, Any], None]] = {
    RunStarted: _on_run_started,
    RunResumed: on_run_resumed,
    RunInterrupted: _on_run_interrupted,
    PromptsDrawn: groups.on_prompts_drawn,
    DrawFailed: groups.on_draw_failed,
    GroupGenerated: groups.on_group_generated,
    GroupAborted: groups.on_group_aborted,
    GroupFailed: groups.on_group_failed,
    PrefixStored: groups.on_prefix_stored,
    StateLeft: groups.on_state_left,
    StateFailed: groups.on_state_failed,
    ProcessUp: processes.on_up,
    ProcessLost: processes.on_lost,
    OrderOverdue: time_limits.on_overdue,
    ProcessWaits: processes.on_waits,
    CallsMeasured: processes.on_calls_measured,
    CacheMeasured: groups.on_cache_measured,
    WeightsStaged: lambda core, event: None,  # `sync_weights` pauses the replica
    ReplicaPaused: weights.on_replica_paused,
    WeightsInstalled: weights.on_weights_installed,
    SyncFailed: weights.on_sync_failed,
    BatchScored: steps.on_batch_scored,
    StepTrained: steps.on_step_trained,
    StepFailed: lambda core, event: steps.fail_step(core, event.step, event.reason),
    StepInspected: steps.on_step_inspected,
    InspectionFailed: steps.fail_inspection,
    WeightsPublished: lambda core, event: steps.on_weights_stored(core, event.version),
    PublishFailed: lambda core, event: steps.fail_publication(core, event.version, event.reason),
    CheckpointSaved: steps.on_checkpoint,
    CheckpointFailed: steps.on_checkpoint,
    CheckpointDamaged: steps.on_checkpoint_damaged,
    TimerFired: on_timer_fired,
    StopRequested: _on_stop_requested,
    DrainRequested: departures.on_drain_requested,
    ReplicaLeaves: departures.on_replica_leaves,
    ReplicasWanted: departures.on_replicas_wanted,
    SettingChanged: _on_setting_changed,
    SchedulerRecovered: time_limits.on_recovered,
    OrderDone: steps.on_order_done,
    OrderProgressed: groups.on_order_progressed,
    RowsMeasured: _on_rows_measured,
    RowsFailed: validation.on_rows_failed,
}
"""The handler of each event: it changes the state, and gives the orders that need no choice."""

TIMERS: Mapping[str, Callable[[Core], None]] = {
    DEADLINE: steps.act_on_stragglers,
    DRAIN: departures.on_drain_timer,
    GIVE_UP: lambda core: None,  # once it is no longer set, the run may end
}
"""The action of each fired timer, in this order."""


def _act_on_timers(core: Core) -> None:
    orders = core.state.orders
    for name, act in TIMERS.items():
        fired = core.fired.pop(name, None)
        if fired is not None and core.state.ending.outcome is None:
            last, orders.event = orders.event, fired
            act(core)
            orders.event = last


REACTIONS: Sequence[Reaction] = (
    Reaction(_act_on_timers, attrgetter("fired")),
    Reaction(ending.end_without_progress),
    *STARTS_WORK,
    Reaction(ending.finish_or_require_progress),
    Reaction(groups.order_discards, attrgetter("discards")),
)
"""The reactions to the events of a tick, in this order, until the run is over."""


def _outlasts(outcome: FinishRun, event: Event) -> bool:
    """Whether an event means something to a run that has ended so."""
    return isinstance(event, RunResumed) or (isinstance(event, RunInterrupted) and event.launch and outcome.again)


class Scheduler:
    """Decides everything about one run.

    `observe(machine, record, source, trigger)` is called after every change of state; it must not change anything.
    Raises: `ConfigError` for an added state that is not registered.
    """

    def __init__(
        self, limits: Limits, policies: PolicySet | None = None, observe: Observer | None = None,
        facts: RunFacts | None = None,
    ) -> None:  # fmt: skip
        """`facts`: of a run that has begun; None: a new run begins."""
        state = self.state = State(limits, observe, facts)
        self.view = View(state)
        decisions = self.decisions = Decisions(policies or PolicySet.from_names({}), state, self.view)
        for added in limits.added_states:
            policy = build_state(added.name)
            decisions.add(f"state {added.name}", policy, policy.enters)
        self._core = Core(state, decisions)

    @property
    def limits(self) -> Limits:
        """The bounds in force."""
        return self.state.limits

    @property
    def policies(self) -> PolicySet:
        return self.decisions.policies

    def tick(self, events: Sequence[Event]) -> tuple[Command, ...]:
        """Apply events in order, decide what follows from them together, and return the commands. The events
        have one time and consecutive ids. Those after one that ends the run are left out; `events` has the others.

        A tick without events orders nothing: the reactions have nothing more to do (law of ticks).

        Raises: `InvariantViolated` or `IllegalTransition` for a defect, `PolicyError` for a policy that raised or
        decided something illegal. Do not use the state after that; `events` ends with the event whose handler raised.
        """
        state, orders = self.state, self.state.orders
        self._core.fired, orders.commands = {}, []
        state.changed, state.completed, state.filtered = not events, {}, []
        if events:
            orders.matched = {}
        applied: list[Event] = []
        self.events: Sequence[Event] = applied
        """The events of the newest tick. Those after one that ended the run are not among them."""
        for event in events:
            if state.ending.outcome is not None and not _outlasts(state.ending.outcome, event):
                break
            applied.append(event)
            self.doing = f"event {event.id}, {type(event).__name__}"
            """The last thing that the newest tick did. It locates an exception."""
            self._apply(event)
        if state.ending.outcome is not None:
            if applied:
                ending.close_run(self._core)
        elif orders.matched or not events:  # stale echoes alone change nothing
            self._react()
        self.doing = "the laws"
        state.groups.settle(state.limits.max_concurrent_groups)
        check_tick(state)
        return tuple(orders.commands)

    def _apply(self, event: Event) -> None:
        """Match an event against the order book, and handle it. A stale echo changes nothing."""
        state, core = self.state, self._core
        state.facts.now = event.at
        repeated = type(event) in processes.ABOUT_LIVES and processes.is_repeated(core, event)
        if repeated or not state.orders.match(event):
            state.orders.facts.stale_echoes += 1
            return
        note_matched(state, event, state.orders.matched[event.id])
        if type(event) not in CHANGE_NO_PROCESS:
            state.changed = True
        HANDLERS[type(event)](core, event)

    def _react(self) -> None:
        """React to the events of a tick. Each reaction runs until it has nothing more to do."""
        for react, needs in REACTIONS:
            if needs is not None and not needs(self._core):
                continue
            self.doing = react.__name__.lstrip("_")
            react(self._core)
            if self.state.ending.outcome is not None:
                ending.close_run(self._core)
                return
