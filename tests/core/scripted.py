"""A scheduler driven by hand: one line of a test is one event, and what was ordered can be asked for."""

from collections.abc import Iterator
from typing import Any, TypeVar

from engine.commands import (
    CancelTimer,
    Command,
    DrawPrompts,
    PublishWeights,
    ResumeGroup,
    SetTimer,
    StartGroup,
    StartProcess,
    TrainStep,
)
from engine.events import (
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderOverdue,
    OrderProgressed,
    PrefixStored,
    ProcessUp,
    PromptsDrawn,
    ReplicaPaused,
    RunResumed,
    RunStarted,
    StepTrained,
    TimerFired,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
    stamp,
)
from engine.policies import PolicySet
from engine.runtime.order_times import NEVER, OrderTimes, OverdueOrder
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.states.orders import RELATIONS
from engine.states.replica import Replica
from engine.states.timeouts import Timeouts
from tests.core.core_rig import CoreRig
from tests.judge.run_ledger import RunLedger

Kind = TypeVar("Kind", bound=Command)


class Scripted(CoreRig):
    """Replicas with many slots joined, prompts drawn on demand, everything else by the test. No order has a time limit,
    unless the test gives it one."""

    def __init__(
        self,
        *,
        replicas: int = 1,
        slots: int = 100,
        samples: int = 1,
        prompts: int = 1000,
        policies: dict[str, str] | None = None,
        answers_draws: bool = True,
        **limits,
    ) -> None:  # type: ignore[no-untyped-def]
        limits = {"timeouts": Timeouts.every(None), **limits}
        chosen = PolicySet.from_names(policies or {})
        self.scheduler = Scheduler(Limits(**limits), chosen)
        self.ledger = RunLedger(self.scheduler.limits, chosen.names)
        self.reacts_again = not policies
        self.prompts = prompts
        self.answers_draws = answers_draws
        self.times = OrderTimes(self.state)
        self.waits: dict[str, str] = {}
        """What a process that is asked waits for; those without an entry wait for nothing."""
        self.silent: set[str] = set()
        """Processes that give no sign of life."""
        self.events = 0
        self.clock = 0.0
        self.timers: dict[int, float] = {}
        """When each timer that was set, and neither fired nor was canceled, is due."""
        self.commands: list[Command] = []
        """Everything ordered so far, but for the first lives of the replicas."""
        self.tell(RunStarted(replicas=replicas))
        for id in range(replicas):
            self.tell(ProcessUp(kind="replica", index=id, life=1, slots=slots, samples=samples))
        self.commands = [order for order in self.commands if not isinstance(order, StartProcess)]

    def tell(self, event: Event, at: float | None = None) -> list[Command]:
        """One event; draws are answered at once, unless that is for the test. Returns what was ordered."""
        self.clock = self.clock + 1.0 if at is None else at
        stamp(event, self.events, self.clock)
        self.events += 1
        if isinstance(event, RunResumed):
            self.timers.clear()
        elif isinstance(event, TimerFired):
            self.timers.pop(event.timer, None)
        new = list(self.scheduler.tick((event,)))
        self.times.note((event,), new, self.clock)
        self.ledger.observe((event,), new)
        self.check_tick((event,), new)
        self.commands += new
        for command in list(new):
            if isinstance(command, SetTimer):
                self.timers[command.timer] = self.clock + command.delay_s
            if isinstance(command, CancelTimer):
                self.timers.pop(command.timer, None)
            if isinstance(command, DrawPrompts) and self.answers_draws:
                first = self.state.groups.ledger.drawn
                count = min(command.count, self.prompts - first)
                last = first + count == self.prompts
                new += self.tell(PromptsDrawn(first=first, count=count, exhausted=last, number=command.number))
        return new

    def tell_together(self, *events: Event) -> list[Command]:
        """Report events in one tick, and answer no order. Returns the new orders."""
        for event in events:
            stamp(event, self.events, self.clock)
            self.events += 1
        new = list(self.scheduler.tick(events))
        self.times.note(events, new, self.clock)
        self.ledger.observe(events, new)
        self.check_tick(events, new)
        self.commands += new
        return new

    def look(self) -> list[Command]:
        """The watchdog looks for overdue orders, and reports them. Returns what was ordered."""
        new: list[Command] = []
        for one in self.times.overdue(self.clock):
            if one.order.number in self.state.orders.by_number and self.state.ending.outcome is None:
                new += self.tell(self.overdue(one), at=self.clock)
        return new

    def overdue(self, one: OverdueOrder) -> OrderOverdue:
        """The report about an overdue order, with the chain of processes that wait for one another."""
        owner, chain, answered = self.state.process_of(one.order.owner), list[str](), True
        if owner is not None and RELATIONS[type(one.order.command)].blames_process:
            chain = [owner.id]
            while answered and chain[-1] not in chain[:-1]:
                awaited = self.state.processes.get(self.waits.get(chain[-1], ""))
                answered = chain[-1] not in self.silent
                if not answered or awaited is None:
                    break
                chain.append(awaited.id)
                if awaited.state != "up":
                    break
        return one.event(tuple(chain), answered)

    def ordered(self, kind: type[Kind]) -> list[Kind]:
        return [command for command in self.commands if isinstance(command, kind)]

    def finish(self, *groups: int, spread: float = 1.0, trainable: int = 2, oldest: int | None = None) -> list[Command]:
        """Running groups end, with tokens of their replica's version, or from `oldest` on."""
        new: list[Command] = []
        for id in groups:
            new += self.tell(self.generated(id, spread=spread, trainable=trainable, oldest=oldest))
        return new

    def generated(self, id: int, spread: float = 1.0, trainable: int = 2, oldest: int | None = None) -> GroupGenerated:
        group = self.state.groups.live[id]
        replica = self._seat(id)
        first = group.oldest_version if group.oldest_version >= 0 else group.admitted_version
        return GroupGenerated(
            group=id, attempt=group.attempt, replica=replica.id, life=replica.life, tokens=10,
            oldest_version=first if oldest is None else oldest, newest_version=replica.version, trainable=trainable,
            reward_mean=0.5, reward_spread=spread,
        )  # fmt: skip

    def _seat(self, id: int) -> Replica:
        """The replica that a group runs on, or ran on last."""
        starts = (order for order in reversed(self.commands) if isinstance(order, StartGroup | ResumeGroup))
        return self.state.replicas.by_id[next(order.replica for order in starts if order.group == id)]

    def abort(self, *groups: int, tokens: int = 5) -> None:
        self._report(GroupAborted, groups, tokens)

    def fail(self, id: int, *, cause: str, reason: str = "no number") -> list[Command]:
        """An attempt of a running group comes to nothing."""
        group = self.state.groups.live[id]
        replica = self._seat(id)
        return self.tell(
            GroupFailed(
                group=id, attempt=group.attempt, replica=replica.id, life=replica.life, cause=cause,
                reason=reason,
            )
        )  # fmt: skip

    def keep_prefix(self, *groups: int, tokens: int = 5) -> None:
        self._report(PrefixStored, groups, tokens)

    def end_trajectories(self, id: int, finished: int) -> list[Command]:
        """`finished` trajectories of a running group have ended."""
        return self.tell(self.progress_of("group", id, finished))

    def progress_of(self, subject: str, id: Any, finished: int = 0) -> OrderProgressed:
        """The report that an open order progresses."""
        order = self.state.orders.find(subject, id)
        assert order is not None
        command: Any = order.command
        return OrderProgressed(order=command.number, finished=finished)

    def _report(self, kind: type[GroupAborted | PrefixStored], groups: tuple[int, ...], tokens: int) -> None:
        for id in groups:
            group = self.state.groups.live[id]
            replica = self._seat(id)
            version = replica.version if tokens else -1
            self.tell(
                kind(
                    group=id, attempt=group.attempt, replica=replica.id, life=replica.life, tokens=tokens,
                    oldest_version=version, newest_version=version,
                )
            )  # fmt: skip

    def train(self) -> None:
        """The step in training ends."""
        last = self.ordered(TrainStep)[-1]
        self.tell(StepTrained(step=last.step, attempt=last.attempt))

    def publish(self) -> None:
        """The version being published reaches the store."""
        last = self.ordered(PublishWeights)[-1]
        self.tell(WeightsPublished(version=last.version, attempt=last.attempt))

    def train_on(self, *groups: int) -> None:
        """Running groups end, and the step that takes them is trained and published."""
        self.finish(*groups)
        self.train()
        self.publish()

    def install(self, id: int = 0, pause: bool = True) -> None:
        """A replica takes the version ordered for it, step by step."""
        replica = self.state.replicas.by_id[id]
        place = {"replica": id, "life": replica.life, "attempt": replica.sync_attempt}
        version = self.state.training.latest_version if replica.next_version is None else replica.next_version
        self.tell(WeightsStaged(**place, version=version))
        if pause:
            self.tell(ReplicaPaused(**place))
            self.tell(WeightsInstalled(**place, version=version))

    def fire(self) -> list[Command]:
        """The timer set last goes off in its time, counted from now."""
        timer = self.ordered(SetTimer)[-1]
        return self.tell(TimerFired(timer=timer.timer), at=self.clock + timer.delay_s)

    def wait(self, seconds: float) -> list[Command]:
        """Nothing happens for so long but that timers fire and the watchdog looks, when they are due. Returns what was
        ordered."""
        until, new = self.clock + seconds, list[Command]()
        while self.state.ending.outcome is None:
            timer = min(self.timers, key=self.timers.__getitem__, default=-1)
            due, look_at = self.timers.get(timer, NEVER), self.times.look_at
            if min(due, look_at) > until:
                break
            if due <= look_at:
                new += self.tell(TimerFired(timer=timer), at=max(self.clock, due))
            else:
                self.clock = max(self.clock, look_at)
                new += self.look()
        self.clock = until
        return new

    def running(self) -> list[int]:
        return sorted(self.state.orders.open["group"])

    def replica_of(self, group: int) -> int:
        """The replica that a group runs on; -1: it does not run."""
        replica = self.state.replicas.of_group(group)
        return -1 if replica is None else replica.id

    def running_on(self, replica: int) -> list[int]:
        """The groups on a replica, in the order they started."""
        return list(self.state.orders.of(replica, "group"))

    def starts(self) -> Iterator[StartGroup | ResumeGroup]:
        return (command for command in self.commands if isinstance(command, StartGroup | ResumeGroup))
