"""A run on a virtual clock, with latencies chosen by the test: the real scheduler, driver and metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from engine import commands as order
from engine import events as fact
from engine.commands import Command
from engine.events import Event
from engine.ids import ReplicaId, Version
from engine.metrics.collector import RunMetrics
from engine.metrics.journal import Journal
from engine.metrics.transitions import Transitions
from engine.record import NullRecorder
from engine.runtime.driver import Driver, Recorder
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits, Pool, ValidationLimits


@dataclass
class Clockwork:
    """Every command's answer comes after a fixed time; `run(until)` plays the answers in order of time."""

    limits: Limits
    replicas: int = 2
    slots: int = 2
    generation_s: Callable[[int], float] = lambda group: 1.0
    fails: Callable[[int], bool] = lambda group: False
    """Whether the attempts of a group fail, for its data."""
    training_s: float = 0.5
    publishing_s: float = 0.25
    starting_s: float = 0.0
    install_s: float = 0.125
    measure_s: float = 0.5
    reports: bool = True
    journal: Path | None = None
    recorder: Recorder | None = None
    snapshot_every: int = 0
    at: float = 0.0
    drawn: int = 0
    prompts: int = 10_000
    queue: list[tuple[float, int, Event]] = field(default_factory=list)
    versions: dict[ReplicaId, Version] = field(default_factory=dict)
    sent: int = 0
    failed: set[int] = field(default_factory=set)
    """Groups whose work in an added state came to nothing once: every third."""

    def __post_init__(self) -> None:
        transitions = Transitions()
        self.scheduler = Scheduler(self.limits, observe=transitions.changed)
        journal = None if self.journal is None else Journal(self.journal)
        self.metrics = RunMetrics(self.scheduler, transitions, journal)
        self.driver = Driver(
            self.scheduler, self, self.recorder or NullRecorder(), self, self.metrics.observe,
            snapshot_every=self.snapshot_every, books=transitions,
        )  # fmt: skip
        self.after(0.0, fact.RunStarted(replicas=self.replicas))

    def now(self) -> float:
        return self.at

    def after(self, seconds: float, event: Event) -> None:
        heappush(self.queue, (self.at + seconds, self.sent, event))
        self.sent += 1

    def run(self, until: Callable[["Clockwork"], bool] = lambda world: False) -> "Clockwork":
        while self.queue and not until(self):
            self.at, _, event = heappop(self.queue)
            self.driver.deliver(event)
        return self

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: Command) -> None:
        match command:
            case order.DrawPrompts(count=count, number=number):
                given = min(count, self.prompts - self.drawn)
                drawn = fact.PromptsDrawn(first=self.drawn, count=given, exhausted=given < count, number=number)
                self.after(0.0, drawn)
                self.drawn += given
            case order.StartGroup() | order.ResumeGroup():
                self.after(self.generation_s(command.group), self.generated(command))
            case order.EnterState(group=group, attempt=attempt, state=state):
                place = {"group": group, "attempt": attempt, "state": state}
                reward = {"trainable": 4, "reward_mean": 0.5, "reward_spread": 1.0}
                if group % 3 == 2 and group not in self.failed:
                    self.failed.add(group)
                    self.after(1.0, fact.StateFailed(**place, cause="data", reason="no judge"))
                else:
                    self.after(1.0, fact.StateLeft(**place, **reward))
            case order.StartProcess(kind="replica", index=index, incarnation=life):
                self.versions[index] = 0
                up = fact.ProcessUp(kind="replica", index=index, incarnation=life, slots=self.slots, version=0)
                self.after(self.starting_s, up)
            case order.StartProcess(kind=kind, index=index, incarnation=life):
                self.after(self.starting_s, fact.ProcessUp(kind=kind, index=index, incarnation=life))
            case order.StopProcess(kind=kind, index=index, incarnation=life, reason=reason):
                self.after(0.0, fact.ProcessLost(kind=kind, index=index, incarnation=life, reason=reason))
            case order.StageWeights():
                self.after(0.0, fact.WeightsStaged(version=command.version, **self.sync(command)))
            case order.PauseReplica():
                if command.mode in ("abort", "sleep"):
                    self.abort_all(command.replica)
                self.after(0.0, fact.ReplicaPaused(**self.sync(command)))
            case order.InstallWeights():
                self.versions[command.replica] = command.version
                self.after(self.install_s, fact.WeightsInstalled(version=command.version, **self.sync(command)))
            case order.MeasureRows():
                names = ("validation", "chunk", "attempt", "replica", "incarnation", "version")
                place = {name: getattr(command, name) for name in names}
                right = min(command.count, command.version)
                rows = tuple(range(command.first, command.first + command.count))
                rewards = tuple(float(place < right) for place in range(command.count))
                said = {"measured": command.count, "right": right, "reward": float(right)}
                said |= {"rows": rows, "rewards": rewards, "answers": (0,) * command.count, "right_rows": rows[:right]}
                self.after(self.measure_s, fact.RowsMeasured(**place, **said))
            case order.TrainStep(step=step, attempt=attempt):
                if self.reports:
                    self.metrics.report(step, {"loss": 0.5 / (step + 1), "seconds_pack": 0.1, "ess": float("nan")})
                self.after(self.training_s, fact.StepTrained(step=step, attempt=attempt))
            case order.PublishWeights(version=version, attempt=attempt):
                self.after(self.publishing_s, fact.WeightsPublished(version=version, attempt=attempt))
            case order.AbortGroup() | order.ResumeReplica() | order.StopMeasuring():
                self.after(0.0, fact.OrderDone(orders=(command.number,)))
            case order.DiscardGroups() | order.RetireWeights() | order.DeleteCheckpoint():
                self.after(0.0, fact.OrderDone(orders=(command.number,)))
            case _:
                pass

    def sync(self, command: order.StageWeights | order.PauseReplica | order.InstallWeights) -> dict[str, int]:
        """The fields that every answer to an order about weights repeats."""
        return {name: getattr(command, name) for name in ("replica", "incarnation", "attempt")}

    def abort_all(self, replica: ReplicaId) -> None:
        """Each running group comes back without a token; what was on its way is an echo by then."""
        for id in self.scheduler.state.fleet.replicas[replica].groups:
            group = self.scheduler.state.groups[id]
            life = self.scheduler.state.fleet.replicas[replica].incarnation
            attempt = {"group": id, "attempt": group.attempt, "replica": replica, "incarnation": life}
            self.after(0.0, fact.GroupAborted(**attempt, tokens=0, oldest_version=-1, newest_version=-1))

    def generated(self, command: order.StartGroup | order.ResumeGroup) -> Event:
        if self.fails(command.group):
            attempt = {"group": command.group, "attempt": command.attempt}
            place = {"replica": command.replica, "incarnation": command.incarnation}
            return fact.GroupFailed(**attempt, **place, cause="data", reason="no reward")
        version = self.versions[command.replica]
        return fact.GroupGenerated(
            group=command.group,
            attempt=command.attempt,
            replica=command.replica,
            incarnation=command.incarnation,
            tokens=10,
            oldest_version=version,
            newest_version=version,
            trainable=4,
            reward_mean=min(1.0, command.group / 16),
            reward_spread=1.0,
        )


def clockwork(
    batch: int = 2,
    stale: int = 1,
    workers: int = 4,
    steps: int | None = 4,
    mode: str = "keep",
    validation: ValidationLimits | None = None,
    pools: tuple[Pool, ...] = (),
    **others: Any,
) -> Clockwork:
    """A small run; `others` are fields of `Clockwork`."""
    limits = Limits(
        train_batch_size=batch,
        max_staleness_steps=stale,
        max_concurrent_groups=workers,
        max_steps=steps,
        sync_mode=mode,
        validation=validation,
        pools=pools,
    )
    return Clockwork(limits, **others)
