"""Replicas, a trainer and a trajectory store without time: the adversary chooses every order of their events.

They keep the promises of real workers (idempotent by attempt, events of one replica in order) and no others.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.commands import (
    AbortGroup,
    Command,
    DeleteCheckpoint,
    EnterState,
    InspectStep,
    InstallWeights,
    MeasureRows,
    ParkGroup,
    PauseReplica,
    PublishWeights,
    ResumeGroup,
    ResumeReplica,
    SaveCheckpoint,
    ScoreBatch,
    StageWeights,
    StartGroup,
    StopMeasuring,
    TrainStep,
    TruncateGroup,
)
from engine.events import (
    BatchScored,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    InspectionFailed,
    OrderDone,
    OrderProgressed,
    PrefixStored,
    PublishFailed,
    ReplicaPaused,
    RowsFailed,
    RowsMeasured,
    StateFailed,
    StateLeft,
    StepFailed,
    StepInspected,
    StepTrained,
    SyncFailed,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.ids import NO_VERSION, GroupId, LifeNumber, ReplicaId, ValidationId, Version
from engine.simulation.simulated_models import row_reward

Emit = Callable[[Event], None]


@dataclass(slots=True)
class SimGroup:
    """A group that is being generated: its final length, and the version of each token."""

    attempt: int
    target: int
    order: int = -1
    """The number of the order."""
    spans: list[tuple[int, Version]] = field(default_factory=list)
    """(tokens, version), in the order sampled."""
    ended: int = 0
    """Trajectories that it has reported as ended."""

    @property
    def tokens(self) -> int:
        return sum(n for n, _ in self.spans)

    @property
    def unfinished(self) -> int:
        """Number of unfinished trajectories. Of the two, one finishes at half of the tokens."""
        return 1 + (2 * self.tokens < self.target)

    def sample(self, tokens: int, version: Version) -> None:
        """Sample up to `tokens` more tokens."""
        tokens = min(tokens, self.target - self.tokens)
        if tokens > 0:
            self.spans.append((tokens, version))

    def versions(self) -> tuple[Version, Version]:
        """Oldest and newest version among the tokens."""
        seen = [version for _, version in self.spans]
        return (min(seen), max(seen)) if seen else (NO_VERSION, NO_VERSION)


class SimStore:
    """The trajectory store: token versions of partial and finished groups. It survives replicas."""

    def __init__(self, length: Callable[[GroupId], int]) -> None:
        self.length = length
        """Number of tokens that a group will have. Depends on the group alone."""
        self.spans: dict[GroupId, list[tuple[int, Version]]] = {}
        self.discarded: set[GroupId] = set()

    def put(self, group: GroupId, spans: list[tuple[int, Version]]) -> None:
        """Keep a group's tokens, unless the group was discarded."""
        if group not in self.discarded:
            self.spans[group] = spans

    def discard(self, groups: tuple[GroupId, ...]) -> None:
        """Forget groups for good."""
        for group in groups:
            self.discarded.add(group)
            self.spans.pop(group, None)


class SimReplica:
    """One life of a rollout engine."""

    def __init__(
        self, id: ReplicaId, life: LifeNumber, slots: int, version: Version, store: SimStore, emit: Emit,
        samples: int = 1,
    ) -> None:  # fmt: skip
        self.id = id
        self.life = life
        self.slots = slots
        self.samples = samples
        self.version = version
        self.store = store
        self.emit = emit
        self.groups: dict[GroupId, SimGroup] = {}
        self.measuring: dict[tuple[ValidationId, int], MeasureRows] = {}
        self.frozen = False
        self.hung = False
        """It accepts no orders and sends no events."""
        self.work: deque[StageWeights | PauseReplica | InstallWeights] = deque()
        """Sync orders that are not carried out yet, in order."""
        self._seen: dict[GroupId, int] = {}
        self._stopped = -1
        """Number of the newest order to stop measuring."""
        self._seen_chunks: dict[tuple[ValidationId, int], int] = {}
        self._synced: set[tuple[int, type[Command]]] = set()

    def take(self, command: Command) -> None:
        """Receive an order. A repeated order changes nothing."""
        match command:
            case StartGroup() | ResumeGroup():
                self._start(command)
            case AbortGroup():
                if self._runs(command.group, command.attempt):
                    del self.groups[command.group]
                self.emit(OrderDone(orders=(command.number,)))
            case ParkGroup():
                if self._runs(command.group, command.attempt):
                    self._cut(command.group)
            case TruncateGroup():
                if self._runs(command.group, command.attempt):
                    self.finish(command.group)
            case StageWeights() | PauseReplica() | InstallWeights():
                self.work.append(command)
            case ResumeReplica():
                if (command.attempt, type(command)) not in self._synced:
                    self._synced.add((command.attempt, type(command)))
                    self.frozen = False
                self.emit(OrderDone(orders=(command.number,)))
            case MeasureRows():
                chunk = (command.validation, command.chunk)
                if self._seen_chunks.get(chunk, 0) < command.attempt:
                    self._seen_chunks[chunk] = command.attempt
                    self.measuring[chunk] = command
            case StopMeasuring():
                if self._stopped < command.number:
                    self._stopped = command.number
                    self.measuring = {c: rows for c, rows in self.measuring.items() if c[0] != command.validation}
                self.emit(OrderDone(orders=(command.number,)))
            case _:
                raise TypeError(f"a replica cannot {type(command).__name__}")

    def _runs(self, group: GroupId, attempt: int) -> bool:
        return group in self.groups and self.groups[group].attempt == attempt

    def _start(self, command: StartGroup | ResumeGroup) -> None:
        if self._seen.get(command.group, 0) >= command.attempt:
            return
        self._seen[command.group] = command.attempt
        group = SimGroup(command.attempt, self.store.length(command.group), command.number)
        if isinstance(command, ResumeGroup):
            group.spans = list(self.store.spans.get(command.group, ()))  # dropped meanwhile: an abort is on its way
        self.groups[command.group] = group
        running = sum(self.samples - one.ended for one in self.groups.values()) + self.samples * len(self.measuring)
        assert running <= self.slots * self.samples, f"law 2: replica {self.id} generates {running} trajectories"
        if self.is_behind(group):
            self._cut(command.group)
            return
        if isinstance(command, ResumeGroup) and command.truncate:
            self.finish(command.group)

    def is_behind(self, group: SimGroup) -> bool:
        """Whether a group has tokens of a newer version than the replica's: a replica stored them and died before
        reporting."""
        return group.versions()[1] > self.version

    def sample(self, group: GroupId, tokens: int) -> None:
        """Sample tokens of a group with the present weights; none while it is frozen."""
        if not self.frozen:
            self.groups[group].sample(tokens, self.version)

    def finish(self, id: GroupId, trainable: int = 2, spread: float = 1.0) -> None:
        """Finish a group with the tokens that it has."""
        group = self.groups.pop(id)
        self.store.put(id, group.spans)
        oldest, newest = group.versions()
        self.emit(
            GroupGenerated(
                group=id, attempt=group.attempt, replica=self.id, life=self.life, tokens=group.tokens,
                oldest_version=oldest, newest_version=newest, trainable=trainable, reward_mean=0.5,
                reward_spread=spread,
            )
        )  # fmt: skip

    def report_ended(self, id: GroupId, ended: int) -> None:
        """Report that at least `ended` trajectories of a group have ended, if that is more than before."""
        group = self.groups[id]
        group.ended = max(group.ended, min(ended, self.samples))
        self.emit(OrderProgressed(order=group.order, finished=group.ended))

    def keep_prefix(self, id: GroupId) -> None:
        """Store the tokens of a group so far, and report it."""
        group = self.groups[id]
        if not group.spans:
            return
        self.store.put(id, list(group.spans))
        oldest, newest = group.versions()
        self.emit(
            PrefixStored(
                group=id, attempt=group.attempt, replica=self.id, life=self.life, tokens=group.tokens,
                oldest_version=oldest, newest_version=newest, unfinished=group.unfinished,
            )
        )  # fmt: skip

    def measure(self, chunk: tuple[ValidationId, int], succeed: bool = True) -> None:
        """Finish a chunk of validation rows, with one version for all rows."""
        order = self.measuring.pop(chunk)
        place = {
            "validation": order.validation, "chunk": order.chunk, "attempt": order.attempt, "replica": self.id,
            "life": self.life,
        }  # fmt: skip
        if not succeed:
            self.emit(RowsFailed(**place, reason="fault"))
            return
        rewards = [row_reward(row, self.version) for row in range(order.first, order.first + order.count)]
        measured = [reward for reward in rewards if reward is not None]
        rows = tuple(order.first + place for place, reward in enumerate(rewards) if reward is not None)
        self.emit(
            RowsMeasured(
                **place, version=self.version, measured=len(measured), right=sum(r >= 1.0 for r in measured),
                reward=sum(measured), rows=rows, rewards=tuple(measured), answers=(0,) * len(rows),
                right_rows=tuple(row for row, reward in zip(rows, measured, strict=True) if reward >= 1.0),
            )
        )  # fmt: skip

    def fail(self, id: GroupId, cause: str) -> None:
        """Fail the present attempt of a group."""
        group = self.groups.pop(id)
        self.emit(
            GroupFailed(
                group=id, attempt=group.attempt, replica=self.id, life=self.life, cause=cause,
                reason="fault"
            )
        )  # fmt: skip

    def can_sync(self) -> bool:
        """Whether the first sync order can be carried out: a pause in mode `wait` needs every group to end first."""
        if not self.work:
            return False
        head = self.work[0]
        return not (isinstance(head, PauseReplica) and head.mode == "wait" and self.groups)

    def sync(self, succeed: bool = True) -> None:
        """Carry out or fail the first sync order. A repeated order does nothing."""
        command = self.work.popleft()
        if (command.attempt, type(command)) in self._synced:
            return
        self._synced.add((command.attempt, type(command)))
        place = {"replica": self.id, "life": self.life, "attempt": command.attempt}
        if not succeed:
            self.emit(SyncFailed(**place, version=command.version, reason="fault"))
        elif isinstance(command, StageWeights):
            self.emit(WeightsStaged(**place, version=command.version))
        elif isinstance(command, PauseReplica):
            if command.mode in ("abort", "sleep"):
                self._abort_all()
            self.frozen = True
            self.emit(ReplicaPaused(**place))
        else:
            self.version = command.version
            self.emit(WeightsInstalled(**place, version=command.version))

    def _abort_all(self) -> None:
        for id in list(self.groups):
            self._cut(id)

    def _cut(self, id: GroupId) -> None:
        group = self.groups.pop(id)
        if group.spans:
            self.store.put(id, group.spans)
        oldest, newest = group.versions()
        self.emit(
            GroupAborted(
                group=id, attempt=group.attempt, replica=self.id, life=self.life, tokens=group.tokens,
                oldest_version=oldest, newest_version=newest, unfinished=group.unfinished,
            )
        )  # fmt: skip


def state_answer(order: EnterState, cause: str = "", spread: float = 1.0) -> StateLeft | StateFailed:
    """The answer of an added state. `cause`: the retry budget of a failure; empty if the work succeeded."""
    place = {"group": order.group, "attempt": order.attempt}
    if cause:
        return StateFailed(**place, state=order.state, cause=cause, reason="fault")
    return StateLeft(**place, state=order.state, trainable=2, reward_mean=0.5, reward_spread=spread)


def inspection_answer(order: InspectStep, *, succeed: bool, refused: str = "") -> StepInspected | InspectionFailed:
    """The answer of an added state of train steps."""
    subject = {"step": order.step, "attempt": order.attempt, "state": order.state, "version": order.version}
    return StepInspected(**subject, refused=refused) if succeed else InspectionFailed(**subject, reason="fault")


class SimTrainer:
    """The trainer, or a scorer with a separate pool. It carries out its orders one after another."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.hung = False
        """It accepts no orders and sends no events."""
        self.work: deque[Command] = deque()
        self.saved: list[int] = []
        """Train steps in each complete checkpoint."""

    def take(self, command: Command) -> None:
        self.work.append(command)

    def progress(self) -> None:
        """Report that the first order progresses."""
        first: Any = self.work[0]
        self.emit(OrderProgressed(order=first.number))

    def do(self, succeed: bool = True) -> None:
        """Carry out or fail the first order."""
        command = self.work.popleft()
        match command:
            case ScoreBatch() if succeed:
                self.emit(BatchScored(step=command.step, attempt=command.attempt, task=command.task))
            case TrainStep() if succeed:
                self.emit(StepTrained(step=command.step, attempt=command.attempt, updates=1))
            case ScoreBatch() | TrainStep():
                self.emit(StepFailed(step=command.step, attempt=command.attempt, reason="fault"))
            case PublishWeights() if succeed:
                self.emit(WeightsPublished(version=command.version, attempt=command.attempt))
            case PublishWeights():
                self.emit(PublishFailed(version=command.version, attempt=command.attempt, reason="fault"))
            case SaveCheckpoint():
                if succeed:
                    self.saved.append(command.steps)
                    self.emit(CheckpointSaved(steps=command.steps))
                else:
                    self.emit(CheckpointFailed(steps=command.steps, reason="fault"))
            case DeleteCheckpoint():
                if command.steps in self.saved:
                    self.saved.remove(command.steps)
                self.emit(OrderDone(orders=(command.number,)))
            case _:
                raise TypeError(f"a trainer cannot {type(command).__name__}")
