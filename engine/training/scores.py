"""Scores as they travel, by group and trajectory, and as the train step has them, by sample: from one to the other.

Called by `scorer.ModelScorer`, which makes them, and by `trainer.ModelTrainer`, which is given them. Both leave out
trajectories without a trainable token, as `batch.trainable_samples` does.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.roles import Batch
from engine.training.batch import Sample
from engine.trajectory import TrajectoryGroup


def scores_of(groups: Sequence[TrajectoryGroup], scored: Sequence[Tensor]) -> list[list[list[float]]]:
    """`roles.Scores` of groups whose samples have these log-probs. [samples][tokens] float32"""
    rows = iter(scored)
    return [
        [next(rows).tolist() if any(trajectory.loss_mask) else [] for trajectory in group.trajectories]
        for group in groups
    ]


def given_scores(batch: Batch, groups: Sequence[Sequence[Sample]], expected: Sequence[str]) -> dict[str, list[Tensor]]:
    """By task, the log-probs that came with a batch. [samples][tokens] float32

    Raises: `EngineError` where those of an expected task did not come, or are of other tokens.
    """
    missing = [task for task in expected if task not in batch.scores]
    if missing:
        raise EngineError(f"the batch of step {batch.step} has no {' and no '.join(missing)}", step=batch.step)
    counts = [sample.tokens for group in groups for sample in group]
    given = {
        task: [torch.tensor(row, dtype=torch.float32) for row in _rows(scores)] for task, scores in batch.scores.items()
    }
    for task, rows in given.items():
        if [len(row) for row in rows] != counts:
            raise EngineError(f"the {task} of step {batch.step} are of other tokens than its batch", step=batch.step)
    return given


def _rows(scores: Any) -> Iterator[Any]:
    """Of trajectories that have a trainable token."""
    for group in scores:
        yield from (row for row in group if len(row))
