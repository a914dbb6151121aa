"""A position in a record that moves forward and backward: the scheduler's own state after any tick.

    cursor = Cursor(lambda: open_record(run))
    cursor.seek(4711)
    cursor.twin().find(parse_breakpoint("group=17"), 4712)
    cursor.changes(4000, 4711)

Called by `engine debug`. It restores the newest snapshot before a tick, its own or one of the record, and replays the
ticks after it. It keeps a snapshot of each block of ticks that it passes. A search notes what each block is about, so
that a later search replays only blocks with a match.
It must never write.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError, EngineError, counted
from engine.ids import EventId, StepId
from engine.inspect.breakpoints import Breakpoint, TickContents, parse_breakpoint
from engine.inspect.story import few, summarize
from engine.inspect.tick_index import Progress, TickIndex
from engine.record import Record, Tick, replay
from engine.record.codec import CodecError, pack, unpack
from engine.record.replayer import first_scheduler
from engine.record.snapshots import restore, snapshot
from engine.scheduling.scheduler import Scheduler
from engine.states.state import State

BLOCK_EVENTS = 4096
"""Events in a block. Replaying a block takes a few tenths of a second."""
MOST_SNAPSHOTS = 256
"""Maximum number of snapshots in memory. The latest in the record are kept."""
CHANGES_SHOWN = 200

Going = Callable[[], bool]
"""Whether a search should continue. Called once per block."""
Watch = Callable[[Tick, "tuple[Change, ...]"], None]


@dataclass(frozen=True, slots=True)
class Change:
    """A state change of a record: machine, id, state before, trigger, state after."""

    machine: str
    id: Any
    source: str
    trigger: str
    target: str

    def __str__(self) -> str:
        return f"{self.machine} {self.id}: {self.source} → {self.target} ({self.trigger})"


class Blocks:
    """What is known of ranges of ticks: a snapshot before each, and its contents. Several cursors may share it."""

    def __init__(self, block_events: int = BLOCK_EVENTS, most: int = MOST_SNAPSHOTS) -> None:
        self.block_events = block_events
        self.contents: dict[int, TickContents] = {}
        """By number of the block, if all its ticks were replayed."""
        self.snapshots: dict[int, bytes] = {}
        """By number of ticks before it."""
        self._most = most

    def keep(self, ticks: int, scheduler: Scheduler) -> None:
        """Keep the snapshot before the first tick of a block."""
        if ticks not in self.snapshots:
            with suppress(CodecError):  # a policy's memory may have values that no snapshot can hold
                self.snapshots[ticks] = pack(snapshot(scheduler))
        if len(self.snapshots) > self._most:
            self.snapshots.pop(min(self.snapshots.copy()), None)  # another thread may have done it


class Cursor:
    """A position in a record. Begins at the first tick."""

    tick: Tick
    """With its commands."""
    tick_changes: tuple[Change, ...]
    """State changes in the tick, in order."""

    def __init__(
        self, open: Callable[[], Record], blocks: Blocks | None = None, progress: Progress = lambda ticks: None
    ) -> None:
        """Raises: `RecordError` if the record cannot be read, `ConfigError` if it has no tick."""
        self._open = open
        self._record = open()
        self.index = TickIndex()
        self.index.read(self._record, progress)
        self.first = self.index.begin
        """The number of the record's first tick."""
        if self.first == len(self.index):
            raise ConfigError("RUN", self._record.name, "has no event yet", "try again once it trains")
        self.blocks = blocks or Blocks()
        self.passed_over: list[str] = []
        """Why snapshots of the record could not be used."""
        self._scheduler: Scheduler | None = None
        self._begin = 0
        """The number of the next tick that the scheduler expects."""
        self._pending: list[Change] = []
        self.seek(self.first)

    def twin(self) -> "Cursor":
        """Another cursor on the same record, which shares its index and what is known of blocks: for another thread."""
        twin = copy(self)
        twin._scheduler, twin._pending = None, []
        return twin

    def __len__(self) -> int:
        """The number behind that of the last tick."""
        return len(self.index)

    @property
    def state(self) -> State:
        """The state after the tick. The next move may change it."""
        assert self._scheduler is not None
        return self._scheduler.state

    @property
    def run(self) -> str:
        return self._record.header.run

    @property
    def added_states(self) -> tuple[str, ...]:
        """States of groups that the run adds."""
        return tuple(added.name for added in self.state.limits.added_states)

    @property
    def events(self) -> int:
        """The number behind that of the last event."""
        after = self.index.place_before(len(self) - 1)
        frames = self._record.frames_and_snapshots(after)
        return next(frame.last for frame in frames if isinstance(frame, Tick)) + 1

    def grow(self) -> int:
        """Read the ticks that the run has written since. Returns their number. Raises: `RecordError`."""
        self._record = self._open()
        return self.index.read(self._record)

    # moves

    def seek(self, tick: int) -> None:
        """Move to a tick. Raises: `ConfigError` for one that the record does not have, `EngineError` if this engine
        decides differently before it."""
        if not self.first <= tick < len(self):
            law = f"does not exist: the record has {counted(len(self) - self.first, 'tick')}"
            raise ConfigError("tick", tick, law, f"use a number from {self.first} to {len(self) - 1}")
        if self._scheduler is None or tick != self._begin - 1:
            self._approach(tick)
            self._replay(tick)

    def seek_event(self, event: EventId) -> None:
        """Move to the tick of an event. Raises: see `seek`."""
        if event < 0:
            raise ConfigError("event", event, "must not be negative", "events are counted from 0")
        first = self.index.first_event(self.first)
        if not first <= event < self.events:
            law = f"does not exist: the record has {counted(self.events - first, 'event')}"
            raise ConfigError("event", event, law, f"use a number from {first} to {self.events - 1}")
        self.seek(self.index.tick_of_event(event))

    def seek_time(self, seconds: float) -> None:
        """Move to the last tick at or before a time. Raises: see `seek`; `ConfigError` for a time outside the run."""
        first, last = self.index.at(self.first) if self.first else 0, self.index.at(len(self) - 1)
        if not first <= seconds <= last:
            raise ConfigError("time", seconds, "is not in the run", f"use seconds from {first:.6g} to {last:.3f}")
        self.seek(self.index.tick_at(seconds))

    def seek_step(self, step: StepId) -> None:
        """Move to the first tick with an event or a command about a train step. Raises: see `seek`."""
        found = self.twin().find(parse_breakpoint(f"step={step}"), self.first) if step >= 0 else None
        if found is None:
            raise ConfigError("step", step, "is not in the record", "steps are counted from 0")
        self.seek(found)

    def changes(self, one: int, other: int) -> list[str]:
        """What differs between the states after two ticks: the figures of the summary, and the states of groups. Moves
        there and back. Raises: see `seek`."""
        here, found = self.tick.number, []
        for tick in (one, other):
            self.seek(tick)
            groups = {f"group {id}": group.state for id, group in self.state.groups.live.items()}
            found.append((_keyed(summarize(self.state)), groups))
        self.seek(here)
        (before, groups_before), (after, groups_after) = found
        lines = [*_differences("", before, after)]
        for name in dict.fromkeys((*groups_before, *groups_after)):
            states = (groups_before.get(name, "not drawn"), groups_after.get(name, "ended"))
            lines += [f"{name}: {states[0]} → {states[1]}"] if states[0] != states[1] else []
        more = len(lines) - CHANGES_SHOWN
        return [*lines[:CHANGES_SHOWN], *([f"… {more} more"] if more > 0 else [])]

    # searches

    def find(
        self, breakpoint: Breakpoint, tick: int, *, forward: bool = True, going: Going = lambda: True
    ) -> int | None:
        """The first tick with a match from `tick` on, or the last one up to it. None: there is none, or `going` ended
        the search. Moves the cursor anywhere. Raises: see `seek`."""
        if not self.first <= tick < len(self):
            return None
        last = self.block_of(len(self) - 1)
        for block in range(self.block_of(tick), last + 1) if forward else range(self.block_of(tick), -1, -1):
            if not going():
                return None
            known = self.blocks.contents.get(block)
            if known is None or breakpoint.holds(known):
                matches = self.scan(block, breakpoint)
                beyond = [one for one in matches if (one >= tick if forward else one <= tick)]
                if beyond:
                    return beyond[0] if forward else beyond[-1]
        return None

    def scan(self, block: int, breakpoint: Breakpoint | None = None) -> list[int]:
        """The ticks of a block with a match. Notes the contents of the block. Moves the cursor. Raises: see `seek`."""
        ticks = self.ticks_of(block)
        if not ticks:
            return []
        whole, found = TickContents.none(), []

        def watch(tick: Tick, changes: tuple[Change, ...]) -> None:
            if tick.number < ticks.start:
                return
            own = TickContents.none()
            own.add(tick, (change.target for change in changes))
            whole.update(own)
            if breakpoint is not None and breakpoint.holds(own):
                found.append(tick.number)

        self._approach(ticks.start)
        self._replay(ticks.stop - 1, watch)
        if ticks.stop < len(self):
            self.blocks.contents[block] = whole
        return found

    def block_of(self, tick: int) -> int:
        """The number of the block in which a tick begins."""
        return self.index.first_event(tick) // self.blocks.block_events

    def ticks_of(self, block: int) -> range:
        """The ticks that begin in a block."""
        first = block * self.blocks.block_events
        return range(self.index.tick_from(first), self.index.tick_from(first + self.blocks.block_events))

    # replay

    def replay_all(self, watch: Watch) -> None:
        """Replay the whole record, and call `watch` after each tick. Raises: see `seek`."""
        self._scheduler, self._begin = first_scheduler(self._record, self._observe), self.first
        self._pending.clear()
        self._replay(len(self) - 1, watch)

    def _approach(self, tick: int) -> None:
        """Let the scheduler expect a tick, or an earlier one with no snapshot between. Raises: `EngineError`."""
        while True:
            place = self.index.snapshot_before(tick)
            recorded = place.ticks if place is not None else 0
            kept = max((ticks for ticks in [*self.blocks.snapshots] if ticks <= tick), default=0)
            if self._scheduler is not None and max(recorded, kept) <= self._begin <= tick:
                return
            data = self.blocks.snapshots.get(kept)
            if data is not None and kept >= recorded:
                self._scheduler, self._begin = restore(unpack(data), self._observe), kept
            elif place is None:
                self._scheduler, self._begin = first_scheduler(self._record, self._observe), self.first
            else:
                try:
                    self._scheduler = restore(self._record.snapshot(place).plain, self._observe)
                except CodecError as error:
                    self.passed_over.append(str(error))
                    self.index.snapshots.remove(place)
                    continue
                self._begin = recorded
            self._pending.clear()
            return

    def _replay(self, last: int, watch: Watch = lambda tick, changes: None) -> None:
        """Replay the ticks from the one that the scheduler expects up to `last`. Raises: `EngineError` if this engine
        decides differently."""
        scheduler = self._scheduler
        assert scheduler is not None

        def took(tick: Tick) -> None:
            changes = tuple(self._pending)
            self._pending.clear()
            self.tick, self.tick_changes, self._begin = tick, changes, tick.number + 1
            watch(tick, changes)
            if self._begin < len(self) and self.block_of(self._begin) != self.block_of(tick.number):
                self.blocks.keep(self._begin, scheduler)

        until, after = self.index.first_event(last), self.index.place_before(self._begin)
        report = replay(self._record, until, lambda _: scheduler, took, after=after, compare_snapshots=False)
        if report.divergence is not None:
            self._scheduler = None
            law = f"the state at tick {report.divergence.tick.number} is unknown: {report.divergence}"
            raise EngineError(f"{law}\n`engine replay` shows the first difference of a record")

    def _observe(self, machine: str, record: Any, source: str, trigger: str) -> None:
        self._pending.append(Change(machine, record.id, source, trigger, record.state))


def _keyed(value: Any) -> Any:
    """Lists of mappings as mappings by their first entry, such as `replica 0`; so that equal things are compared."""
    if isinstance(value, list) and all(isinstance(inner, dict) and inner for inner in value):
        return {" ".join(map(str, next(iter(inner.items())))): _keyed(inner) for inner in value}
    if isinstance(value, dict):
        return {name: _keyed(inner) for name, inner in value.items()}
    return value


def _differences(path: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            yield from _differences(f"{path} {name}".strip(), before.get(name), after.get(name))
    else:
        yield f"{path}: {_shown(before)} → {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "there"
    if isinstance(value, list):
        return few(value)
    return "none" if value is None else str(value)
