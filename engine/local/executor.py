"""Carries commands out in this process: hosts, stores and timers on one event loop.

The twin of `actors.executor`; made by `run.run_async`. Events come in from the hosts' tasks and go to the driver at
once.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.commands import (
    CancelTimer,
    Command,
    DiscardGroups,
    DrawPrompts,
    EnterState,
    FinishRun,
    PublishWeights,
    ResumeGroup,
    RetireWeights,
    SaveCheckpoint,
    ScoreBatch,
    SetTimer,
    StartGroup,
    StartReplica,
    StopReplica,
    TrainStep,
)
from engine.driver import Driver
from engine.events import Event, GroupFailed, OrderDone, PromptsDrawn, ReplicaLost
from engine.hosts.added import AddedStatesHost, Work
from engine.hosts.clock import Timers
from engine.hosts.measuring import HeldOut
from engine.hosts.prompts import Prompts, draw_prompts, read_prompt
from engine.hosts.reasons import reason_of
from engine.hosts.replica import ReplicaHost
from engine.hosts.scorer import OF_TRAINED_WEIGHTS, ScorerHost
from engine.hosts.threads import contained
from engine.hosts.trainer import Report, TrainerHost
from engine.ids import ReplicaId
from engine.local.stores import LocalTrajectories, LocalWeights
from engine.roles import Generator, Scorer, Trainer
from engine.states.limits import REWARDING
from engine.trajectory import Prompt

TRAINER_COMMANDS = (ScoreBatch, TrainStep, PublishWeights, SaveCheckpoint)


class LocalExecutor:
    """One run in one process. `over` is done when the run is: with its `FinishRun`, or with what the scheduler
    raised."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        prompts: Prompts,
        samples: int,
        slots: int,
        prefix_every_tokens: int,
        report: Report,
        checkpoints: Path | None,
        replace: Callable[[ReplicaId], Generator] | None,
        replacements: int,
        held_out: Sequence[Prompt] = (),
        scorers: Mapping[tuple[str, ...], Scorer] | None = None,
        works: Mapping[str, Work] | None = None,
        state_timeout_s: float | None = None,
    ) -> None:
        """`replace` makes a new generator for a replica that was lost, `replacements` times at most for each;
        `scorers` by the tasks that they score in the trainer's place; `works` by the added state that they are of."""
        self.trajectories = LocalTrajectories()
        self.weights = LocalWeights()
        self.over: asyncio.Future[FinishRun] = asyncio.get_running_loop().create_future()
        self.driver: Driver | None = None
        self._prompts = prompts
        self._samples = samples
        self._slots = slots
        self._prefix_every_tokens = prefix_every_tokens
        self._replace = replace
        self._replacements = replacements
        self._held_out = held_out
        self._drawn = 0
        self._replicas: dict[ReplicaId, ReplicaHost] = {}
        self._lost: set[ReplicaHost] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._timers = Timers(self.deliver)
        self._scorers = {
            tasks: ScorerHost(
                scorer=scorer,
                trajectories=self.trajectories,
                weights=self.weights,
                emit=self.deliver,
                ask=lambda steps: self._trainer.hand_over_again(steps),
            )
            for tasks, scorer in (scorers or {}).items()
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

    def join(self, replica: ReplicaId, generator: Generator, incarnation: int = 1) -> None:
        """Host a generator as one life of a replica."""
        host = ReplicaHost(
            replica=replica,
            incarnation=incarnation,
            generator=generator,
            samples=self._samples,
            trajectories=self.trajectories,
            weights=self.weights,
            emit=self.deliver,
            broken=lambda reason: self._lose(replica, incarnation, reason),
            prefix_every_tokens=self._prefix_every_tokens,
            held_out=HeldOut(prompts=self._held_out, evaluator=generator) if self._held_out else None,
            rewarded=REWARDING not in self._works,
        )
        self._replicas[replica] = host
        host.join(self._slots)

    def execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._carry_out(command)
        done = tuple(one.number for one in commands if isinstance(one, DiscardGroups | RetireWeights))
        if done:
            self.deliver(OrderDone(orders=done))

    async def close(self) -> None:
        """End whatever still runs; nothing is reported any more."""
        self._timers.close()
        replicas = (host.close() for host in self._replicas.values())
        scorers = (host.close() for host in self._scorers.values())
        await asyncio.gather(*replicas, *scorers, *self._closing, self._trainer.close(), self._added.close())

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, StartGroup | ResumeGroup):
            self._start(command)
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
        elif isinstance(command, StopReplica):
            self._lose(command.replica, command.incarnation, command.reason, wanted=command.returns)
        elif isinstance(command, StartReplica):
            self._begin(command.replica)
        elif isinstance(command, FinishRun):
            if not self.over.done():
                self.over.set_result(command)
        else:
            self._replicas[command.replica].carry_out(command)  # type: ignore[attr-defined]

    def _draw(self, command: DrawPrompts) -> None:
        drawn = draw_prompts(self._prompts, command, self._drawn)
        if isinstance(drawn, PromptsDrawn):
            self._drawn += drawn.count
        self.deliver(drawn)

    def _start(self, command: StartGroup | ResumeGroup) -> None:
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
        self._replicas[command.replica].carry_out(command, prompt)

    def _begin(self, replica: ReplicaId) -> None:
        """Host a replica that there has not been, or another life of one that was let go."""
        before = self._replicas.get(replica)
        if before is not None and before not in self._lost:
            return
        incarnation = 0 if before is None else before.incarnation
        generator, reason = self._made(replica, "it was wanted")
        if generator is None:
            self.deliver(ReplicaLost(replica=replica, incarnation=incarnation, returns=False, reason=reason))
        else:
            self.join(replica, generator, incarnation + 1)

    def _made(self, replica: ReplicaId, reason: str) -> tuple[Generator | None, str]:
        """A new generator, or why there is none."""
        if self._replace is None:
            return None, f"{reason}; the run was given its generators one by one and can make no other"
        try:
            return contained(self._replace, replica), reason
        except Exception as error:
            return None, f"{reason}; another one could not be made: {reason_of(error)}"

    def _lose(self, replica: ReplicaId, incarnation: int, reason: str, *, wanted: bool = True) -> None:
        """End one life of a replica and begin the next, if it is wanted and there is one."""
        host = self._replicas[replica]
        if host.incarnation != incarnation or host in self._lost:
            return
        self._lost.add(host)
        closing = asyncio.get_running_loop().create_task(host.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        generator: Generator | None = None
        if wanted and self._replace is not None and incarnation <= self._replacements:
            generator, reason = self._made(replica, reason)
        self.deliver(
            ReplicaLost(replica=replica, incarnation=incarnation, returns=generator is not None, reason=reason)
        )
        if generator is not None:
            self.join(replica, generator, incarnation + 1)
