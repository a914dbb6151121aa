"""Which orders a record shows as given and not answered: what has to be ordered again when whoever sent them is gone.

    orders = OpenOrders()
    for frame in record.frames():
        orders.take(frame.event, frame.commands)
    executor.execute(orders.left(at))

Kept by the scheduler's process as it goes, since a snapshot says what is open with the rest; used by the one that takes
its place while the actors live on. Carrying an order out twice must do no harm, so nothing is lost by ordering too
much; an order that is missing here would wedge the run.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.commands import (
    AbortGroup,
    CancelTimer,
    Command,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
    InstallWeights,
    MeasureRows,
    ParkGroup,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StageWeights,
    StartGroup,
    StartReplica,
    StopMeasuring,
    StopReplica,
    TrainStep,
    TruncateGroup,
)
from engine.events import (
    BatchScored,
    CheckpointFailed,
    CheckpointSaved,
    DrawFailed,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    PromptsDrawn,
    PublishFailed,
    ReplicaJoined,
    ReplicaLost,
    ReplicaPaused,
    RowsFailed,
    RowsMeasured,
    RunResumed,
    StateFailed,
    StateLeft,
    StepFailed,
    StepTrained,
    SyncFailed,
    TimerFired,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.ids import Incarnation, ReplicaId
from engine.schedule.codec import command_from, plain_command

UNANSWERED, ARRIVED_S = 1024, 600.0
"""Of the orders that nothing answers so many are kept, the newest, and none that was sent so long before the last: an
actor that had not heard it would be gone."""

Key = tuple[Any, ...]
SYNC = (StageWeights, PauseReplica, InstallWeights)


class OpenOrders:
    """Feed it every frame of a record in order. A dictionary keeps orders by what they are about; a newer one about
    the same takes the place of an older."""

    def __init__(self) -> None:
        self._open: dict[Key, tuple[int, Command]] = {}
        self._set_at: dict[Key, float] = {}
        self._unanswered: deque[tuple[int, float, Command]] = deque(maxlen=UNANSWERED)
        self._count = 0

    def take(self, event: Event, commands: Iterable[Command]) -> None:
        """An event of the record, and what it led to."""
        answered = _ANSWERS.get(type(event))
        if answered is not None:
            answered(self, event)
        for command in commands:
            self._count += 1
            _ORDERS[type(command)](self, command, event.at)

    def left(self, at: float) -> list[Command]:
        """What is to be ordered again, in the order in which it was; `at`: when, in seconds since the run began. Timers
        have the rest of their time left."""
        left = [(number, self._rest(key, command, at)) for key, (number, command) in self._open.items()]
        told = [(number, command) for number, _, command in self._unanswered]
        return [command for _, command in sorted([*left, *told], key=lambda entry: entry[0])]

    def to_plain(self) -> Any:
        """Lists and tuples of scalars, for a snapshot."""
        held = [
            (number, self._set_at.get(key, 0.0), command.cause, *plain_command(command))
            for key, (number, command) in self._open.items()
        ]
        told = [(number, at, command.cause, *plain_command(command)) for number, at, command in self._unanswered]
        return [self._count, held, told]

    @classmethod
    def of_plain(cls, plain: Any) -> "OpenOrders":
        """As they were. Raises: `CodecError`, `ValueError` or `TypeError` for anything that `to_plain` did not give."""
        orders = cls()
        count, held, told = plain
        for number, at, cause, *said in held:
            orders._count = int(number)
            command = _command(said, cause)
            _ORDERS[type(command)](orders, command, float(at))
        for number, at, cause, *said in told:
            orders._unanswered.append((int(number), float(at), _command(said, cause)))
        orders._count = int(count)
        return orders

    def _rest(self, key: Key, command: Command, at: float) -> Command:
        if not isinstance(command, SetTimer):
            return command
        return replace(command, delay_s=max(0.0, self._set_at[key] + command.delay_s - at))

    # orders

    def _add(self, key: Key, command: Command) -> None:
        self._open.pop(key, None)
        self._open[key] = self._count, command

    def _tell(self, command: Command, at: float) -> None:
        """One that nothing answers."""
        while self._unanswered and self._unanswered[0][1] < at - ARRIVED_S:
            self._unanswered.popleft()
        self._unanswered.append((self._count, at, command))

    def _abort(self, command: AbortGroup, at: float) -> None:
        self._end_group(command.group, command.attempt)
        self._tell(command, at)

    def _discard(self, command: DiscardGroups, at: float) -> None:
        for group in command.groups:
            self._open.pop(("state", group), None)
        self._tell(command, at)

    def _stop_measuring(self, command: StopMeasuring, at: float) -> None:
        chunks = [
            key
            for key, (_, order) in self._open.items()
            if isinstance(order, MeasureRows)
            and (order.validation, order.replica) == (command.validation, command.replica)
        ]
        self._close(chunks)
        self._add(("stop rows", command.replica), command)

    def _measure(self, command: MeasureRows, at: float) -> None:
        """To stop what was measured before would now stop this, too."""
        stop: Any = self._open.get(("stop rows", command.replica), (0, None))[1]
        if stop is not None and stop.validation == command.validation:
            del self._open["stop rows", command.replica]
        self._add(("rows", command.validation, command.chunk), command)

    def _sync(self, command: StageWeights | PauseReplica | InstallWeights, at: float) -> None:
        self._add((type(command), command.replica), command)

    def _stop(self, command: StopReplica, at: float) -> None:
        self._replica_gone(command.replica, command.incarnation)
        self._add(("stop", command.replica), command)

    def _set(self, command: SetTimer, at: float) -> None:
        self._add(("timer", command.timer), command)
        self._set_at["timer", command.timer] = at

    def _end_timer(self, of: CancelTimer | TimerFired) -> None:
        self._open.pop(("timer", of.timer), None)
        self._set_at.pop(("timer", of.timer), None)

    def _end(self, command: FinishRun, at: float) -> None:
        """Nothing is wanted any more."""
        self._forget()

    # answers

    def _forget(self, event: Event | None = None) -> None:
        self._open.clear()
        self._set_at.clear()
        self._unanswered.clear()

    def _close(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del self._open[key]

    def _end_group(self, group: int, attempt: int) -> None:
        order: Any = self._open.get(("group", group), (0, None))[1]
        if order is not None and order.attempt <= attempt:
            del self._open["group", group]
            self._open.pop(("cut", group), None)

    def _group_ended(self, event: GroupGenerated | GroupAborted | GroupFailed) -> None:
        order: Any = self._open.get(("group", event.group), (0, None))[1]
        if order is not None and _same(order, event, "attempt", "replica", "incarnation"):
            self._end_group(event.group, event.attempt)

    def _sync_answered(self, event: WeightsStaged | ReplicaPaused | WeightsInstalled | SyncFailed) -> None:
        resume: Any = self._open.get(("resume", event.replica), (0, None))[1]
        if resume is not None and _same(resume, event, "incarnation") and resume.attempt < event.attempt:
            del self._open["resume", event.replica]  # it came before what is answered here
        for kind in _ANSWERED_BY[type(event)]:
            order = self._open.get((kind, event.replica), (0, None))[1]
            if order is not None and _same(order, event, "incarnation", "attempt"):
                del self._open[kind, event.replica]

    def _replica_gone(self, replica: ReplicaId, until: Incarnation) -> None:
        """What was ordered of the lives of a replica up to this one is for nobody."""
        self._close([
            key for key, (_, order) in self._open.items()
            if getattr(order, "replica", None) == replica and getattr(order, "incarnation", 0) <= until
        ])  # fmt: skip

    def _step_failed(self, event: StepFailed) -> None:
        self._close([
            key for key, (_, order) in self._open.items()
            if isinstance(order, ScoreBatch | TrainStep) and _same(order, event, "step", "attempt")
        ])  # fmt: skip

    def _answered(self, key: Key, event: Event, *fields: str) -> None:
        order = self._open.get(key, (0, None))[1]
        if order is not None and _same(order, event, *fields):
            del self._open[key]


def _command(said: list[Any], cause: int) -> Command:
    """From what `plain_command` gave: a record has lists where that has tuples."""
    return command_from([list(value) if type(value) is tuple else value for value in said], cause)


def _same(order: Command, event: Event, *fields: str) -> bool:
    return all(getattr(order, name) == getattr(event, name) for name in fields)


_ANSWERED_BY: dict[type[Event], tuple[type[Command], ...]] = {
    WeightsStaged: (StageWeights,),
    ReplicaPaused: (PauseReplica,),
    WeightsInstalled: (InstallWeights,),
    SyncFailed: SYNC,
}

_ORDERS: dict[type[Command], Callable[[OpenOrders, Any, float], None]] = {
    DrawPrompts: lambda self, c, at: self._add(("draw",), c),
    **dict.fromkeys((StartGroup, ResumeGroup), lambda self, c, at: self._add(("group", c.group), c)),
    **dict.fromkeys((TruncateGroup, ParkGroup), lambda self, c, at: self._add(("cut", c.group), c)),
    AbortGroup: OpenOrders._abort,
    DiscardGroups: OpenOrders._discard,
    **dict.fromkeys(SYNC, OpenOrders._sync),
    ResumeReplica: lambda self, c, at: self._add(("resume", c.replica), c),
    StopReplica: OpenOrders._stop,
    StartReplica: lambda self, c, at: self._add(("start", c.replica), c),
    RetireWeights: OpenOrders._tell,
    ScoreBatch: lambda self, c, at: self._add(("score", c.step, c.task), c),
    TrainStep: lambda self, c, at: self._add(("train", c.step), c),
    PublishWeights: lambda self, c, at: self._add(("publish", c.version), c),
    SaveCheckpoint: lambda self, c, at: self._add(("save", c.steps), c),
    SetTimer: OpenOrders._set,
    CancelTimer: lambda self, c, at: self._end_timer(c),
    FinishRun: OpenOrders._end,
    MeasureRows: OpenOrders._measure,
    StopMeasuring: OpenOrders._stop_measuring,
    EnterState: lambda self, c, at: self._add(("state", c.group), c),
}  # fmt: skip

_ANSWERS: dict[type[Event], Callable[[OpenOrders, Any], None]] = {
    **dict.fromkeys((PromptsDrawn, DrawFailed), lambda self, e: self._answered(("draw",), e, "number")),
    **dict.fromkeys((GroupGenerated, GroupAborted, GroupFailed), OpenOrders._group_ended),
    **dict.fromkeys(_ANSWERED_BY, OpenOrders._sync_answered),
    ReplicaJoined: lambda self, e: self._replica_gone(e.replica, e.incarnation - 1),
    ReplicaLost: lambda self, e: self._replica_gone(e.replica, e.incarnation),
    BatchScored: lambda self, e: self._answered(("score", e.step, e.task), e, "attempt"),
    StepTrained: lambda self, e: self._answered(("train", e.step), e, "attempt"),
    StepFailed: OpenOrders._step_failed,
    **dict.fromkeys(
        (WeightsPublished, PublishFailed), lambda self, e: self._answered(("publish", e.version), e, "attempt")
    ),
    **dict.fromkeys((CheckpointSaved, CheckpointFailed), lambda self, e: self._answered(("save", e.steps), e)),
    TimerFired: lambda self, e: self._end_timer(e),
    **dict.fromkeys(
        (RowsMeasured, RowsFailed),
        lambda self, e: self._answered(("rows", e.validation, e.chunk), e, "attempt", "replica", "incarnation"),
    ),
    **dict.fromkeys(
        (StateLeft, StateFailed), lambda self, e: self._answered(("state", e.group), e, "attempt", "state")
    ),
    RunResumed: OpenOrders._forget,
}  # fmt: skip
