"""`engine replay RUN --at N [--group G]`: an event, its commands, the state after it, and the story of a group.

It replays the record up to the event, so it shows the scheduler's own state, not a reconstruction.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.commands import Command
from engine.errors import ConfigError, EngineError
from engine.events import Event
from engine.ids import EventId, GroupId
from engine.inspect.story import SHOWN, Story, stamped, summarize, summary_lines, worded
from engine.metrics.waits import waits
from engine.record import Header, Record, Rejected, ReplayReport, Tick, read, recover, replay
from engine.record.replayer import build_scheduler
from engine.scheduling.scheduler import Scheduler

# -- the whole record --------------------------------------------------------------------------------------------------


def open_record(run: str | Path) -> Record:
    """The record of a run. `run`: the run's directory, or that of the record.

    Raises: `ConfigError` if there is no such directory, `RecordError` if the record cannot be read.
    """
    path = Path(run)
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
    at: float
    """Seconds since the run began."""
    waits: tuple[str, ...]
    """Sentences; empty if the run has ended or no order is open."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.outcome is not None:
            return f"the run has {self.outcome}: {self.reason}"
        lines = [f"after event {self.event}, at {self.at:.3f} s, according to the record"]
        return "\n".join([*lines, *(f"  {wait}" for wait in self.waits or ["nothing: no order is open"])])


def recorded_waits(run: str | Path) -> RecordedWaits:
    """Raises: see `open_record`; also `RecordError` if this engine decides differently."""
    recovered = recover(open_record(run))
    state = recovered.scheduler.state
    end = state.ending.outcome
    found = tuple(wait.sentence(recovered.at) for wait in waits(state))
    outcome, reason = (None, "") if end is None else (end.outcome, end.reason)
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
    """Replay up to event `n`; with a group, up to the end, for its whole story.

    Raises: `ConfigError` for an event or group that the record does not have, `RecordError` if the record cannot be
    read, `EngineError` if the replay diverges at or before event `n`, because the state is then unknown.
    """
    if n < 0:
        raise ConfigError("--at", n, "must not be negative: events are counted from 0", "use 0 or more")
    if group is not None and group < 0:
        raise ConfigError("--group", group, "must not be negative: groups are counted from 0", "use 0 or more")
    watcher = _Watcher(n, group)
    report = replay(record, n if group is None else None, watcher.build, watcher.watch)
    return watcher.moment(report)


class _Watcher:
    """Observes a replay and collects the contents of a `Moment`."""

    def __init__(self, n: EventId, group: GroupId | None) -> None:
        self.n = n
        self.story = None if group is None else Story(group)
        self._changes: list[tuple[str, int, str]] = []
        """(machine, id, change) during the current event."""
        self._at_n: dict[str, Any] | None = None
        self._scheduler: Scheduler

    def build(self, header: Header) -> Scheduler:
        def observe(machine: str, changed: Any, source: str, trigger: str) -> None:
            self._changes.append((machine, changed.id, f"{source} → {changed.state} ({trigger})"))

        self._scheduler = build_scheduler(header, observe)
        self._changes.clear()
        return self._scheduler

    def watch(self, tick: Tick) -> None:
        state = self._scheduler.state
        if tick.first <= self.n <= tick.last:
            self._at_n = {
                "event": self.n,
                "events": tick.events,
                "commands": tick.commands,
                "changes": tuple(f"{machine} {id}: {change}" for machine, id, change in self._changes),
                "summary": summarize(state),
            }
        if self.story is not None:
            mine = [text for machine, id, text in self._changes if machine == "group" and id == self.story.group]
            self.story.add(tick, mine, state)
        self._changes.clear()

    def moment(self, report: ReplayReport) -> Moment:
        """The result of a finished replay. Raises: see `state_at`."""
        rejected = [r for r in report.rejected if r.events[0].id <= self.n <= r.events[-1].id]
        notes = [f"cut: {report.torn}"] if report.torn else []
        if report.divergence is not None:
            if report.divergence.index <= self.n:
                raise EngineError(f"the state at event {self.n} is unknown: {report.divergence}")
            notes.append(f"the story ends early: {report.divergence}")
        self._require_group()
        if self._at_n is not None:
            notes += [_rejection(r) for r in rejected]
            return Moment(**self._at_n, story=self.story, notes=tuple(notes))
        if rejected:  # the replay leaves such ticks out, and ends there
            return Moment(
                event=self.n, events=rejected[-1].events, commands=(), changes=(),
                summary=summarize(self._scheduler.state),
                rejected=rejected[-1].reason, story=self.story, notes=tuple(notes),
            )  # fmt: skip
        if not report.events:
            raise ConfigError("--at", self.n, "the record has no events")
        law = f"does not exist: the record has {report.events} events"
        raise ConfigError("--at", self.n, law, f"use a number from 0 to {report.events - 1}")

    def _require_group(self) -> None:
        drawn = self._scheduler.state.groups.ledger.drawn
        if self.story is not None and self.story.group >= drawn:
            fix = f"use a number from 0 to {drawn - 1}" if drawn else ""
            raise ConfigError("--group", self.story.group, f"does not exist: the record has {drawn} groups", fix)


def _rejection(rejected: Rejected) -> str:
    return f"an earlier tick at this position was rejected: {worded(rejected.events[-1])}: {rejected.reason}"


def _cut(lines: list[str], what: str) -> list[str]:
    if len(lines) <= SHOWN_COMMANDS:
        return lines
    return [*lines[:SHOWN_COMMANDS], f"  … {len(lines)} {what} in all"]
