"""Makes the worker of a process from the plan, and passes orders to it: one class for each kind of process.

A process makes the class of its kind, calls `open`, then `carry_out`. The workers run on an event loop; blocking calls
run on threads. They must never depend on where they run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.commands import Command, DiscardGroups, StartProcess
from engine.errors import ConfigError, EngineError, reason_of
from engine.events import Event
from engine.ids import NO_VERSION, Incarnation, StepId
from engine.policies.state_registry import work_of
from engine.protocols import Closable, ReportsProgress, Trainer
from engine.states.limits import GENERATED, PUBLISHING, QUEUED, REWARDING, SCORING, ValidationLimits
from engine.states.orders import RELATIONS
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER
from engine.storage.trajectories import Trajectories
from engine.storage.weights import Weights
from engine.trajectory import Prompt
from engine.workers.measurement import HeldOut
from engine.workers.order_queue import OrderQueue
from engine.workers.plan import Inspection, Plan, Restore, Rollout, Work
from engine.workers.progress_reports import SerialProgress
from engine.workers.replica import ReplicaWorker
from engine.workers.sample_keeper import HeldOutRow, SampleKeeper, keeper_of
from engine.workers.scorer import ScorerWorker
from engine.workers.stage import StageWorker, unchanged
from engine.workers.threads import on_a_thread
from engine.workers.trainer import Report, TrainerWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The stores and callbacks of a worker."""

    trajectories: Trajectories
    weights: Weights
    emit: Callable[[Event], None]
    """Reports an event to the scheduler."""
    report: Report
    """Reports the trainer's metrics of a step, before its next event."""
    broken: Callable[[str], None]
    """Reports that this process cannot continue."""
    ask_trainer: Callable[[StepId], Awaitable[None]]
    """Makes the trainer hand over the weights after this number of train steps. Raises the reason if it cannot."""


class PlannedWorker:
    """The worker of one incarnation of a process. Orders that arrive before it is loaded wait."""

    kind: ClassVar[str]
    _worker: Any = None
    """The `ReplicaWorker`, `OrderQueue` or `StageWorker`; None until it is loaded."""
    _broken: Callable[[str], None]

    def __init__(self, plan: Plan, index: int, incarnation: Incarnation) -> None:
        self.plan = plan
        self.index = index
        self.incarnation = incarnation
        self._opening: asyncio.Task[None] | None = None
        self._opened = False
        self._settled = asyncio.Event()
        """It is open, or closes without having opened."""
        self._early: list[tuple[Command, Prompt | None]] = []
        self._abandoned = False

    async def open(self, peers: Peers, restore: Restore | None = None) -> None:
        """Load the worker. Repeated calls share one load and its result. Raises what the user's factory
        raises."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open_once(peers, restore))
        await asyncio.shield(self._opening)

    async def _open_once(self, peers: Peers, restore: Restore | None) -> None:
        await self._open(peers, restore)
        self._broken = peers.broken
        self._opened = True
        self._settled.set()
        early, self._early = self._early, []
        for command, prompt in early:
            self.carry_out(command, prompt)

    async def _open(self, peers: Peers, restore: Restore | None) -> None:
        raise NotImplementedError

    def _progress_every_s(self, order: type[Command]) -> float:
        """Seconds between two reports of progress on orders of this class."""
        return self.plan.limits.timeouts.progress_every_s(RELATIONS[order].limit)

    @property
    def threads(self) -> int | None:
        """CPU threads for numerical libraries; 0: one for each core; None: unchanged."""
        return None

    def carry_out(self, command: Command, prompt: Prompt | None = None) -> None:
        """Start a command and return at once. `prompt` is required for commands that start or resume a group. Never
        raises: a worker that cannot start a command is broken."""
        if not self._opened:
            self._early.append((command, prompt))
            return
        try:
            self._carry_out(command, prompt)
        except Exception as error:
            log.exception("%s cannot be started", type(command).__name__)
            self._broken(f"its worker cannot start {type(command).__name__}: {reason_of(error)}")

    def forget_early(self) -> None:
        """Drop the waiting orders: a restarted scheduler reissues them."""
        self._early.clear()

    def _carry_out(self, command: Any, prompt: Prompt | None) -> None:
        self._worker.carry_out(command)

    def abandon(self) -> None:
        """A call into the user's code hangs: `close` does not wait for it."""
        self._abandoned = True
        if isinstance(self._worker, OrderQueue):
            self._worker.abandon()

    async def close(self) -> None:
        """Cancel everything, without reports, and close the worker. Waits for a load in progress, so that the objects
        that it creates are closed, too."""
        self._settled.set()
        if self._opening is not None:
            if self._abandoned:
                self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        if self._worker is not None:
            await self._worker.close()


class PlannedReplica(PlannedWorker):
    """The worker of a generator."""

    kind = REPLICA
    rollout: Rollout | None = None
    _joined = False

    @property
    def threads(self) -> int:
        return self.plan.rollout_threads

    async def _open(self, peers: Peers, restore: Restore | None) -> None:
        plan = self.plan
        self.rollout = rollout = await on_a_thread(plan.rollout_maker, self.index)
        keeper = keeper_of(plan.run_dir, plan.sample_policy)
        self._worker = ReplicaWorker(
            replica=self.index,
            incarnation=self.incarnation,
            generator=rollout.generator,
            samples=plan.samples,
            trajectories=peers.trajectories,
            weights=peers.weights,
            emit=peers.emit,
            broken=peers.broken,
            prefix_every_tokens=plan.prefix_every_tokens,
            held_out=self._held_out(rollout, keeper),
            rewarded=plan.rewarded,
            prepared=bool(plan.limits.states_at(QUEUED)),
            described=plan.described,
            progress_every_s=self._progress_every_s,
            keeper=keeper,
            cache_every_s=plan.cache_every_s,
        )

    def _held_out(self, rollout: Rollout, keeper: SampleKeeper | None) -> HeldOut | None:
        """The validation prompts that this replica may measure. Raises: `ConfigError` if it has no evaluator."""
        if self.plan.limits.validation is None:
            return None
        if rollout.evaluator is None:
            law = "validation needs an evaluator, but the plan's rollouts have none"
            raise ConfigError("limits.validation", f"{len(self.plan.held_out)} rows", law, "add one, or use None")
        return HeldOut(
            prompts=self.plan.held_out, evaluator=rollout.evaluator, rows=_held_out_rows(self.plan.limits.validation),
            answers=rollout.answers, samples=keeper,
            parts={one.name: one.parts for one in self.plan.limits.validation.measured_sets},
            correct={one.name: one.correct for one in self.plan.limits.validation.measured_sets},
        )  # fmt: skip

    def join(self) -> None:
        """Report that the replica is up, with the initial weights. Further calls do nothing. Raises: `EngineError` if
        it is not open."""
        if self._worker is None:
            raise EngineError(f"replica {self.index} is not open")
        if not self._joined:
            self._joined = True
            self._worker.join(self.plan.slots)

    def _carry_out(self, command: Command, prompt: Prompt | None) -> None:
        self._worker.carry_out(command, prompt)


def _held_out_rows(limits: ValidationLimits) -> list[HeldOutRow]:
    places = map(limits.place, range(limits.rows))
    return [HeldOutRow(one.name, prompt, sample, one.prompts) for one, prompt, sample in places]


class PlannedTrainer(PlannedWorker):
    """The worker of the trainer."""

    kind = TRAINER
    _made: Any = None
    """The trainer, which is closed even if it could not be loaded."""

    @property
    def threads(self) -> int:
        return self.plan.trainer_threads

    async def _open(self, peers: Peers, restore: Restore | None) -> None:
        progress = SerialProgress(self._progress_every_s, peers.emit)
        progress.begin(StartProcess, -1 if restore is None else restore.order)
        try:
            self._worker = await self._started(peers, restore, progress)
        finally:
            progress.end()  # also of a start that fails or is given up

    async def _started(self, peers: Peers, restore: Restore | None, progress: SerialProgress) -> TrainerWorker:
        plan = self.plan
        if restore is not None and restore.version != NO_VERSION:
            restore = replace(restore, weights=await peers.weights.get(restore.version))
            progress.note()
        worker = TrainerWorker(
            trainer=await on_a_thread(self._make, restore, progress.note),
            trajectories=peers.trajectories,
            weights=peers.weights,
            emit=peers.emit,
            report=peers.report,
            broken=peers.broken,
            checkpoints=None if plan.run_dir is None else plan.run_dir / "checkpoints",
            own_tasks=[task for task in plan.limits.scoring_tasks if task not in plan.limits.scored_apart],
            scored_apart=plan.limits.scored_apart,
            hands_over=plan.hands_over,
            samples=keeper_of(plan.run_dir, plan.sample_policy),
            correct=plan.correct,
            progress=progress,
            check_weights=plan.check_weights,
            takes_turns=plan.limits.trains_in_turns,
        )
        await worker.leave()
        progress.note()
        for redo in () if restore is None else restore.redo:
            await worker.redo(redo.step, redo.groups, redo.staleness, reports=redo.reports)
            progress.note()
        if restore is not None and restore.reaches:
            await worker.hand_over(restore.reaches)
        return worker

    def _make(self, restore: Restore | None, progressed: Callable[[], None]) -> Trainer:
        self._made = trainer = self.plan.make_trainer()
        if isinstance(trainer, ReportsProgress):
            trainer.watch_progress(progressed)
        if restore is not None and restore.steps:
            if self.plan.restore_trainer is None:
                raise EngineError("the trainer cannot be restored from a checkpoint: Plan.restore_trainer is not set")
            self.plan.restore_trainer(trainer, restore)
        return trainer

    async def hand_over(self, steps: StepId) -> None:
        """Give scorers the weights after `steps` train steps, if they are still owed. Raises the reason if it
        cannot."""
        await self._settled.wait()
        if not self._opened:
            raise EngineError(
                f"the weights after {steps} train steps are lost: the trainer ended before it had started"
            )
        await self._worker.hand_over_again(steps)

    async def _close(self) -> None:
        await super()._close()
        if isinstance(self._made, Closable):
            await on_a_thread(self._made.close)


class PlannedScorer(PlannedWorker):
    """The worker of the scorer of one pool's tasks. Its orders are `ScoreBatch`."""

    kind = SCORER

    @property
    def threads(self) -> int:
        given = self.plan.scorer_threads
        return given[self.index] if self.index < len(given) else self.plan.trainer_threads

    async def _open(self, peers: Peers, restore: Restore | None) -> None:
        make, tasks = self.plan.make_scorer, self.plan.limits.scorers()[self.index]
        assert make is not None  # `Plan.require_scorers` has checked it
        progress = SerialProgress(self._progress_every_s, peers.emit)
        scorer = await on_a_thread(make, tasks)
        if isinstance(scorer, ReportsProgress):
            scorer.watch_progress(progress.note)
        self._worker = ScorerWorker(
            scorer=scorer,
            trajectories=peers.trajectories,
            weights=peers.weights,
            emit=peers.emit,
            broken=peers.broken,
            ask=peers.ask_trainer,
            progress=progress,
        )


class PlannedStages(PlannedWorker):
    """The worker of added states, user coroutines that run concurrently. Its orders are `EnterState`, `InspectStep`
    and `DiscardGroups`."""

    kind = ADDED_STATES

    async def _open(self, peers: Peers, restore: Restore | None) -> None:
        self._worker = StageWorker(
            works=await on_a_thread(self._works),
            inspections=await on_a_thread(self._inspections),
            trajectories=peers.trajectories,
            weights=peers.weights,
            emit=peers.emit,
            timeout_s=self.plan.state_timeout_s,
            untimed=(REWARDING,),
            incarnation=self.incarnation,
            broken=peers.broken,
            described=self.plan.described,
        )

    def _works(self) -> dict[str, Work]:
        """Import and make the work of each state. Raises what the user's code raises."""
        from engine.config import load_extensions_of  # late: only this worker needs it

        plan = self.plan
        load_extensions_of(plan.config)
        names = [*plan.limits.states_at(QUEUED), *plan.limits.states_at(GENERATED)]
        made = {name: plan.make_work(name) for name in names} if plan.make_work is not None else {}
        return {name: made.get(name) or work_of(name) or unchanged for name in names}

    def _inspections(self) -> dict[str, Inspection]:
        """The same for the states of train steps."""
        plan = self.plan
        names = [*plan.limits.states_at(SCORING), *plan.limits.states_at(PUBLISHING)]
        return {name: (plan.make_inspection or work_of)(name) for name in names}

    def _carry_out(self, command: Any, prompt: Prompt | None) -> None:
        if isinstance(command, DiscardGroups):
            self._worker.discard(command.groups)
        else:
            self._worker.carry_out(command, prompt)


WORKERS: Mapping[str, type[PlannedWorker]] = {
    planned.kind: planned for planned in (PlannedReplica, PlannedTrainer, PlannedScorer, PlannedStages)
}
"""By kind of process."""
