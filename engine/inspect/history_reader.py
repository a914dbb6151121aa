"""Reads a record once and gives its `History`.

Called by the commands that show a run. It replays the schedule, because only the scheduler knows why a group was
released and why a slot was idle: events and commands do not say it. Idle time is classified by `metrics.RunMetrics`, as
during the run. Must not write.
"""

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

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
from engine.errors import EngineError
from engine.events import (
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
from engine.ids import NO_VERSION, EventId, GroupId, Incarnation, ReplicaId, StepId, Version
from engine.inspect.history import (
    FATES,
    NO_EVENT,
    RUNNING,
    STOPPED,
    CheckpointWrite,
    Failure,
    GenerationAttempt,
    GroupRow,
    GroupWait,
    History,
    IdleSpan,
    ProcessLife,
    RowsAttempt,
    StepPhase,
    StepRow,
    SyncPhase,
)
from engine.inspect.moment import open_record
from engine.metrics.collector import RunMetrics
from engine.metrics.idle import Period
from engine.metrics.transitions import Transitions
from engine.record import Header, Record, Tick, replay
from engine.record.replayer import build_scheduler
from engine.scheduling.scheduler import Scheduler
from engine.states.group import Group
from engine.states.machine import Phase
from engine.states.process import REPLICA

PAUSES = {"sleep": "pool", "drain": "drain"}
"""Why a pause aborts groups, by its mode; otherwise a weight sync does."""


def read_history(run: str | Path | Record) -> History:
    """The history of a run: its directory, that of its record, or an open record. A running run is read to its present
    end.

    Raises: `ConfigError` if there is no such directory, `RecordError` if the record cannot be read, `EngineError` if
    this engine decides differently from the record.
    """
    record = run if isinstance(run, Record) else open_record(run)
    reader = _HistoryReader()
    report = replay(record, None, reader.build, reader.watch, compare_snapshots=False)
    if report.divergence is not None:
        raise EngineError(f"the record cannot be shown: {report.divergence}")
    notes = [f"cut: {report.torn}"] if report.torn else []
    notes += [f"tick {one.number} was rejected: {one.reason}" for one in report.rejected]
    return reader.history(record.header, report.ticks, report.events, tuple(notes))


class _Move(NamedTuple):
    """A group changed its state."""

    group: Group
    source: str
    target: str
    trigger: str
    tokens: int
    """Tokens that it had in the trajectory store then."""


class _OpenAttempt(NamedTuple):
    order: StartGroup | ResumeGroup
    slot: int
    start: float
    version: Version
    tokens: int
    """Tokens that it began with."""


class _Tracks:
    """The free slot tracks of each life of a replica."""

    def __init__(self) -> None:
        self._free: dict[tuple[ReplicaId, Incarnation], list[int]] = {}
        self._made: Counter[tuple[ReplicaId, Incarnation]] = Counter()

    def take(self, life: tuple[ReplicaId, Incarnation]) -> int:
        free = self._free.setdefault(life, [])
        if free:
            return heappop(free)
        self._made[life] += 1
        return self._made[life] - 1

    def give_back(self, life: tuple[ReplicaId, Incarnation], slot: int) -> None:
        heappush(self._free[life], slot)


class _GroupNotes:
    """What is known of a group besides the scheduler's record of it, which is deleted when it ends."""

    __slots__ = ("attempts", "deadline", "drawn_at", "ended_at", "newest", "oldest", "reward_mean", "reward_spread",
                 "staleness", "started_at", "state", "step", "tokens")  # fmt: skip

    def __init__(self, drawn_at: float) -> None:
        self.drawn_at = drawn_at
        self.started_at = self.ended_at = -1.0
        self.state = "queued"
        self.deadline = self.step = self.staleness = -1
        self.attempts = self.tokens = 0
        self.oldest = self.newest = NO_VERSION
        self.reward_mean: float | None = None
        self.reward_spread: float | None = None

    def row(self, id: GroupId) -> GroupRow:
        return GroupRow(
            id, self.state, self.drawn_at, self.started_at, self.ended_at, self.deadline, self.attempts, self.tokens,
            self.oldest, self.newest, self.reward_mean, self.reward_spread, self.step, self.staleness,
        )  # fmt: skip


class _Rows:
    """Takes the rows that `RunMetrics` writes."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        if "validation" not in row:
            self.steps.append(row)

    def close(self) -> None:
        """There is no file."""


class _GroupReader:
    """The attempts and waits of groups, and what became of their tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.state = scheduler.state
        self.attempts: list[GenerationAttempt] = []
        self.chunks: list[RowsAttempt] = []
        self.waits: list[GroupWait] = []
        self.notes: list[_GroupNotes] = []
        self.tokens = dict.fromkeys(FATES, 0)
        self._open: dict[GroupId, _OpenAttempt] = {}
        self._open_chunks: dict[tuple[int, int], tuple[MeasureRows, int, float]] = {}
        self._waiting: dict[GroupId, tuple[str, float, EventId]] = {}
        self._tracks = _Tracks()
        self._cuts: dict[GroupId, Command] = {}
        """The newest order to park or truncate a running attempt, or to abort it."""
        self._pauses: dict[ReplicaId, tuple[str, EventId]] = {}
        """(why groups abort, cause) of the newest pause of each replica."""

    # groups

    def draw(self, at: float) -> None:
        """Note the groups that were drawn in a tick."""
        for _ in range(len(self.notes), self.state.ledger.drawn):
            self.notes.append(_GroupNotes(at))

    def pause(self, command: PauseReplica) -> None:
        draining = self.state.replicas[command.replica].state in ("draining", "drained")
        why = PAUSES.get("drain" if draining else command.mode, "sync")
        self._pauses[command.replica] = (why, command.cause)

    def cut(self, command: ParkGroup | TruncateGroup | AbortGroup) -> None:
        self._cuts[command.group] = command

    def move(self, move: _Move, tick: Tick, about: dict[GroupId, Event], starts: dict[GroupId, Any]) -> None:
        """Take a change of a group's state. `about`: the group events of the tick. `starts`: its orders to generate."""
        group, target = move.group, move.target
        event = about.get(group.id)
        notes = self.notes[group.id]
        if group.id in self._open:
            self._end_attempt(move, tick, event)
        elif group.id in self._waiting:
            self._end_wait(group.id, target, tick.at, event.id if event is not None else tick.last)
        self._note_tokens(notes, move.tokens)
        notes.state = target
        if target in ("generating", "resumed"):
            self._begin_attempt(group, starts[group.id], tick.at, notes)
        elif self.state.phase_of(target) in (Phase.CONSUMED, Phase.RELEASED):
            self._end_group(notes, group, target, tick.at)
        elif target not in ("queued", "aborted", "batched"):
            self._waiting[group.id] = (target, tick.at, event.id if event is not None else tick.last)
        if isinstance(event, GroupGenerated | StateLeft):
            notes.reward_mean, notes.reward_spread = event.reward_mean, event.reward_spread

    def _begin_attempt(self, group: Group, order: Any, at: float, notes: _GroupNotes) -> None:
        if notes.started_at < 0:
            notes.started_at = at
        notes.attempts += 1
        notes.deadline = group.deadline
        slot = self._tracks.take((order.replica, order.incarnation))
        version = self.state.replicas[order.replica].version
        self._open[group.id] = _OpenAttempt(order, slot, at, version, notes.tokens)

    def _end_attempt(self, move: _Move, tick: Tick, event: Event | None) -> None:
        open, cut = self._open[move.group.id], self._cuts.pop(move.group.id, None)
        replica = open.order.replica
        ended_by = event.id if event is not None else tick.last
        ordered_by = NO_EVENT if cut is None else cut.cause
        if isinstance(event, GroupGenerated):
            outcome, reason = "generated", "truncated" if isinstance(cut, TruncateGroup) else ""
        elif isinstance(event, GroupFailed):
            outcome, reason, ordered_by = "failed", event.reason, NO_EVENT
        elif isinstance(cut, AbortGroup):
            outcome, reason, ended_by = "aborted", "dropped", cut.cause
        elif not isinstance(event, GroupAborted):
            outcome, (reason, ended_by), ordered_by = "lost", self._loss(replica, tick), NO_EVENT
        elif isinstance(cut, ParkGroup):
            outcome, reason = "aborted", "timeout" if cut.reason else "moved"
        elif self.state.replicas[replica].state == "ready":
            outcome, reason = "aborted", "unasked"
        else:
            outcome = "aborted"
            reason, ordered_by = self._pauses.get(replica, ("sync", ended_by))
        self._close(move.group.id, move.tokens, tick.at, outcome, reason, ended_by, ordered_by)

    def _loss(self, replica: ReplicaId, tick: Tick) -> tuple[str, EventId]:
        """Why a replica was lost in a tick, and by which event."""
        for event in tick.events:
            if isinstance(event, ProcessLost) and (event.kind, event.index) == (REPLICA, replica):
                return event.reason, event.id
        for command in tick.commands:
            if isinstance(command, StopProcess) and (command.kind, command.index) == (REPLICA, replica):
                return command.reason, command.cause
        return "its replica was lost", tick.last

    def _close(
        self, id: GroupId, tokens: int, at: float, outcome: str, reason: str, ended_by: EventId, ordered_by: EventId
    ) -> None:
        open, group = self._open.pop(id), self.state.groups.get(id)
        order = open.order
        self._tracks.give_back((order.replica, order.incarnation), open.slot)
        oldest, newest = (NO_VERSION, NO_VERSION) if group is None else (group.oldest_version, group.newest_version)
        self.attempts.append(
            GenerationAttempt(
                id, order.attempt, order.replica, order.incarnation, open.slot, open.start, at,
                type(order) is ResumeGroup, outcome, reason, open.version, oldest, newest, tokens,
                max(0, tokens - open.tokens), order.cause, ended_by,
                ended_by if ordered_by == NO_EVENT else ordered_by,
            )
        )  # fmt: skip

    def _note_tokens(self, notes: _GroupNotes, tokens: int) -> None:
        """A group has so many tokens now. Those that it no longer has are lost."""
        if tokens < notes.tokens:
            self.tokens["lost"] += notes.tokens - tokens
        notes.tokens = tokens

    def _end_group(self, notes: _GroupNotes, group: Group, state: str, at: float) -> None:
        notes.ended_at = at
        notes.oldest, notes.newest = group.oldest_version, group.newest_version
        self.tokens["trained" if state == "consumed" else state] += notes.tokens

    def _end_wait(self, id: GroupId, outcome: str, at: float, ended_by: EventId) -> None:
        state, start, cause = self._waiting.pop(id)
        self.waits.append(GroupWait(id, state, start, at, outcome, cause, ended_by))

    # held-out rows

    def measure(self, command: MeasureRows, at: float) -> None:
        slot = self._tracks.take((command.replica, command.incarnation))
        self._open_chunks[command.validation, command.chunk] = (command, slot, at)

    def measured(self, event: RowsMeasured | RowsFailed) -> None:
        if (event.validation, event.chunk) in self._open_chunks:
            outcome = "measured" if isinstance(event, RowsMeasured) else "failed"
            self._close_chunk((event.validation, event.chunk), event.at, outcome, event.id)

    def lose_chunks(self, replica: ReplicaId, at: float, event: EventId) -> None:
        for key in [key for key, (order, _, _) in self._open_chunks.items() if order.replica == replica]:
            self._close_chunk(key, at, "lost", event)

    def _close_chunk(self, key: tuple[int, int], at: float, outcome: str, event: EventId) -> None:
        order, slot, start = self._open_chunks.pop(key)
        self._tracks.give_back((order.replica, order.incarnation), slot)
        self.chunks.append(
            RowsAttempt(
                order.validation, order.chunk, order.attempt, order.replica, order.incarnation, slot, start, at,
                outcome, order.version, order.count, order.cause, event,
            )
        )  # fmt: skip

    # the end of a run, and its continuation

    def close_all(self, at: float, outcome: str, event: EventId) -> None:
        """Everything that is open ends."""
        for id in list(self._open):
            group, notes = self.state.groups.get(id), self.notes[id]
            tokens = notes.tokens if group is None else max(notes.tokens, group.tokens)  # a branch has cleared them
            self._close(id, tokens, at, outcome, "", event, NO_EVENT)
            self._note_tokens(notes, tokens)
        for id in list(self._waiting):
            self._end_wait(id, outcome, at, event)
        for key in list(self._open_chunks):
            self._close_chunk(key, at, outcome, event)
        self._cuts.clear()

    def branch(self) -> None:
        """Every group is queued again that the surviving steps do not hold. Call it before the moves that follow."""
        for id in self.state.groups:
            self._undo(self.notes[id])

    def resume(self, at: float, event: EventId) -> None:
        """The run continues: groups that are ready wait from now on. Call it after the moves of the tick."""
        for id, group in self.state.groups.items():
            if id not in self._waiting and self.state.phase_of(group.state) is Phase.READY:
                self._waiting[id] = (group.state, at, event)

    def _undo(self, notes: _GroupNotes) -> None:
        """A branch queued a group again."""
        if notes.state == "consumed":
            self.tokens["trained"] -= notes.tokens
        if notes.state == "consumed" or notes.ended_at < 0:
            self.tokens["undone"] += notes.tokens
        notes.tokens, notes.ended_at, notes.state = 0, -1.0, "queued"

    def rows(self) -> tuple[GroupRow, ...]:
        """All groups. Call it once, at the end."""
        for id, group in self.state.groups.items():
            notes = self.notes[id]
            self._note_tokens(notes, group.tokens)
            notes.state, notes.oldest, notes.newest = group.state, group.oldest_version, group.newest_version
            self.tokens["open"] += notes.tokens
        return tuple([notes.row(id) for id, notes in enumerate(self.notes)])


class _StepReader:
    """Train steps, their phases and their batches."""

    def __init__(self, groups: _GroupReader) -> None:
        self._groups = groups
        self._steps: dict[StepId, dict[str, Any]] = {}
        self._undone: list[StepRow] = []
        self._open: dict[StepId, tuple[str, float, EventId]] = {}

    def move(self, step: StepId, state: str, tick: Tick) -> None:
        event = next((c.cause for c in tick.commands if _works_on(c, step)), tick.last)
        if step in self._open:
            self._end_phase(step, state, tick.at, event)
        if state != "waiting" and state != "finished":
            self._open[step] = (state, tick.at, event)
        elif state == "finished":
            self._notes(step)["finished_at"] = tick.at

    def batch(self, command: TrainStep | InspectStep) -> None:
        if not command.groups:
            return  # weights are inspected
        notes = self._notes(command.step)
        notes["groups"], notes["staleness"] = command.groups, command.staleness
        for id, staleness in zip(command.groups, command.staleness, strict=True):
            group = self._groups.notes[id]
            group.step, group.staleness = command.step, staleness

    def publish(self, command: PublishWeights) -> None:
        if command.steps - 1 in self._steps:
            self._steps[command.steps - 1]["version"] = command.version

    def branch(self, steps: StepId) -> None:
        """The run continues from the weights after `steps` steps."""
        undone = [step for step in self._steps if step >= steps]
        self._undone += [self._row(step, undone=True) for step in undone]
        for step in undone:
            del self._steps[step]

    def close_all(self, at: float, outcome: str, event: EventId) -> None:
        for step in list(self._open):
            self._end_phase(step, outcome, at, event)

    def rows(self) -> tuple[StepRow, ...]:
        return (*self._undone, *(self._row(step, undone=False) for step in self._steps))

    def _notes(self, step: StepId) -> dict[str, Any]:
        empty = {"groups": (), "staleness": (), "phases": [], "version": -1, "finished_at": -1.0}
        return self._steps.setdefault(step, empty)

    def _end_phase(self, step: StepId, outcome: str, at: float, event: EventId) -> None:
        name, start, cause = self._open.pop(step)
        self._notes(step)["phases"].append(StepPhase(step, name, start, at, outcome, cause, event))

    def _row(self, step: StepId, *, undone: bool) -> StepRow:
        notes = self._steps[step]
        tokens = sum(self._groups.notes[id].tokens for id in notes["groups"])
        return StepRow(
            step, notes["groups"], notes["staleness"], tuple(notes["phases"]), notes["version"], tokens,
            notes["finished_at"], undone,
        )  # fmt: skip


def _works_on(command: Command, step: StepId) -> bool:
    if isinstance(command, TrainStep | ScoreBatch | InspectStep):
        return command.step == step
    return isinstance(command, PublishWeights) and command.steps == step + 1


class _ProcessReader:
    """Lives of processes, their syncs, and checkpoints."""

    def __init__(self) -> None:
        self.lives: list[ProcessLife] = []
        self.syncs: list[SyncPhase] = []
        self.checkpoints: list[CheckpointWrite] = []
        self._lives: dict[tuple[str, int], tuple[StartProcess, float, float | None]] = {}
        self._syncs: dict[ReplicaId, tuple[Any, str, str, float]] = {}
        self._saves: dict[StepId, tuple[SaveCheckpoint, float]] = {}

    def start(self, command: StartProcess, at: float) -> None:
        self._end_life((command.kind, command.index), at, "lost", "replaced", command.cause)
        self._lives[command.kind, command.index] = (command, at, None)

    def up(self, event: ProcessUp) -> None:
        begun = self._lives.get((event.kind, event.index))
        if begun is not None:
            self._lives[event.kind, event.index] = (begun[0], begun[1], event.at)

    def lost(self, event: ProcessLost) -> None:
        self._end_life((event.kind, event.index), event.at, "lost", event.reason, event.id)
        if event.kind == REPLICA:
            self._end_sync(event.index, event.at, "lost", event.id)

    def sync(self, command: StageWeights | PauseReplica | InstallWeights, at: float) -> None:
        self._end_sync(command.replica, at, "replaced", command.cause)
        name, mode = {StageWeights: "staging", InstallWeights: "installing"}.get(type(command), "pausing"), ""
        if isinstance(command, PauseReplica):
            mode = command.mode
        self._syncs[command.replica] = (command, name, mode, at)

    def synced(self, event: WeightsStaged | ReplicaPaused | WeightsInstalled | SyncFailed) -> None:
        self._end_sync(event.replica, event.at, "failed" if isinstance(event, SyncFailed) else "done", event.id)

    def save(self, command: SaveCheckpoint, at: float) -> None:
        self._saves[command.steps] = (command, at)

    def saved(self, event: CheckpointSaved | CheckpointFailed) -> None:
        self._end_save(event.steps, event.at, "saved" if isinstance(event, CheckpointSaved) else "failed", event.id)

    def close_all(self, at: float, outcome: str, event: EventId) -> None:
        for key in list(self._lives):
            self._end_life(key, at, outcome, "", event)
        for replica in list(self._syncs):
            self._end_sync(replica, at, outcome, event)
        for steps in list(self._saves):
            self._end_save(steps, at, outcome, event)

    def _end_life(self, key: tuple[str, int], at: float, outcome: str, reason: str, event: EventId) -> None:
        if key in self._lives:
            order, start, up = self._lives.pop(key)
            life = ProcessLife(*key, order.incarnation, start, up, at, outcome, reason, order.cause, event)
            self.lives.append(life)

    def _end_sync(self, replica: ReplicaId, at: float, outcome: str, event: EventId) -> None:
        if replica in self._syncs:
            order, name, mode, start = self._syncs.pop(replica)
            self.syncs.append(
                SyncPhase(
                    replica, order.incarnation, order.attempt, order.version, name, mode, start, at, outcome,
                    order.cause, event,
                )
            )  # fmt: skip

    def _end_save(self, steps: StepId, at: float, outcome: str, event: EventId) -> None:
        if steps in self._saves:
            order, start = self._saves.pop(steps)
            self.checkpoints.append(CheckpointWrite(steps, start, at, outcome, order.cause, event))


class _HistoryReader:
    """Watches a replay and collects a `History`."""

    def build(self, header: Header) -> Scheduler:
        self._moves: list[_Move] = []
        self._step_moves: list[tuple[StepId, str]] = []
        self._transitions = transitions = Transitions()
        scheduler = build_scheduler(header, self._changed)
        self.state = scheduler.state
        self._rows = _Rows()
        self._metrics = RunMetrics(scheduler, transitions, self._rows)
        self._groups = _GroupReader(scheduler)
        self._steps = _StepReader(self._groups)
        self._processes = _ProcessReader()
        self._idle: list[IdleSpan] = []
        self._period: Period | None = None
        self._failures: list[Failure] = []
        self._failed = 0
        self._settings: list[tuple[float, str, str]] = []
        self._slots: dict[ReplicaId, int] = {}
        self._at = 0.0
        self._finish: FinishRun | None = None
        groups, processes = self._groups, self._processes
        self._on_event: dict[type[Event], Callable[[Any], None]] = {
            RowsMeasured: groups.measured, RowsFailed: groups.measured, ProcessUp: self._up, ProcessLost: self._lost,
            WeightsStaged: processes.synced, ReplicaPaused: processes.synced, WeightsInstalled: processes.synced,
            SyncFailed: processes.synced, CheckpointSaved: processes.saved, CheckpointFailed: processes.saved,
            SettingChanged: lambda event: self._settings.append((event.at, event.setting, event.value)),
        }  # fmt: skip
        self._on_command: dict[type[Command], Callable[[Any, float], None]] = {
            MeasureRows: groups.measure,
            **dict.fromkeys((InspectStep, TrainStep), lambda command, at: self._steps.batch(command)),
            PublishWeights: lambda command, at: self._steps.publish(command), StartProcess: processes.start,
            StageWeights: processes.sync, PauseReplica: processes.sync, InstallWeights: processes.sync,
            SaveCheckpoint: processes.save,
        }  # fmt: skip
        return scheduler

    def _changed(self, machine: str, changed: Any, source: str, trigger: str) -> None:
        self._transitions.changed(machine, changed, source, trigger)
        if machine == "group":
            self._moves.append(_Move(changed, source, changed.state, trigger, changed.tokens))
        elif machine == "step":
            self._step_moves.append((changed.id, changed.state))

    def watch(self, tick: Tick) -> None:
        """Take the next tick of the replay."""
        self._metrics.observe(tick)
        matched = self.state.orders.matched
        about: dict[GroupId, Event] = {}
        resumed: RunResumed | None = None
        for event in tick.events:
            if event.id not in matched:
                continue  # a stale echo
            group = getattr(event, "group", -1)
            if group >= 0 and type(event) in ABOUT_GROUPS:
                about[group] = event
            elif type(event) is RunResumed:
                resumed = event
                self._close_all(self._at, "lost", event.id)
                if not event.kept:
                    self._groups.branch()
                    self._steps.branch(event.steps)
            else:
                handle = self._on_event.get(type(event))
                if handle is not None:
                    handle(event)
        self._groups.draw(tick.at)
        starts = self._read_orders(tick)
        for move in self._moves:
            self._groups.move(move, tick, about, starts)
        for step, state in self._step_moves:
            self._steps.move(step, state, tick)
        self._moves.clear()
        self._step_moves.clear()
        if resumed is not None:
            self._groups.resume(tick.at, resumed.id)
        for command in tick.commands:
            handle_command = self._on_command.get(type(command))
            if handle_command is not None:
                handle_command(command, tick.at)
        if self._finish is not None:
            self._close_all(tick.at, STOPPED, self._finish.cause)
        self._note_idle()
        self._note_failures(tick)
        self._at = tick.at

    def _read_orders(self, tick: Tick) -> dict[GroupId, StartGroup | ResumeGroup]:
        """The orders to generate, by group. Also notes orders that cut attempts short."""
        starts: dict[GroupId, StartGroup | ResumeGroup] = {}
        self._finish = None
        for command in tick.commands:
            if isinstance(command, StartGroup | ResumeGroup):
                starts[command.group] = command
            elif isinstance(command, ParkGroup | TruncateGroup | AbortGroup):
                self._groups.cut(command)
            elif isinstance(command, PauseReplica):
                self._groups.pause(command)
            elif isinstance(command, FinishRun):
                self._finish = command
        return starts

    def _up(self, event: ProcessUp) -> None:
        self._processes.up(event)
        if event.kind == REPLICA:
            self._slots[event.index] = event.slots

    def _lost(self, event: ProcessLost) -> None:
        self._processes.lost(event)
        if event.kind == REPLICA:
            self._groups.lose_chunks(event.index, event.at, event.id)

    def _close_all(self, at: float, outcome: str, event: EventId) -> None:
        self._groups.close_all(at, outcome, event)
        self._steps.close_all(at, outcome, event)
        self._processes.close_all(at, outcome, event)

    def _note_idle(self) -> None:
        period, before = self._metrics.idle.period, self._period
        if period is before or period is None:
            return
        if before is not None:
            self._add_span(before, period)
        self._period = period

    def _add_span(self, before: Period, after: Period) -> None:
        if after.at <= before.at:
            return
        idle = [(cause, s - before.idle_s[cause]) for cause, s in after.idle_s.items() if s != before.idle_s[cause]]
        _, _, _, task, cause = before.split
        self._idle.append(
            IdleSpan(before.at, after.at, after.busy_s - before.busy_s, tuple(idle), task or cause)
        )  # fmt: skip

    def _note_failures(self, tick: Tick) -> None:
        failed = sum(self._metrics.retries.values())
        if failed != self._failed:
            self._failed = failed
            self._failures.append(Failure(tick.at, tick.last, self._metrics.last_failure))

    def history(self, header: Header, ticks: int, events: int, notes: tuple[str, ...]) -> History:
        """The result of a finished replay."""
        self._metrics.steps.flush()
        outcome = self.state.outcome
        self._close_all(self._at, RUNNING, NO_EVENT)
        if self._period is not None:
            self._metrics.at = self._at  # the newest ticks may be limit checks, which no figure counts
            self._add_span(self._period, self._metrics.idle.sums)
        groups = self._groups.rows()
        return History(
            run=header.run, code=header.code, limits=header.limits, policies=header.policies, config=header.config,
            ticks=ticks, events=events, end=self._at, outcome=RUNNING if outcome is None else outcome.outcome,
            reason="" if outcome is None else outcome.reason, notes=notes, slots=self._slots,
            attempts=tuple(self._groups.attempts), chunks=tuple(self._groups.chunks), waits=tuple(self._groups.waits),
            groups=groups, steps=self._steps.rows(), syncs=tuple(self._processes.syncs),
            validations=tuple(self._metrics.validations), lives=tuple(self._processes.lives),
            checkpoints=tuple(self._processes.checkpoints), idle=tuple(self._idle), tokens=self._groups.tokens,
            rows=tuple(self._rows.steps), failures=tuple(self._failures), settings=tuple(self._settings),
        )  # fmt: skip


ABOUT_GROUPS = (GroupGenerated, GroupAborted, GroupFailed, StateLeft)
"""Events that end an attempt of a group or its stay in an added state."""
