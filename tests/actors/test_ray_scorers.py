"""Scores made by actors of their own: under exactly the weights of their step, also when a scorer or the run dies."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from group_gate import Gate
from ray_plans import SMALLEST, Counter, check_record, events_of, plan
from token_generator import TokenGenerator

from engine.actors.models import plan_of
from engine.actors.run import start
from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.events import BatchScored, CheckpointSaved, ProcessLost, PublishFailed, RunResumed, StepFailed
from engine.metrics.status import Status
from engine.roles import Batch
from engine.runtime.plan import Plan, Restore, Rollout
from engine.states.limits import Limits, Pool
from engine.training.scorer import ModelScorer
from engine.training.trainer import ModelTrainer

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


def test_every_step_has_the_scores_of_its_own_weights(tmp_path: Path) -> None:
    status = run_whole(scored_apart(tmp_path))
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    assert not events_of(tmp_path, StepFailed)
    assert len(events_of(tmp_path, BatchScored)) == 2 * STEPS
    check_record(tmp_path)


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


def test_a_scorer_that_dies_costs_its_step_an_attempt(tmp_path: Path) -> None:
    status = run_whole(scored_apart(tmp_path, partial(Reader, 2, tmp_path / "died")))
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    (lost,) = events_of(tmp_path, ProcessLost)
    assert (lost.kind, lost.index) == ("scorer", 0) and "ScorerActor" in lost.reason
    check_record(tmp_path)


def test_a_run_that_goes_on_scores_under_what_was_restored(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    planned = scored_apart(tmp_path, limits=replace(LIMITS, max_steps=8))
    generator = partial(TokenGenerator, length=2, free=True)
    planned = replace(planned, make_rollout=gate.before(4 * 4, lambda replica: Rollout(generator=generator())))
    with start(planned) as run:
        for status in run.updates():
            if status.step >= 4:
                break
    assert next(event.steps for event in events_of(tmp_path, CheckpointSaved)) == 2
    gate.open()
    with start(replace(planned, resume=True)) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", 8), status.reason
    assert events_of(tmp_path, RunResumed)[0].steps == 4
    assert not events_of(tmp_path, StepFailed)
    check_record(tmp_path)


def test_a_plan_whose_pools_need_a_scorer_has_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"make_scorer.*_logprobs, .*_logprobs have a pool without train"):
        start(replace(scored_apart(tmp_path), make_scorer=None))


class Both(ModelTrainer):
    """Holds what it is given against what it would have scored itself."""

    def train(self, batch: Batch) -> dict[str, float]:
        own = ModelScorer(self.model_path, self.settings, ("old_logprobs", "ref_logprobs"))
        own.load(self.weights())
        for task in ("old_logprobs", "ref_logprobs"):
            given = [[list(row) for row in group] for group in batch.scores[task]]
            assert given == own.score(batch, task), f"{task} of step {batch.step}"
        assert self.reference is None
        return super().train(batch)


def test_the_built_in_scorers_give_the_trainer_what_it_would_have_scored(tmp_path: Path) -> None:
    config = {
        "run": {"dir": str(tmp_path), "max_steps": 3, "seed": 3},
        "model": {"make": "arithmetic", "arithmetic": SMALLEST},
        "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4},
        "rollout": {"slots": 6, "max_tokens": 40},
        "trainer": {
            "learning_rate": 1e-3, "checkpoint_every": 0, "threads": 1, "old_policy": "proximal", "kl_loss_coef": 0.1,
            "overlong_cache_tokens": 39,
        },
        "validation": {"at_start": False, "at_end": False},
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    planned = plan_of(parse_config(config), tmp_path / "run")
    settings = parse_config(config).trainer_settings()
    model = planned.make_scorer.args[0]  # type: ignore[union-attr]
    watched = replace(
        planned,
        limits=replace(planned.limits, pools=APART),
        make_trainer=lambda: Both(model, settings, scored_apart=("old_logprobs", "ref_logprobs")),
        scorer_threads=(1,),
    )
    status = run_whole(watched)
    assert (status.outcome, status.step) == ("finished", 3), status.reason
    check_record(tmp_path / "run")
