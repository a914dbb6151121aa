"""The worker of the `Trainer`: scores, trains, publishes and saves checkpoints, one order after another.

The trainer's blocking calls run on a separate thread, so that the event loop stays free.
Must never run two calls at once, or report an incomplete checkpoint.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from engine.commands import DeleteCheckpoint, PublishWeights, SaveCheckpoint, ScoreBatch, TrainStep
from engine.errors import EngineError, TrainerSpoiled, clean, describe_error, reason_of
from engine.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    OrderDone,
    PublishFailed,
    StepFailed,
    StepTrained,
    WeightsPublished,
)
from engine.ids import NO_VERSION, GroupId, LifeNumber, StepId
from engine.protocols import Batch, Closable, Explainable, Offloadable, ReportsProgress, RolloutFigures
from engine.protocols.user_values import MOST_OF_ALL, name_problem, shown_name
from engine.reward_histogram import HISTOGRAMS
from engine.states.process import TRAINER
from engine.storage.checkpoints import checkpoint_path, remove_checkpoint, save_checkpoint
from engine.storage.weights import Trained
from engine.trajectory import SOURCES, TrajectoryGroup
from engine.workers.order_queue import OrderQueue, QueuedOrder
from engine.workers.plan import Plan, Redo, Restore
from engine.workers.response_figures import response_figures, reward_histograms, source_figures
from engine.workers.sample_keeper import keeper_of
from engine.workers.scorer import end_of_scoring
from engine.workers.threads import on_a_thread
from engine.workers.worker import Peers

# -- metrics of a user's trainer ---------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

Figure = int | float
MAX_WARNINGS = 100
"""Maximum number of metrics that get a warning."""
RESERVED = ("step", SOURCES, HISTOGRAMS, "validation", "sets")
"""Keys of the rows in `metrics.jsonl` by which readers tell what a row is about."""
UPDATES = "optimizer_steps"
"""The metric that counts the optimizer's updates of a step. The record has it."""
MOST_UPDATES = 2**31 - 1


class Figures:
    """Reads the metrics of every step of one trainer."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, step: StepId, metrics: Mapping[Any, Any]) -> dict[str, Figure]:
        """The usable metrics of a step, NaN and infinities included. Never raises. Call it on the trainer's thread:
        reading a value may copy it from an accelerator."""
        try:
            items = list(metrics.items())
        except BaseException as error:  # a user's mapping may raise anything; the step is trained nevertheless
            self._warn(step, "metrics", f"metrics that cannot be read ({describe_error(error)})")
            return {}
        figures: dict[str, Figure] = {}
        for name, value in items:
            figure, problem = read_metric(name, value)
            if figure is None:
                self._warn(step, shown_name(name), problem)
            else:
                figures[str(name)] = figure
        return figures

    def _warn(self, step: StepId, key: str, what: str) -> None:
        if key not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(key)
            law = "It is skipped. This warning is not repeated for later steps."
            log.warning("train() of step %d returned %s. %s", step, what, law)


def metrics_problem(metrics: Any) -> str:
    """What is wrong with what `train` returned, apart from single metrics; empty if nothing is."""
    if metrics is not None and not isinstance(metrics, Mapping):
        return f"train() must return a dict of metrics or None, not {type(metrics).__name__}"
    if metrics is not None and len(metrics) > MOST_OF_ALL:
        return f"train() returned {len(metrics)} metrics; at most {MOST_OF_ALL} are allowed"
    return ""


def figure_of(value: Any) -> Figure | None:
    """A real number, or an array with one element, as a 64-bit int or a float; None for anything else."""
    try:
        real: Any = value if isinstance(value, Real) else value.item()
        figure = float(real) if isinstance(real, Real) else None
        return int(real) if type(real) in (int, bool) and abs(real) < 2**63 else figure
    except BaseException:  # whatever the value's own conversion raises
        return None


def read_metric(name: Any, value: Any) -> tuple[Figure | None, str]:
    """A usable metric; or None, and what is wrong with it, as the end of a sentence with "returned". Never raises."""
    problem = name_problem(name) or ("a name that the engine uses" if name in RESERVED else "")
    if problem:
        return None, f"a metric named {shown_name(name)}, {problem}"
    figure = figure_of(value)
    if figure is None:
        return None, f"the metric {name!r} as a {type(value).__name__}, which is not a real number that fits a float"
    if name == UPDATES and not 0 <= figure <= MOST_UPDATES:
        return None, f"the metric {name!r} as {figure}, which must be from 0 to {MOST_UPDATES}"
    return figure, ""


def _figures_of(groups: Sequence[TrajectoryGroup], correct: Sequence[str]) -> tuple[dict[str, Figure], dict[str, Any]]:
    """The figures of a batch's responses; and its tables, without empty ones."""
    tables = {SOURCES: source_figures(groups), HISTOGRAMS: reward_histograms(groups)}
    return response_figures(groups, correct), {name: table for name, table in tables.items() if table}


# -- the trainer -------------------------------------------------------------------------------------------------------


class TrainerWorker(OrderQueue):
    """The worker of the trainer, which does the scoring tasks that no separate scorer does.

    One that takes turns with replicas is on the accelerator from the first score or training of a step until the step
    is trained, if it can leave it. A failed step leaves the accelerator; its retry returns to it.
    """

    kind = TRAINER
    trainer: Any = None
    """The user's trainer, which is closed even if it could not be loaded."""
    _offloadable: Offloadable | None = None
    _is_away = False
    """Whether it has left the accelerator."""
    _spoiled = False
    _owed: StepId | None = None
    """Train steps in the weights that scorers still wait for."""

    def __init__(self, plan: Plan, index: int, life: LifeNumber, peers: Peers) -> None:
        super().__init__(plan, index, life, peers)
        self._checkpoints = None if plan.run_dir is None else plan.run_dir / "checkpoints"
        apart = plan.limits.scored_apart
        self._own_tasks = [task for task in plan.limits.scoring_tasks if task not in apart]
        self._samples = keeper_of(plan.run_dir, plan.sample_policy)
        self._handing_over = asyncio.Lock()
        self._figures = Figures()
        self._handlers = {
            ScoreBatch: self._score_batch,
            TrainStep: self._train,
            PublishWeights: self._publish,
            SaveCheckpoint: self._save,
            DeleteCheckpoint: self._delete,
        }
        self._starts = dict.fromkeys(self._handlers, self._queue)

    @property
    def threads(self) -> int:
        return self.plan.threads.trainer

    async def _load(self, restore: Restore | None) -> None:
        """Make the trainer, and bring it to where it begins."""
        if restore is not None and restore.version != NO_VERSION:
            restore = replace(restore, weights=await self.peers.weights.get(restore.version))
            self.note_progress()
        await on_a_thread(self._make, restore)
        if self.plan.limits.trains_in_turns and isinstance(self.trainer, Offloadable):
            self._offloadable = self.trainer
        await self._leave()
        self.note_progress()
        for redo in () if restore is None else restore.redo:
            await self._redo(redo)
            self.note_progress()
        if restore is not None and restore.reaches:
            await self._owe(restore.reaches)

    def _make(self, restore: Restore | None) -> None:
        self.trainer = trainer = self.plan.make_trainer()
        if isinstance(trainer, ReportsProgress):
            trainer.watch_progress(self.note_progress)
        if restore is not None and restore.steps:
            if self.plan.restore_trainer is None:
                raise EngineError("the trainer cannot be restored from a checkpoint: Plan.restore_trainer is not set")
            self.plan.restore_trainer(trainer, restore)

    async def _close(self) -> None:
        await super()._close()
        if isinstance(self.trainer, Closable):
            await on_a_thread(self.trainer.close)

    async def _leave(self) -> None:
        """Leave the accelerator to replicas, if the trainer takes turns with them."""
        if self._offloadable is not None and not self._is_away and not self._spoiled:
            await self._call(self._offloadable.offload)
            self._is_away = True

    async def _redo(self, redo: Redo) -> None:
        """Train a step again with its batch and scores, before any order. Raises: `EngineError`."""
        try:
            for task in self._own_tasks:
                await self._score(redo.step, redo.groups, task)
            metrics = await self._train_batch(redo.step, redo.groups, redo.staleness)
        except Exception as error:
            raise EngineError(f"train step {redo.step} cannot be trained again: {reason_of(error)}") from error
        if redo.reports:
            self.peers.report(redo.step, metrics)

    async def _owe(self, steps: StepId) -> None:
        """Give scorers that need them the current weights, those after `steps` train steps. Never raises. If it fails,
        a scorer that needs the weights requests them again; if that fails too, its attempt fails."""
        if not self.plan.hands_over:
            return
        self._owed = steps
        try:
            await self._hand_over_owed(steps)
        except EngineError as error:
            log.warning("%s. Scorers that need them will request them again.", error, exc_info=error)

    async def hand_over(self, steps: StepId) -> None:
        """Give scorers the weights after `steps` train steps, if they are still owed. Raises the reason if it
        cannot."""
        await self._settled.wait()
        if not self._opened:
            raise EngineError(
                f"the weights after {steps} train steps are lost: the trainer ended before it had started"
            )
        await self._hand_over_owed(steps)

    async def _hand_over_owed(self, steps: StepId) -> None:
        async with self._handing_over:
            if self._owed != steps:
                return
            try:
                await self.peers.weights.put(Trained(steps), await self._call(self.trainer.weights))
            except Exception as error:
                law = f"the weights after {steps} train steps cannot be handed over: {reason_of(error)}"
                raise EngineError(law) from error
            self._owed = None

    async def _answer(self, command: QueuedOrder) -> Event | None:
        event = None if self._spoiled else await super()._answer(command)
        return None if self._spoiled else event

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await super()._call(function, *arguments)
        except TrainerSpoiled as error:
            name = getattr(function, "__name__", type(function).__name__)
            log.exception("%s() has spoiled the trainer", name)
            self._spoil(f"{name}() failed and spoiled the trainer: {reason_of(error)}")
            raise

    async def _call_on_accelerator(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._offloadable is not None and self._is_away:
            await self._call(self._offloadable.onload)
            self._is_away = False
        try:
            return await self._call(function, *arguments)
        except Exception:
            await self._leave()
            raise

    def _spoil(self, reason: str) -> None:
        """Have this process replaced, instead of answering another order."""
        self._spoiled = True
        self.break_down(clean(reason))

    async def _score_batch(self, command: ScoreBatch) -> Event:
        return await end_of_scoring(command, self._score(command.step, command.groups, command.task))

    async def _score(self, step: StepId, ids: Sequence[GroupId], task: str) -> None:
        batch = Batch(step=step, groups=await self.peers.trajectories.get(ids), staleness=[0] * len(ids))
        await self._call_on_accelerator(self.trainer.score, batch, task)

    async def _train_batch(self, step: StepId, ids: Sequence[GroupId], staleness: Sequence[int]) -> dict[str, Any]:
        groups = await self.peers.trajectories.get(ids)
        scores = {task: await self.peers.trajectories.scores(step, task, ids) for task in self.plan.limits.scored_apart}
        batch = Batch(step=step, groups=groups, staleness=list(staleness), scores=scores)
        responses, tables = await self._call(_figures_of, groups, self.plan.correct)
        metrics: object = await self._call_on_accelerator(self.trainer.train, batch)
        await self._leave()
        law = await self._call(metrics_problem, metrics)
        if law:
            self._spoil(f"{law}; its weights may already contain train step {step}")
            raise TrainerSpoiled(law)
        figures: dict[str, Figure] = {}
        if isinstance(metrics, Mapping):
            figures = await self._call(self._figures.read, step, metrics)
        if self._samples is not None:
            await self._samples.keep_step(batch, await self._rollout_figures())
        return {**responses, **figures, **tables}

    async def _rollout_figures(self) -> Sequence[Sequence[RolloutFigures]]:
        """The trainer's figures of the rollouts that it has just trained; empty if it has none."""
        if not isinstance(self.trainer, Explainable):
            return ()
        try:
            figures: Sequence[Sequence[RolloutFigures]] = await self._call(self.trainer.rollout_figures)
        except Exception as error:
            log.warning("rollout_figures() failed; samples lack these figures", exc_info=error)
            return ()
        return figures

    async def _train(self, command: TrainStep) -> Event:
        try:
            metrics = await self._train_batch(command.step, command.groups, command.staleness)
        except Exception as error:
            log.warning("train step %d failed", command.step, exc_info=error)
            return StepFailed(step=command.step, attempt=command.attempt, reason=reason_of(error))
        self.peers.report(command.step, metrics)
        await self._owe(command.step + 1)
        return StepTrained(step=command.step, attempt=command.attempt, updates=int(metrics.get(UPDATES, 0)))

    async def _publish(self, command: PublishWeights) -> Event:
        try:
            weights = await self._call(self.trainer.weights)
            if self.plan.check_weights is not None:
                self.plan.check_weights(weights)
            self.note_progress()
            await self.peers.weights.put(command.version, weights)
        except Exception as error:
            log.warning("publishing version %d failed", command.version, exc_info=error)
            return PublishFailed(version=command.version, attempt=command.attempt, reason=reason_of(error))
        return WeightsPublished(version=command.version, attempt=command.attempt)

    async def _save(self, command: SaveCheckpoint) -> Event:
        try:
            if self._checkpoints is None:
                raise EngineError("a checkpoint cannot be saved, because this run has no run directory")
            await self._call(save_checkpoint, self.trainer, self._checkpoints, command.steps, self.note_progress)
        except Exception as error:
            log.warning("the checkpoint after %d steps failed", command.steps, exc_info=error)
            return CheckpointFailed(steps=command.steps, reason=reason_of(error))
        return CheckpointSaved(steps=command.steps)

    async def _delete(self, command: DeleteCheckpoint) -> Event:
        """A deletion that fails is logged and acknowledged: the checkpoint stays, and nothing else depends on it."""
        if self._checkpoints is not None:
            path = checkpoint_path(self._checkpoints, command.steps)
            try:
                await self._call(remove_checkpoint, path)
            except Exception as error:
                log.warning("the checkpoint %s cannot be deleted and stays: %s", path, reason_of(error))
        return OrderDone(orders=(command.number,))
