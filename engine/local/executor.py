"""Carries commands out in this process: hosts, stores and timers on one event loop.

The twin of `actors.executor`; made by `run.run_async`. Events come in from the hosts' tasks and go to the driver at
once.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from engine.commands import (
    CancelTimer,
    Command,
    DeleteCheckpoint,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
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
from engine.events import Event, GroupFailed, OrderDone, ProcessLost, ProcessProbed, PromptsDrawn
from engine.hosts.added import AddedStatesHost, Work
from engine.hosts.clock import Timers
from engine.hosts.measuring import HeldOut
from engine.hosts.prompts import Prompts, draw_prompts, read_prompt
from engine.hosts.reasons import reason_of
from engine.hosts.replica import ReplicaHost
from engine.hosts.scorer import OF_TRAINED_WEIGHTS, ScorerHost
from engine.hosts.threads import contained
from engine.hosts.trainer import Report, TrainerHost
from engine.hosts.waits import Waits
from engine.ids import Incarnation, ReplicaId, StepId
from engine.local.stores import LocalTrajectories, LocalWeights
from engine.roles import Generator, Scorer, Trainer
from engine.states.limits import REWARDING
from engine.states.process import REPLICA, SCORER, TRAINER
from engine.trajectory import Prompt

log = logging.getLogger(__name__)

TRAINER_COMMANDS = (ScoreBatch, TrainStep, PublishWeights, SaveCheckpoint, DeleteCheckpoint)
CLOSE_S = 30.0
"""How long a generator may take to close. Then its `close` is cancelled."""


class LocalExecutor:
    """One run in one process. `over` is done when the run is: with its `FinishRun`, or with what the scheduler
    raised."""

    def __init__(
        self,
        *,
        generators: Sequence[Generator],
        make: Callable[[ReplicaId], Generator] | None,
        trainer: Trainer,
        prompts: Prompts,
        samples: int,
        slots: int,
        prefix_every_tokens: int,
        report: Report,
        checkpoints: Path | None,
        held_out: Sequence[Prompt] = (),
        scorers: Mapping[tuple[str, ...], Scorer] | None = None,
        works: Mapping[str, Work] | None = None,
        state_timeout_s: float | None = None,
    ) -> None:
        """`generators` are the first lives of replicas 0, 1 and so on; `make` makes every other life, and None makes
        none. `scorers` by the tasks that they score in the trainer's place; `works` by the added state that they are
        of."""
        self.trajectories = LocalTrajectories()
        self.weights = LocalWeights()
        self.over: asyncio.Future[FinishRun] = asyncio.get_running_loop().create_future()
        self.driver: Driver | None = None
        self._first = dict(enumerate(generators))
        """First lives that are not hosted yet."""
        self._make = make
        self._prompts = prompts
        self._samples = samples
        self._slots = slots
        self._prefix_every_tokens = prefix_every_tokens
        self._held_out = held_out
        self._drawn = 0
        self._replicas: dict[ReplicaId, ReplicaHost] = {}
        self._begun: dict[ReplicaId, Incarnation] = {}
        """The newest life of each replica that was ordered."""
        self._delayed: dict[ReplicaId, asyncio.TimerHandle] = {}
        """Lives that are to begin later."""
        self._closing: set[asyncio.Task[None]] = set()
        self._timers = Timers(self.deliver)
        self._waits = {index: Waits() for index in range(len(scorers or {}))}
        self._scorers = {
            tasks: ScorerHost(
                scorer=scorer,
                trajectories=self.trajectories,
                weights=self.weights,
                emit=self.deliver,
                ask=partial(self._ask_trainer, self._waits[index]),
            )
            for index, (tasks, scorer) in enumerate((scorers or {}).items())
        }
        self._works = works or {}
        self._added = AddedStatesHost(
            works=self._works,
            trajectories=self.trajectories,
            emit=self.deliver,
            timeout_s=state_timeout_s,
            untimed=(REWARDING,),
        )
        self._scorer_of = {task: host for tasks, host in self._scorers.items() for task in tasks}
        self._trainer = TrainerHost(
            trainer=trainer,
            trajectories=self.trajectories,
            weights=self.weights,
            emit=self.deliver,
            report=report,
            checkpoints=checkpoints,
            scored_apart=list(self._scorer_of),
            hands_over=any(task in OF_TRAINED_WEIGHTS for task in self._scorer_of),
        )

    def deliver(self, *events: Event) -> None:
        """Hand events to the driver. What it raises ends the run."""
        if self.over.done():
            return
        assert self.driver is not None
        try:
            self.driver.deliver(*events)
        except Exception as error:
            if not self.over.done():
                self.over.set_exception(error)

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._carry_out(command)
        done = tuple(one.number for one in commands if isinstance(one, DiscardGroups | RetireWeights))
        if done:
            self.deliver(OrderDone(orders=done))

    async def close(self) -> None:
        """End whatever still runs; nothing is reported any more."""
        self._timers.close()
        for delayed in self._delayed.values():
            delayed.cancel()
        unused = (self._host(replica, 1, generator) for replica, generator in self._first.items())
        replicas = (_close(host) for host in (*self._replicas.values(), *unused))
        scorers = (host.close() for host in self._scorers.values())
        await asyncio.gather(*replicas, *scorers, *self._closing, self._trainer.close(), self._added.close())

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, StartGroup | ResumeGroup):
            self._start_group(command)
        elif isinstance(command, ScoreBatch) and command.task in self._scorer_of:
            self._scorer_of[command.task].carry_out(command)
        elif isinstance(command, EnterState):
            self._added.carry_out(command)
        elif isinstance(command, TRAINER_COMMANDS):
            self._trainer.carry_out(command)
        elif isinstance(command, DiscardGroups):
            self._added.discard(command.groups)
            self.trajectories.store.discard(command.groups)
        elif isinstance(command, DrawPrompts):
            self._draw(command)
        elif isinstance(command, SetTimer):
            self._timers.set(command)
        elif isinstance(command, CancelTimer):
            self._timers.cancel(command)
        elif isinstance(command, RetireWeights):
            self.weights.store.retire(command.version)
        elif isinstance(command, StartProcess):
            self._start_replica(command)
        elif isinstance(command, StopProcess):
            self._stop(command)
        elif isinstance(command, ProbeProcess):
            self._answer(command)
        elif isinstance(command, FinishRun):
            if not self.over.done():
                self.over.set_result(command)
        else:
            self._order_replica(command)

    def _stop(self, command: StopProcess) -> None:
        """End a life. Only a replica has another one here; of anything else, the call that hangs is abandoned."""
        if command.kind == REPLICA:
            self._lose_replica(command.index, command.incarnation, command.reason)
            return
        if command.kind == TRAINER:
            self._trainer.abandon()
        elif command.kind == SCORER:
            [*self._scorers.values()][command.index].abandon()
        self.deliver(
            ProcessLost(kind=command.kind, index=command.index, incarnation=command.incarnation,
                        reason=command.reason, final=True)
        )  # fmt: skip

    def _answer(self, probe: ProbeProcess) -> None:
        """Nothing here can be silent: this is the event loop of all. Only scorers wait for anybody: the trainer."""
        waits = self._waits.get(probe.index) if probe.kind == SCORER else None
        self.deliver(
            ProcessProbed(kind=probe.kind, index=probe.index, incarnation=probe.incarnation, order=probe.order,
                          waits_for="" if waits is None else waits.oldest)
        )  # fmt: skip

    async def _ask_trainer(self, waits: Waits, steps: StepId) -> None:
        with waits.on(TRAINER):
            await self._trainer.hand_over_again(steps)

    def _order_replica(self, command: Command, prompt: Prompt | None = None) -> None:
        """Hand a command to the replica that it is for. A replica that is not there any more needs none."""
        host = self._replicas.get(command.replica)  # type: ignore[attr-defined]
        if host is not None:
            host.carry_out(command, prompt)

    def _draw(self, command: DrawPrompts) -> None:
        drawn = draw_prompts(self._prompts, command, self._drawn)
        if isinstance(drawn, PromptsDrawn):
            self._drawn += drawn.count
        self.deliver(drawn)

    def _start_group(self, command: StartGroup | ResumeGroup) -> None:
        try:
            prompt = read_prompt(self._prompts, command.group)
        except Exception as error:
            failed = GroupFailed(
                group=command.group,
                attempt=command.attempt,
                replica=command.replica,
                incarnation=command.incarnation,
                cause="data",
                reason=f"its prompt cannot be read: {reason_of(error)}",
            )
            self.deliver(failed)
            return
        self._order_replica(command, prompt)

    # lives of replicas

    def _start_replica(self, command: StartProcess) -> None:
        """Begin a life of a replica. A repeat changes nothing."""
        assert command.kind == REPLICA, "everything else lives as long as the run"
        replica, incarnation = command.index, command.incarnation
        if self._begun.get(replica, 0) >= incarnation:
            return
        self._begun[replica] = incarnation
        if command.delay_s:
            begin = asyncio.get_running_loop().call_later(command.delay_s, self._begin_life, replica, incarnation)
            self._delayed[replica] = begin
        else:
            self._begin_life(replica, incarnation)

    def _begin_life(self, replica: ReplicaId, incarnation: Incarnation) -> None:
        self._delayed.pop(replica, None)
        try:
            host = self._host(replica, incarnation, self._generator(replica))
        except Exception as error:
            self._report_lost(replica, incarnation, f"its generator could not be made: {reason_of(error)}")
            return
        self._replicas[replica] = host
        host.join(self._slots)

    def _generator(self, replica: ReplicaId) -> Generator:
        """The generator of the next life of a replica. Raises: whatever the run's factory raises."""
        if replica in self._first:
            return self._first.pop(replica)
        if self._make is None:
            raise EngineError("the run was given its generators one by one and can make no other")
        return contained(self._make, replica)

    def _host(self, replica: ReplicaId, incarnation: Incarnation, generator: Generator) -> ReplicaHost:
        assert self.driver is not None
        return ReplicaHost(
            replica=replica,
            incarnation=incarnation,
            generator=generator,
            samples=self._samples,
            trajectories=self.trajectories,
            weights=self.weights,
            emit=self.deliver,
            broken=lambda reason: self._lose_replica(replica, incarnation, reason),
            prefix_every_tokens=self._prefix_every_tokens,
            held_out=HeldOut(prompts=self._held_out, evaluator=generator) if self._held_out else None,
            rewarded=REWARDING not in self._works,
            progress_every_s=self.driver.scheduler.limits.timeouts.progress_every_s,
        )

    def _lose_replica(self, replica: ReplicaId, incarnation: Incarnation, reason: str) -> None:
        """End a life of a replica. It is reported as lost once it is closed: its next life needs what it holds. A life
        that has ended already is not ended again."""
        if replica in self._delayed and self._begun[replica] == incarnation:
            self._delayed.pop(replica).cancel()
            self._report_lost(replica, incarnation, reason)
            return
        host = self._replicas.get(replica)
        if host is None or host.incarnation != incarnation:
            return
        del self._replicas[replica]
        closing = asyncio.get_running_loop().create_task(_close(host))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        closing.add_done_callback(lambda _: self._report_lost(replica, incarnation, reason))

    def _report_lost(self, replica: ReplicaId, incarnation: Incarnation, reason: str) -> None:
        self.deliver(
            ProcessLost(kind=REPLICA, index=replica, incarnation=incarnation, reason=reason, final=self._make is None)
        )


async def _close(host: ReplicaHost) -> None:
    """Close a replica within `CLOSE_S`."""
    closing = asyncio.get_running_loop().create_task(host.close())
    _, unfinished = await asyncio.wait([closing], timeout=CLOSE_S)
    if unfinished:
        closing.cancel()
        log.warning("the generator of replica %d did not close within %g s: close is cancelled", host.replica, CLOSE_S)
