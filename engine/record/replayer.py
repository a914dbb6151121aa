"""Replays a record: passes its ticks to a new scheduler and compares every answer with the recorded one.

Called by `engine replay`, by `engine.inspect` and by tests. Events keep their recorded stamps. It
compares each snapshot with the replayed state, field by field. It must never execute a command.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, TypeVar

from msgspec import structs

from engine.commands import Command
from engine.errors import EngineError
from engine.events import Event
from engine.ids import EventId
from engine.policies import PolicySet
from engine.record.codec import CodecError
from engine.record.frames import Header, Rejected, Snapshot, Tick
from engine.record.reader import Place, Record
from engine.record.segment_log import Torn
from engine.record.snapshots import declarations, first_difference, restore
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits


class Replayable(Protocol):
    """What a scheduler must have to be replayed."""

    def tick(self, events: Sequence[Event]) -> tuple[Command, ...]: ...


S = TypeVar("S", bound=Replayable)
Build = Callable[[Header], Replayable]
Watch = Callable[[Tick], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first tick whose answer differs from the recorded one."""

    tick: Tick
    """The recorded tick."""
    got: tuple[Command, ...] = ()
    raised: str = ""
    """What the scheduler raised instead of answering."""
    snapshot: str = ""
    """The answers are identical, but the state differs from the snapshot after this tick. Has the place of the snapshot
    and the first field that differs."""

    @property
    def index(self) -> EventId:
        """The first event of the tick."""
        return self.tick.first

    def __str__(self) -> str:
        tick, expected = self.tick, self.tick.commands
        lines = [f"diverged at tick {tick.number}, t={tick.at:.3f} s"]
        lines += [f"  event {event.id}: {event}" for event in tick.events[:SHOWN]]
        if self.snapshot:
            lines.append(
                f"  the commands are identical, but the state differs from the snapshot after it: {self.snapshot}"
            )
        elif self.raised:
            lines += [*_side("expected", expected), f"  got: {self.raised}"]
        else:
            same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(expected, self.got, strict=False))])
            if same:
                lines.append(f"  the first {same} commands are identical, then")
            lines += [*_side("expected", expected[same:]), *_side("got", self.got[same:])]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The result of a replay. `identical` covers the ticks that were replayed."""

    ticks: int
    events: int
    commands: int
    divergence: Divergence | None = None
    rejected: tuple[Rejected, ...] = ()
    torn: Torn | None = None

    @property
    def identical(self) -> bool:
        return self.divergence is None

    def to_plain(self) -> dict[str, Any]:
        return {
            "identical": self.identical, "ticks": self.ticks, "events": self.events, "commands": self.commands,
            "divergence": None if self.divergence is None else str(self.divergence),
            "rejected": [f"tick {one.number}: {one.reason}" for one in self.rejected],
            "torn": None if self.torn is None else str(self.torn),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"cut: {self.torn}"] if self.torn else []
        for rejected in self.rejected:
            last = rejected.events[-1]
            lines.append(f"skipped: tick {rejected.number} was rejected at event {last.id}, {last}: {rejected.reason}")
        if self.divergence is not None:
            lines.append(str(self.divergence))
        else:
            lines.append(f"identical: {self.events} events in {self.ticks} ticks, {self.commands} commands")
        return "\n".join(lines)


def build_scheduler(header: Header, observe: Callable[[str, Any, str, str], None] | None = None) -> Scheduler:
    """The scheduler that a record began with.

    Raises: `ConfigError` for invalid limits, or a policy that is not registered in this process.
    """
    return Scheduler(Limits.from_plain(dict(header.limits)), PolicySet.from_names(header.policies), observe)


def first_scheduler(record: Record, observe: Callable[[str, Any, str, str], None] | None = None) -> Scheduler:
    """The scheduler before the first tick of a record. Raises: `RecordError` if this process cannot make it."""
    if record.begin is None:
        return build_from_header(record, lambda header: build_scheduler(header, observe))
    plain = record.snapshot(record.begin).plain
    try:
        return restore(plain, observe)
    except CodecError as error:
        of_other = bool(plain) and plain[0] != declarations()
        fix = f"; use engine {record.header.code}, whose facts it has" if of_other else ""
        raise record.error_at(record.begin, f"{error}{fix}") from error.__cause__


def build_from_header(record: Record, build: Callable[[Header], S]) -> S:
    """What `build` makes of a record's header. Raises: `RecordError` if it cannot."""
    try:
        return build(record.header)
    except (EngineError, TypeError, ValueError) as error:
        raise record.header_error(f"cannot build a scheduler from this header: {error}") from error


def replay(
    record: Record,
    until: EventId | None = None,
    build: Build | None = None,
    watch: Watch | None = None,
    *,
    after: Place | None = None,
    compare_snapshots: bool = True,
    compare_reasons: bool = True,
    skip: Callable[[Rejected], None] | None = None,
) -> ReplayReport:
    """Replay every tick, or those up to the one with event `until`, and stop at the first divergence.

    Args: `build` makes the scheduler, in place of the one that the record began with. `watch` is called after each tick
    with an identical answer, `skip` for each rejected one. `after`: replay only the ticks after this snapshot; `build`
    must then return the scheduler restored from it. `compare_reasons`: see `compare`.
    Raises: `RecordError` if the record cannot be read, or no scheduler can be built from its header.
    """
    scheduler = first_scheduler(record) if build is None else build_from_header(record, build)
    ticks = events = commands = 0
    rejected: list[Rejected] = []
    divergence: Divergence | None = None
    last: Tick | None = None
    for frame in record.frames_and_snapshots(after):
        if until is not None and (frame.position - 1 if isinstance(frame, Snapshot) else frame.events[0].id) > until:
            break
        if isinstance(frame, Snapshot):
            differs = ""
            if compare_snapshots and isinstance(scheduler, Scheduler):
                differs = first_difference(scheduler, frame.plain)
            if differs and last is not None:
                place = next(place for place in record.snapshots() if place.ticks == frame.ticks)
                divergence = Divergence(tick=last, snapshot=f"{record.error_at(place, differs)}")
                break
            continue
        if isinstance(frame, Rejected):
            rejected.append(frame)
            if skip is not None:
                skip(frame)
            continue
        answer, divergence = compare(frame, scheduler, reasons=compare_reasons)
        if divergence is not None:
            break
        last = frame
        ticks, events, commands = ticks + 1, events + len(frame.events), commands + len(answer)
        if watch is not None:
            watch(frame)
    return ReplayReport(
        ticks=ticks, events=events, commands=commands, divergence=divergence, rejected=tuple(rejected),
        torn=record.torn,
    )  # fmt: skip


def compare(
    tick: Tick, scheduler: Replayable, *, reasons: bool = True
) -> tuple[tuple[Command, ...], Divergence | None]:
    """The scheduler's answer, and the divergence if any. Without `reasons`, only whether a command has one counts, not
    its words."""
    try:
        answer = tuple(scheduler.tick(tick.events))
    except Exception as error:  # the record is data: report as a divergence whatever it makes the scheduler raise
        return (), Divergence(tick=tick, raised=f"{type(error).__name__}: {error}")
    same = answer == tick.commands or (not reasons and _unworded(answer) == _unworded(tick.commands))
    return answer, None if same else Divergence(tick=tick, got=answer)


def _unworded(commands: Sequence[Command]) -> list[Command]:
    return [structs.replace(one, reason="-") if getattr(one, "reason", "") else one for one in commands]


SHOWN = 20
"""Maximum numbers of commands shown per side, and of events."""


def _side(name: str, commands: tuple[Command, ...]) -> list[str]:
    lines = [f"  {name}: {len(commands)} commands"]
    lines += [f"    {command}" for command in commands[:SHOWN]]
    if len(commands) > SHOWN:
        lines.append(f"    … and {len(commands) - SHOWN} more")
    return lines
