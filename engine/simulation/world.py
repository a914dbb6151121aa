"""The simulated world: replicas, a trainer and a network under a virtual clock, with seeded faults.

It runs the production driver and scheduler. The property tests use it, and users who want to try a configuration
without machines. The same seed gives the same run, event for event.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from engine.commands import (
    CancelTimer,
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
    MeasureRows,
    ProbeProcess,
    PublishWeights,
    ResumeGroup,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StartGroup,
    StartProcess,
    StopProcess,
    TrainStep,
)
from engine.driver import Driver
from engine.errors import EngineError
from engine.events import Event, OrderDone, ProcessLost, ProcessProbed, ProcessUp, PromptsDrawn, RunStarted, TimerFired
from engine.ids import GroupId, ReplicaId
from engine.policies import DEFAULTS, PolicySet
from engine.ports import Recorder
from engine.scheduler import Scheduler
from engine.simulation.agents import NEVER, SimGroup, SimReplica, SimStore, SimTrainer, state_answer
from engine.simulation.judge import Finding, Judge
from engine.states.invariants import check_all
from engine.states.limits import Limits
from engine.states.process import REPLICA, SCORER, TRAINER

STORES = -1000
"""The channel of both stores' answers."""
ROUNDING = 1e-6
"""Tolerance in tokens: sums of durations are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probability of each fault, for each occasion. By default there are none."""

    lose: float = 0.0
    """A message is lost and resent after ten times its latency. Later messages wait for it."""
    duplicate: float = 0.0
    """A message arrives twice."""
    die: float = 0.0
    """A replica dies when it receives a group. Its earlier messages may arrive after it was declared lost."""
    stay_dead: float = 0.0
    """A replica that died cannot be started again."""
    die_trainer: float = 0.0
    """The trainer or a scorer dies when it carries out an order."""
    fail_start: float = 0.0
    """A process ends before it is up."""
    fail_group: float = 0.0
    fail_data: float = 0.0
    fail_sync: float = 0.0
    fail_trainer: float = 0.0
    fail_state: float = 0.0
    """The work of an added state fails."""
    hang: float = 0.0
    """The process that receives an order hangs: it does nothing until it is replaced."""
    stick: float = 0.0
    """A started group gets no token and never ends, unless it is cut short."""
    fail_rows: float = 0.0
    """An attempt to measure held-out rows fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of one world. Durations are virtual seconds; a token takes one second."""

    limits: Limits
    replicas: int = 2
    slots: int = 4
    prompts: int = 64
    """Number of prompts in the data source."""
    seed: int = 0
    latency_s: float = 0.1
    train_s: float = 20.0
    sync_s: float = 2.0
    state_s: float = 5.0
    """Duration of the work of an added state on one group."""
    measure_s: float = 5.0
    """Duration of measuring a chunk of held-out rows."""
    mean_tokens: float = 20.0
    """Response lengths are Pareto distributed: most are short, a few are very long."""
    max_tokens: int | None = None
    """Maximum response length; None: a few are longer than all others together."""
    prefix_every_tokens: int = 0
    """Prefixes of a group are stored after this many new tokens; 0: only when it is aborted."""
    spread: float = 1.0
    """Share of groups with different rewards. A zero-variance filter drops the others."""
    faults: Faults = Faults()


class _NoRecord:
    def write(self, event: Event, commands: Sequence[Command], state_hash: int) -> None: ...

    def reject(self, event: Event, reason: str) -> None: ...

    def snapshot(self, payloads: Sequence[bytes]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class World:
    """Clock, executor, and all simulated processes."""

    def __init__(
        self,
        setting: Setting,
        policies: PolicySet | None = None,
        recorder: Recorder | None = None,
        check: bool = True,
        snapshot_every: int = 0,
    ) -> None:
        self.setting = setting
        self.random = Random(setting.seed)
        self.time = 0.0
        self.store = SimStore(self._length)
        self.judge = Judge(setting.limits, self.store)
        self.scheduler = Scheduler(setting.limits, policies, observe=self.judge.changed)
        self.judge.regular = self.scheduler.policies.names["validation"] == DEFAULTS["validation"]
        self.check = check
        self.driver = Driver(
            self.scheduler, self, recorder or _NoRecord(), self, self._observe, snapshot_every=snapshot_every
        )
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self._begun: dict[tuple[str, int], int] = {}
        """The newest life of each process that was started."""
        self._ended: set[tuple[str, int, int]] = set()
        """Lives that have ended."""
        self._down: set[tuple[str, int]] = set()
        """Trainer and scorers whose next life is not up yet. Their orders wait."""
        self.trainer_busy_s = 0.0
        self.trainer = SimTrainer(self._from_trainer)
        self._scorers = {
            index: SimTrainer(lambda event, index=index: self._send(-2 - index, event))  # type: ignore[misc]
            for index in range(len(setting.limits.scorers()))
        }
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._arrival: dict[tuple[str, int], float] = {}
        self._drawn = 0
        self._timers: set[int] = set()
        lives = [*range(setting.replicas), *setting.limits.validators()]
        self._after(0.0, lambda: self.driver.deliver(RunStarted(replicas=len(lives))))
        for id in lives:
            self._join(id, 1)

    # clock

    def now(self) -> float:
        return self.time

    def run(self, events: int = 1_000_000) -> FinishRun:
        """Run to the end. Raises: `Finding`, with the seed, for a broken law or a deadlock."""
        try:
            while self.driver.outcome is None:
                if not self._agenda or self.driver.events_handled > events:
                    state = self.scheduler.state
                    what = f"still going after {events} events" if self._agenda else "nothing can happen any more"
                    raise Finding(f"liveness: {what}; {state.ledger.count}, step {state.steps_batched}")
                self.time, _, action = heappop(self._agenda)
                action()
            self.judge.close(self.scheduler.state, self.driver.outcome, self.setting.prompts)
        except EngineError as error:
            raise Finding(f"{error} [seed {self.setting.seed}, event {self.driver.events_handled}]") from error
        return self.driver.outcome

    def _after(self, delay: float, action: Callable[[], None]) -> None:
        heappush(self._agenda, (self.time + delay, self._order, action))
        self._order += 1

    def _observe(self, event: Event, commands: tuple[Command, ...]) -> None:
        self.judge.observe(event, commands)
        if self.check:
            check_all(self.scheduler.state)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def _length(self, group: GroupId) -> int:
        draw = Random(self.setting.seed * 1_000_003 + group).paretovariate(1.5)
        length = max(1, round(self.setting.mean_tokens / 3 * draw))
        return length if self.setting.max_tokens is None else min(length, self.setting.max_tokens)

    # network

    def _transit(self, channel: tuple[str, int], action: Callable[[], None]) -> None:
        """Deliver a message: in order within its channel, late if it was lost, perhaps twice."""
        latency = self.setting.latency_s * self.random.uniform(0.5, 1.5)
        if self._chance(self.setting.faults.lose):
            latency *= 10
        arrival = max(self.time + latency, self._arrival.get(channel, 0.0))
        self._arrival[channel] = arrival
        self._after(arrival - self.time, action)
        if self._chance(self.setting.faults.duplicate):
            self._after(arrival - self.time, action)

    def _send(self, source: int, event: Event) -> None:
        copies = iter((event, copy(event)))
        self._transit(("up", source), lambda: self.driver.deliver(next(copies)))

    # executor

    def execute(self, commands: Sequence[Command]) -> None:
        done = tuple(one.number for one in commands if isinstance(one, DiscardGroups | RetireWeights))
        for command in commands:
            match command:
                case DrawPrompts():
                    self._draw(command)
                case SetTimer():
                    self._set_timer(command)
                case CancelTimer():
                    self._timers.discard(command.timer)
                case ScoreBatch() | TrainStep() | PublishWeights() | SaveCheckpoint() | DeleteCheckpoint():
                    self._train(command)
                case StopProcess():
                    self._stop(command)
                case ProbeProcess():
                    self._probe(command)
                case StartProcess():
                    self._start(command)
                case DiscardGroups():
                    self.store.discard(command.groups)
                case EnterState():
                    self._work(command)
                case FinishRun() | RetireWeights():
                    pass
                case _:
                    self._order_replica(command)
        if done and not self._chance(self.setting.faults.hang):
            self._send(STORES, OrderDone(orders=done))

    def _draw(self, command: DrawPrompts) -> None:
        count = min(command.count, self.setting.prompts - self._drawn)
        first, self._drawn = self._drawn, self._drawn + count
        exhausted = self._drawn == self.setting.prompts
        drawn = PromptsDrawn(first=first, count=count, exhausted=exhausted, number=command.number)
        if not self._chance(self.setting.faults.hang):
            self._after(0.0, lambda: self.driver.deliver(drawn))

    def _work(self, order: EnterState) -> None:
        """Do the work of an added state and send the result, whatever happens to the group meanwhile."""
        failed = self._chance(self.setting.faults.fail_state)
        if self._chance(self.setting.faults.hang):
            return
        answer = state_answer(order, self.random.choice(("infrastructure", "data")) if failed else "")
        self._after(self.setting.state_s * self.random.uniform(0.5, 1.5), lambda: self._send(-2, answer))

    def _set_timer(self, command: SetTimer) -> None:
        self._timers.add(command.timer)

        def fire() -> None:
            if command.timer in self._timers:
                self.driver.deliver(TimerFired(timer=command.timer))

        self._after(command.delay_s, fire)

    def _train(self, command: Command) -> None:
        worker, kind, index = self.trainer, TRAINER, 0
        limits, pools = self.setting.limits, self.scheduler.state.pools
        if isinstance(command, ScoreBatch | TrainStep):
            task = command.task if isinstance(command, ScoreBatch) else "train"
            self.judge.begin_task(pools.of(task), self.replicas.values(), command)
            for number, tasks in enumerate(limits.scorers()):
                if task in tasks:
                    worker, kind, index = self._scorers[number], SCORER, number
        worker.take(command)
        worker.hung |= self._chance(self.setting.faults.hang)
        if len(worker.work) == 1 and (kind, index) not in self._down:
            self._plan_training(worker, kind, index)

    def _plan_training(self, worker: SimTrainer, kind: str, index: int) -> None:
        """Visit a trainer or scorer again when its first order is done. A life that ended meanwhile does nothing."""
        life = self._begun.get((kind, index), 1)
        self._after(self._training_time(worker.work[0]), lambda: self._trainer_done(worker, kind, index, life))

    def _from_trainer(self, event: Event) -> None:
        if isinstance(event, OrderDone):  # a checkpoint is deleted: it takes no time and no random draw
            self._after(0.0, lambda: self.driver.deliver(event))
        else:
            self._send(-1, event)

    def _training_time(self, command: Command) -> float:
        if isinstance(command, DeleteCheckpoint):
            return 0.0
        base = self.setting.train_s if isinstance(command, TrainStep) else self.setting.sync_s
        seconds = base * self.random.uniform(0.5, 1.5)
        self.trainer_busy_s += seconds
        return seconds

    def _trainer_done(self, worker: SimTrainer, kind: str, index: int, life: int) -> None:
        if worker.hung or self._begun.get((kind, index), 1) != life or (kind, index) in self._down:
            return
        if self._chance(self.setting.faults.die_trainer):
            self._lose(kind, index, life)
            return
        fails = not isinstance(worker.work[0], DeleteCheckpoint) and self._chance(self.setting.faults.fail_trainer)
        worker.do(succeed=not fails)
        if worker.work:
            self._plan_training(worker, kind, index)

    # processes

    def _join(self, id: ReplicaId, incarnation: int) -> None:
        replica = SimReplica(id, incarnation, self.setting.slots, 0, self.store, lambda event: self._send(id, event))
        self.replicas[id] = replica
        self._begun[REPLICA, id] = incarnation
        self._send(id, ProcessUp(kind=REPLICA, index=id, incarnation=incarnation, slots=self.setting.slots, version=0))

    def _start(self, command: StartProcess) -> None:
        """Start a life of a process. A repeated start changes nothing."""
        process, life = (command.kind, command.index), command.incarnation
        if self._begun.get(process, 0) >= life:
            return
        self._begun[process] = life
        if self._chance(self.setting.faults.hang):
            return
        delay = command.delay_s + self.setting.sync_s * 5 + len(command.redo) * self.setting.train_s
        self._after(delay, lambda: self._started(command))

    def _started(self, command: StartProcess) -> None:
        kind, index, life = command.kind, command.index, command.incarnation
        if self._begun[kind, index] != life or (kind, index, life) in self._ended:
            return
        if self._chance(self.setting.faults.fail_start):
            self._lose(kind, index, life)
        elif kind == REPLICA:
            self._join(index, life)
        else:
            self._down.discard((kind, index))
            self._send(-1 if kind == TRAINER else -2 - index, ProcessUp(kind=kind, index=index, incarnation=life))
            worker = self._worker(kind, index)
            if worker is not None and worker.work:
                self._plan_training(worker, kind, index)

    def _worker(self, kind: str, index: int) -> SimTrainer | None:
        if kind == TRAINER:
            return self.trainer
        return self._scorers[index] if kind == SCORER else None

    def _stop(self, command: StopProcess) -> None:
        self._lose(command.kind, command.index, command.incarnation, command.reason)

    def _probe(self, command: ProbeProcess) -> None:
        """Answer a probe if the life is up and does not hang. Simulated processes never wait for others."""
        kind, index, life = command.kind, command.index, command.incarnation
        hung = kind == REPLICA and (index not in self.replicas or self.replicas[index].hung)
        worker = self._worker(kind, index)
        hung |= (kind, index) in self._down or (worker is not None and worker.hung)
        if not hung and self._begun.get((kind, index), 1) == life and (kind, index, life) not in self._ended:
            answer = ProcessProbed(kind=kind, index=index, incarnation=life, order=command.order)
            self._after(self.setting.latency_s, lambda: self.driver.deliver(answer))

    def _lose(self, kind: str, index: int, life: int, reason: str = "fault") -> None:
        """End a life, once. Its earlier messages still arrive, perhaps later."""
        if (kind, index, life) in self._ended or self._begun.get((kind, index), 1) != life:
            return
        self._ended.add((kind, index, life))
        final = False
        if kind == REPLICA:
            self.replicas.pop(index, None)
            final = self._chance(self.setting.faults.stay_dead)
        else:
            self._down.add((kind, index))
            worker = self._worker(kind, index)
            if worker is not None:
                worker.hung = False
                worker.work.clear()
        lost = ProcessLost(kind=kind, index=index, incarnation=life, reason=reason, final=final)
        self._after(self.setting.latency_s, lambda: self.driver.deliver(lost))

    def _works(self, replica: SimReplica) -> bool:
        """Whether a life of a replica has neither ended nor hangs."""
        return self.replicas.get(replica.id) is replica and not replica.hung

    def _order_replica(self, command: Command) -> None:
        id: ReplicaId = getattr(command, "replica")  # noqa: B009  every command left has one
        incarnation: int = getattr(command, "incarnation")  # noqa: B009

        def arrive() -> None:
            replica = self.replicas.get(id)
            if replica is None or replica.incarnation != incarnation:
                return
            replica.hung |= self._chance(self.setting.faults.hang)
            if replica.hung:
                return
            started = command.group if isinstance(command, StartGroup | ResumeGroup) else None
            if started is None:
                self._sample(replica)
            replica.take(command)
            if started in replica.groups:
                replica.groups[started].stuck = self._chance(self.setting.faults.stick)
            if self._chance(self.setting.faults.die):
                self._lose(REPLICA, id, incarnation)
            elif isinstance(command, MeasureRows):
                seconds = self.setting.measure_s * self.random.uniform(0.5, 1.5)
                self._after(seconds, lambda: self._measured(replica, command))
            elif started is None:
                self._plan(replica)
            else:
                self._plan_group(replica, started)

        self._transit(("down", id), arrive)

    def _sample(self, replica: SimReplica) -> None:
        """Sample the tokens of every group of a replica up to the present."""
        for group in replica.groups.values():
            self._sample_group(replica, group)

    def _sample_group(self, replica: SimReplica, group: SimGroup) -> None:
        if not (replica.frozen or group.stuck):
            group.progress += self.time - group.since
            group.sample(int(group.progress + ROUNDING) - group.tokens, replica.version)
        group.since = self.time

    def _plan(self, replica: SimReplica) -> None:
        """Visit a replica again when its next sync order is done and, unless it is frozen, when its next group is."""
        self._plan_sync(replica)
        for id in replica.groups:
            self._plan_group(replica, id)

    def _plan_sync(self, replica: SimReplica) -> None:
        if replica.can_sync():
            self._after(self.setting.sync_s * self.random.uniform(0.5, 1.5), lambda: self._sync(replica))

    def _plan_group(self, replica: SimReplica, id: GroupId) -> None:
        group = replica.groups.get(id)
        if group is None:
            return  # finished at once: it was resumed to be truncated
        if group.since == NEVER:
            group.since = self.time
        if not (replica.frozen or group.stuck):
            self._after(max(group.target - group.progress, 0.0), lambda: self._finish(replica, id, group))
            if self.setting.prefix_every_tokens:
                self._after(self.setting.prefix_every_tokens, lambda: self._keep_prefix(replica, id, group))

    def _sync(self, replica: SimReplica) -> None:
        if not self._works(replica) or not replica.can_sync():
            return
        self._sample(replica)
        replica.sync(succeed=not self._chance(self.setting.faults.fail_sync))
        self._plan_sync(replica)

    def _keep_prefix(self, replica: SimReplica, id: GroupId, group: SimGroup) -> None:
        """Store the tokens of a group that still runs. If it was frozen meanwhile, visit it again later."""
        if not self._works(replica) or replica.groups.get(id) is not group or replica.frozen:
            return
        self._sample_group(replica, group)
        every = self.setting.prefix_every_tokens
        if group.tokens - group.saved >= every:
            replica.keep_prefix(id)
            self._after(every, lambda: self._keep_prefix(replica, id, group))

    def _measured(self, replica: SimReplica, order: MeasureRows) -> None:
        chunk = (order.validation, order.chunk)
        if self._works(replica) and replica.measuring.get(chunk) == order:
            replica.measure(chunk, succeed=not self._chance(self.setting.faults.fail_rows))

    def _finish(self, replica: SimReplica, id: GroupId, group: SimGroup) -> None:
        """Finish a group that is done. If its replica was frozen meanwhile, visit it again later."""
        if not self._works(replica) or replica.groups.get(id) is not group or replica.frozen:
            return
        self._sample_group(replica, group)
        if group.tokens < group.target:
            return
        faults = self.setting.faults
        if self._chance(faults.fail_group):
            replica.fail(id, "infrastructure")
        elif self._chance(faults.fail_data):
            replica.fail(id, "data")
        else:
            replica.finish(id, spread=1.0 if self.random.random() < self.setting.spread else 0.0)
        self._plan_sync(replica)
