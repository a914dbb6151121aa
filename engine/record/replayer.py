"""Replays a record: gives its events to a new scheduler and compares every answer with the recorded one.

Called by `engine replay`, by `engine.inspect` and by tests. Events keep their recorded stamps, and no command is
executed. It compares the frame that this scheduler would write, commands and state hash, with the recorded frame, and
each snapshot with the replayed state.
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
    """The first event whose answer differs from the recorded one."""

    event: Event
    expected: tuple[Command, ...]
    expected_hash: int
    got: tuple[Command, ...] = ()
    got_hash: int = 0
    raised: str = ""
    """What the scheduler raised instead of answering."""
    snapshot: str = ""
    """The answer equals the recorded one, but the state differs from the snapshot at this place."""

    @property
    def index(self) -> int:
        """Position of the event."""
        return self.event.id

    def __str__(self) -> str:
        lines = [f"diverged at event {self.index}, t={self.event.at:.3f} s: {self.event}"]
        if self.snapshot:
            lines.append(
                f"  the answer is identical, but the state differs from the snapshot after it: {self.snapshot}"
            )
        elif self.raised:
            lines += [*_side("expected", self.expected, self.expected_hash), f"  got: {self.raised}"]
        elif self.expected == self.got:
            lines += [f"  the {len(self.got)} commands are identical, but the state differs:"]
            lines += [
                f"  expected: state hash {self.expected_hash:016x}",
                f"  got:      state hash {self.got_hash:016x}",
            ]
        else:
            same = _same_at_start(self.expected, self.got)
            if same:
                lines.append(f"  the first {same} commands are identical, then")
            lines += _side("expected", self.expected[same:], self.expected_hash)
            lines += _side("got", self.got[same:], self.got_hash)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The result of a replay. `identical` covers the events that were replayed."""

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
            f"skipped: event {r.event.id} was rejected during the run, {r.event}: {r.reason}" for r in self.rejected
        ]
        if self.divergence is not None:
            lines.append(str(self.divergence))
        else:
            lines.append(f"identical: {self.events} events, {self.commands} commands")
        return "\n".join(lines)


def build_scheduler(header: Header, observe: Callable[[str, Any, str, str], None] | None = None) -> Scheduler:
    """The scheduler that a record began with.

    Raises: `ConfigError` for invalid limits, or a policy that is not registered in this process.
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

    Args: `watch` is called after each event with an identical answer. `after`: replay only the events after this
    snapshot; `build` must then return the scheduler restored from it.
    Raises: `RecordError` if the record cannot be read, or no scheduler can be built from its header.
    """
    try:
        scheduler = build(record.header)
    except (EngineError, TypeError, ValueError) as error:
        raise record.header_error(f"cannot build a scheduler from this header: {error}") from error
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
    """The scheduler's answer, and the divergence if any. Recorded commands are decoded only if the bytes differ."""
    event = frame.event
    try:
        answer = tuple(scheduler.handle(event))
        state_hash = scheduler.state_hash
        if encode_handled(event, answer, state_hash) == frame.payload:
            return answer, None
    except CodecError as error:
        return (), _diverged(record.handled(event.id), raised=f"the answer cannot be recorded: {error}")
    except Exception as error:  # the record is data: report as a divergence whatever it makes the scheduler raise
        return (), _diverged(record.handled(event.id), raised=f"{type(error).__name__}: {error}")
    recorded = record.handled(event.id)
    if answer == recorded.commands and state_hash == recorded.state_hash:
        return answer, None
    return answer, _diverged(recorded, got=answer, got_hash=state_hash)


def _same_state(found: Snapshot, scheduler: Replayable) -> bool:
    """Whether a snapshot equals the replayed state, apart from what observers counted. True if they cannot be
    compared, because the engine that wrote the snapshot had other fields."""
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
