"""Reads a record once and gives its `History`.

Called by the commands that show a run. It replays the schedule, because only the scheduler knows why a group was
released and why a slot was idle: events and commands do not say it. Idle time is classified by `metrics.RunMetrics`, as
during the run. Processes replay the stretches between snapshots of a long record in parallel. `history_builder` joins
what they report, and `history_cache` keeps it. Must write nothing else.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

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
from engine.ids import GroupId, StepId
from engine.inspect.history import NO_EVENT, RUNNING, STOPPED, History
from engine.inspect.history_builder import Call, GroupBuilder, HistoryBuilder
from engine.inspect.history_cache import HistoryCache
from engine.inspect.moment import open_record
from engine.metrics.collector import RunMetrics
from engine.metrics.idle import Period
from engine.metrics.journal import Row
from engine.record import Header, Record, Tick, replay
from engine.record.codec import CodecError
from engine.record.reader import Place
from engine.record.replayer import build_scheduler
from engine.record.snapshots import STRETCH_EVENTS, restore
from engine.scheduling.scheduler import Scheduler
from engine.states.group import Group
from engine.states.machine import Phase
from engine.states.process import REPLICA

PAUSES = {"sleep": "pool", "drain": "drain"}
"""Why a pause aborts groups, by its mode; otherwise a weight sync does."""
MAX_PROCESSES = 16
"""Maximum number of processes that replay at once. Each holds the reports of a stretch in memory."""
PR_SET_PDEATHSIG = 1
Report = Callable[..., None]
"""Called with the name of a method of `HistoryBuilder` and its arguments."""


def read_history(run: str | Path | Record, stretch_events: int = STRETCH_EVENTS) -> History:
    """The history of a run: its directory, that of its record, or an open record. A running run is read to its present
    end.

    Raises: `ConfigError` if there is no such directory, `RecordError` if the record cannot be read, `EngineError` if
    this engine decides differently from the record.
    """
    record = run if isinstance(run, Record) else open_record(run)
    stretches = _stretches(record, stretch_events)
    if len(stretches) > 1:
        history = _join(record, _found(record, stretches))
        if history is not None:
            return history
    builder = HistoryBuilder()
    watcher = _StretchWatcher(lambda name, *arguments: getattr(builder, name)(*arguments))
    return _history(record, builder, [watcher.replay(record, _Stretch(None, None))])


def cache_history(run: Path, stretch_events: int) -> None:
    """Keep what the stretches of a run's record contain, so far as nothing is kept. Replays them in this process, one
    by one. Raises: see `read_history`."""
    record = open_record(run)
    cache = HistoryCache(record)
    for stretch in _stretches(record, stretch_events)[:-1]:
        if not cache.holds(stretch) and (data := replay_stretch(record, stretch)) is not None:
            cache.keep(stretch, data)


# -- stretches of a record ---------------------------------------------------------------------------------------------


class _Stretch(NamedTuple):
    """The part of a record between two snapshots."""

    begin: Place | None
    """None: the first event."""
    end: Place | None
    """None: the end of the record."""


class _Replayed(NamedTuple):
    """What the replay of a stretch found, besides what it reported."""

    ticks: int
    events: int
    at: float
    outcome: str
    reason: str
    notes: tuple[str, ...]


class _Finished(NamedTuple):
    """What a process found in a stretch."""

    replayed: tuple[Any, ...]
    attempts: list[Any]
    """Columns, like `waits` and `rows`. These and `tokens` are of the groups whose whole life is in the stretch.
    Columns are read faster: they need no object for each row, and Python's garbage collection passes over numbers."""
    waits: list[Any]
    rows: list[Any]
    tokens: dict[str, int]
    calls: list[Call]
    """All other reports."""


def _stretches(record: Record, least: int) -> list[_Stretch]:
    """Stretches of at least `least` events, in order. The last may be shorter. If the run finished or was drained, the
    last has no event. The one before it may then be shorter: it ends with the snapshot that ends the record."""
    places: list[Place | None] = [None]
    snapshots = sorted(record.snapshots(), key=lambda place: place.position)
    for place in snapshots:
        before = places[-1]
        if place.position - (0 if before is None else before.position) >= least:
            places.append(place)
    newest = snapshots[-1] if len(places) > 1 else None
    if newest not in places and not any(record.frames_and_snapshots(newest)):
        places.append(newest)
    return [_Stretch(begin, end) for begin, end in zip(places, [*places[1:], None], strict=True)]


def _found(record: Record, stretches: Sequence[_Stretch]) -> Iterator[bytes | None]:
    """What `replay_stretch` returns for each, in order, from the cache if possible."""
    cache = HistoryCache(record)
    missing = [stretch for stretch in stretches if not cache.holds(stretch)]
    replayed = _replay_at_once(record, missing)
    for stretch in stretches:
        data = next(replayed) if stretch in missing else cache.load(stretch)
        if data is None and stretch not in missing:  # its file is damaged, or other source code wrote it
            data = replay_stretch(record, stretch)
            missing.append(stretch)
        if data is not None and stretch in missing and stretch.end is not None:
            cache.keep(stretch, data)
        yield data


_record: Record
"""Set only in a process that replays stretches."""


def _begin_process(record: Record, parent: int) -> None:
    global _record
    _record = record
    gc.set_threshold(50_000)  # the parent may collect more rarely, but each replay leaves a scheduler with cycles
    end_with(parent)


def end_with(parent: int) -> None:
    """Leave interrupts to the parent of this process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before this process asked to end with it


def _replay_recorded(stretch: _Stretch) -> bytes | None:
    return replay_stretch(_record, stretch)


def _replay_at_once(record: Record, stretches: Sequence[_Stretch]) -> Iterator[bytes | None]:
    """What `replay_stretch` returns for each, in order."""
    done, count = 0, min(len(stretches), len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if count > 1 and threading.active_count() == 1:  # a process with threads must not be forked
        fork = multiprocessing.get_context("fork")  # its processes have the user's policies, and import nothing
        try:
            with ProcessPoolExecutor(count, fork, _begin_process, (record, os.getpid())) as processes:
                for found in processes.map(_replay_recorded, stretches):
                    yield found
                    done += 1
        except BrokenProcessPool:
            pass  # one was killed, as when the memory is full: the rest needs less in this process alone
    yield from (replay_stretch(record, stretch) for stretch in stretches[done:])


def replay_stretch(record: Record, stretch: _Stretch) -> bytes | None:
    """A packed `_Finished`; None if this engine cannot begin at the snapshot. Raises: see `read_history`."""
    calls: list[Call] = []
    watcher = _StretchWatcher(lambda *call: calls.append(call))
    try:
        replayed = watcher.replay(record, stretch)
    except CodecError:
        return None
    groups, whole = GroupBuilder(), watcher.whole_groups()
    rest = []
    for call in calls:
        name, id = call[0], call[1]
        if name in OF_ONE_GROUP and id in whole:
            getattr(groups, name)(*call[1:])
            continue
        rest.append(call)
        if name in OF_ALL_GROUPS:
            getattr(groups, name)(*call[1:])
    ended = [notes.row(id) for id, notes in groups.notes.items() if id in whole]
    attempts, waits, rows = ([*zip(*values, strict=True)] for values in (groups.attempts, groups.waits, ended))
    return msgpack.packb(_Finished(replayed, attempts, waits, rows, groups.tokens, rest))


REPORTS = {name: getattr(HistoryBuilder, name) for name in dir(HistoryBuilder) if not name.startswith("_")}
OF_ONE_GROUP = ("cut", "begin", "move", "reward")
OF_ALL_GROUPS = ("draw", "pause", "lose", "batch")
"""Reports that builders of single groups also need."""


def _join(record: Record, stretches: Iterator[bytes | None]) -> History | None:
    """The history of all stretches; None if one could not be replayed."""
    builder, replayed = HistoryBuilder(), []
    for data in stretches:
        if data is None:
            return None
        found = _Finished._make(msgpack.unpackb(data, use_list=False, strict_map_key=False))
        replayed.append(_Replayed._make(found.replayed))
        builder.add(found.attempts, found.waits, found.rows, found.tokens)
        for name, *arguments in found.calls:
            REPORTS[name](builder, *arguments)
    return _history(record, builder, replayed)


def _history(record: Record, builder: HistoryBuilder, stretches: Sequence[_Replayed]) -> History:
    last = stretches[-1]
    return builder.history(
        record.header, sum(one.ticks for one in stretches), sum(one.events for one in stretches), last.at,
        last.outcome, last.reason, tuple([note for one in stretches for note in one.notes]),
    )  # fmt: skip


# -- the replay --------------------------------------------------------------------------------------------------------


class _Move(NamedTuple):
    """A group changed its state."""

    group: Group
    target: str
    tokens: int
    """Tokens that it had in the trajectory store then."""


class _Rows:
    """Takes the place of a journal: reports the rows of train steps."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def write(self, row: Row) -> None:
        if "step" in row:
            self._report("row_finished", row)

    def close(self) -> None:
        """Nothing is open."""


class _StretchWatcher:
    """Watches the replay of a stretch, and reports what a `HistoryBuilder` needs."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._moves: list[_Move] = []
        self._step_moves: list[tuple[StepId, str]] = []
        self._period: Period | None = None
        self._failed = 0
        self._ended: dict[GroupId, None] = {}
        """Groups that ended in this stretch."""
        self._resumed = False
        self._on_event: dict[type[Event], Callable[[Any], None]] = {
            RowsMeasured: self._measured, RowsFailed: self._measured, ProcessUp: self._up, ProcessLost: self._lost,
            WeightsStaged: self._synced, ReplicaPaused: self._synced, WeightsInstalled: self._synced,
            SyncFailed: self._synced, CheckpointSaved: self._saved, CheckpointFailed: self._saved,
            SettingChanged: lambda event: report("setting", event.at, event.setting, event.value),
        }  # fmt: skip
        self._on_command: dict[type[Command], Callable[[Any, float], None]] = {
            MeasureRows: self._measure, StartProcess: self._start, SaveCheckpoint: self._save,
            InspectStep: self._batch, TrainStep: self._batch,
            PublishWeights: lambda command, at: report("publish", command.steps - 1, command.version),
            StageWeights: self._sync, PauseReplica: self._sync, InstallWeights: self._sync,
        }  # fmt: skip

    def replay(self, record: Record, stretch: _Stretch) -> _Replayed:
        """Replay a stretch. Raises: see `read_history`; `CodecError` if its snapshot cannot be used."""
        begin, end = stretch
        restored = None if begin is None else restore(record.snapshot(begin).plain)

        def build(header: Header) -> Scheduler:
            scheduler = restored or build_scheduler(header)
            self._begin(scheduler)
            return scheduler

        until = None if end is None else end.position - 1
        report = replay(record, until, build, self.watch, after=begin, compare_snapshots=False)
        if report.divergence is not None:
            raise EngineError(f"the record cannot be shown: {report.divergence}")
        self._end(last=end is None)
        notes = [f"cut: {report.torn}"] if report.torn and end is None else []
        notes += [f"tick {one.number} was rejected: {one.reason}" for one in report.rejected]
        ending = self.state.ending.outcome
        outcome, reason = (RUNNING, "") if ending is None else (ending.word, ending.reason)
        return _Replayed(report.ticks, report.events, self._at, outcome, reason, tuple(notes))

    def whole_groups(self) -> set[GroupId]:
        """The groups that were drawn and ended in this stretch; none if the run was resumed in it."""
        return set() if self._resumed else {id for id in self._ended if id >= self._drawn_before}

    def _begin(self, scheduler: Scheduler) -> None:
        self.state = state = scheduler.state
        state.groups.machine.observe = self._group_changed
        self._at = state.now
        self._drawn = self._drawn_before = state.groups.ledger.drawn
        self._metrics = RunMetrics(scheduler, _Rows(self._report))
        state.observe(self._changed, groups=False)
        if state.started:
            self._metrics.idle.at = self._at
            self._metrics.idle.measure()
            self._period = self._metrics.idle.period

    def _changed(self, machine: str, record: Any, source: str, trigger: str) -> None:
        self._metrics.note(machine, record, source, trigger)
        if machine == "step":
            self._step_moves.append((record.id, record.state))

    def _group_changed(self, machine: str, group: Group, source: str, trigger: str) -> None:
        self._moves.append(_Move(group, group.state, group.tokens))

    def watch(self, tick: Tick) -> None:
        """Take the next tick of the replay."""
        self._metrics.observe(tick)
        self._metrics.steps.flush()
        matched = self.state.orders.matched
        about: dict[GroupId, Event] = {}
        resumed: RunResumed | None = None
        for event in tick.events:
            if event.id not in matched:
                continue  # a stale echo
            kind = type(event)
            if kind in ABOUT_GROUPS:
                about[event.group] = event  # type: ignore[attr-defined]
            elif kind is RunResumed:
                resumed = event  # type: ignore[assignment]
            else:
                handle = self._on_event.get(kind)
                if handle is not None:
                    handle(event)
        if resumed is not None:
            self._note_resumption(resumed)
        drawn = self.state.groups.ledger.drawn
        if drawn > self._drawn:
            self._report("draw", self._drawn, drawn, tick.at)
            self._drawn = drawn
        starts, finish = self._read_orders(tick)
        for move in self._moves:
            self._move(move, tick, about, starts)
        for step, state in self._step_moves:
            cause = next((command.cause for command in tick.commands if _works_on(command, step)), tick.last)
            self._report("step", step, state, tick.at, cause)
        self._moves.clear()
        self._step_moves.clear()
        if resumed is not None:
            groups, steps = self.state.groups.live.values(), self.state.training.steps.values()
            states = [[(one.id, one.state) for one in records] for records in (groups, steps)]
            self._report("resume", tick.at, resumed.id, *states)
        for command in tick.commands:
            handle_command = self._on_command.get(type(command))
            if handle_command is not None:
                handle_command(command, tick.at)
        if finish is not None:
            self._report("close", tick.at, STOPPED, finish.cause, self._live())
        self._note_idle()
        self._note_failures(tick)
        self._at = tick.at

    def _note_resumption(self, event: RunResumed) -> None:
        self._resumed = True
        self._report("close", self._at, "lost", event.id, self._live())
        if not event.kept:
            self._report("branch", list(self.state.groups.live))
            self._report("undo_steps", event.steps)

    def _live(self) -> dict[GroupId, tuple[int, int, int]]:
        return {
            id: (group.tokens, group.oldest_version, group.newest_version)
            for id, group in self.state.groups.live.items()
        }

    # groups

    def _read_orders(self, tick: Tick) -> tuple[dict[GroupId, StartGroup | ResumeGroup], FinishRun | None]:
        """The orders to generate, by group, and that to end the run. Reports orders that end attempts."""
        starts: dict[GroupId, StartGroup | ResumeGroup] = {}
        finish: FinishRun | None = None
        for command in tick.commands:
            kind = type(command)
            if kind is StartGroup or kind is ResumeGroup:
                starts[command.group] = command  # type: ignore[assignment, attr-defined]
            elif isinstance(command, ParkGroup | TruncateGroup | AbortGroup):
                self._report("cut", command.group, kind.__name__, getattr(command, "reason", ""), command.cause)
            elif isinstance(command, PauseReplica):
                draining = self.state.replicas.by_id[command.replica].state in ("draining", "drained")
                why = PAUSES.get("drain" if draining else command.mode, "sync")
                self._report("pause", command.replica, why, command.cause)
            elif isinstance(command, StopProcess) and command.kind == REPLICA:
                self._report("lose", command.index, command.reason, command.cause, tick.last)
            elif isinstance(command, FinishRun):
                finish = command
        for event in tick.events:
            if isinstance(event, ProcessLost) and event.kind == REPLICA:
                self._report("lose", event.index, event.reason, event.id, tick.last)
        return starts, finish

    def _move(
        self, move: _Move, tick: Tick, about: dict[GroupId, Event], starts: dict[GroupId, StartGroup | ResumeGroup]
    ) -> None:
        group, state = move.group, move.target
        if state in ("generating", "resumed"):
            order = starts[group.id]
            self._report(
                "begin", group.id, state, tick.at, move.tokens, group.deadline, order.attempt, order.replica,
                order.incarnation, type(order) is ResumeGroup, self.state.replicas.by_id[order.replica].version,
                order.cause,
            )  # fmt: skip
            return
        event, phase = about.get(group.id), self.state.groups.phase_of(state)
        id, kind, reason, ready = NO_EVENT, "", "", False
        if event is not None:
            id, kind, reason = event.id, ABOUT_GROUPS[type(event)], getattr(event, "reason", "")
            ready = isinstance(event, GroupAborted) and self.state.replicas.by_id[event.replica].state == "ready"
        if phase >= Phase.CONSUMED:
            self._ended[group.id] = None
        self._report(
            "move", group.id, state, int(phase), tick.at, tick.last, move.tokens,
            group.oldest_version, group.newest_version, id, kind, reason, ready,
        )  # fmt: skip
        if isinstance(event, GroupGenerated | StateLeft):
            self._report("reward", group.id, event.reward_mean, event.reward_spread)

    def _batch(self, command: TrainStep | InspectStep, at: float) -> None:
        if command.groups:  # otherwise weights are inspected
            self._report("batch", command.step, command.groups, command.staleness)

    # processes

    def _up(self, event: ProcessUp) -> None:
        self._report("up", event.kind, event.index, event.at, event.slots)

    def _lost(self, event: ProcessLost) -> None:
        self._report("lost", event.kind, event.index, event.at, event.reason, event.id)

    def _start(self, command: StartProcess, at: float) -> None:
        self._report("start", command.kind, command.index, command.incarnation, at, command.cause)

    def _sync(self, command: StageWeights | PauseReplica | InstallWeights, at: float) -> None:
        name, mode = {StageWeights: "staging", InstallWeights: "installing"}.get(type(command), "pausing"), ""
        if isinstance(command, PauseReplica):
            mode = command.mode
        self._report(
            "sync", command.replica, command.incarnation, command.attempt, command.version, name, mode, at,
            command.cause,
        )  # fmt: skip

    def _synced(self, event: WeightsStaged | ReplicaPaused | WeightsInstalled | SyncFailed) -> None:
        outcome = "failed" if isinstance(event, SyncFailed) else "done"
        self._report("synced", event.replica, event.at, outcome, event.id)

    def _measure(self, command: MeasureRows, at: float) -> None:
        self._report(
            "measure", command.validation, command.chunk, command.attempt, command.replica, command.incarnation,
            command.version, command.count, at, command.cause,
        )  # fmt: skip

    def _measured(self, event: RowsMeasured | RowsFailed) -> None:
        outcome = "measured" if isinstance(event, RowsMeasured) else "failed"
        self._report("measured", event.validation, event.chunk, event.at, outcome, event.id)

    def _save(self, command: SaveCheckpoint, at: float) -> None:
        self._report("save", command.steps, at, command.cause)

    def _saved(self, event: CheckpointSaved | CheckpointFailed) -> None:
        outcome = "saved" if isinstance(event, CheckpointSaved) else "failed"
        self._report("saved", event.steps, event.at, outcome, event.id)

    # figures

    def _note_idle(self) -> None:
        period, before = self._metrics.idle.period, self._period
        if period is None or (before is not None and period.split == before.split):
            return  # the sums of a period go on from those before it
        if before is not None:
            self._report_span(before, period)
        self._period = period

    def _report_span(self, before: Period, after: Period) -> None:
        if after.at <= before.at:
            return
        idle = [(cause, s - before.idle_s[cause]) for cause, s in after.idle_s.items() if s != before.idle_s[cause]]
        _, _, _, task, cause = before.split
        self._report("span", before.at, after.at, after.busy_s - before.busy_s, idle, task or cause)

    def _note_failures(self, tick: Tick) -> None:
        failed = sum(self._metrics.retries.values())
        if failed != self._failed:
            self._failed = failed
            self._report("failure", tick.at, tick.last, self._metrics.last_failure)

    def _end(self, *, last: bool) -> None:
        """The stretch has ended, and with it the record if it is the `last`."""
        if last:
            live = self._live()
            self._report("close", self._at, RUNNING, NO_EVENT, live)
            self._report("end", [(id, self.state.groups.live[id].state, tokens) for id, tokens in live.items()])
        idle = self._metrics.idle
        if self._period is not None:
            idle.at = self._at  # the last tick may be one that metrics pass over
            self._report_span(self._period, idle.sums)
        for row in self._metrics.validations:
            self._report("validation", row)
        for name, totals in self._metrics.calls.items():
            self._report("function", name, *totals)


def _works_on(command: Command, step: StepId) -> bool:
    if isinstance(command, TrainStep | ScoreBatch | InspectStep):
        return command.step == step
    return isinstance(command, PublishWeights) and command.steps == step + 1


ABOUT_GROUPS: dict[type[Event], str] = {
    GroupGenerated: "generated", GroupAborted: "aborted", GroupFailed: "failed", StateLeft: "left",
}  # fmt: skip
"""Events that end an attempt of a group or its stay in an added state, with their kinds for the builder."""
