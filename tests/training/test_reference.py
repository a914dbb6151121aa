"""The reference model, and short real trainings under every loss and correction."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_steps import play, same
from transformers import LlamaConfig, LlamaForCausalLM

from engine.errors import ConfigError
from engine.protocols import Batch
from engine.training.advantages import set_advantages
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import Mask, TrainerSettings
from engine.trajectory import TrajectoryGroup

MakeBatch = Callable[..., Batch]
Make = Callable[..., TrajectoryGroup]


def anchored(model_path: str, **settings: Any) -> ModelTrainer:
    return ModelTrainer(model_path, TrainerSettings(**{"learning_rate": 1e-2, "kl_loss_coef": 0.1, **settings}))


def reference_weights(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    assert trainer.reference is not None
    return trainer.reference.model.state_dict()


def test_no_second_model_is_loaded_where_nothing_reads_it(model_path: str) -> None:
    assert anchored(model_path, kl_loss_coef=0.0).reference is None


def test_the_reference_is_never_trained_and_holds_no_gradient(model_path: str, batch: MakeBatch) -> None:
    trainer = anchored(model_path)
    initial = trainer.weights()
    for step in range(2):
        trainer.train(batch(step))
    assert same(reference_weights(trainer), initial) and not same(trainer.weights(), initial)
    assert trainer.reference is not None
    assert not any(p.requires_grad or p.grad is not None for p in trainer.reference.model.parameters())


def test_a_trainer_that_takes_over_has_the_reference_of_the_first_weights(
    model_path: str, batch: MakeBatch, tmp_path: Path
) -> None:
    """From a checkpoint, to the bit; what the policy has learned since is no part of the reference."""
    trainer = anchored(model_path)
    initial = trainer.weights()
    trainer.train(batch(0))
    trainer.save(str(tmp_path / "saved"), 1)
    heir = anchored(model_path)
    heir.load(str(tmp_path / "saved"))
    assert same(reference_weights(heir), initial)
    reports = [each.train(batch(1)) for each in (trainer, heir)]
    assert same(trainer.weights(), heir.weights())
    assert reports[0]["reference_kl_k3"] == reports[1]["reference_kl_k3"] > 0


def test_kl_is_zero_as_long_as_policy_and_reference_are_one(model_path: str, batch: MakeBatch) -> None:
    trainer = anchored(model_path, kl_loss="k2")
    first, later = trainer.train(batch(0)), trainer.train(batch(1))
    assert [first[f"reference_kl_{name}"] for name in ("k1", "k2", "k3")] == [0.0, 0.0, 0.0]
    assert later["reference_kl_k2"] > 1e-4


@pytest.mark.parametrize("kl", [{"kl_loss_coef": 0.1}, {"kl_loss_coef": 0.0, "kl_reward_coef": 0.1}])
def test_scored_before_or_by_the_step_itself_is_the_same(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, kl: dict[str, float]
) -> None:
    asked, unasked, stale = (anchored(model_path, **kl) for _ in range(3))
    for each in (asked, unasked, stale):
        each.train(batch(0))
    stale.score(batch(2), "ref_logprobs")
    asked.score(batch(1), "ref_logprobs")
    assert asked.reference is not None
    with monkeypatch.context() as patch:
        patch.setattr(asked.reference, "score", lambda samples: pytest.fail("scored twice"))
        asked.train(batch(1))
    unasked.train(batch(1))
    stale.train(batch(1))
    assert same(asked.weights(), unasked.weights()) and same(stale.weights(), unasked.weights())
    assert asked._reference is None


def other_model(path: Path, tokens: int) -> str:
    torch.manual_seed(9)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=tokens, max_position_embeddings=64, **sizes)).save_pretrained(path)
    return str(path)


def test_another_model_can_be_the_reference_if_it_has_the_same_tokens(
    model_path: str, batch: MakeBatch, tmp_path: Path
) -> None:
    trainer = anchored(model_path, reference_path=other_model(tmp_path / "same", 16))
    assert trainer.train(batch(0))["reference_kl_k3"] > 0.01
    with pytest.raises(ConfigError, match=r"trainer\.reference_path.*has 20 tokens"):
        anchored(model_path, reference_path=other_model(tmp_path / "other", 20))


@pytest.mark.parametrize(
    "kl",
    [
        {"kl_loss_coef": 1.0, "kl_loss": "k3"},
        {"kl_loss_coef": 0.0, "kl_reward_coef": 1.0},
        {"kl_loss_coef": 0.0, "kl_reward_coef": 1.0, "advantage": "reinforce_pp"},
    ],
    ids=["loss", "reward", "reward by token"],
)
def test_a_kl_term_keeps_the_policy_near_the_reference(
    model_path: str, group: Make, left_alone: float, kl: dict[str, Any]
) -> None:
    held = learn(anchored(model_path, **{**TASK, **kl}), group, 8)
    assert held[-1]["reference_kl_k3"] < 0.7 * left_alone


@pytest.fixture(scope="module")
def left_alone(model_path: str, group: Make) -> float:
    """How far a policy goes within 8 steps of the two-token task where nothing holds it."""
    free = learn(anchored(model_path, **{**TASK, "kl_loss_coef": 1e-9}), group, 8)
    assert free[-1]["reference_kl_k3"] > 0.1
    return free[-1]["reference_kl_k3"]


TASK = {"learning_rate": 2e-2, "policy_mini_batch_size": 4, "seed": 3, "clip_low": 0.2, "clip_high": 0.28}


def learn(trainer: ModelTrainer, group: Make, steps: int) -> list[dict[str, float]]:
    """Metrics of each step of the two-token task."""
    draws = torch.Generator().manual_seed(11)
    reports = []
    for step in range(steps):
        groups = [play(trainer, group, step * 8 + index, 5 + index % 4, draws) for index in range(8)]
        reports.append(trainer.train(Batch(step=step, groups=groups, staleness=[0] * len(groups))))
    return reports


ICEPOP = Mask(measure="token_ratio", low=0.2, high=5.0)
LEARNING: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.1, "aggregation": "sequence_mean", "correction": "token_tis"},
    "cispo": {"masks": (ICEPOP,), "advantage": "rloo"},
}
"""Settings of a loss. That of the clipped losses is in `test_trainer_steps.py`."""


@pytest.mark.parametrize("loss", LEARNING)
def test_a_loss_learns_under_corrections(model_path: str, group: Make, loss: str) -> None:
    chosen = {**TASK, **LEARNING[loss], "loss": loss, "kl_loss_coef": 0.0}
    reports = learn(anchored(model_path, **chosen), group, 16)
    assert all(math.isfinite(value) for report in reports for value in report.values())
    assert reports[0]["reward_mean"] < 0.1
    assert max(report["reward_mean"] for report in reports) > 0.6


def test_distillation_follows_a_teacher_and_reads_no_reward(
    model_path: str, group: Make, as_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    teacher = LlamaForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    teacher.save_pretrained(tmp_path / "teacher")
    settings = {"advantage": "distillation", "reference_path": str(tmp_path / "teacher"), "kl_loss_coef": 0.0}
    trainer = anchored(model_path, **settings)

    def sampled(step: int) -> Batch:
        """The policy's own log-probs of fixed responses, as if it had sampled them; equal rewards."""
        batch = as_batch(step, [group(number, [0.5] * 4) for number in range(4)])
        scored = iter(trainer.policy.score([sample for each in trainer._samples(batch) for sample in each]))
        for each in batch.groups:
            for trajectory in each.trajectories:
                trajectory.logprobs = next(scored).tolist()
        return batch

    first = sampled(0)
    samples = trainer._samples(first)
    trainer._set_reference(first, samples, None)
    set_advantages(samples, trainer.settings)
    sample = samples[2][1]
    assert sample.token_advantages is not None and sample.reference is not None
    assert torch.equal(sample.token_advantages, sample.reference - sample.behavior)

    metrics = [trainer.train(sampled(step)) for step in range(12)]
    assert metrics[-1]["reference_kl_k3"] < 0.7 * metrics[0]["reference_kl_k3"]
    assert metrics[0]["trained_token_share"] == 1.0 and metrics[0]["grad_norm"] > 0
