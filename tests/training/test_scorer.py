"""Scores made apart from the trainer are those that it would have made itself, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_trainer_steps import same

from engine.errors import ConfigError, EngineError
from engine.protocols import Batch
from engine.training.lora import Lora
from engine.training.model_scorer import ModelScorer
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]
BOTH = ("ref_logprobs", "old_logprobs")


def settings(**changes: Any) -> TrainerSettings:
    given = {"learning_rate": 1e-2, "kl_loss_coef": 0.1, "loss": "decoupled_ppo", "policy_mini_batch_size": 2}
    return TrainerSettings(**{**given, **changes})


def scored(scorer: ModelScorer, batch: Batch) -> Batch:
    batch.scores = {task: scorer.score(batch, task) for task in BOTH}
    return batch


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8.0)], ids=["whole", "adapter"])
def test_steps_with_scores_from_elsewhere_equal_those_without(
    model_path: str, batch: MakeBatch, lora: Lora | None
) -> None:
    alone = ModelTrainer(model_path, settings(lora=lora))
    beside = ModelTrainer(model_path, settings(lora=lora), scored_apart=BOTH)
    scorer = ModelScorer(model_path, settings(lora=lora), BOTH)
    assert beside.reference is None, "the reference is loaded once, by the scorer"
    for step in range(2 if lora else 3):
        if step:
            scorer.load(beside.weights())
        given = batch(step)
        given.groups[1].trajectories[2].loss_mask = [0] * len(given.groups[1].trajectories[2].token_ids)
        for task in BOTH:
            alone.score(given, task)
        mine, theirs = alone.train(given), beside.train(scored(scorer, given))
        del mine["seconds_train"], theirs["seconds_train"]
        assert {k: v for k, v in mine.items() if not k.startswith("seconds")} == {
            k: v for k, v in theirs.items() if not k.startswith("seconds")
        }
        assert same(alone.weights(), beside.weights())


@pytest.mark.parametrize("task", BOTH)
def test_a_scorer_progresses_with_each_pass(model_path: str, batch: MakeBatch, task: str) -> None:
    scorer, passes = ModelScorer(model_path, settings(micro_batch_tokens=12), BOTH), []
    scorer.watch_progress(lambda: passes.append(task))
    scorer.score(batch(0), task)
    assert len(passes) > 1


@pytest.mark.parametrize("task", BOTH)
def test_given_scores_are_read(model_path: str, batch: MakeBatch, task: str) -> None:
    """Others make another step: they are not computed anew."""
    trainers = [ModelTrainer(model_path, settings(), scored_apart=BOTH) for _ in range(2)]
    scorer = ModelScorer(model_path, settings(), BOTH)
    given = [scored(scorer, batch(0)) for _ in trainers]
    other = [[[value - 1.0 for value in row] for row in group] for group in given[1].scores[task]]
    given[1].scores = {**given[1].scores, task: other}
    for trainer, one in zip(trainers, given, strict=True):
        trainer.train(one)
    assert not same(trainers[0].weights(), trainers[1].weights())


def test_a_batch_without_what_is_scored_apart_is_not_trained(model_path: str, batch: MakeBatch) -> None:
    trainer = ModelTrainer(model_path, settings(), scored_apart=("ref_logprobs",))
    before = trainer.weights()
    with pytest.raises(EngineError, match="has no ref_logprobs"):
        trainer.train(batch(0))
    wrong = batch(0)
    wrong.scores = {"ref_logprobs": [[[0.0]] * 4] * 4}
    with pytest.raises(EngineError, match="do not match the batch: score each trainable token"):
        trainer.train(wrong)
    assert same(before, trainer.weights())


def test_a_scorer_holds_what_its_tasks_need(model_path: str, batch: MakeBatch) -> None:
    scorer = ModelScorer(model_path, settings(), ("ref_logprobs",))
    with pytest.raises(ConfigError, match="cannot score it"):
        scorer.score(batch(0), "old_logprobs")
    with pytest.raises(ConfigError, match="cannot score it"):
        scorer.load({})
    with pytest.raises(ConfigError, match="cannot score it"):
        ModelScorer(model_path, settings(), ("entropy",))


def test_the_reference_stays_what_it_was(model_path: str, batch: MakeBatch) -> None:
    scorer = ModelScorer(model_path, settings(), BOTH)
    first = scorer.score(batch(0), "ref_logprobs")
    old = scorer.score(batch(0), "old_logprobs")
    assert first == old, "both begin as one"
    trainer = ModelTrainer(model_path, settings())
    trainer.train(batch(0))
    scorer.load(trainer.weights())
    assert scorer.score(batch(0), "ref_logprobs") == first
    assert scorer.score(batch(0), "old_logprobs") != old
    assert not any(p.requires_grad for p in scorer._policies["old_logprobs"].model.parameters())
    assert torch.is_grad_enabled()
