"""Scores made by actors of their own: under exactly the weights of their step, also when a scorer or the run dies."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_plans import Counter, check_record, events_of, plan

from engine.actors.launch import start
from engine.events import PublishFailed, StepFailed
from engine.metrics.status import Status
from engine.protocols import Batch
from engine.runtime.plan import Plan, Restore
from engine.states.limits import Limits, Pool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS = 5
APART = (
    Pool(tasks=("rollout", "reward", "validation"), replicas=(0, 1)),
    Pool(tasks=("train",)),
    Pool(tasks=("old_logprobs",)),
    Pool(tasks=("ref_logprobs",)),
)
LIMITS = Limits(
    train_batch_size=4, max_staleness_steps=2, max_concurrent_groups=12, max_steps=STEPS, checkpoint_every=2,
    scoring_tasks=("ref_logprobs", "old_logprobs"), pools=APART,
)  # fmt: skip


class Reader:
    """Scores are the weights it has; those of the reference are -1. Dies in step `dies_in`, once or always."""

    def __init__(self, dies_in: int = -1, marker: Path | None = None) -> None:
        self.weights = 0
        self.dies_in = dies_in
        self.marker = marker

    def load(self, weights: int) -> None:
        self.weights = weights

    def score(self, batch: Batch, task: str) -> Any:
        if batch.step == self.dies_in and not (self.marker is not None and self.marker.exists()):
            if self.marker is not None:
                self.marker.write_text("died")
            os.kill(os.getpid(), signal.SIGKILL)
        value = -1.0 if task == "ref_logprobs" else float(self.weights)
        return [[[value] * sum(t.loss_mask) for t in group.trajectories] for group in batch.groups]


class Watchful(Counter):
    """Refuses a batch that was not scored under the weights it has."""

    def train(self, batch: Batch) -> dict[str, float]:
        for task, value in {"old_logprobs": float(self.steps), "ref_logprobs": -1.0}.items():
            rows = [row for group in batch.scores[task] for row in group]
            assert rows and all(list(row) == [value] * 2 for row in rows), (task, batch.step, self.steps)
        return super().train(batch)

    def save(self, directory: str, step: int) -> None:
        Path(directory, "steps").write_text(str(self.steps))


def restore(trainer: Any, restored: Restore) -> None:
    assert restored.checkpoint is not None
    trainer.steps = int(Path(restored.checkpoint, "steps").read_text())


def scored_apart(run_dir: Path, scorer: Callable[..., Reader] = Reader, **changes: Any) -> Plan:
    given = {"limits": LIMITS, "make_trainer": Watchful, "restore_trainer": restore, **changes}
    return plan(run_dir, make_scorer=lambda tasks: scorer() if tasks == ("old_logprobs",) else Reader(), **given)


def run_whole(plan: Plan) -> Status:
    with start(plan) as run:
        return run.wait()


class Stingy(Watchful):
    """Cannot give its weights the third time it is asked."""

    asked = 0

    def weights(self) -> Any:
        self.asked += 1
        if self.asked == 3:
            raise RuntimeError("no room")
        return super().weights()


def test_weights_that_could_not_be_handed_over_are_asked_for(tmp_path: Path) -> None:
    status = run_whole(scored_apart(tmp_path, make_trainer=Stingy))
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    assert not events_of(tmp_path, StepFailed) and not events_of(tmp_path, PublishFailed)
    check_record(tmp_path)
