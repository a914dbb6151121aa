"""`engine replay RUN --at N [--group G]`: an event, its commands, the state after it, and the story of a group.

A cursor moves to the tick of the event, so this is the scheduler's own state, not a reconstruction.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.commands import Command
from engine.errors import ConfigError, EngineError, counted
from engine.events import Event
from engine.ids import EventId, GroupId
from engine.inspect.cursor import Change, Cursor
from engine.inspect.story import SHOWN, Story, stamped, summarize, summary_lines, worded
from engine.inspect.tick_index import TickIndex
from engine.metrics.waits import waits
from engine.record import Record, Rejected, ReplayReport, Tick, read, recover, replay
from engine.record.bug_file import read_bug_file
from engine.record.replayer import first_scheduler

# -- the whole record --------------------------------------------------------------------------------------------------


def open_record(run: str | Path) -> Record:
    """The record of a run. `run`: the run's directory, that of the record, or a bug file.

    Raises: `ConfigError` if there is no such directory, `RecordError` if the record cannot be read.
    """
    path = Path(run)
    if path.is_file():
        return read_bug_file(path).record(str(run))
    if not path.is_dir():
        raise ConfigError("RUN", str(run), "is not a directory", "give the directory of a run")
    record = read(path / "schedule" if (path / "schedule").is_dir() else path)
    record.require_index()
    return record


def replayed(run: str | Path) -> ReplayReport:
    """Replay a record. Raises: see `open_record`; also `RecordError` for damage in any segment."""
    return replay(open_record(run))


@dataclass(frozen=True, slots=True)
class RecordedWaits:
    """What a run waited for after the last event of its record."""

    outcome: str | None
    reason: str
    event: EventId
    """-1 if the record has no events."""
    at: float
    """Seconds since the run began."""
    waits: tuple[str, ...]
    """Sentences; empty if the run has ended or no order is open."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.outcome is not None:
            return f"the run has {self.outcome}: {self.reason}"
        place = f"after event {self.event}, at {self.at:.3f} s, according to the record"
        if self.event < 0:
            place = "according to the record, which has no events"
        return "\n".join([place, *(f"  {wait}" for wait in self.waits or ["nothing: no order is open"])])


def recorded_waits(run: str | Path) -> RecordedWaits:
    """Raises: see `open_record`; also `RecordError` if this engine decides differently."""
    recovered = recover(open_record(run))
    state = recovered.scheduler.state
    end = state.ending.outcome
    found = tuple(wait.sentence(recovered.at) for wait in waits(state))
    outcome, reason = (None, "") if end is None else (end.word, end.reason)
    return RecordedWaits(outcome, reason, recovered.events - 1, recovered.at, found)


# -- one event ---------------------------------------------------------------------------------------------------------


SHOWN_COMMANDS = 5 * SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of a run right after the tick that has an event, and how it came about."""

    event: EventId
    events: tuple[Event, ...]
    """The events of the tick."""
    commands: tuple[Command, ...]
    changes: tuple[str, ...]
    """State changes in the tick: `group 3: queued → generating (start)`."""
    summary: dict[str, Any]
    """`summary.summarize` of the state after the tick; if it was rejected, before it."""
    rejected: str = ""
    """Why the scheduler could not handle it."""
    story: Story | None = None
    notes: tuple[str, ...] = ()
    """Remarks about the record: a torn end, a divergence after this event."""

    def to_plain(self) -> dict[str, Any]:
        story = None if self.story is None else [*self.story.lines(mark=self.event)]
        return {
            "event": self.event, "events": [*map(stamped, self.events)], "commands": [*map(worded, self.commands)],
            "changes": self.changes, "rejected": self.rejected, "state": self.summary,
            "story": story, "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [*self.notes, *map(stamped, self.events)]
        if self.rejected:
            lines.append(f"  rejected: {self.rejected}")
        lines += _cut([f"  {change}" for change in self.changes], "state changes")
        lines += _cut([f"  -> {worded(command)}" for command in self.commands], "commands")
        if not self.commands and not self.rejected:
            lines.append("  no commands")
        tick = f"event {self.event}" if len(self.events) == 1 else f"the tick of event {self.event}"
        lines += ["", f"state {'before' if self.rejected else 'after'} {tick}"]
        lines += [f"  {line}" for line in summary_lines(self.summary)]
        if self.story is not None:
            lines += ["", f"story of group {self.story.group}", *self.story.lines(mark=self.event)]
        return "\n".join(lines)


def state_at(record: Record, n: EventId, group: GroupId | None = None) -> Moment:
    """The tick of event `n` and the state after it; with a group, its whole story.

    Raises: `ConfigError` for an event or group that the record does not have, `RecordError` if the record cannot be
    read, `EngineError` if this engine decides differently between the newest snapshot before
    event `n` and the event, because the state is then unknown.
    """
    if n < 0:
        raise ConfigError("--at", n, "must not be negative: events are counted from 0", "use 0 or more")
    if next(record.ticks(), None) is None:
        return _before_the_first_tick(record, n)
    cursor = Cursor(lambda: record)
    notes = [f"cut: {record.torn}"] if record.torn else []
    rejected = [one for one in cursor.index.rejected.values() if one.events[0].id <= n <= one.events[-1].id]
    first, is_rejected = cursor.index.first_event(cursor.first), n >= cursor.events
    if n < first or (is_rejected and not rejected):
        law = f"does not exist: the record has {counted(cursor.events - first, 'event')}"
        raise ConfigError("--at", n, law, f"use a number from {first} to {cursor.events - 1}")
    cursor.seek(cursor.index.tick_of_event(n))
    moment = Moment(
        event=n, events=cursor.tick.events, commands=cursor.tick.commands,
        changes=tuple(map(str, cursor.tick_changes)), summary=summarize(cursor.state),
    )  # fmt: skip
    if is_rejected:  # the state is that before it
        last = rejected[-1]
        moment = replace(moment, events=last.events, commands=(), changes=(), rejected=last.reason)
    else:
        notes += map(_rejection, rejected)
    story = None if group is None else _story(cursor, group, notes)
    return replace(moment, story=story, notes=tuple(notes))


def _before_the_first_tick(record: Record, n: EventId) -> Moment:
    """The tick of event `n`, which the scheduler rejected, in a record without any other. Raises: `ConfigError` if
    there is none."""
    index = TickIndex()
    index.read(record)
    for one in index.rejected.values():
        if one.events[0].id <= n <= one.events[-1].id:
            summary = summarize(first_scheduler(record).state)
            return Moment(event=n, events=one.events, commands=(), changes=(), summary=summary, rejected=one.reason)
    raise ConfigError("RUN", record.name, "has no event yet", "try again once it trains")


def _story(cursor: Cursor, group: GroupId, notes: list[str]) -> Story:
    """The story of a group. Adds to `notes` if it ends early. Raises: `ConfigError` for a group that does not exist."""
    if group < 0:
        raise ConfigError("--group", group, "must not be negative: groups are counted from 0", "use 0 or more")
    story, drawn = Story(group), 0
    if cursor.first:
        notes.append(f"the story begins at tick {cursor.first}: the record lacks the ticks before it")

    def watch(tick: Tick, changes: tuple[Change, ...]) -> None:
        nonlocal drawn
        drawn = cursor.state.groups.ledger.drawn
        mine = [change for change in changes if (change.machine, change.id) == ("group", group)]
        story.add(tick, [f"{one.source} → {one.target} ({one.trigger})" for one in mine], cursor.state)

    try:
        cursor.replay_all(watch)
    except EngineError as error:
        notes.append(f"the story ends early: {error}")
    if group >= drawn:
        fix = f"use a number from 0 to {drawn - 1}" if drawn else ""
        raise ConfigError("--group", group, f"does not exist: the record has {drawn} groups", fix)
    return story


def _rejection(rejected: Rejected) -> str:
    return f"an earlier tick at this position was rejected: {worded(rejected.events[-1])}: {rejected.reason}"


def _cut(lines: list[str], what: str) -> list[str]:
    if len(lines) <= SHOWN_COMMANDS:
        return lines
    return [*lines[:SHOWN_COMMANDS], f"  … {len(lines)} {what} in all"]
