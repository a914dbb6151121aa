"""The course of a run as its record tells it: who started when on which weights, who was trained when and beside whom.

Made from events and commands alone, of a real run's record or of a simulated world's; never from the configuration and
never from the scheduler's own books. `definitions.py` says in these terms what each mode is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.commands import (
    AbortGroup,
    Command,
    EnterState,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    ScoreBatch,
    StartGroup,
    TrainStep,
)
from engine.events import (
    BatchScored,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderProgressed,
    ProcessLost,
    ProcessUp,
    ReplicaPaused,
    StepFailed,
    StepTrained,
    WeightsInstalled,
    WeightsPublished,
)
from engine.ids import GroupId, ReplicaId, StepId, Version
from engine.record import read
from engine.record.frames import Tick
from engine.record.recorder import MemoryRecorder

Key = tuple[int, int, Version]


@dataclass(frozen=True)
class Begun:
    """A group's first start: position in the record, and the version its replica had."""

    group: GroupId
    at: int
    version: Version


@dataclass(frozen=True)
class Cut:
    """A group cut short: position in the record, tokens it had, and whether its replica was on its way to sleep."""

    group: GroupId
    at: int
    tokens: int
    asleep: bool


@dataclass(frozen=True)
class Freed:
    """A trajectory or a group ended on a replica that was not paused, and everything that follows was ordered."""

    group: GroupId
    at: int
    empty: int
    """Slots of the replica that no group needs."""
    running: int
    begun: int
    """Groups that had started."""
    parked: int
    """Groups that could resume on the replica."""
    steps: int
    """Train steps in the version of the replica."""


@dataclass
class Trained:
    """A train step: its groups, the positions between which it was trained, and who ran at any time between them."""

    groups: tuple[GroupId, ...]
    said: tuple[int, ...]
    """Staleness as the order has it."""
    ordered: int
    done: int = -1
    beside: set[GroupId] = field(default_factory=set)
    """Groups that held a slot of a replica that was awake, while it was trained."""


class Course:
    """Everything below is in the order of the record, whose positions are its events' numbers."""

    def __init__(self, ticks: Iterable[Tick]) -> None:
        self.begun: dict[GroupId, Begun] = {}
        self.generated: dict[GroupId, GroupGenerated] = {}
        self.ready_at: dict[GroupId, int] = {}
        self.cut: list[Cut] = []
        self.resumed: list[tuple[int, GroupId]] = []
        self.preferred: list[tuple[Key, Key]] = []
        """Of every group that continues: unfinished trajectories, tokens (negative), oldest version; and the least that
        any parked group had then."""
        self._parked: dict[GroupId, Key] = {}
        self._parked_on: dict[GroupId, Version] = {}
        """The version that a parked group ran on last; one that is older cannot continue it."""
        self.failed: set[GroupId] = set()
        self.steps: dict[StepId, Trained] = {}
        self.steps_in: dict[Version, int] = {0: 0}
        """Train steps in each version that was published."""
        self.installed: list[tuple[int, ReplicaId, Version]] = []
        self.sleeps: list[tuple[int, ReplicaId]] = []
        self.scored: list[tuple[int, int, StepId, str]] = []
        """(ordered at, done at, step, task)."""
        self.entered: list[tuple[int, GroupId, str]] = []
        self.freed: list[Freed] = []
        self._slots: dict[ReplicaId, int] = {}
        self._samples = 1
        self._ended: dict[GroupId, int] = {}
        """Trajectories of running groups that have ended."""
        self._incarnations: dict[ReplicaId, int] = {}
        self._paused: set[ReplicaId] = set()
        self._running: dict[GroupId, ReplicaId] = {}
        self._orders: dict[GroupId, StartGroup | ResumeGroup] = {}
        """The newest order to generate each group."""
        self._versions: dict[ReplicaId, Version] = {}
        self._to_sleep: set[ReplicaId] = set()
        self._publishing: dict[Version, int] = {}
        self._scoring: dict[tuple[StepId, str], int] = {}
        self._training: StepId | None = None
        for tick in ticks:
            free: list[StartGroup | ResumeGroup] = []
            for event in tick.events:
                at = event.id
                if isinstance(event, GroupGenerated) and self._is_newest(event):
                    free.append(self._orders[event.group])
                elif isinstance(event, OrderProgressed) and (order := self._progressing(event)) is not None:
                    free.append(order)
                self._happened(at, event)
            for command in tick.commands:
                self._ordered(at, command)
            for order in free:
                if order.replica not in self._paused:
                    self._look_at_slots(at, order)

    def _progressing(self, event: OrderProgressed) -> StartGroup | ResumeGroup | None:
        """The order to generate a running group, if it progresses."""
        orders = (self._orders[group] for group in self._running)
        return next((order for order in orders if order.number == event.order), None)

    def _look_at_slots(self, at: int, order: StartGroup | ResumeGroup) -> None:
        replica = order.replica
        held = [group for group, where in self._running.items() if where == replica]
        ended = sum(self._ended[group] for group in held)
        version = self._versions[replica]
        self.freed.append(
            Freed(
                group=order.group,
                at=at,
                empty=self._slots[replica] - len(held) + ended // self._samples,
                running=len(self._running),
                begun=len(self.begun),
                parked=sum(needed <= version for needed in self._parked_on.values()),
                steps=self.steps_in[version],
            )
        )

    # facts

    def _happened(self, at: int, event: Event) -> None:
        match event:
            case ProcessUp(kind="replica") if event.incarnation > self._incarnations.get(event.index, 0):
                self._lose(event.index)
                self._incarnations[event.index] = event.incarnation
                self._versions[event.index] = event.version
                self._slots[event.index], self._samples = event.slots, event.samples
                self._to_sleep.discard(event.index)
                self._paused.discard(event.index)
            case WeightsInstalled():
                self._versions[event.replica] = event.version
                self.installed.append((at, event.replica, event.version))
            case ReplicaPaused() if event.replica in self._to_sleep:
                self.sleeps.append((at, event.replica))
            case ProcessLost(kind="replica") if self._incarnations.get(event.index) == event.incarnation:
                self._lose(event.index)
            case OrderProgressed() if (order := self._progressing(event)) is not None:
                self._ended[order.group] = event.finished
            case GroupGenerated() if self._leaves(event):
                self.generated[event.group] = event
                self.ready_at[event.group] = at
            case GroupAborted() if self._leaves(event):
                self.cut.append(Cut(event.group, at, event.tokens, event.replica in self._to_sleep))
                self._parked[event.group] = (event.unfinished, -event.tokens, event.oldest_version)
                self._parked_on[event.group] = self._versions[event.replica]
            case GroupFailed() if self._leaves(event):
                self.failed.add(event.group)
            case WeightsPublished():
                self.steps_in[event.version] = self._publishing[event.version]
            case BatchScored() if (event.step, event.task) in self._scoring:
                ordered = self._scoring.pop((event.step, event.task))
                self.scored.append((ordered, at, event.step, event.task))
            case StepTrained() if self._training == event.step:
                self.steps[event.step].done = at
                self._training = None
            case StepFailed() if self._training == event.step:
                self._training = None

    def _lose(self, replica: ReplicaId) -> None:
        """An incarnation ended, with what ran on it."""
        self._running = {group: where for group, where in self._running.items() if where != replica}

    def _is_newest(self, event: GroupGenerated | GroupAborted | GroupFailed) -> bool:
        """Whether this is about the group's newest attempt, and it runs."""
        return event.group in self._running and self._orders[event.group].attempt == event.attempt

    def _leaves(self, event: GroupGenerated | GroupAborted | GroupFailed) -> bool:
        """Whether this is the group's newest attempt, which then holds no slot any more."""
        if not self._is_newest(event):
            return False
        del self._running[event.group]
        return True

    # orders

    def _ordered(self, at: int, command: Command) -> None:
        match command:
            case StartGroup():
                self.begun.setdefault(command.group, Begun(command.group, at, self._versions.get(command.replica, 0)))
                self._seat(command)
            case ResumeGroup():
                self.resumed.append((at, command.group))
                if command.group in self._parked:
                    kept = [key for key in self._parked.values() if key[1]]
                    self.preferred.append((self._parked[command.group], min(kept)))
                self._seat(command)
            case AbortGroup():
                self._running.pop(command.group, None)
            case ResumeReplica():
                self._paused.discard(command.replica)
            case PauseReplica():
                self._paused.add(command.replica)
                (self._to_sleep.add if command.mode == "sleep" else self._to_sleep.discard)(command.replica)
            case TrainStep():
                self.steps[command.step] = Trained(command.groups, command.staleness, at)
                self.steps[command.step].beside = set(self._running)
                self._training = command.step
            case ScoreBatch():
                self._scoring[command.step, command.task] = at
            case PublishWeights():
                self._publishing[command.version] = command.steps
            case EnterState():
                self.entered.append((at, command.group, command.state))

    def _seat(self, command: StartGroup | ResumeGroup) -> None:
        self._parked.pop(command.group, None)
        self._parked_on.pop(command.group, None)
        self._running[command.group] = command.replica
        self._orders[command.group] = command
        self._ended[command.group] = 0
        if self._training is not None:
            self.steps[self._training].beside.add(command.group)

    # figures

    @property
    def batches(self) -> list[tuple[GroupId, ...]]:
        return [self.steps[step].groups for step in sorted(self.steps)]

    def staleness(self, step: StepId) -> list[int]:
        """Of every group of a step: how many train steps behind it its oldest token was."""
        return [step - self.steps_in[self.generated[group].oldest_version] for group in self.steps[step].groups]

    def every_staleness(self) -> list[int]:
        """Of every group trained on, in the order of the steps."""
        return [stale for step in sorted(self.steps) for stale in self.staleness(step)]

    @property
    def out_of_order(self) -> int:
        """Groups trained on before one that had started earlier."""
        taken = [(step, self.begun[group].at) for step in sorted(self.steps) for group in self.steps[step].groups]
        return sum(any(s > step and b < begun for s, b in taken) for step, begun in taken)


def course_of(source: Path | MemoryRecorder) -> Course:
    """Of a run's directory, or of a record in memory."""
    return Course(read(source / "schedule" if isinstance(source, Path) else source).ticks())
