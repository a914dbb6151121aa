"""Steps trained again after a trainer's death: the same weights, moments and counts, to the bit."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.commands import SaveCheckpoint, ScoreBatch, TrainStep
from engine.errors import EngineError
from engine.events import BatchScored, CheckpointSaved, Event, StepTrained
from engine.protocols import Batch
from engine.runtime.local import SimpleGenerator
from engine.runtime.local.local_processes import LocalTrajectories, LocalWeights
from engine.runtime.prompt_sources import listed
from engine.states.limits import Limits, Pool
from engine.storage.samples import SamplePolicy
from engine.storage.trajectories import checked_scores
from engine.training import model_checkpoint
from engine.training.model_scorer import ModelScorer
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.workers.plan import Plan, Redo, Restore, Rollout
from engine.workers.trainer import TrainerWorker
from engine.workers.worker import Peers

STEPS, SAVED = 4, 2
SETTINGS = TrainerSettings(
    learning_rate=1e-2, policy_mini_batch_size=2, lr_warmup_steps=5, weight_decay=0.1, kl_loss_coef=0.1,
    old_policy="proximal",
)  # fmt: skip


class Bench:
    """A trainer in its worker, over a store that outlives it."""

    def __init__(self, trainer: ModelTrainer, store: LocalTrajectories, apart: tuple[str, ...], run_dir: Path) -> None:
        self.answers: asyncio.Queue[Event] = asyncio.Queue()
        self.reported: list[int] = []
        self.trainer = trainer
        tasks = SETTINGS.scoring_tasks(99)
        self.own = [task for task in tasks if task not in apart]
        pools = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=apart)) if apart else ()
        plan = Plan(
            limits=Limits(
                train_batch_size=4, max_staleness_steps=0, max_concurrent_groups=4, scoring_tasks=tasks, pools=pools
            ),
            samples=1, make_rollout=lambda replica: Rollout(generator=SimpleGenerator()),
            make_trainer=lambda: trainer, make_prompts=lambda: listed(["?"]), run_dir=run_dir,
            restore_trainer=lambda trainer, restore: trainer.load(restore.checkpoint),
            sample_policy=SamplePolicy(per_step=0, validation=0),
        )  # fmt: skip
        peers = Peers(
            trajectories=store, weights=LocalWeights(), emit=self.answers.put_nowait,
            report=lambda step, figures: self.reported.append(step), ask_trainer=lambda steps: asyncio.sleep(0),
        )  # fmt: skip
        self.worker = TrainerWorker(plan, 0, 1, peers)
        self._orders = count()

    async def step(self, batch: Batch) -> None:
        """As the scheduler orders it."""
        groups = tuple(group.group for group in batch.groups)
        for task in self.own:
            await self.order(ScoreBatch(step=batch.step, attempt=1, task=task, groups=groups, cause=0), BatchScored)
        staleness = tuple(batch.staleness)
        train = TrainStep(step=batch.step, attempt=1, groups=groups, staleness=staleness, cause=0)
        await self.order(train, StepTrained)

    async def order(self, command: Any, answer: type[Event]) -> None:
        self.worker.carry_out(structs.replace(command, number=next(self._orders)))
        assert isinstance(await self.answers.get(), answer)


@pytest.mark.parametrize("apart", [(), ("ref_logprobs",)], ids=["scored by the trainer", "scored apart"])
def test_steps_trained_again_are_the_same_to_the_bit(
    model_path: str, batch: Callable[..., Batch], tmp_path: Path, apart: tuple[str, ...]
) -> None:
    async def scene() -> None:
        store = LocalTrajectories()
        straight = Bench(ModelTrainer(model_path, SETTINGS, scored_apart=apart), store, apart, tmp_path)
        await straight.worker.open()
        batches = [batch(step) for step in range(STEPS)]
        scorer = ModelScorer(model_path, SETTINGS, apart) if apart else None
        for each in batches:
            ids = [group.group for group in each.groups]
            for group in each.groups:
                await store.put(group, 1)
            if scorer is not None:
                scores = checked_scores(each.groups, scorer.score(each, "ref_logprobs"))
                await store.put_scores(each.step, "ref_logprobs", ids, scores)
            await straight.step(each)
            if each.step + 1 == SAVED:
                await straight.order(SaveCheckpoint(steps=SAVED, cause=0), CheckpointSaved)
        again = Bench(ModelTrainer(model_path, SETTINGS, scored_apart=apart), store, apart, tmp_path)
        redo = tuple(
            Redo(
                step=b.step, groups=tuple(g.group for g in b.groups), staleness=tuple(b.staleness),
                reports=b.step == STEPS - 1,
            )
            for b in batches[SAVED:]
        )  # fmt: skip
        saved = str(tmp_path / "checkpoints" / f"step-{SAVED:06d}")
        restore = Restore(steps=SAVED, checkpoint=saved, redo=redo)
        await again.worker.open(restore)
        assert again.reported == [STEPS - 1], "what was reported is not again"
        assert again.trainer.optimizer_steps == straight.trainer.optimizer_steps == 2 * STEPS
        held = [
            {**t.weights(), **model_checkpoint.optimizer_tensors(t.model, t.optimizer)}
            for t in (straight.trainer, again.trainer)
        ]
        assert held[0].keys() == held[1].keys()
        assert all(torch.equal(held[0][name], held[1][name]) for name in held[0])
        await store.discard([batches[-1].groups[0].group])
        last = Bench(ModelTrainer(model_path, SETTINGS, scored_apart=apart), store, apart, tmp_path)
        with pytest.raises(EngineError, match=r"train step 3 cannot be trained again: .*does not hold groups"):
            await last.worker.open(replace(restore, redo=redo[-1:]))
        for bench in (straight, again, last):
            await bench.worker.close()

    asyncio.run(asyncio.wait_for(scene(), 60))
