"""Feed a record to a fresh scheduler and compare every answer with the one that was recorded.

Called by `engine replay`, by `engine.inspect` and by tests. Events keep their recorded stamps; nothing is executed.
What is compared is the frame that this scheduler would have written, commands and state hash, with the frame that
was; and each snapshot on the way with the state that was replayed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.commands import Command
from engine.errors import EngineError
from engine.events import Event
from engine.policies import PolicySet
from engine.record.frames import Handled, Header, Rejected, encode_handled, encode_snapshot
from engine.record.log import Torn
from engine.record.msgpack_values import CodecError, unpack
from engine.record.reader import Place, Record, Snapshot
from engine.record.snapshots import same_engine, snapshot
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits


class Replayable(Protocol):
    """What a scheduler must have to be replayed."""

    def handle(self, event: Event) -> tuple[Command, ...]: ...

    @property
    def state_hash(self) -> int: ...


Build = Callable[[Header], Replayable]
Watch = Callable[[Handled], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first event that was answered otherwise than in the record."""

    event: Event
    expected: tuple[Command, ...]
    expected_hash: int
    got: tuple[Command, ...] = ()
    got_hash: int = 0
    raised: str = ""
    """What the scheduler raised instead of answering."""
    snapshot: str = ""
    """The event was answered as recorded; this is where the snapshot lies whose state is another."""

    @property
    def index(self) -> int:
        """Position of the event."""
        return self.event.id

    def __str__(self) -> str:
        lines = [f"diverged at event {self.index}, t={self.event.at:.3f} s: {self.event}"]
        if self.snapshot:
            lines.append(
                f"  the event is answered as recorded, but the snapshot behind it is of another state: {self.snapshot}"
            )
        elif self.raised:
            lines += [*_side("expected", self.expected, self.expected_hash), f"  got: {self.raised}"]
        elif self.expected == self.got:
            lines += [f"  the {len(self.got)} commands are the same, the state is not:"]
            lines += [
                f"  expected: state hash {self.expected_hash:016x}",
                f"  got:      state hash {self.got_hash:016x}",
            ]
        else:
            same = _same_at_start(self.expected, self.got)
            if same:
                lines.append(f"  the first {same} commands are the same, then")
            lines += _side("expected", self.expected[same:], self.expected_hash)
            lines += _side("got", self.got[same:], self.got_hash)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What came of a replay. `identical` speaks of the events that were replayed."""

    events: int
    commands: int
    divergence: Divergence | None = None
    rejected: tuple[Rejected, ...] = ()
    torn: Torn | None = None

    @property
    def identical(self) -> bool:
        return self.divergence is None

    def __str__(self) -> str:
        lines = [f"cut: {self.torn}"] if self.torn else []
        lines += [
            f"rejected in the run, skipped here: event {r.event.id}, {r.event}: {r.reason}" for r in self.rejected
        ]
        if self.divergence is not None:
            lines.append(str(self.divergence))
        else:
            lines.append(f"identical: {self.events} events, {self.commands} commands")
        return "\n".join(lines)


def build_scheduler(header: Header, observe: Callable[[str, Any, str, str], None] | None = None) -> Scheduler:
    """The scheduler that a record began with.

    Raises: `ConfigError` where limits are out of law or a policy of that name is not registered in this process.
    """
    return Scheduler(Limits.from_plain(dict(header.limits)), PolicySet.from_names(header.policies), observe)


def replay(
    record: Record,
    until: int | None = None,
    build: Build = build_scheduler,
    watch: Watch | None = None,
    *,
    after: Place | None = None,
    compare_snapshots: bool = True,
) -> ReplayReport:
    """Replay events 0 … `until` (all of them by default) and stop at the first divergence.

    Args: `watch` is called after each event that was answered as recorded. `after`: only what follows a snapshot, of
    which `build` gives the scheduler.
    Raises: `RecordError` for a record that cannot be read or whose header builds no scheduler.
    """
    try:
        scheduler = build(record.header)
    except (EngineError, TypeError, ValueError) as error:
        raise record.header_error(f"it builds no scheduler: {error}") from error
    events = commands = 0
    rejected: list[Rejected] = []
    divergence: Divergence | None = None
    last: Handled | None = None
    for frame in record.frames_and_snapshots(answers=False, after=after):
        if until is not None and (frame.position - 1 if isinstance(frame, Snapshot) else frame.event.id) > until:
            break
        if isinstance(frame, Snapshot):
            if compare_snapshots and last is not None and not _same_state(frame, scheduler):
                where = f"{frame.path} at byte {frame.offset}"
                divergence = replace(_diverged(record.handled(last.event.id)), snapshot=where)
                break
            continue
        if isinstance(frame, Rejected):
            rejected.append(frame)
            continue
        answer, divergence = _compare(frame, scheduler, record)
        if divergence is not None:
            break
        last = frame
        events += 1
        commands += len(answer)
        if watch is not None:
            watch(replace(frame, commands=answer))
    return ReplayReport(
        events=events, commands=commands, divergence=divergence, rejected=tuple(rejected), torn=record.torn
    )


def _compare(frame: Handled, scheduler: Replayable, record: Record) -> tuple[tuple[Command, ...], Divergence | None]:
    """The scheduler's answer, and how it differs. What was recorded is decoded only where the bytes differ."""
    event = frame.event
    try:
        answer = tuple(scheduler.handle(event))
        state_hash = scheduler.state_hash
        if encode_handled(event, answer, state_hash) == frame.payload:
            return answer, None
    except CodecError as error:
        return (), _diverged(record.handled(event.id), raised=f"a command that cannot be recorded: {error}")
    except Exception as error:  # a record is data: whatever it makes this scheduler raise is a difference to report
        return (), _diverged(record.handled(event.id), raised=f"{type(error).__name__}: {error}")
    recorded = record.handled(event.id)
    if answer == recorded.commands and state_hash == recorded.state_hash:
        return answer, None
    return answer, _diverged(recorded, got=answer, got_hash=state_hash)


def _same_state(found: Snapshot, scheduler: Replayable) -> bool:
    """Whether a snapshot is of the state that was replayed, what observers counted aside. True where it cannot be
    compared: another engine wrote it, whose records had other fields."""
    plain = found.plain
    if not isinstance(scheduler, Scheduler) or not same_engine(plain, scheduler):
        return True
    parts = snapshot(scheduler)
    parts[0][-1] = plain[0][-1]
    mine = encode_snapshot(found.position, parts)
    theirs = [part.payload for part in found.parts]
    return mine == theirs or list(map(unpack, mine)) == list(map(unpack, theirs))


def _diverged(frame: Handled, got: tuple[Command, ...] = (), got_hash: int = 0, raised: str = "") -> Divergence:
    return Divergence(
        event=frame.event,
        expected=frame.commands,
        expected_hash=frame.state_hash,
        got=got,
        got_hash=got_hash,
        raised=raised,
    )


def _same_at_start(expected: tuple[Command, ...], got: tuple[Command, ...]) -> int:
    same = 0
    for left, right in zip(expected, got, strict=False):
        if left != right:
            break
        same += 1
    return same


SHOWN = 20
"""Commands shown per side."""


def _side(name: str, commands: tuple[Command, ...], state_hash: int) -> list[str]:
    lines = [f"  {name}: {len(commands)} commands, state hash {state_hash:016x}"]
    lines += [f"    {command}" for command in commands[:SHOWN]]
    if len(commands) > SHOWN:
        lines.append(f"    … and {len(commands) - SHOWN} more")
    return lines
