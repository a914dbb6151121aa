"""`RunMetrics`: counts what a run does, one tick at a time, beside the driver.

    transitions = Transitions()
    scheduler = Scheduler(limits, policies, observe=transitions)
    metrics = RunMetrics(scheduler, transitions, journal=Journal(path))
    driver = Driver(..., observe=metrics.observe)

`observe` costs O(1) per event and tick, and must never change the scheduler. A figure of the present state is read only
when `status.py` or the exporter (`export.py`) needs it; both may run on other threads.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from engine.commands import ParkGroup, SetTimer, StartGroup, TrainStep
from engine.events import (
    CacheMeasured,
    CallsMeasured,
    CheckpointFailed,
    CheckpointSaved,
    DrainRequested,
    DrawFailed,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    InspectionFailed,
    ProcessLost,
    ProcessUp,
    PublishFailed,
    RowsFailed,
    RowsMeasured,
    RunResumed,
    SchedulerRecovered,
    StateFailed,
    StepFailed,
    SyncFailed,
    TimerFired,
    WeightsInstalled,
)
from engine.ids import NO_VERSION, StepId
from engine.metrics.counts import BATCH, GeneratedGroups, GroupCounts, Histogram, ReplicaCounts, RunProgress
from engine.metrics.idle import IdleTime
from engine.metrics.journal import Row, StepRows, bounds_in, sets_of
from engine.metrics.names import (
    DECISION_BUCKETS,
    FIGURES_KEPT,
    LIVE_VALIDATION_STATES,
    PHASE_BUCKETS,
    REQUESTS,
    RETRY_CAUSES,
    REWARD_FUNCTIONS_KEPT,
    STALENESS_BUCKETS,
    STEP_PHASES,
    VALIDATION_BUCKETS,
)
from engine.metrics.transitions import Transitions
from engine.protocols import SLOTS
from engine.record.frames import Tick
from engine.reward_histogram import BOUNDS, HISTOGRAMS
from engine.states.orders import LIMIT
from engine.states.process import KINDS, REPLICA
from engine.states.state import State
from engine.states.validation import VALIDATION
from engine.trajectory import SOURCES

__all__ = ["HasState", "RunMetrics", "TakesRows", "Transitions"]


NO_GROUPS: Mapping[str, float] = {"groups": 0, "share": 0.0}
"""The figures of a data source without a group in the batch."""
OF_A_KIND = ("token_share_", "ratio_mean_", "behavior_kl_k3_stale_", "logprob_gap_mean_")
"""The trainer's figures of one kind of tokens, by staleness or cause. A step without such tokens has none."""


class FunctionTotals(NamedTuple):
    """Calls of one of the user's functions that have ended, and the sum of their durations."""

    calls: int
    seconds: float
    cause: str
    """Why slots are idle while groups wait for it: `reward` or `agent`."""


class HasState(Protocol):
    """The parts of the scheduler that metrics read."""

    @property
    def state(self) -> State: ...


class SourceFigures(Protocol):
    """The prompts of a run, if they come from several data sources."""

    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """By data source: `drawn`, `dropped`, `rested`. Called on any thread."""


class TakesRows(Protocol):
    """Receives one row for each train step and validation: the journal, alone or with sinks."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class RunMetrics:
    """The metrics of one run. The driver calls `observe`; the trainer's side calls `report` and `validated`."""

    def __init__(
        self, scheduler: HasState, transitions: Transitions, journal: TakesRows | None = None,
        rows: StepRows | None = None, first: Sequence[Row] = (),
    ) -> None:  # fmt: skip
        """`rows`: rows that an earlier process of the run left unfinished. `first`: rows of the first train steps that
        an earlier process wrote."""
        self.state = scheduler.state
        self.transitions = transitions
        self.idle = IdleTime(self.state)
        self.retries = dict.fromkeys(RETRY_CAUSES, 0)
        self.deaths = dict.fromkeys(KINDS, 0)
        """Number of processes that died, by kind."""
        self.failed_group: dict[str, int] = {}
        """The group whose attempt failed last, by cause."""
        self.last_failure = ""
        """The newest failure and its reason."""
        self.calls: dict[str, FunctionTotals] = {}
        """By function."""
        self.replicas = ReplicaCounts()
        self.generated = GeneratedGroups(self.replicas)
        self.staleness = Histogram(STALENESS_BUCKETS)
        self.phase_s = {phase: Histogram(PHASE_BUCKETS) for phase in STEP_PHASES}
        self.decision_s = Histogram(DECISION_BUCKETS)
        self.figures: dict[str, float] = {}
        """The trainer's metrics for the newest step that it reported."""
        self.reward_counts: dict[str, Histogram] = {}
        """Rewards of the responses of all reported steps: `reward`, and `reward_NAME` of each function."""
        self.sources: dict[str, Mapping[str, float]] = {}
        """Figures of the newest reported step by data source."""
        self.mixed: SourceFigures | None = None
        """The prompts of the run, if they come from several data sources."""
        self.finished_at = 0.0
        """When the last train step finished, or the run was resumed."""
        self.step_staleness: tuple[int, ...] = ()
        """Staleness of the groups of the newest trained step."""
        self.tokens_trained = 0
        self.since: dict[tuple[str, int], float] = {}
        """The times since which replicas, open steps and the newest checkpoint have been in their present state; see
        `waits`."""
        self.silence = (-1, "")
        """(number of changes so far, text) of the last report that nothing changed."""
        self.rewards: list[float | None] = []
        """Mean reward of each finished step of this run, in order."""
        self.accuracies: list[tuple[int, float]] = []
        """(train steps, accuracy) of every validation reported."""
        self.validations: list[Row] = []
        """A row for each validation that ended, in that order, as in `metrics.jsonl`."""
        self.validation_s = Histogram(VALIDATION_BUCKETS)
        self.rows_measured = 0
        self.progress = RunProgress(self.state, transitions)
        self.steps = (rows or StepRows(self._emit, transitions.group_counts())).written_to(self._emit, first)
        self._journal: TakesRows | None = None
        self._validations_ended()  # those of a replayed record, which were written and shown before
        self.validations_before = len(self.validations)
        transitions.steps.clear()
        transitions.replicas.clear()
        self._journal = journal
        self._events: Counter[type[Event]] = Counter()
        """Number of events by class, without those that `generated` counts."""
        self._without_effect = 0
        """Number of events so far that changed nothing: stale echoes, and figures of calls and caches."""
        self.groups = GroupCounts(self.state, transitions)
        self._finished_at: deque[float] = deque(maxlen=11)
        self._counted = self._counters()

    def _counters(self) -> dict[type[Event], Callable[[Any], None]]:
        """The method that counts events of each class; stale echoes are not passed to it."""
        return {
            GroupAborted: self.replicas.on_abort,
            GroupFailed: self._group_failed,
            StateFailed: self._state_failed,
            ProcessUp: self._process_up,
            ProcessLost: self._process_lost,
            WeightsInstalled: self.replicas.on_install,
            SyncFailed: self._sync_failed,
            StepFailed: lambda event: self._retry("train_step", f"train step {event.step}: {event.reason}"),
            InspectionFailed: self._inspection_failed,
            PublishFailed: lambda event: self._retry("publish", f"version {event.version}: {event.reason}"),
            RowsMeasured: self._rows_measured,
            RowsFailed: lambda event: self._retry("validation", f"validation {event.validation}: {event.reason}"),
            CheckpointFailed: lambda event: self._retry("checkpoint", f"checkpoint {event.steps}: {event.reason}"),
            DrawFailed: lambda event: self._retry("draw", f"the data source: {event.reason}"),
            CallsMeasured: self._calls_measured,
            CheckpointSaved: self.progress.on_checkpoint_saved,
            DrainRequested: self.transitions.note_event,
            RunResumed: self._run_resumed,
            SchedulerRecovered: self.transitions.note_event,
        }

    def finish_replay(self) -> None:
        """Call it when a replay has reached the present. From then on, open orders and waits are known."""
        self.finished_at = self.progress.checkpoint_at = self.state.now
        for step in self.state.training.steps.values():
            if step.groups or step.state == "collecting":
                self.steps.changed(step.id, step.state, self.state.now)
            if step.groups:
                groups = [self.state.groups.live[id] for id in step.groups if id in self.state.groups.live]
                self.steps.formed(step.id, groups, step.staleness)

    # input

    def observe(self, tick: Tick) -> None:
        """Count the events of a tick that the scheduler has decided about, and its commands."""
        if self._is_idle_check(tick):
            return
        self.idle.at = tick.at
        matched, transitions = self.state.orders.matched, self.transitions
        for event in tick.events:
            self._count(event, stale=event.id not in matched)
        transitions.released = None
        if transitions.others_changed:
            transitions.others_changed = False
            if transitions.steps:
                self._steps_changed(tick.at)
            if transitions.validations:
                self._validations_ended()
        for command in tick.commands:
            if type(command) is TrainStep:
                self._batch_ordered(command)
            elif type(command) is ParkGroup:
                self.progress.on_park(command)
            elif type(command) is not StartGroup:
                self.replicas.on_order(command, tick.at)
        if transitions.replicas:
            self.since.update(dict.fromkeys((("replica", id) for id in transitions.replicas), tick.at))
            for replica in transitions.replicas.values():
                self.idle.replica_changed(replica)
            transitions.replicas.clear()
        self.idle.measure()
        if self.state.ending.outcome is not None:
            self.steps.flush()

    def _is_idle_check(self, tick: Tick) -> bool:
        """Whether a tick is a check of the time limits that found nothing."""
        if type(tick.events[0]) is not TimerFired or len(tick.events) > 1:
            return False
        matched = self.state.orders.matched.get(tick.events[0].id, ())
        only_next = all(type(command) is SetTimer and command.name == LIMIT for command in tick.commands)
        return only_next and any(order.id == LIMIT for order in matched)

    def _count(self, event: Event, *, stale: bool) -> None:
        """Count an event. Nearly all are generated groups, which are counted together later."""
        kind = type(event)
        if kind is GroupGenerated and not stale:
            self._group_generated(event)
            return
        self._events[kind] += 1
        self._without_effect += stale or kind in (CallsMeasured, CacheMeasured)
        if kind in REQUESTS:
            self.progress.on_request(kind)
        counted = None if stale else self._counted.get(kind)
        if counted is not None:
            counted(event)

    def report(self, step: StepId, metrics: Mapping[str, Any]) -> None:
        """Take the trainer's metrics for a step. Their names become keys of its row in `metrics.jsonl`."""
        if SOURCES in metrics:
            drawn = {} if self.mixed is None else self.mixed.figures()
            self.sources = {
                name: {**drawn.get(name, {}), **metrics[SOURCES].get(name, NO_GROUPS)}
                for name in sorted({*drawn, *metrics[SOURCES]})
            }
            metrics = {**metrics, SOURCES: self.sources}
        self.steps.report(step, metrics)
        for name, buckets in metrics.get(HISTOGRAMS, {}).items():
            if name in self.reward_counts or len(self.reward_counts) <= REWARD_FUNCTIONS_KEPT:
                counted = self.reward_counts.setdefault(name, Histogram(BOUNDS))
                for _, high, count in buckets:
                    counted.add(high, count)
        for name in [name for name in self.figures if name.startswith(OF_A_KIND) and name not in metrics]:
            del self.figures[name]  # no token was of this kind
        for name, value in metrics.items():
            if isinstance(value, int | float) and (name in self.figures or len(self.figures) < FIGURES_KEPT):
                self.figures[name] = float(value)

    def validated(self, steps: int, accuracy: float) -> None:
        """Take the accuracy of the weights after `steps` train steps."""
        self.accuracies.append((steps, accuracy))

    def close(self) -> None:
        """Write the rows of finished steps for which the trainer reported no metrics, and close the journal."""
        self.steps.flush()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # output

    def catch_up(self) -> None:
        """Count the groups that were only noted. Call it before reading figures; safe on any thread."""
        self.generated.catch_up()

    @property
    def at(self) -> float:
        """Time of the newest event, seconds since the run began."""
        return self.idle.at

    @at.setter
    def at(self, at: float) -> None:
        self.idle.at = at

    @property
    def tokens_generated(self) -> int:
        self.catch_up()
        return self.generated.tokens

    @property
    def events(self) -> Counter[str]:
        """Events handled, by kind."""
        self.catch_up()
        counts = Counter({kind.__name__: count for kind, count in list(self._events.items())})
        if self.generated.groups:
            counts[GroupGenerated.__name__] += self.generated.groups
        return counts

    @property
    def changes(self) -> int:
        """Number of events so far that changed something."""
        return self.events.total() - self._without_effect

    def reported(self) -> list[Row]:
        """Rows of the reported validations, oldest first."""
        return [row for row in self.validations if row["outcome"] == "reported"]

    def validations_by_state(self) -> dict[str, int]:
        """Validations that have not ended, by state. Safe to call from another thread."""
        created = self.state.validations.created
        counts = {state: self.transitions.net("validation", state) for state in LIVE_VALIDATION_STATES}
        return {state: max(0, n + created * (state == VALIDATION.initial)) for state, n in counts.items()}

    def tokens_per_s(self, now: float) -> float:
        """Response tokens of generated groups per second, over the newest seconds; 0 before the first."""
        self.catch_up()
        return self.generated.tokens_per_s(now)

    def eta_s(self, now: float) -> float | None:
        """Seconds until the last step at the present pace; None if the last step or the pace is unknown."""
        last, done = self.state.limits.max_steps, self.state.training.steps_trained
        over = self.state.ending.outcome is not None and done != last
        if last is None or over or not self._finished_at:
            return None
        times = self._finished_at
        pace = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[-1] / max(1, done)
        return max(0.0, (last - done) * pace - (now - times[-1])) if done < last else 0.0

    # counting

    def _run_resumed(self, event: RunResumed) -> None:
        self.progress.on_resume(event)
        self.groups.on_resume(event)
        self.finished_at = event.at

    def _group_generated(self, event: Any) -> None:
        group, waiting = self.state.groups.live.get(event.group), self.generated.waiting
        waiting.append((event, None if group is None else group.started_at))
        if len(waiting) >= BATCH:
            self.generated.catch_up(blocking=False)

    def _group_failed(self, event: GroupFailed) -> None:
        cause = "group_data" if event.cause == "data" else "group_infrastructure"
        self.failed_group[cause] = event.group
        self.replicas.on_failure(event)
        self._retry(cause, f"group {event.group}: {event.reason}")

    def _state_failed(self, event: StateFailed) -> None:
        cause = "group_data" if event.cause == "data" else "group_infrastructure"
        self.failed_group[cause] = event.group
        self._retry(cause, f"group {event.group}, {event.state}: {event.reason}")

    def _inspection_failed(self, event: InspectionFailed) -> None:
        if event.version == NO_VERSION:
            self._retry("train_step", f"train step {event.step}, {event.state}: {event.reason}")
        else:
            self._retry("publish", f"version {event.version}, {event.state}: {event.reason}")

    def _calls_measured(self, event: CallsMeasured) -> None:
        before = self.calls.get(event.function)
        calls, seconds = (before.calls, before.seconds) if before is not None else (0, 0.0)
        cause = "agent" if event.setting == SLOTS else "reward"
        self.calls[event.function] = FunctionTotals(calls + event.calls, seconds + event.seconds, cause)
        if event.kind == REPLICA:
            self.idle.calls_measured(self.state.replicas.by_id[event.index])

    def _process_up(self, event: ProcessUp) -> None:
        if event.kind == REPLICA:
            self.replicas.on_join(event.index)

    def _process_lost(self, event: ProcessLost) -> None:
        process = self.state.find_process(event.kind, event.index)
        if event.kind == REPLICA:
            self.replicas.on_loss(event)
        if process is not None and process.wanted:  # otherwise the user removed it
            self.deaths[event.kind] += 1
            self._retry("replica_lost" if event.kind == REPLICA else "process_lost", f"{process.id}: {event.reason}")

    def _sync_failed(self, event: SyncFailed) -> None:
        self.replicas.on_revert(event)
        self._retry("weight_sync", f"replica {event.replica}, version {event.version}: {event.reason}")

    def _rows_measured(self, event: RowsMeasured) -> None:
        self.rows_measured += event.measured

    def _validations_ended(self) -> None:
        for run in self.transitions.validations:
            began = run.started_at if run.started_at >= 0 else run.ended_at
            row: Row = {
                "validation": run.id, "version": run.version, "steps": run.steps, "outcome": run.state,
                "accuracy": run.accuracy, "reward_mean": run.reward_mean, "rows": run.rows, "measured": run.measured,
                "sets": sets_of(run.estimates), "reason": run.reason, "elapsed_s": run.ended_at,
                "seconds": {"queued": began - run.queued_at, "running": run.ended_at - began},
            }  # fmt: skip
            self.validations.append(row)
            if run.state == "reported":
                self.validation_s.observe(run.ended_at - run.queued_at)
                self.validated(run.steps, run.accuracy or 0.0)
            if self._journal is not None:
                self._journal.write(row)
        self.transitions.validations.clear()

    def set_figures(self) -> list[tuple[tuple[str, str, str], float]]:
        """The figures of the newest validation, by set, metric and estimate (`value`, `low`, `high`)."""
        return [
            ((name, metric, bound), value)
            for row in self.reported()[-1:]
            for name, figures in row["sets"].items()
            for metric, bound, value in bounds_in(figures)
        ]

    def _retry(self, cause: str, story: str) -> None:
        self.retries[cause] += 1
        self.last_failure = story

    def _batch_ordered(self, command: TrainStep) -> None:
        groups = [self.state.groups.live[id] for id in command.groups if id in self.state.groups.live]
        self.steps.formed(command.step, groups, command.staleness)

    def _steps_changed(self, at: float) -> None:
        for step, state in self.transitions.steps:
            if self.steps.trains(step) and state in ("publishing", "finished"):
                self._step_trained(step)
            self.steps.changed(step, state, at)
            self.since["step", step] = at
            if state == "finished":
                del self.since["step", step]
                self.steps.finished(step, self.state.training.latest_version, at, self.transitions.group_counts())
                self._finished_at.append(at)
                self.finished_at = at
        self.transitions.steps.clear()
        ordered = self.state.checkpoints.ordered
        if self.state.checkpoint_pending and ("checkpoint", ordered) not in self.since:
            self.since = {key: time for key, time in self.since.items() if key[0] != "checkpoint"}
            self.since["checkpoint", ordered] = at

    def _step_trained(self, step: StepId) -> None:
        groups, staleness, tokens = self.steps.batch(step)
        self.staleness.observe_all(staleness, groups)
        self.step_staleness = staleness or self.step_staleness
        self.tokens_trained += tokens

    def _emit(self, row: Row) -> None:
        self.rewards.append(row.get("reward_mean"))
        for phase, histogram in self.phase_s.items():
            histogram.observe(row.get("seconds", {}).get(phase, 0.0))
        if self._journal is not None:
            self._journal.write(row)
