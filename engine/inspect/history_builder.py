"""Builds a `History` from what a replay of its record reports.

Called by `history_reader`, which replays a long record in several processes. All arguments are plain values, so that
one process can send calls to another. What concerns one group never depends on another group. So the process that
replays a stretch of the record finishes the groups whose whole life is in it. Must not know the scheduler.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from engine.ids import NO_VERSION, EventId, GroupId, Incarnation, ReplicaId, StepId, Version
from engine.inspect.history import (
    FATES,
    NO_EVENT,
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
from engine.metrics.collector import FunctionTotals
from engine.metrics.journal import Row
from engine.record import Header
from engine.states.machine import Phase
from engine.states.process import REPLICA

Call = tuple[Any, ...]
"""The name of a method of `HistoryBuilder` or `GroupBuilder` and its arguments."""
Tokens = tuple[int, Version, Version]
"""Tokens of a group, and the oldest and newest weights version among them."""
NO_WAITS = ("queued", "aborted", "batched")
"""States of groups that are neither attempts nor waits."""


class _Order(NamedTuple):
    """The order to generate a group, with what was true when it began."""

    attempt: int
    replica: ReplicaId
    incarnation: Incarnation
    resumed: bool
    version: Version
    cause: EventId
    start: float
    tokens: int


class _GroupNotes:
    """What is known about a group."""

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


def _notes_of(row: GroupRow) -> _GroupNotes:
    notes = _GroupNotes(row.drawn_at)
    for name in _GroupNotes.__slots__:
        setattr(notes, name, getattr(row, {"oldest": "oldest_version", "newest": "newest_version"}.get(name, name)))
    return notes


class GroupBuilder:
    """The attempts and waits of groups, and what became of their tokens."""

    def __init__(self) -> None:
        self.attempts: list[GenerationAttempt] = []
        self.waits: list[GroupWait] = []
        self.notes: dict[GroupId, _GroupNotes] = {}
        self.ended: dict[GroupId, GroupRow] = {}
        """Groups that the process that replayed their stretch has finished."""
        self.tokens = dict.fromkeys(FATES, 0)
        self._open: dict[GroupId, _Order] = {}
        self._waiting: dict[GroupId, tuple[str, float, EventId]] = {}
        self._cuts: dict[GroupId, tuple[str, str, EventId]] = {}
        """(command, reason, cause) of the newest order to park or truncate a running attempt, or to abort it."""
        self._pauses: dict[ReplicaId, tuple[str, EventId]] = {}
        """(why groups abort, cause) of the newest pause of each replica."""
        self._losses: dict[ReplicaId, tuple[EventId, str, EventId]] = {}
        """(last event of the tick, reason, event) of the newest loss of each replica."""

    def note(self, id: GroupId) -> _GroupNotes:
        """The notes of a group that was drawn."""
        notes = self.notes.get(id)
        if notes is None:
            notes = self.notes[id] = _notes_of(self.ended.pop(id))
        return notes

    # reports about one group

    def draw(self, first: GroupId, end: GroupId, at: float) -> None:
        for id in range(first, end):
            if id not in self.ended:
                self.notes[id] = _GroupNotes(at)

    def cut(self, id: GroupId, command: str, reason: str, cause: EventId) -> None:
        """A running attempt was ordered to end."""
        self._cuts[id] = (command, reason, cause)

    def begin(
        self, id: GroupId, state: str, at: float, tokens: int, deadline: StepId, attempt: int, replica: ReplicaId,
        incarnation: Incarnation, resumed: bool, version: Version, cause: EventId,
    ) -> None:  # fmt: skip
        """An attempt to generate a group began."""
        notes = self.notes[id]
        self._note_tokens(notes, tokens)
        if notes.started_at < 0:
            notes.started_at = at
        notes.state, notes.deadline = state, deadline
        notes.attempts += 1
        self._open[id] = _Order(attempt, replica, incarnation, resumed, version, cause, at, tokens)

    def move(
        self, id: GroupId, state: str, phase: int, at: float, last: EventId, tokens: int, oldest: Version,
        newest: Version, event: EventId, kind: str, reason: str, ready: bool,
    ) -> None:  # fmt: skip
        """A group entered a state in which it does not run. `last`: the last event of the tick. `event`: the event
        about the group, of this `kind` and with this `reason`; `NO_EVENT`: there was none. `ready`: its replica
        reported the event while it was not paused."""
        notes = self.notes[id]
        by = last if event == NO_EVENT else event
        order = self._open.get(id)
        if order is not None:
            self._end_attempt(id, order, at, last, tokens, oldest, newest, by, kind, reason, ready)
        elif id in self._waiting:
            self._end_wait(id, state, at, by)
        self._note_tokens(notes, tokens)
        notes.state = state
        if phase >= Phase.CONSUMED:
            notes.ended_at, notes.oldest, notes.newest = at, oldest, newest
            self.tokens["trained" if state == "consumed" else state] += tokens
        elif state not in NO_WAITS:
            self._waiting[id] = (state, at, by)

    def reward(self, id: GroupId, mean: float, spread: float) -> None:
        notes = self.notes[id]
        notes.reward_mean, notes.reward_spread = mean, spread

    def batch(self, step: StepId, groups: Sequence[GroupId], staleness: Sequence[int]) -> None:
        for id, stale in zip(groups, staleness, strict=True):
            notes = self.notes.get(id)
            if notes is not None:  # otherwise another builder has it
                notes.step, notes.staleness = step, stale

    # reports about all groups

    def pause(self, replica: ReplicaId, why: str, cause: EventId) -> None:
        self._pauses[replica] = (why, cause)

    def lose(self, replica: ReplicaId, reason: str, event: EventId, last: EventId) -> None:
        self._losses[replica] = (last, reason, event)

    def close(self, at: float, outcome: str, event: EventId, live: Mapping[GroupId, Tokens]) -> None:
        """End everything that is open."""
        for id, order in list(self._open.items()):
            notes = self.notes[id]
            own, oldest, newest = live.get(id, (0, NO_VERSION, NO_VERSION))
            tokens = max(notes.tokens, own)  # a branch has cleared them
            self._close(id, order, tokens, oldest, newest, at, outcome, "", event, event)
            self._note_tokens(notes, tokens)
        for id in list(self._waiting):
            self._end_wait(id, outcome, at, event)
        self._cuts.clear()

    def branch(self, live: Iterable[GroupId]) -> None:
        """Every group that no surviving step holds is queued again. Reported before the moves that follow."""
        for id in live:
            notes = self.note(id)
            if notes.state == "consumed":
                self.tokens["trained"] -= notes.tokens
            if notes.state == "consumed" or notes.ended_at < 0:
                self.tokens["undone"] += notes.tokens
            notes.tokens, notes.ended_at, notes.state = 0, -1.0, "queued"

    def end(self, live: Iterable[tuple[GroupId, str, Tokens]]) -> None:
        """The record ends with these groups."""
        for id, state, (tokens, oldest, newest) in live:
            notes = self.note(id)
            self._note_tokens(notes, tokens)
            notes.state, notes.oldest, notes.newest = state, oldest, newest
            self.tokens["open"] += tokens

    def add(
        self, attempts: Iterable[Any], waits: Iterable[Any], rows: Iterable[Any], tokens: Mapping[str, int]
    ) -> None:
        """Take the groups that another builder has finished, as columns."""
        # `_make` takes three times as long as `tuple.__new__`
        self.attempts += map(partial(tuple.__new__, GenerationAttempt), zip(*attempts, strict=True))
        self.waits += map(partial(tuple.__new__, GroupWait), zip(*waits, strict=True))
        self.ended.update((row[0], tuple.__new__(GroupRow, row)) for row in zip(*rows, strict=True))
        for fate, count in tokens.items():
            self.tokens[fate] += count

    def rows(self) -> list[GroupRow]:
        """All groups, by number."""
        rows = [*self.ended.values(), *(notes.row(id) for id, notes in self.notes.items())]
        return sorted(rows, key=attrgetter("group"))

    def _end_attempt(
        self, id: GroupId, order: _Order, at: float, last: EventId, tokens: int, oldest: Version, newest: Version,
        by: EventId, kind: str, reason: str, ready: bool,
    ) -> None:  # fmt: skip
        cut = self._cuts.pop(id, None)
        command, why, cause = cut or ("", "", by)
        if kind == "generated":
            outcome, reason = kind, "truncated" if command == "TruncateGroup" else ""
        elif kind == "failed":
            outcome, cause = kind, by
        elif command == "AbortGroup":
            outcome, reason, by = "aborted", "dropped", cause
        elif kind != "aborted":
            outcome, (tick, reason, by) = "lost", self._losses.get(order.replica, (NO_EVENT, "", last))
            if tick != last:
                reason, by = "its replica was lost", last
            cause = by
        elif command == "ParkGroup":
            outcome, reason = kind, "timeout" if why else "moved"
        elif ready:
            outcome, reason = kind, "unasked"
        else:
            outcome = kind
            reason, cause = self._pauses.get(order.replica, ("sync", by))
        self._close(id, order, tokens, oldest, newest, at, outcome, reason, by, cause)

    def _close(
        self, id: GroupId, order: _Order, tokens: int, oldest: Version, newest: Version, at: float, outcome: str,
        reason: str, by: EventId, ordered_by: EventId,
    ) -> None:  # fmt: skip
        del self._open[id]
        self.attempts.append(
            GenerationAttempt(
                id, order.attempt, order.replica, order.incarnation, order.start, at, order.resumed, outcome, reason,
                order.version, oldest, newest, tokens, max(0, tokens - order.tokens), order.cause, by, ordered_by,
            )
        )  # fmt: skip

    def _note_tokens(self, notes: _GroupNotes, tokens: int) -> None:
        """A group now has this number of tokens. Tokens that it no longer has are lost."""
        if tokens < notes.tokens:
            self.tokens["lost"] += notes.tokens - tokens
        notes.tokens = tokens

    def _end_wait(self, id: GroupId, outcome: str, at: float, by: EventId) -> None:
        state, start, cause = self._waiting.pop(id)
        self.waits.append(GroupWait(id, state, start, at, outcome, cause, by))


class _Begun(NamedTuple):
    """A value that has begun: its other fields, and its start and cause."""

    fields: tuple[Any, ...]
    start: float
    cause: EventId


class HistoryBuilder(GroupBuilder):
    """Builds the whole history."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[RowsAttempt] = []
        self.syncs: list[SyncPhase] = []
        self.lives: list[ProcessLife] = []
        self.checkpoints: list[CheckpointWrite] = []
        self.idle: list[IdleSpan] = []
        self.failures: list[Failure] = []
        self.settings: list[tuple[float, str, str]] = []
        self.slots: dict[ReplicaId, int] = {}
        self.validations: list[Mapping[str, Any]] = []
        self.functions: dict[str, FunctionTotals] = {}
        self.step_rows: list[Row] = []
        self._steps: dict[StepId, dict[str, Any]] = {}
        self._undone: list[StepRow] = []
        self._open_phases: dict[StepId, tuple[str, float, EventId]] = {}
        self._open_chunks: dict[tuple[int, int], _Begun] = {}
        self._open_lives: dict[tuple[str, int], tuple[Incarnation, float, float | None, EventId]] = {}
        self._open_syncs: dict[ReplicaId, _Begun] = {}
        self._open_saves: dict[StepId, _Begun] = {}

    # train steps

    def step(self, step: StepId, state: str, at: float, event: EventId) -> None:
        """A train step entered a state."""
        if step in self._open_phases:
            self._end_phase(step, state, at, event)
        if state == "finished":
            self._notes_of_step(step)["finished_at"] = at
        elif state != "waiting":
            self._open_phases[step] = (state, at, event)

    def batch(self, step: StepId, groups: Sequence[GroupId], staleness: Sequence[int]) -> None:
        super().batch(step, groups, staleness)
        self._notes_of_step(step).update(groups=tuple(groups), staleness=tuple(staleness))

    def publish(self, step: StepId, version: Version) -> None:
        if step in self._steps:
            self._steps[step]["version"] = version

    def undo_steps(self, steps: StepId) -> None:
        """The run continues from the weights after `steps` steps."""
        undone = [step for step in self._steps if step >= steps]
        self._undone += [self._step_row(step, undone=True) for step in undone]
        for step in undone:
            del self._steps[step]

    def _notes_of_step(self, step: StepId) -> dict[str, Any]:
        empty = {"groups": (), "staleness": (), "phases": [], "version": -1, "finished_at": -1.0}
        return self._steps.setdefault(step, empty)

    def _end_phase(self, step: StepId, outcome: str, at: float, event: EventId) -> None:
        name, start, cause = self._open_phases.pop(step)
        self._notes_of_step(step)["phases"].append(StepPhase(step, name, start, at, outcome, cause, event))

    def _step_row(self, step: StepId, *, undone: bool) -> StepRow:
        notes = self._steps[step]
        tokens = sum((self.notes.get(id) or self.ended[id]).tokens for id in notes["groups"])
        return StepRow(
            step, notes["groups"], notes["staleness"], tuple(notes["phases"]), notes["version"], tokens,
            notes["finished_at"], undone,
        )  # fmt: skip

    def row_finished(self, row: Row) -> None:
        """The row of `metrics.jsonl` of a step that finished."""
        self.step_rows.append(row)

    # processes

    def start(self, kind: str, index: int, incarnation: Incarnation, at: float, cause: EventId) -> None:
        self._end_life((kind, index), at, "lost", "replaced", cause)
        self._open_lives[kind, index] = (incarnation, at, None, cause)

    def up(self, kind: str, index: int, at: float, slots: int) -> None:
        if (kind, index) in self._open_lives:
            incarnation, start, _, cause = self._open_lives[kind, index]
            self._open_lives[kind, index] = (incarnation, start, at, cause)
        if kind == REPLICA:
            self.slots[index] = slots

    def lost(self, kind: str, index: int, at: float, reason: str, event: EventId) -> None:
        self._end_life((kind, index), at, "lost", reason, event)
        if kind == REPLICA:
            self._end_sync(index, at, "lost", event)
            for key in [key for key, begun in self._open_chunks.items() if begun.fields[1] == index]:
                self.measured(*key, at, "lost", event)

    def sync(
        self, replica: ReplicaId, incarnation: Incarnation, attempt: int, version: Version, name: str, mode: str,
        at: float, cause: EventId,
    ) -> None:  # fmt: skip
        """A phase of a weight sync began."""
        self._end_sync(replica, at, "replaced", cause)
        self._open_syncs[replica] = _Begun((replica, incarnation, attempt, version, name, mode), at, cause)

    def synced(self, replica: ReplicaId, at: float, outcome: str, event: EventId) -> None:
        self._end_sync(replica, at, outcome, event)

    def measure(
        self, validation: int, chunk: int, attempt: int, replica: ReplicaId, incarnation: Incarnation,
        version: Version, rows: int, at: float, cause: EventId,
    ) -> None:  # fmt: skip
        """A replica was ordered to measure validation rows."""
        self._open_chunks[validation, chunk] = _Begun((attempt, replica, incarnation, version, rows), at, cause)

    def measured(self, validation: int, chunk: int, at: float, outcome: str, event: EventId) -> None:
        begun = self._open_chunks.pop((validation, chunk), None)
        if begun is not None:
            attempt, replica, incarnation, version, rows = begun.fields
            self.chunks.append(
                RowsAttempt(
                    validation, chunk, attempt, replica, incarnation, begun.start, at, outcome, version, rows,
                    begun.cause, event,
                )
            )  # fmt: skip

    def save(self, steps: StepId, at: float, cause: EventId) -> None:
        self._open_saves[steps] = _Begun((), at, cause)

    def saved(self, steps: StepId, at: float, outcome: str, event: EventId) -> None:
        begun = self._open_saves.pop(steps, None)
        if begun is not None:
            self.checkpoints.append(CheckpointWrite(steps, begun.start, at, outcome, begun.cause, event))

    def _end_life(self, key: tuple[str, int], at: float, outcome: str, reason: str, event: EventId) -> None:
        if key in self._open_lives:
            incarnation, start, up, cause = self._open_lives.pop(key)
            self.lives.append(ProcessLife(*key, incarnation, start, up, at, outcome, reason, cause, event))

    def _end_sync(self, replica: ReplicaId, at: float, outcome: str, event: EventId) -> None:
        if replica in self._open_syncs:
            fields, start, cause = self._open_syncs.pop(replica)
            self.syncs.append(SyncPhase._make((*fields, start, at, outcome, cause, event)))

    # the rest

    def span(self, start: float, end: float, busy_s: float, idle_s: Iterable[Any], trainer: str) -> None:
        self.idle.append(IdleSpan(start, end, busy_s, tuple(map(tuple, idle_s)), trainer))

    def failure(self, at: float, event: EventId, text: str) -> None:
        self.failures.append(Failure(at, event, text))

    def setting(self, at: float, setting: str, value: str) -> None:
        self.settings.append((at, setting, value))

    def validation(self, row: Mapping[str, Any]) -> None:
        self.validations.append(row)

    def function(self, name: str, *totals: Any) -> None:
        found, before = FunctionTotals(*totals), self.functions.get(name)
        self.functions[name] = found if before is None else before.plus(found)

    def resume(self, at: float, event: EventId, groups: Iterable[Any], steps: Iterable[tuple[StepId, str]]) -> None:
        """The run continues: groups and train steps are in these states from now on. Reported after the moves of the
        tick, in which no group runs."""
        for id, state in groups:
            if state not in NO_WAITS:
                self._waiting.setdefault(id, (state, at, event))
        for step, state in steps:
            if state != "waiting":
                self._open_phases.setdefault(step, (state, at, event))

    def close(self, at: float, outcome: str, event: EventId, live: Mapping[GroupId, Tokens]) -> None:
        super().close(at, outcome, event, live)
        for key in list(self._open_chunks):
            self.measured(*key, at, outcome, event)
        for step in list(self._open_phases):
            self._end_phase(step, outcome, at, event)
        for life in list(self._open_lives):
            self._end_life(life, at, outcome, "", event)
        for replica in list(self._open_syncs):
            self._end_sync(replica, at, outcome, event)
        for steps in list(self._open_saves):
            self.saved(steps, at, outcome, event)

    def history(
        self, header: Header, ticks: int, events: int, end: float, outcome: str, reason: str, notes: tuple[str, ...]
    ) -> History:
        """The history, once the record has ended."""
        groups = tuple(self.rows())
        steps = (*self._undone, *(self._step_row(step, undone=False) for step in self._steps))
        return History(
            run=header.run, code=header.code, limits=header.limits, policies=header.policies, config=header.config,
            ticks=ticks, events=events, end=end, outcome=outcome, reason=reason, notes=notes, slots=self.slots,
            attempts=_by_end(self.attempts), chunks=tuple(self.chunks), waits=_by_end(self.waits), groups=groups,
            steps=steps, syncs=tuple(self.syncs), validations=tuple(self.validations), lives=tuple(self.lives),
            checkpoints=tuple(self.checkpoints), idle=tuple(self.idle), tokens=self.tokens, rows=tuple(self.step_rows),
            failures=tuple(self.failures), functions=self.functions, settings=tuple(self.settings),
        )  # fmt: skip


def _by_end(values: list[Any]) -> tuple[Any, ...]:
    """In the order in which they ended: builders that finished some groups append them in another order."""
    return tuple(sorted(values, key=attrgetter("end", "group")))
