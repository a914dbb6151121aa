"""A run in which the test chooses every order: which message arrives, which group ends, what fails, who dies.

The agents are those of the simulation; there is no clock. After every event every law is checked against the records
and against the judge's true books.
"""

from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any

from engine.commands import (
    CancelTimer,
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
    InspectStep,
    PublishWeights,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StartProcess,
    StopProcess,
    TrainStep,
)
from engine.events import (
    DrawFailed,
    Event,
    OrderDone,
    ProcessLost,
    ProcessUp,
    PromptsDrawn,
    RunStarted,
    SettingChanged,
    TimerFired,
)
from engine.policies import PolicySet
from engine.record.frames import Header, Tick
from engine.record.reader import Record, read
from engine.record.recorder import MemoryRecorder, Recorder
from engine.record.recovery import Recovered, recover
from engine.runtime.driver import Driver
from engine.runtime.order_times import NEVER, OrderTimes
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.states.orders import RELATIONS
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER
from tests.core.agents import SimReplica, SimStore, SimTrainer, inspection_answer, state_answer
from tests.core.core_rig import CoreRig
from tests.judge.run_checks import Judge

AT_REST = "the test wants it to rest"


class Adversary(CoreRig):
    """Executor whose every effect waits until the test asks for it."""

    def __init__(
        self,
        limits: Limits,
        policies: PolicySet,
        prompts: int,
        slots: int,
        snapshot_every: int = 0,
        samples: int = 1,
        together: int = 1,
        replicas: int = 0,
    ) -> None:
        """`together`: number of events that arrive at once. They are one tick, unless some need their own. `replicas`:
        number of replicas that join first, at least as many as validations need."""
        self.together = together
        self.arriving: list[Event] = []
        """Events that arrive with the next ones."""
        self.limits = limits
        self.prompts = prompts
        self.slots = slots
        self.samples = samples
        self.drawn = 0
        self.time = 0.0
        self.store = SimStore(lambda group: 1 + group * 7 % 5)
        self.judge = Judge(limits, policies, self.store)
        self.scheduler = Scheduler(limits, policies, observe=self.judge.changed)
        self.times = OrderTimes(self.scheduler.state)
        header = Header(run="adversary", limits=limits.to_plain(), policies=dict(policies.names))
        self.recorder: Any = self.new_record(header)
        self.snapshot_every = snapshot_every
        self.driver = Driver(self.scheduler, self, self.recorder, self, self._observe, snapshot_every=snapshot_every)
        self.up: dict[int, deque[Event]] = {}
        self.down: dict[int, deque[Command]] = {}
        self.replicas: dict[int, SimReplica] = {}
        self.lives: dict[int, int] = {}
        """The last life of each replica that was up."""
        self.starting: dict[tuple[str, int], int] = {}
        """Lives that were ordered and are not up."""
        self.trainer = SimTrainer(self._post(-1))
        self.scorers: dict[int, SimTrainer] = {}
        """Of the pools in which nothing is trained."""
        self.draws: list[DrawPrompts] = []
        self.timers: list[SetTimer] = []
        self.due: dict[int, float] = {}
        """When each timer is to fire."""
        self.judged: list[EnterState | InspectStep] = []
        """Work of added states in progress; it may end in any order."""
        self.done: list[int] = []
        """Orders that only had to arrive and did. Their answers may come late, in any order, together or one by one."""
        self.past: list[Event] = []
        """Events that may arrive again."""
        self.history: list[Event] = []
        self.deliver(RunStarted())
        self.least = limits.validators().stop
        """The fewest replicas that the run can have."""
        self.first = max(replicas, self.least) if replicas else 0
        """Number of replicas that joined first."""
        for id in range(self.first):
            self.join(id)

    def new_record(self, header: Header) -> MemoryRecorder | Recorder:
        return MemoryRecorder(header)

    def now(self) -> float:
        return self.time

    def _observe(self, tick: Tick) -> None:
        self.times.note(tick.events, tick.commands, tick.at)
        self.judge_tick(tick)
        self.check_tick(tick.events, tick.commands)

    def judge_tick(self, tick: Tick) -> None:
        self.judge.observe(tick.events, tick.commands)

    def _post(self, source: int) -> Callable[[Event], None]:
        def post(event: Event) -> None:
            if isinstance(event, OrderDone):
                self.done += event.orders
            else:
                self.up.setdefault(source, deque()).append(event)

        return post

    def deliver(self, event: Event) -> None:
        self.time += 1.0
        if not isinstance(event, SettingChanged):  # checked when it is requested; repeated later, it may break a law
            self.past.append(copy(event))
        self.history.append(event)
        self._arrive(event)

    def _arrive(self, event: Event) -> None:
        self.arriving.append(event)
        if len(self.arriving) >= self.together or not self.driver.events_handled:
            self.arrive()

    def arrive(self) -> bool:
        """Whatever is on its way arrives. False where that is nothing."""
        events, self.arriving = self.arriving, []
        self.driver.deliver(*events)
        return bool(events)

    def execute(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case DrawPrompts():
                    self.draws.append(command)
                case SetTimer():
                    self.timers.append(command)
                    self.due[command.timer] = self.time + command.delay_s
                case CancelTimer():
                    self.timers = [t for t in self.timers if t.timer != command.timer]
                case ScoreBatch() | TrainStep():
                    self._work(command)
                case PublishWeights() | SaveCheckpoint() | DeleteCheckpoint():
                    self.trainer.take(command)
                case StopProcess():
                    self._stop(command)
                case StartProcess():
                    self._start(command)
                case DiscardGroups():
                    self.store.discard(command.groups)
                    self.done.append(command.number)
                case EnterState() | InspectStep():
                    self.judged.append(command)
                case RetireWeights():
                    self.done.append(command.number)
                case FinishRun():
                    pass
                case _:
                    self.down.setdefault(command.replica, deque()).append(command)

    def _idle(self, id: int) -> bool:
        replica = self.replicas.get(id)
        return replica is None or replica.frozen or not (replica.groups or replica.measuring)

    def _work(self, command: ScoreBatch | TrainStep) -> None:
        pools = self.state.pools
        lease = pools.of(command.task if isinstance(command, ScoreBatch) else "train")
        self.judge.begin_task(pools.sleepers(lease), self._idle, command)
        task = command.task if isinstance(command, ScoreBatch) else "train"
        for index, tasks in enumerate(self.limits.scorers()):
            if task in tasks:
                self.scorers.setdefault(index, SimTrainer(self._post(-2 - index))).take(command)
                return
        self.trainer.take(command)

    def _start(self, command: StartProcess) -> None:
        """One that is there already is not started again. What was ordered of a trainer before is nobody's."""
        process = (command.kind, command.index)
        if command.kind == REPLICA and self.lives.get(command.index, 0) >= command.life:
            return
        self.starting[process] = command.life
        if command.kind == TRAINER:
            saved, self.trainer = self.trainer.saved, SimTrainer(self._post(-1))
            self.trainer.saved = saved
        elif command.kind == SCORER:
            self.scorers[command.index] = SimTrainer(self._post(-2 - command.index))

    def _stop(self, command: StopProcess) -> None:
        kind, index = command.kind, command.index
        if self.starting.get((kind, index)) == command.life:
            self.fail_start((kind, index))
        elif kind != REPLICA:
            self._end(kind, index)
            self._post(3000)(ProcessLost(kind=kind, index=index, life=command.life, reason=command.reason))
        elif index in self.replicas and self.replicas[index].life == command.life:
            self.kill(index)
        elif self.lives.get(index, 0) < command.life:  # it waited for its pool
            self._post(3000)(ProcessLost(kind=kind, index=index, life=command.life, reason=command.reason))

    def _end(self, kind: str, index: int) -> None:
        """What a worker was ordered, and what it is ordered until it starts again, is nobody's."""
        if kind == ADDED_STATES:
            self.judged.clear()
        elif kind == TRAINER or (kind == SCORER and index in self.scorers):
            worker = self.trainer if kind == TRAINER else self.scorers[index]
            worker.work.clear()
            worker.hung = True

    # what can happen; each is one action of one agent

    def join(self, id: int) -> None:
        """A replica is up whose start was ordered, or that the launch has started."""
        known = self.state.find_process(REPLICA, id)
        life = self.starting.pop((REPLICA, id), 1 if known is None else known.life + 1)
        self.lives[id] = life
        self.down.pop(id, None)
        self.replicas[id] = SimReplica(id, life, self.slots, 0, self.store, self._post(id), self.samples)
        self._post(id)(
            ProcessUp(
                kind=REPLICA, index=id, life=life, slots=self.slots, samples=self.samples, version=0
            )
        )  # fmt: skip

    def come_up(self, process: tuple[str, int]) -> None:
        """Any process that was ordered to start is up."""
        kind, index = process
        if kind == REPLICA:
            self.join(index)
        else:
            up = ProcessUp(kind=kind, index=index, life=self.starting.pop(process))
            self._post(-1 if kind == TRAINER else -2 - index)(up)

    def fail_start(self, process: tuple[str, int], final: bool = False) -> None:
        """A life ends before it is up, with what it was ordered."""
        lost = ProcessLost(
            kind=process[0], index=process[1], life=self.starting.pop(process), reason="unborn", final=final
        )
        if process[0] != REPLICA:
            self._end(*process)
        self._post(3000)(lost)

    def kill(self, id: int, final: bool = False) -> None:
        """What it sent before its death still waits to arrive, perhaps after the news of it."""
        replica = self.replicas.pop(id)
        lost = ProcessLost(kind=REPLICA, index=id, life=replica.life, reason="killed", final=final)
        self.up.setdefault(1000 + id, deque()).append(lost)

    def kill_worker(self, kind: str, index: int = 0) -> None:
        """The trainer, a scorer, or the process of the added states dies, with what it was ordered."""
        self.arrive()  # a resume on its way would make the news that of an earlier life
        process = self.state.find_process(kind, index)
        if process is None or process.state != "up":
            return
        self._end(kind, index)
        self.deliver(ProcessLost(kind=kind, index=index, life=process.life, reason="killed"))

    def killable(self) -> list[tuple[str, int]]:
        """Processes that are no replicas, and up."""
        processes = self.state.processes.values()
        return [(p.kind, p.index) for p in processes if p.state == "up" and p.kind in (TRAINER, SCORER, ADDED_STATES)]

    def crash(self, replicas: int, *, kept: bool = False, missing: Callable[[int], bool] = lambda group: False) -> None:
        """Every process ends at once; what is left is the record and the checkpoints. Then the run is resumed.

        `kept`: the trajectory store is left as well, but for groups that are `missing` from it.
        """
        self.twin = None
        judging = False
        recovered = recover(self.record(), lambda *change: self.judge.changed(*change) if judging else None)
        judging = True
        self.go_on(recovered)
        self.scheduler = recovered.scheduler
        self.times = OrderTimes(self.state)
        self.driver = Driver(
            self.scheduler, self, self.recorder, self, self._observe, recovered.events, self.snapshot_every
        )
        saved = [steps for steps in self.trainer.saved if steps <= self.state.training.steps_trained]
        self.trainer = SimTrainer(self._post(-1))
        self.trainer.saved = saved
        self.scorers.clear()
        self.drawn = self.state.groups.ledger.drawn
        self.up.clear()
        self.down.clear()
        self.replicas.clear()
        self.starting.clear()
        self.lives.clear()
        self.draws.clear()
        self.timers.clear()
        self.judged.clear()
        self.done.clear()
        self.arriving.clear()
        if kept:
            state = self.state
            stored = [
                g for g in state.groups.live.values() if g.state == "generated" or (g.tokens and g.state != "batched")
            ]
            gone = tuple(g.id for g in stored if missing(g.id))
            self.deliver(recovered.resume_without_loss(replicas=replicas, missing=gone))
        else:
            self.deliver(recovered.resume_from_checkpoint(steps=max(saved, default=0), replicas=replicas))
        self.past.clear()  # nobody is left who could say any of it again
        for id in range(replicas):
            self.join(id)

    def record(self) -> Record:
        """What a crash leaves of the record."""
        return read(self.recorder)

    def go_on(self, recovered: Recovered) -> None:
        """The record continues where it ends."""

    def arrive_up(self, source: int) -> None:
        self.deliver(self.up[source].popleft())

    def arrive_down(self, id: int) -> None:
        command = self.down[id].popleft()
        replica = self.replicas.get(id)
        if replica is not None and replica.life == command.life and not replica.hung:
            replica.take(command)

    def repeat(self, index: int) -> None:
        """An echo of something already delivered."""
        if self.past:
            self._arrive(copy(self.past[index % len(self.past)]))

    def draw(self, most: int = 1 << 30) -> None:
        """The source gives what was ordered, or `most` of it; for 0 the draw fails, unless that would end the run."""
        command = self.draws.pop(0)
        if not most and self.state.ending.failed_draws + 1 < self.scheduler.limits.infrastructure_attempts:
            self.deliver(DrawFailed(number=command.number, reason="the source is asleep"))
            return
        count = min(command.count, self.prompts - self.drawn, max(1, most))
        first, self.drawn = self.drawn, self.drawn + count
        last = self.drawn == self.prompts
        self.deliver(PromptsDrawn(first=first, count=count, exhausted=last, number=command.number))

    def fire(self, in_time: bool = False) -> None:
        """The oldest timer fires, or `in_time` the first, when it is due."""
        if in_time:
            self.timers.sort(key=lambda timer: self.due[timer.timer])
            self.time = max(self.time, self.due[self.timers[0].timer] - 1.0)
        self.deliver(TimerFired(timer=self.timers.pop(0).timer))

    def unanswered(self) -> list[list[Any]]:
        """Orders whose answer may be lost."""
        return [orders for orders in (self.draws, self.judged, self.done) if orders]

    def say_done(self, first: int, count: int) -> None:
        """Some of the orders that arrived are reported done, from any of them on; the last comes first."""
        first %= len(self.done)
        reported, self.done[first : first + count] = self.done[first : first + count], []
        self.deliver(OrderDone(orders=tuple(reversed(reported))))

    def find_overdue(self, waits_for: tuple[str, ...] = (), answered: bool = True) -> None:
        """Time passes until an order may be overdue. The owner of one that is waits for these processes, of which the
        last gives a sign of life or not."""
        self.time = max(self.time, self.times.look_at)
        for one in self.times.overdue(self.time):
            owner = self.state.process_of(one.order.owner)
            asked = owner is not None and RELATIONS[type(one.order.command)].blames_process
            chain = (owner.id, *waits_for) if owner is not None and asked else ()
            self.deliver(one.event(chain, answered or not asked))

    @property
    def is_timed(self) -> bool:
        """Whether an open order runs towards a limit."""
        return self.times.look_at < NEVER

    def in_added_states(self) -> range:
        """Work of added states that may end, by its index: their process is up."""
        return range(0 if (ADDED_STATES, 0) in self.starting else len(self.judged))

    def leave(self, index: int, cause: str = "") -> None:
        """The work of an added state ends, or fails for `cause`."""
        order = self.judged.pop(index % len(self.judged))
        if isinstance(order, InspectStep):
            self._post(2000)(inspection_answer(order, succeed=not cause))
        else:
            self._post(2000)(state_answer(order, cause))

    def sources(self) -> list[int]:
        return [source for source, waiting in self.up.items() if waiting]

    def addressees(self) -> list[int]:
        return [id for id, waiting in self.down.items() if waiting]

    def awake(self) -> list[SimReplica]:
        """The replicas that do not hang."""
        return [replica for replica in self.replicas.values() if not replica.hung]

    def running(self) -> list[tuple[SimReplica, int]]:
        return [(replica, group) for replica in self.awake() for group in replica.groups]

    def measuring(self) -> list[tuple[SimReplica, tuple[int, int]]]:
        return [(replica, chunk) for replica in self.awake() for chunk in replica.measuring]

    def working(self) -> list[SimTrainer]:
        """The trainer and the scorers that are up, do not hang and have something to do."""
        workers = {(TRAINER, 0): self.trainer, **{(SCORER, index): one for index, one in self.scorers.items()}}
        return [
            worker for process, worker in workers.items()
            if worker.work and not worker.hung and process not in self.starting
        ]  # fmt: skip

    def syncing(self) -> list[SimReplica]:
        return [replica for replica in self.awake() if replica.can_sync()]

    def complete(self, patience: int = 20_000) -> FinishRun:
        """Let everything happen that can, fairly, until the run ends. Fails when nothing can and it has not (law 7)."""
        for _ in range(patience):
            if self.driver.outcome is not None:
                if self.driver.outcome.reason == AT_REST:
                    self.crash(max(1, self.limits.validators().stop, len(self.replicas)), kept=True)
                    continue
                self.judge.close(self.state, self.driver.outcome, self.prompts)
                return self.driver.outcome
            if not self.act():
                ledger = self.state.groups.ledger
                raise AssertionError(f"liveness: nothing can happen any more; {ledger.count}, drawn {ledger.drawn}")
        raise AssertionError(f"liveness: not ended after {patience} actions; {self.state.groups.ledger.count}")

    def act(self) -> bool:
        """Everything that can happen now, once; False where that is nothing."""
        acted = False
        for source in self.sources():
            self.arrive_up(source)
            acted = True
        for id in self.addressees():
            self.arrive_down(id)
            acted = True
        for replica in self.syncing():
            replica.sync()
            acted = True
        for replica, group in self.running():
            if not replica.frozen and group in replica.groups:
                replica.sample(group, 10)
                replica.finish(group)
                acted = True
        for replica, chunk in self.measuring():
            replica.measure(chunk)
            acted = True
        for worker in self.working():
            worker.do()
            acted = True
        if self.in_added_states():
            self.leave(0)
            acted = True
        if self.done:
            self.say_done(0, len(self.done))
            acted = True
        if self.draws and self.driver.outcome is None:
            self.draw()
            acted = True
        acted = acted or self.arrive()
        if not acted and self.starting:
            self.come_up(next(iter(self.starting)))
            acted = True
        if not acted and self.timers:
            self.fire(in_time=True)
            acted = True
        if not acted and self.is_timed:
            self.find_overdue()
            acted = True
        return acted
