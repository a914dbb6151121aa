"""`RunMetrics`: counts what a run does, one tick at a time, beside the driver.

    scheduler = Scheduler(limits, policies)
    metrics = RunMetrics(scheduler, journal=Journal(path))
    driver = Driver(..., observe=metrics.observe)

`observe` makes one pass over what a tick changed, and must never change the scheduler. A figure of the present state is
read only when `status.py` or the exporter (`export.py`) needs it; both may run on other threads.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct, field

from engine.commands import Command, ParkGroup, ResumeGroup
from engine.events import (
    CacheMeasured,
    CallsMeasured,
    CheckpointFailed,
    CheckpointSaved,
    DrawFailed,
    Event,
    GroupFailed,
    GroupGenerated,
    InspectionFailed,
    ProcessLost,
    PublishFailed,
    RowsFailed,
    RowsMeasured,
    RunResumed,
    StateFailed,
    StepFailed,
    SyncFailed,
)
from engine.ids import NO_VERSION, StepId
from engine.metrics.counts import GeneratedGroups, GroupCounts, Histogram, ReplicaCounts, TrainedGroups
from engine.metrics.idle import IdleTime
from engine.metrics.intervals import estimates
from engine.metrics.journal import FAILED_SHARE, Row, StepRows, bounds_in, finished_row, sets_of
from engine.metrics.names import (
    DECISION_BUCKETS,
    FIGURES_KEPT,
    LIVE_VALIDATION_STATES,
    PARKED_REASONS,
    PHASE_BUCKETS,
    RETRY_CAUSES,
    REWARD_FUNCTIONS_KEPT,
    STEP_PHASES,
    VALIDATION_BUCKETS,
)
from engine.protocols import SLOTS
from engine.record.frames import Tick
from engine.reward_histogram import BOUNDS, HISTOGRAMS
from engine.states.process import KINDS, REPLICA
from engine.states.state import State
from engine.states.step import Step
from engine.states.validation import VALIDATION, Validation
from engine.trajectory import SOURCES

NO_GROUPS: Mapping[str, float] = {"groups": 0, "share": 0.0}
"""The figures of a data source without a group in the batch."""
QUIET = frozenset({CallsMeasured, CacheMeasured})
"""Events that change nothing."""
OF_A_KIND = ("token_share_", "ratio_mean_", "behavior_kl_k3_stale_", "logprob_gap_mean_")
"""The trainer's figures of one kind of tokens, by staleness or cause. A step without such tokens has none."""


class FunctionTotals(NamedTuple):
    """Calls of one of the user's functions that have ended, and the sum of their durations; see `CallsMeasured`."""

    calls: int
    seconds: float
    cause: str
    """Why slots are idle while groups wait for it: `reward` or `agent`."""
    setting: str
    at_once: int
    """These and `queued`: the largest reported."""
    queued: int
    held_s: float
    watched_s: float
    """Seconds between the reports, of all processes together."""

    def plus(self, more: "FunctionTotals") -> "FunctionTotals":
        return more._replace(
            calls=self.calls + more.calls, seconds=self.seconds + more.seconds, held_s=self.held_s + more.held_s,
            at_once=max(self.at_once, more.at_once), queued=max(self.queued, more.queued),
            watched_s=self.watched_s + more.watched_s,
        )  # fmt: skip


class CallTotals(Struct):
    """The calls of the user's functions that were reported, and when each process last reported some."""

    totals: dict[str, FunctionTotals] = field(default_factory=dict)
    """By function."""
    reported_at: dict[tuple[str, str, int], float] = field(default_factory=dict)
    """By function and process."""

    def count(self, event: CallsMeasured) -> None:
        who = event.function, event.kind, event.index
        watched_s, self.reported_at[who] = event.at - self.reported_at.get(who, event.at), event.at
        found = FunctionTotals(
            event.calls, event.seconds, "agent" if event.setting == SLOTS else "reward", event.setting, event.at_once,
            event.queued, event.held_s, watched_s,
        )  # fmt: skip
        before = self.totals.get(event.function)
        self.totals[event.function] = found if before is None else before.plus(found)


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
    """The metrics of one run. The driver calls `observe`; the trainer's side calls `report` and `validated`. It takes
    the place of the scheduler's observer of all machines but that of groups."""

    def __init__(
        self, scheduler: HasState, journal: TakesRows | None = None, first: Sequence[Row] = (),
        validations: Sequence[Row] = (),
    ) -> None:  # fmt: skip
        """`first`, `validations`: rows of the first train steps and of all validations that an earlier process
        wrote."""
        state = self.state = scheduler.state
        self.idle = IdleTime(state)
        self.retries = dict.fromkeys(RETRY_CAUSES, 0)
        self.deaths = dict.fromkeys(KINDS, 0)
        """Number of processes that died, by kind."""
        self.failed_group: dict[str, int] = {}
        """The group whose attempt failed last, by cause."""
        self.last_failure = ""
        """The newest failure and its reason."""
        self._functions = CallTotals()
        self.calls: Mapping[str, FunctionTotals] = self._functions.totals
        """By function."""
        self.changes = 0
        """Number of ticks so far that changed something."""
        self.parked = dict.fromkeys(PARKED_REASONS, 0)
        """Running groups that were parked, by reason."""
        self.replicas = ReplicaCounts()
        self.generated = GeneratedGroups(state)
        self.groups = GroupCounts(state)
        self.trained = TrainedGroups()
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
        self.checkpoint_at = 0.0
        """When the last checkpoint was saved, or the run was resumed; seconds since the run began."""
        self.silence = (-1, "")
        """(number of changes so far, text) of the last report that nothing changed."""
        self.rewards: list[float | None] = []
        """Mean reward of each finished step of this run, in order."""
        self.accuracies: list[tuple[int, float, float]] = []
        """(train steps, accuracy, share of failed responses) of every validation reported."""
        self.validations: list[Row] = []
        """A row for each validation that ended, in that order, as in `metrics.jsonl`."""
        self.validation_s = Histogram(VALIDATION_BUCKETS)
        self.rows_measured = 0
        self.steps = StepRows(self._emit, first)
        for row in validations:
            self._take_validation(row)
        self.validations_before = len(self.validations)
        self._journal = journal
        self._events: Counter[type[Event]] = Counter()
        """Number of events by class."""
        self._finished_at: deque[float] = deque(maxlen=11)
        self._counted, self._ordered = self._event_counters(), self._order_counters()
        self._steps_finished: list[Step] = []
        """Steps that finished in this tick."""
        self._replicas_changed = False
        """Whether replicas changed, or reported calls, in this tick."""
        self._validations_ended: list[Row] = []
        """Rows of the validations that ended in this tick."""
        state.observe(self.note, groups=False)

    def _order_counters(self) -> dict[type[Command], Callable[[Any, float], None]]:
        """The method that counts orders of each class."""
        return {
            ParkGroup: self._group_parked,
            ResumeGroup: self.replicas.on_resume_group,
        }

    def _event_counters(self) -> dict[type[Event], Callable[[Any], None]]:
        """The method that counts events of each class but generated groups. Stale echoes are not passed to it."""
        return {
            GroupFailed: self._group_failed,
            StateFailed: self._state_failed,
            ProcessLost: self._process_lost,
            SyncFailed: self._sync_failed,
            StepFailed: lambda event: self._retry("train_step", f"train step {event.step}: {event.reason}"),
            InspectionFailed: self._inspection_failed,
            PublishFailed: lambda event: self._retry("publish", f"version {event.version}: {event.reason}"),
            RowsMeasured: self._rows_measured,
            RowsFailed: lambda event: self._retry("validation", f"validation {event.validation}: {event.reason}"),
            CheckpointFailed: lambda event: self._retry("checkpoint", f"checkpoint {event.steps}: {event.reason}"),
            DrawFailed: lambda event: self._retry("draw", f"the data source: {event.reason}"),
            CallsMeasured: self._calls_measured,
            CheckpointSaved: self._checkpoint_saved,
            RunResumed: self._run_resumed,
        }

    def finish_replay(self) -> None:
        """Call it when a replay has reached the present: the ages of the last step and checkpoint count from there. The
        trainer's metrics of steps that were trained before are lost, so their rows do not wait for them."""
        self.finished_at = self.checkpoint_at = self.state.facts.now
        for step in self.state.training.formed_steps:
            if step.id < self.state.training.steps_trained:
                self.steps.report(step.id, {})

    # input

    def observe(self, tick: Tick) -> None:
        """Count the events of a tick that the scheduler has decided about, and its commands."""
        at = self.idle.at = tick.at
        self._count(tick.events, at)
        for step in self._steps_finished:
            self.steps.finished(finished_row(step, self.state.training.latest_version, at))
            self._finished_at.append(at)
            self.finished_at = at
        self._steps_finished.clear()
        for row in self._validations_ended:
            self._take_validation(row)
            if self._journal is not None:
                self._journal.write(row)
        self._validations_ended.clear()
        if not self._ordered.keys().isdisjoint(map(type, tick.commands)):
            for command in tick.commands:
                if (count := self._ordered.get(type(command))) is not None:
                    count(command, at)
        if self._replicas_changed:
            self.idle.replicas_changed()
            self._replicas_changed = False
        self.idle.measure()
        if self.state.ending.outcome is not None:
            self.steps.flush()

    def _count(self, events: Sequence[Event], at: float) -> None:
        """Count events. Nearly all are generated groups, which are counted together."""
        matched = self.state.orders.matched
        self._events.update(map(type, events))
        # an event that matched nothing is a stale echo
        matching = events if len(matched) == len(events) else [event for event in events if event.id in matched]
        generated = [event for event in matching if type(event) is GroupGenerated]
        others = [event for event in matching if type(event) is not GroupGenerated]
        if generated or not QUIET.issuperset(map(type, others)):
            self.changes += 1
        if generated:
            self.generated.count(generated, at)
        for event in others:
            if (count := self._counted.get(type(event))) is not None:
                count(event)

    def note(self, machine: str, record: Any, source: str, trigger: str) -> None:
        """Note what `observe` must look at after the tick. The scheduler calls it after each change of a record."""
        if machine == "step":
            if source == "training" and trigger in ("publish", "finish"):
                self.trained.count(record)
            if record.state == "finished":
                self._steps_finished.append(record)
        elif machine == "replica":
            self._replicas_changed = True
            self.replicas.changed(record, trigger, self.state)
        elif machine == "validation" and record.state in VALIDATION.terminal:
            self._validations_ended.append(_validation_row(record))

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
                    counted.observe([high] * count)
        for name in [name for name in self.figures if name.startswith(OF_A_KIND) and name not in metrics]:
            del self.figures[name]  # no token was of this kind
        for name, value in metrics.items():
            if isinstance(value, int | float) and (name in self.figures or len(self.figures) < FIGURES_KEPT):
                self.figures[name] = float(value)

    def validated(self, steps: int, accuracy: float, failed_share: float = 0.0) -> None:
        """Take the accuracy of the weights after `steps` train steps."""
        self.accuracies.append((steps, accuracy, failed_share))

    def close(self) -> None:
        """Write the rows of finished steps for which the trainer reported no metrics, and close the journal."""
        self.steps.flush()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # output

    @property
    def at(self) -> float:
        """Time of the newest event, seconds since the run began."""
        return self.idle.at

    @at.setter
    def at(self, at: float) -> None:
        self.idle.at = at

    @property
    def events(self) -> Counter[str]:
        """Events handled, by kind."""
        return Counter({kind.__name__: count for kind, count in list(self._events.items())})

    def requests(self, kind: type[Event]) -> int:
        """Number of requests of a class."""
        return self._events[kind]

    def reported(self) -> list[Row]:
        """Rows of the reported validations, oldest first."""
        return [row for row in self.validations if row["outcome"] == "reported"]

    def validations_by_state(self) -> dict[str, int]:
        """Validations that have not ended, by state. Safe to call from another thread."""
        states = [validation.state for validation in list(self.state.validations.live.values())]
        return {state: states.count(state) for state in LIVE_VALIDATION_STATES}

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
        self.finished_at = self.checkpoint_at = event.at

    def _checkpoint_saved(self, event: CheckpointSaved) -> None:
        self.checkpoint_at = event.at

    def _group_parked(self, command: ParkGroup, at: float) -> None:
        self.parked["timeout" if command.reason else "moved"] += 1

    def _group_failed(self, event: GroupFailed) -> None:
        cause = "group_data" if event.cause == "data" else "group_infrastructure"
        self.failed_group[cause] = event.group
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
        self._functions.count(event)
        if event.kind == REPLICA:
            self._replicas_changed = True

    def _process_lost(self, event: ProcessLost) -> None:
        process = self.state.find_process(event.kind, event.index)
        if process is not None and process.wanted:  # otherwise the user removed it
            self.deaths[event.kind] += 1
            self._retry("replica_lost" if event.kind == REPLICA else "process_lost", f"{process.id}: {event.reason}")

    def _sync_failed(self, event: SyncFailed) -> None:
        self._retry("weight_sync", f"replica {event.replica}, version {event.version}: {event.reason}")

    def _rows_measured(self, event: RowsMeasured) -> None:
        self.rows_measured += event.measured

    def _take_validation(self, row: Row) -> None:
        self.validations.append(row)
        if row["outcome"] == "reported":
            self.validation_s.observe([sum(row["seconds"].values())])
            self.validated(row["steps"], row["accuracy"] or 0.0, row[FAILED_SHARE] or 0.0)

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

    def _emit(self, row: Row) -> None:
        self.rewards.append(row.get("reward_mean"))
        for phase, histogram in self.phase_s.items():
            histogram.observe([row.get("seconds", {}).get(phase, 0.0)])
        if self._journal is not None:
            self._journal.write(row)


def _validation_row(validation: Validation) -> Row:
    """The row of a validation that ends."""
    began = validation.started_at if validation.started_at >= 0 else validation.ended_at
    return {
        "validation": validation.id, "version": validation.version, "steps": validation.steps,
        "outcome": validation.state, "accuracy": validation.accuracy, "reward_mean": validation.reward_mean,
        "rows": validation.asked, "measured": validation.measured,
        FAILED_SHARE: None if validation.left else 1 - validation.measured / validation.asked,
        "sets": sets_of(estimates(validation.figures)), "reason": validation.reason, "elapsed_s": validation.ended_at,
        "seconds": {"queued": began - validation.queued_at, "running": validation.ended_at - began},
    }  # fmt: skip
