"""Finds the intervals of a run, one tick at a time: attempts, waits, phases of steps and syncs, lives, idle time.

    builder = HistoryBuilder(scheduler, metrics)
    metrics.observe(tick); builder.take(tick)

The loop of a run calls it through `history_log`, and a replay calls it for what the log lacks, so both find the same.
It watches the scheduler, because events and commands do not say why a group was released or a slot was idle. What has
ended is in `ended`, what has begun in `open`; both can be written and read back. It keeps nothing of what has ended,
and must never change the scheduler.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Struct, field, structs

from engine.commands import (
    AbortGroup,
    Command,
    FinishRun,
    InspectStep,
    InstallWeights,
    MeasureRows,
    ParkGroup,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    SaveCheckpoint,
    ScoreBatch,
    StageWeights,
    StartGroup,
    StartProcess,
    StopProcess,
    TrainStep,
    TruncateGroup,
)
from engine.events import (
    CallsMeasured,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    ProcessLost,
    ProcessUp,
    ReplicaPaused,
    RowsFailed,
    RowsMeasured,
    RunResumed,
    SettingChanged,
    StateLeft,
    SyncFailed,
    WeightsInstalled,
    WeightsStaged,
)
from engine.ids import NO_VERSION, EventId, GroupId, LifeNumber, ReplicaId, StepId, Version
from engine.metrics.collector import CallTotals, HasState, RunMetrics
from engine.metrics.history import (
    NO_EVENT,
    RUNNING,
    STOPPED,
    CheckpointWrite,
    Failure,
    GenerationAttempt,
    GroupRow,
    GroupWait,
    IdleSpan,
    Intervals,
    ProcessLife,
    RowsAttempt,
    StepPhase,
    StepRow,
    SyncPhase,
)
from engine.metrics.idle import Period, Split
from engine.metrics.journal import finished_row
from engine.metrics.names import ROLLOUT_IDLE_CAUSES
from engine.record.frames import Tick
from engine.states.causes import SLOT_CAUSES
from engine.states.group import GROUP, Group
from engine.states.process import REPLICA
from engine.states.step import Step

NO_WAITS = ("queued", "aborted", "batched")
"""States of groups that are neither attempts nor waits."""
PAUSES = {"sleep": "pool", "drain": "drain"}
"""Why a pause aborts groups, by its mode; otherwise a weight sync does."""
ENDS_OF_WORK = frozenset({GroupGenerated, GroupAborted, GroupFailed, StateLeft})
"""Events that end an attempt of a group or its stay in an added state."""
SYNC_PHASES = {StageWeights: "staging", PauseReplica: "pausing", InstallWeights: "installing"}

# -- what has begun ----------------------------------------------------------------------------------------------------


class _Attempt(Struct, frozen=True, array_like=True, gc=False):
    """A running attempt of a group, with what was true when it began."""

    attempt: int
    replica: ReplicaId
    life: LifeNumber
    resumed: bool
    version: Version
    cause: EventId
    start: float
    tokens: int


class _Cut(Struct, frozen=True, array_like=True, gc=False):
    """The newest order to park, truncate or abort a running attempt."""

    command: str
    reason: str
    cause: EventId


class _Begin(Struct, frozen=True, array_like=True, gc=False):
    """Where something began: a wait with its state, or a phase of a step with its name."""

    name: str
    start: float
    cause: EventId


class _LiveGroup(Struct, array_like=True, gc=False):
    """A group that has not ended."""

    drawn_at: float
    """-1: the run went back to an earlier checkpoint, and an earlier row of the group says it."""
    started_at: float = -1.0
    state: str = "queued"
    deadline: StepId = -1
    attempts: int = 0
    tokens: int = 0
    reward_mean: float | None = None
    reward_spread: float | None = None
    step: StepId = -1
    staleness: int = -1
    attempt: _Attempt | None = None
    wait: _Begin | None = None
    cut: _Cut | None = None

    def row(self, id: GroupId, ended_at: float, oldest: Version, newest: Version) -> GroupRow:
        return GroupRow(
            id, self.state, self.drawn_at, self.started_at, ended_at, self.deadline, self.attempts, self.tokens, oldest,
            newest, self.reward_mean, self.reward_spread, self.step, self.staleness,
        )  # fmt: skip


class _OpenStep(Struct, array_like=True):
    """A train step that has not finished."""

    groups: tuple[GroupId, ...] = ()
    staleness: tuple[int, ...] = ()
    phases: tuple[StepPhase, ...] = ()
    version: Version = -1
    tokens: int = 0
    phase: _Begin | None = None

    def row(self, id: StepId, finished_at: float = -1.0, *, undone: bool = False) -> StepRow:
        return StepRow(
            id, self.groups, self.staleness, self.phases, self.version, self.tokens, finished_at, undone
        )  # fmt: skip


class _Loss(NamedTuple):
    """The newest loss of a replica."""

    last: EventId
    """The last event of its tick."""
    reason: str
    event: EventId


class _OpenIdle(Struct):
    """The idle span that has not ended. Its sums reach up to `since`; from there on, the split holds."""

    start: float
    since: float
    split: Split
    busy: int
    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)


class OpenValues(Struct):
    """What a builder knows of a run besides the values that have ended."""

    ticks: int = 0
    """Number of ticks that it took."""
    events: int = 0
    at: float = 0.0
    """Time of the last event."""
    drawn: int = 0
    notes: tuple[str, ...] = ()
    """Remarks about the record until here."""
    groups: dict[GroupId, _LiveGroup] = field(default_factory=dict)
    steps: dict[StepId, _OpenStep] = field(default_factory=dict)
    chunks: dict[tuple[int, int], RowsAttempt] = field(default_factory=dict)
    """This and the following: values without their ends, by what they are about."""
    lives: dict[tuple[str, int], ProcessLife] = field(default_factory=dict)
    syncs: dict[ReplicaId, SyncPhase] = field(default_factory=dict)
    checkpoints: dict[StepId, CheckpointWrite] = field(default_factory=dict)
    pauses: dict[ReplicaId, tuple[str, EventId]] = field(default_factory=dict)
    """(why groups abort, cause) of the newest pause of each replica."""
    losses: dict[ReplicaId, _Loss] = field(default_factory=dict)
    idle: _OpenIdle | None = None
    slots: dict[ReplicaId, int] = field(default_factory=dict)
    lost: int = 0
    """Tokens of attempts that no prefix kept."""
    undone: int = 0
    """Tokens of groups that ran or were ready when the run went back to an earlier checkpoint."""
    calls: CallTotals = field(default_factory=CallTotals)


# -- the builder -------------------------------------------------------------------------------------------------------


class HistoryBuilder:
    """Observes the scheduler, and passes on to `metrics` the changes that these observed before."""

    def __init__(
        self, scheduler: HasState, metrics: RunMetrics, open: OpenValues | None = None, ended: Intervals | None = None
    ) -> None:
        """`open`, `ended`: those of an earlier builder of the run, which took the same ticks as the scheduler."""
        self.state = state = scheduler.state
        self.metrics = metrics
        self.open = open or OpenValues()
        self.ended = ended or Intervals()
        self._moves: list[tuple[Group, str, int]] = []
        """(group, its new state, the tokens that it had in the trajectory store then) of each move in the tick."""
        self._step_moves: list[tuple[Step, str]] = []
        self._period: Period | None = None
        self._failed = sum(metrics.retries.values())
        self._validations = len(metrics.validations)
        self._on_event: dict[type[Event], Callable[[Any], None]] = {
            RowsMeasured: self._measured, RowsFailed: self._measured, ProcessUp: self._up, ProcessLost: self._lost,
            WeightsStaged: self._synced, ReplicaPaused: self._synced, WeightsInstalled: self._synced,
            SyncFailed: self._synced, CheckpointSaved: self._saved, CheckpointFailed: self._saved,
            SettingChanged: self._set, CallsMeasured: self.open.calls.count,
        }  # fmt: skip
        self._before_moves: dict[type[Command], Callable[[Any, EventId], None]] = {
            ParkGroup: self._cut, TruncateGroup: self._cut, AbortGroup: self._cut, PauseReplica: self._pause,
            StopProcess: self._stop,
        }  # fmt: skip
        self._after_moves: dict[type[Command], Callable[[Any, float], None]] = {
            MeasureRows: self._measure, StartProcess: self._start, SaveCheckpoint: self._save,
            InspectStep: self._batch, TrainStep: self._batch, PublishWeights: self._publish,
            StageWeights: self._sync, PauseReplica: self._sync, InstallWeights: self._sync, FinishRun: self._finish,
        }  # fmt: skip
        state.groups.machine.observe = self._group_changed
        state.observe(self._changed, groups=False)
        if self.open.idle is not None and metrics.idle.period is None:
            cause = self.open.idle.split.cause
            metrics.idle.rollout_cause = next(one for one in SLOT_CAUSES if one.name == cause)  # until slots are free

    def _changed(self, machine: str, record: Any, source: str, trigger: str) -> None:
        self.metrics.note(machine, record, source, trigger)
        if machine == "step":
            self._step_moves.append((record, record.state))

    def _group_changed(self, machine: str, group: Group, source: str, trigger: str) -> None:
        self._moves.append((group, group.state, group.tokens))

    def take(self, tick: Tick) -> None:
        """Take a tick that the scheduler has decided, after the metrics have."""
        open, at, last = self.open, tick.at, tick.last
        about, resumed = self._read_events(tick)
        if resumed is not None:
            self._resumed(resumed)
        drawn = self.state.groups.ledger.drawn
        for id in range(open.drawn, drawn):
            open.groups[id] = _LiveGroup(at)
        open.drawn = drawn
        starts, after = self._read_commands(tick, last)
        for group, state, tokens in self._moves:
            if state == "generating" or state == "resumed":
                self._begin(group, state, tokens, at, starts[group.id])
            else:
                self._move(group, state, tokens, at, last, about.get(group.id))
        self._moves.clear()
        if self._step_moves:
            self._move_steps(tick)
        if resumed is not None:
            self._continue(resumed)
        for handle, command in after:
            handle(command, at)
        if self.metrics.idle.period is not self._period:
            self._note_idle(self.metrics.idle.period)
        self._note_figures(at, last)
        open.ticks, open.events, open.at = open.ticks + 1, last + 1, at

    def _read_events(self, tick: Tick) -> tuple[dict[GroupId, Event], RunResumed | None]:
        """The events that end attempts or stays in added states, by group. Takes all others but stale echoes."""
        matched, about = self.state.orders.matched, dict[GroupId, Event]()
        resumed: RunResumed | None = None
        for event in tick.events:
            kind = type(event)
            if kind in ENDS_OF_WORK:
                if event.id in matched:
                    about[event.group] = event  # type: ignore[attr-defined]
            elif kind is RunResumed:
                resumed = event  # type: ignore[assignment]
            elif kind in self._on_event and event.id in matched:
                self._on_event[kind](event)
        return about, resumed

    def _read_commands(
        self, tick: Tick, last: EventId
    ) -> tuple[dict[GroupId, StartGroup | ResumeGroup], list[tuple[Callable[[Any, float], None], Command]]]:
        """The orders to generate, by group, and the commands to take after the moves. Takes orders that end
        attempts."""
        starts: dict[GroupId, StartGroup | ResumeGroup] = {}
        after = []
        for command in tick.commands:
            kind = type(command)
            if kind is StartGroup or kind is ResumeGroup:
                starts[command.group] = command  # type: ignore[assignment, attr-defined]
                continue
            if kind in self._before_moves:
                self._before_moves[kind](command, last)
            if kind in self._after_moves:
                after.append((self._after_moves[kind], command))
        for event in tick.events:
            if type(event) is ProcessLost and event.kind == REPLICA:
                self.open.losses[event.index] = _Loss(last, event.reason, event.id)
        return starts, after

    # groups

    def _cut(self, command: ParkGroup | TruncateGroup | AbortGroup, last: EventId) -> None:
        group = self.open.groups.get(command.group)
        if group is not None:
            group.cut = _Cut(type(command).__name__, getattr(command, "reason", ""), command.cause)

    def _pause(self, command: PauseReplica, last: EventId) -> None:
        draining = self.state.replicas.by_id[command.replica].state in ("draining", "drained")
        why = PAUSES.get("drain" if draining else command.mode, "sync")
        self.open.pauses[command.replica] = (why, command.cause)

    def _stop(self, command: StopProcess, last: EventId) -> None:
        if command.kind == REPLICA:
            self.open.losses[command.index] = _Loss(last, command.reason, command.cause)

    def _begin(self, record: Group, state: str, tokens: int, at: float, order: StartGroup | ResumeGroup) -> None:
        """An attempt to generate a group began."""
        group = self.open.groups[record.id]
        if tokens != group.tokens:
            self._note_tokens(group, tokens)
        if group.started_at < 0:
            group.started_at = at
        group.state, group.deadline = state, record.deadline
        group.attempts += 1
        group.attempt = _Attempt(
            order.attempt, order.replica, order.life, type(order) is ResumeGroup,
            self.state.replicas.by_id[order.replica].version, order.cause, at, tokens,
        )  # fmt: skip

    def _move(
        self, record: Group, state: str, tokens: int, at: float, last: EventId, event: Event | None
    ) -> None:  # fmt: skip
        """A group entered a state in which it does not run. `last`: the last event of the tick. `event`: the one that
        says so, if any."""
        group = self.open.groups[record.id]
        by = last if event is None else event.id
        if group.attempt is not None:
            how = self._end_of(group, group.attempt.replica, last, by, event)
            longest = event.longest if type(event) is GroupGenerated else 0
            self._end_attempt(record.id, group, record, tokens, at, *how, longest)
        elif group.wait is not None:
            self._end_wait(record.id, group, state, at, by)
        if tokens != group.tokens:
            self._note_tokens(group, tokens)
        group.state = state
        if type(event) is GroupGenerated or type(event) is StateLeft:
            group.reward_mean, group.reward_spread = event.reward_mean, event.reward_spread
        if state in GROUP.terminal:
            self.ended.groups.append(group.row(record.id, at, record.oldest_version, record.newest_version))
            del self.open.groups[record.id]
        elif state not in NO_WAITS:
            group.wait = _Begin(state, at, by)

    def _end_of(
        self, group: _LiveGroup, replica: ReplicaId, last: EventId, by: EventId, event: Event | None
    ) -> tuple[str, str, EventId, EventId]:
        """How and why an attempt ended: (outcome, reason, the event that ended it, the event that ordered its end)."""
        cut, group.cut = group.cut, None
        ordered_by, command = (by, "") if cut is None else (cut.cause, cut.command)
        if type(event) is GroupGenerated:
            return "generated", "truncated" if command == "TruncateGroup" else "", by, ordered_by
        if isinstance(event, GroupFailed):
            return "failed", event.reason, by, by
        if command == "AbortGroup":
            return "aborted", "dropped", ordered_by, ordered_by
        if not isinstance(event, GroupAborted):
            loss = self.open.losses.get(replica)
            if loss is None or loss.last != last:
                return "lost", "its replica was lost", last, last
            return "lost", loss.reason, loss.event, loss.event
        if cut is not None and command == "ParkGroup":
            return "aborted", "timeout" if cut.reason else "moved", by, ordered_by
        if self.state.replicas.by_id[event.replica].state == "ready":
            return "aborted", "unasked", by, ordered_by
        why, ordered_by = self.open.pauses.get(replica, ("sync", by))
        return "aborted", why, by, ordered_by

    def _end_attempt(
        self, id: GroupId, group: _LiveGroup, record: Group | None, tokens: int, at: float, outcome: str, reason: str,
        by: EventId, ordered_by: EventId, longest: int = 0,
    ) -> None:  # fmt: skip
        began, group.attempt = group.attempt, None
        assert began is not None
        oldest, newest = NO_VERSION, NO_VERSION
        if record is not None:
            oldest, newest = record.oldest_version, record.newest_version
        self.ended.attempts.append(
            GenerationAttempt(
                id, began.attempt, began.replica, began.life, began.start, at, began.resumed, outcome, reason,
                began.version, oldest, newest, tokens, max(0, tokens - began.tokens), began.cause, by, ordered_by,
                longest,
            )
        )  # fmt: skip

    def _end_wait(self, id: GroupId, group: _LiveGroup, outcome: str, at: float, by: EventId) -> None:
        began, group.wait = group.wait, None
        assert began is not None
        self.ended.waits.append(GroupWait(id, began.name, began.start, at, outcome, began.cause, by))

    def _note_tokens(self, group: _LiveGroup, tokens: int) -> None:
        """A group now has this number of tokens. Tokens that it no longer has are lost."""
        if tokens < group.tokens:
            self.open.lost += group.tokens - tokens
        group.tokens = tokens

    # train steps

    def _move_steps(self, tick: Tick) -> None:
        for step, state in self._step_moves:
            by = next((command.cause for command in tick.commands if _works_on(command, step.id)), tick.last)
            self._end_phase(step.id, state, tick.at, by)
            if state == "finished":
                self.ended.rows.append(finished_row(step, self.state.training.latest_version, tick.at))
                self.ended.steps.append(self.open.steps.pop(step.id, _OpenStep()).row(step.id, tick.at))
            elif state != "waiting":
                self._open_step(step.id).phase = _Begin(state, tick.at, by)
        self._step_moves.clear()

    def _open_step(self, step: StepId) -> _OpenStep:
        return self.open.steps.setdefault(step, _OpenStep())

    def _end_phase(self, id: StepId, outcome: str, at: float, by: EventId) -> None:
        step = self.open.steps.get(id)
        if step is not None and step.phase is not None:
            began, step.phase = step.phase, None
            step.phases += (StepPhase(id, began.name, began.start, at, outcome, began.cause, by),)

    def _batch(self, command: TrainStep | InspectStep, at: float) -> None:
        if not command.groups:  # weights are inspected
            return
        step, groups = self._open_step(command.step), self.open.groups
        step.groups, step.staleness, step.tokens = command.groups, command.staleness, 0
        for id, staleness in zip(command.groups, command.staleness, strict=True):
            group = groups[id]
            group.step, group.staleness = command.step, staleness
            step.tokens += group.tokens

    def _publish(self, command: PublishWeights, at: float) -> None:
        if command.steps - 1 in self.open.steps:
            self.open.steps[command.steps - 1].version = command.version

    # processes

    def _start(self, command: StartProcess, at: float) -> None:
        key = command.kind, command.index
        self._end_life(key, at, "lost", "replaced", command.cause)
        self.open.lives[key] = ProcessLife(*key, command.life, at, None, at, "", "", command.cause, NO_EVENT)

    def _up(self, event: ProcessUp) -> None:
        key = event.kind, event.index
        if key in self.open.lives:
            self.open.lives[key] = structs.replace(self.open.lives[key], up=event.at)
        if event.kind == REPLICA:
            self.open.slots[event.index] = event.slots

    def _lost(self, event: ProcessLost) -> None:
        self._end_life((event.kind, event.index), event.at, "lost", event.reason, event.id)
        if event.kind == REPLICA:
            self._end_sync(event.index, event.at, "lost", event.id)
            for key in [key for key, chunk in self.open.chunks.items() if chunk.replica == event.index]:
                self._end_chunk(key, event.at, "lost", event.id)

    def _end_life(self, key: tuple[str, int], at: float, outcome: str, reason: str, by: EventId) -> None:
        if (life := self.open.lives.pop(key, None)) is not None:
            self.ended.lives.append(structs.replace(life, end=at, outcome=outcome, reason=reason, ended_by=by))

    def _sync(self, command: StageWeights | PauseReplica | InstallWeights, at: float) -> None:
        self._end_sync(command.replica, at, "replaced", command.cause)
        self.open.syncs[command.replica] = SyncPhase(
            command.replica, command.life, command.attempt, command.version, SYNC_PHASES[type(command)],
            command.mode if isinstance(command, PauseReplica) else "", at, at, "", command.cause, NO_EVENT,
        )  # fmt: skip

    def _synced(self, event: WeightsStaged | ReplicaPaused | WeightsInstalled | SyncFailed) -> None:
        self._end_sync(event.replica, event.at, "failed" if isinstance(event, SyncFailed) else "done", event.id)

    def _end_sync(self, replica: ReplicaId, at: float, outcome: str, by: EventId) -> None:
        if (sync := self.open.syncs.pop(replica, None)) is not None:
            self.ended.syncs.append(sync._replace(end=at, outcome=outcome, ended_by=by))

    def _measure(self, command: MeasureRows, at: float) -> None:
        self.open.chunks[command.validation, command.chunk] = RowsAttempt(
            command.validation, command.chunk, command.attempt, command.replica, command.life, at, at, "",
            command.version, command.count, command.cause, NO_EVENT,
        )  # fmt: skip

    def _measured(self, event: RowsMeasured | RowsFailed) -> None:
        outcome = "measured" if isinstance(event, RowsMeasured) else "failed"
        self._end_chunk((event.validation, event.chunk), event.at, outcome, event.id)

    def _end_chunk(self, key: tuple[int, int], at: float, outcome: str, by: EventId) -> None:
        if (chunk := self.open.chunks.pop(key, None)) is not None:
            self.ended.chunks.append(chunk._replace(end=at, outcome=outcome, ended_by=by))

    def _save(self, command: SaveCheckpoint, at: float) -> None:
        self.open.checkpoints[command.steps] = CheckpointWrite(command.steps, at, at, "", command.cause, NO_EVENT)

    def _saved(self, event: CheckpointSaved | CheckpointFailed) -> None:
        self._end_save(event.steps, event.at, "saved" if isinstance(event, CheckpointSaved) else "failed", event.id)

    def _end_save(self, steps: StepId, at: float, outcome: str, by: EventId) -> None:
        if (save := self.open.checkpoints.pop(steps, None)) is not None:
            self.ended.checkpoints.append(save._replace(end=at, outcome=outcome, ended_by=by))

    # figures

    def _set(self, event: SettingChanged) -> None:
        self.ended.settings.append((event.at, event.setting, event.value))

    def _note_figures(self, at: float, last: EventId) -> None:
        """Take the failures of a tick and the validations that ended in it."""
        failed = sum(self.metrics.retries.values())
        if failed != self._failed:
            self._failed = failed
            self.ended.failures.append(Failure(at, last, self.metrics.last_failure))
        if len(self.metrics.validations) != self._validations:
            self.ended.validations += self.metrics.validations[self._validations :]
            self._validations = len(self.metrics.validations)

    def _note_idle(self, period: Period | None) -> None:
        """Slots or the trainer began something else, or the same as before on another builder."""
        self._period = period
        idle = self.open.idle
        if period is None or (idle is not None and (idle.split, idle.busy) == (period.split, period.busy)):
            return
        if idle is not None:
            self._sum_idle(idle, period.at)
            if idle.split == period.split:
                idle.busy = period.busy
                return
            self._end_idle(idle)
        self.open.idle = _OpenIdle(period.at, period.at, period.split, period.busy)

    def _sum_idle(self, idle: _OpenIdle, at: float) -> None:
        seconds, (most, away, cause, *_) = at - idle.since, idle.split
        idle.since = at
        idle.busy_s += idle.busy * seconds
        for name, slots in ((cause, most - idle.busy), *away):
            if slots > 0 and seconds > 0:
                idle.idle_s[name] = idle.idle_s.get(name, 0.0) + slots * seconds

    def _end_idle(self, idle: _OpenIdle) -> None:
        if idle.since > idle.start:
            named = tuple((cause, idle.idle_s[cause]) for cause in ROLLOUT_IDLE_CAUSES if cause in idle.idle_s)
            split = idle.split
            span = IdleSpan(idle.start, idle.since, idle.busy_s, named, split.task or split.trainer_cause)
            self.ended.idle.append(span)

    # ends

    def _resumed(self, event: RunResumed) -> None:
        """The run continues in new processes, perhaps from an earlier checkpoint. Called before the moves."""
        self._close(self.open.at, "lost", event.id)
        if event.kept:
            return
        for id in self.state.groups.live:
            group = self.open.groups.get(id)
            if group is None:  # it had ended
                group = self.open.groups[id] = _LiveGroup(-1.0)
            self.open.undone += group.tokens
            group.tokens, group.state = 0, "queued"
        self.ended.steps.append(event.steps)
        for step in [step for step in self.open.steps if step >= event.steps]:
            self.ended.steps.append(self.open.steps.pop(step).row(step, undone=True))

    def _continue(self, event: RunResumed) -> None:
        """Groups and train steps are in their states from now on. Called after the moves; no group runs."""
        for record in self.state.groups.live.values():
            group = self.open.groups[record.id]
            if record.state not in NO_WAITS and group.wait is None:
                group.wait = _Begin(record.state, event.at, event.id)
        for step in self.state.training.steps.values():
            if step.state != "waiting" and self._open_step(step.id).phase is None:
                self._open_step(step.id).phase = _Begin(step.state, event.at, event.id)

    def _finish(self, command: FinishRun, at: float) -> None:
        self._close(at, STOPPED, command.cause)

    def _close(self, at: float, outcome: str, by: EventId) -> None:
        """End everything that is open."""
        open, live = self.open, self.state.groups.live
        for id, group in open.groups.items():
            if group.attempt is not None:
                record = live.get(id)
                tokens = max(group.tokens, 0 if record is None else record.tokens)  # a branch cleared them
                self._end_attempt(id, group, record, tokens, at, outcome, "", by, by)
                group.tokens = tokens
            elif group.wait is not None:
                self._end_wait(id, group, outcome, at, by)
            group.cut = None
        for chunk in list(open.chunks):
            self._end_chunk(chunk, at, outcome, by)
        for step in open.steps:
            self._end_phase(step, outcome, at, by)
        for life in list(open.lives):
            self._end_life(life, at, outcome, "", by)
        for replica in list(open.syncs):
            self._end_sync(replica, at, outcome, by)
        for steps in list(open.checkpoints):
            self._end_save(steps, at, outcome, by)

    def end(self) -> None:
        """End everything at the end of the record. Groups that live and steps that go on get rows. Takes no tick
        after this."""
        open = self.open
        self._close(open.at, RUNNING, NO_EVENT)
        for id, record in self.state.groups.live.items():
            group = open.groups[id]
            self._note_tokens(group, record.tokens)
            group.state = record.state
            self.ended.groups.append(group.row(id, -1.0, record.oldest_version, record.newest_version))
        self.ended.steps += [step.row(id) for id, step in open.steps.items()]
        if open.idle is not None:
            self._sum_idle(open.idle, open.at)
            self._end_idle(open.idle)


def _works_on(command: Command, step: StepId) -> bool:
    if isinstance(command, TrainStep | ScoreBatch | InspectStep):
        return command.step == step
    return isinstance(command, PublishWeights) and command.steps == step + 1
