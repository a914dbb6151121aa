"""What the train step saves changes nothing: each saving has the gradients of the plain path within 1e-6."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaForCausalLM

from engine.errors import ConfigError
from engine.protocols import Batch
from engine.training import gradients
from engine.training.advantages import set_advantages
from engine.training.batch import Sample, pack
from engine.training.gradients import Policy, accumulate_gradient, body_and_head
from engine.training.model_scorer import ModelScorer
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import TrajectoryGroup

Make = Callable[..., TrajectoryGroup]
MakeBatch = Callable[..., Batch]
Gradients = dict[str, torch.Tensor]

EVERY = [
    {},
    {"aggregation": "sequence_mean", "advantage": "dr_grpo"},
    {"aggregation": "constant", "aggregation_tokens": 20, "loss": "cispo"},
    {"old_policy": "proximal", "correction": "sequence_tis"},
]


def gradient_of(trainer: ModelTrainer, samples: list[Sample]) -> Gradients:
    trainer.optimizer.zero_grad(set_to_none=True)
    accumulate_gradient(trainer.policy, samples)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def prepared(trainer: ModelTrainer, batch: Batch) -> list[Sample]:
    """The batch as one minibatch, weighed and with its advantages."""
    groups = trainer._samples(batch)
    set_advantages(groups, trainer.settings)
    [samples] = trainer._minibatches(groups)
    return samples


def close(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def mixed(group: Make, as_batch: MakeBatch) -> Batch:
    """Two groups that teach, and two of equal rewards, one of which has the longest responses."""
    long = [[5] * 12, [6] * 14, [7] * 9, [8] * 11]
    return as_batch(
        0,
        [
            group(0, [1.0, 0.0, 0.5, 0.0]),
            group(1, [1.0] * 4, responses=long),
            group(2, [0.0] * 4),
            group(3, [0.0, 0.0, 1.0, 0.0]),
        ],
    )


@pytest.mark.parametrize("settings", EVERY)
def test_trajectories_without_advantage_are_passed_over_exactly(
    model_path: str, group: Make, as_batch: MakeBatch, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(**settings))
    samples = prepared(trainer, mixed(group, as_batch))
    passed: list[int] = []
    monkeypatch.setattr(gradients, "pack", lambda given, *how: passed.append(len(given)) or pack(given, *how))
    saved = gradient_of(trainer, samples)
    monkeypatch.setattr(Sample, "teaches_nothing", False)
    assert close(saved, gradient_of(trainer, samples))
    assert passed == [8, 16]


@pytest.mark.parametrize("settings", [{"kl_loss_coef": 0.1}, {"entropy_coef": 0.1}])
def test_a_kl_or_entropy_term_passes_every_trajectory(
    model_path: str, group: Make, as_batch: MakeBatch, settings: dict[str, Any]
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(**settings))
    assert trainer.train(mixed(group, as_batch))["trained_token_share"] == 1.0
    less = ModelTrainer(model_path, TrainerSettings()).train(mixed(group, as_batch))["trained_token_share"]
    assert 0 < less < 1


def test_logits_a_few_tokens_at_a_time_have_the_same_gradient(
    model_path: str, group: Make, as_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(entropy_coef=0.1, temperature=0.7))
    samples = prepared(trainer, mixed(group, as_batch))
    whole, scored = gradient_of(trainer, samples), trainer.policy.score(samples)
    rows: list[int] = []
    original = Policy._of_logits

    def noted(policy: Policy, logits: torch.Tensor, *given: Any) -> Any:
        rows.append(len(logits))
        return original(policy, logits, *given)

    monkeypatch.setattr(Policy, "_of_logits", noted)
    monkeypatch.setattr(gradients, "LOGIT_BYTES", 5 * 4 * 16)
    assert close(whole, gradient_of(trainer, samples))
    assert max(rows) == 5
    for one, other in zip(scored, trainer.policy.score(samples), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_the_gradient_of_a_bfloat16_head_is_as_exact_in_many_parts_as_in_one(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 37 parts. Sums in bfloat16 would be rounded after each."""
    torch.manual_seed(1)
    trainer = ModelTrainer(model_path, TrainerSettings(bf16="on", device="cpu"))
    head = trainer.model.get_output_embeddings()
    assert head.weight.dtype == torch.bfloat16
    hidden, targets = torch.randn(37 * 5, head.in_features), torch.arange(37 * 5) % head.out_features
    exact = torch.autograd.functional.jacobian(
        lambda weight: -(hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).sum(), head.weight.float()
    )

    def error(rows: int) -> float:
        monkeypatch.setattr(gradients, "LOGIT_BYTES", rows * 4 * head.out_features)
        micro = SimpleNamespace(inputs=dict, predictors=lambda states: states, targets=targets)
        states = SimpleNamespace(last_hidden_state=hidden.bfloat16())
        monkeypatch.setattr(trainer.policy, "_parts", (lambda **given: states, head))
        (-trainer.policy._logprobs(micro, False).chosen.sum()).backward()
        [master] = [trainer.policy.masters.of(head.weight)]
        found, master.grad = master.grad, None
        return float((found - exact).norm() / exact.norm())

    assert error(5) <= 1.2 * error(37 * 5)


def test_checkpointed_activations_have_the_same_gradient(model_path: str, group: Make, as_batch: MakeBatch) -> None:
    plain = ModelTrainer(model_path, TrainerSettings())
    saving = ModelTrainer(model_path, TrainerSettings(activation_checkpointing=True))
    layer = saving.model.model.layers[0]  # type: ignore[union-attr, index]
    calls: list[bool] = []
    layer.mlp.register_forward_pre_hook(lambda *given: calls.append(torch.is_grad_enabled()))
    kept = gradient_of(saving, prepared(saving, mixed(group, as_batch)))
    assert len(calls) == 2, "once forward, and once more for the backward pass"
    assert close(kept, gradient_of(plain, prepared(plain, mixed(group, as_batch))))
    assert not saving.model.training


SMALL: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.5, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**SMALL, logits_scaling=3.0),
        CohereConfig(**SMALL, logit_scale=0.1),
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5),
    ],
    ids=["Granite", "Cohere", "Gemma 2"],
)
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_models_that_scale_or_cap_logits_compute_those_of_trained_tokens(
    tmp_path: Path, group: Make, as_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, config: Any, packing: str
) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer = ModelTrainer(str(tmp_path), TrainerSettings(packing=packing, entropy_coef=0.1))
    assert trainer.policy.packing.packed == (packing == "auto" and config.model_type != "gemma2")
    samples = prepared(trainer, mixed(group, as_batch))
    rows: list[int] = []
    trainer.model.get_output_embeddings().register_forward_hook(lambda *given: rows.append(given[2].numel() // 16))
    saved, scored = gradient_of(trainer, samples), trainer.policy.score(samples)
    trained = sum(sample.tokens for sample in samples)
    assert rows == [trained, trained]
    monkeypatch.setattr(gradients, "LOGIT_BYTES", 5 * 4 * 16)
    in_parts = gradient_of(trainer, samples)
    monkeypatch.setattr(trainer.policy, "_parts", None)
    assert close(in_parts, saved) and close(gradient_of(trainer, samples), saved)
    for one, other in zip(scored, trainer.policy.score(samples), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("capping", [None, 0.5])
def test_logits_in_float32_are_those_of_the_float32_head(
    tmp_path: Path, group: Make, as_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, capping: float | None
) -> None:
    """Of a plain head and of one whose model caps its logits."""
    torch.manual_seed(3)
    config = Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=capping)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    trainer = ModelTrainer(str(tmp_path), TrainerSettings(bf16="on", fp32_head=True, device="cpu"))
    found: list[torch.Tensor] = []
    original = Policy._of_logits

    def noted(policy: Policy, logits: torch.Tensor, *given: Any) -> Any:
        found.append(logits)
        return original(policy, logits, *given)

    monkeypatch.setattr(Policy, "_of_logits", noted)
    trainer.policy.score(prepared(trainer, mixed(group, as_batch)))
    assert {logits.dtype for logits in found} == {torch.float32}
    assert any(not torch.equal(logits, logits.bfloat16().float()) for logits in found)


class Shifted(LlamaForCausalLM):
    """Its logits are not those of its head alone, nor of a forward pass without the tokens."""

    def forward(self, input_ids: torch.Tensor, **given: Any) -> Any:
        output = super().forward(input_ids, **given)
        output.logits = output.logits + input_ids[:, :, None]
        return output


def test_a_model_that_makes_its_logits_in_another_way_is_asked_for_them(model_path: str) -> None:
    shifted = Shifted.from_pretrained(model_path).eval()
    assert body_and_head(shifted) is None
    with pytest.raises(ConfigError, match=r"trainer\.fp32_head .*Shifted makes its logits in another way"):
        Policy(shifted, TrainerSettings(bf16="on", fp32_head=True), torch.device("cpu"), True)
    found = body_and_head(AutoModelForCausalLM.from_pretrained(model_path))
    assert found is not None and isinstance(found[1], torch.nn.Linear)


def test_old_log_probs_are_neither_ordered_nor_computed_for_one_optimizer_step(
    model_path: str, group: Make, as_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = TrainerSettings(old_policy="proximal")
    assert one.scoring_tasks(4) == () and one.optimizer_steps(4) == 1
    for several in ({"policy_mini_batch_size": 3}, {"epochs_per_batch": 2}):
        settings = TrainerSettings(old_policy="proximal", **several)
        assert settings.scoring_tasks(4) == ("old_logprobs",) and settings.optimizer_steps(4) == 2
    scored: list[int] = []
    original = Policy.score
    monkeypatch.setattr(Policy, "score", lambda policy, given: scored.append(len(given)) or original(policy, given))
    ModelTrainer(model_path, one).train(mixed(group, as_batch))
    assert scored == []
    two = TrainerSettings(old_policy="proximal", epochs_per_batch=2)
    ModelTrainer(model_path, two).train(mixed(group, as_batch))
    assert scored == [8], "and only of trajectories with a gradient"


@pytest.mark.parametrize(
    ("given", "passed"),
    [({}, 8), ({"kl_loss_coef": 0.1}, 16), ({"entropy_coef": 0.1}, 16), ({"kl_reward_coef": 0.1}, 16)],
)
def test_ordered_old_log_probs_are_those_of_trajectories_with_a_gradient(
    model_path: str, group: Make, as_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any],
    passed: int,
) -> None:  # fmt: skip
    """A KL in the reward makes advantages that are not known before the reference has scored."""
    settings = TrainerSettings(old_policy="proximal", policy_mini_batch_size=2, learning_rate=1e-2, **given)
    ordered, unordered, apart = (
        ModelTrainer(model_path, settings, scored_apart=names) for names in ((), (), ("old_logprobs",))
    )
    scorer = ModelScorer(model_path, settings, ("old_logprobs",))
    scored: list[int] = []
    original = Policy.score
    batch, elsewhere = mixed(group, as_batch), mixed(group, as_batch)
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "score", lambda policy, given: scored.append(len(given)) or original(policy, given))
        ordered.score(batch, "old_logprobs")
        elsewhere.scores = {"old_logprobs": scorer.score(elsewhere, "old_logprobs")}
    assert scored == [passed] * 2
    for trainer, one in ((ordered, batch), (unordered, mixed(group, as_batch)), (apart, elsewhere)):
        metrics = trainer.train(one)
        assert metrics["optimizer_steps"] == 2 and metrics["nonfinite_trajectories"] == 0
    for trainer in (ordered, apart):
        assert trainer.rollout_figures() == unordered.rollout_figures(), "no gap where there was no pass"
        assert all(torch.equal(trainer.weights()[name], value) for name, value in unordered.weights().items())


def test_an_empty_minibatch_leaves_parameters_alone_that_no_minibatch_reaches(
    model_path: str, group: Make, as_batch: MakeBatch
) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(weight_decay=0.5, learning_rate=0.1))
    unused = torch.nn.Parameter(torch.ones(4, 4))
    trainer.model.register_parameter("unused", unused)
    trainer.optimizer.add_param_group({"params": [unused]})
    trainer.train(as_batch(0, [group(0, [1.0, 0.0])]))
    trainer.train(as_batch(1, [group(1, [1.0, 1.0])]))
    assert torch.equal(unused, torch.ones(4, 4))
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}


@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_that_is_cut_off_as_a_whole_can_be_normalised(
    model_path: str, group: Make, as_batch: MakeBatch, advantage: str
) -> None:
    made = group(0, [1.0, 0.0])
    for trajectory in made.trajectories:
        trajectory.finish_reason = "length"
    trainer = ModelTrainer(model_path, TrainerSettings(advantage=advantage, filter_overlong=True))
    assert trainer.train(as_batch(0, [made]))["trained_token_share"] == 0
