"""With `bf16` the passes use bfloat16 weights, and the optimizer float32 masters: no small update is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.protocols import Batch
from engine.training import model_checkpoint
from engine.training.masters import Masters
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]
BF16 = torch.bfloat16
LARGE = {"learning_rate": 1e-2, "policy_mini_batch_size": 2, "weight_decay": 0.1}


def halved(model_path: str, **settings: Any) -> ModelTrainer:
    return ModelTrainer(model_path, TrainerSettings(bf16="on", device="cpu", **settings))


def state_of(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    """The model's own weights, their masters, and the moments."""
    masters = trainer.policy.masters
    own = dict(trainer.model.named_parameters())
    moments = model_checkpoint.optimizer_tensors(trainer.model, trainer.optimizer, masters)
    every = own | {f"master/{name}": masters.of(value) for name, value in own.items()} | moments
    return {name: value.detach().clone() for name, value in every.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_below_the_resolution_of_bfloat16_is_kept(model_path: str, batch: MakeBatch) -> None:
    trainer = halved(model_path, learning_rate=1e-6)
    before = state_of(trainer)
    for step in range(3):
        trainer.train(batch(step))
    after = state_of(trainer)
    for name, value in trainer.model.named_parameters():
        assert value.dtype == BF16 and value.grad is None
        master = after[f"master/{name}"]
        assert master.dtype == after[f"exp_avg/{name}"].dtype == torch.float32
        assert 0 < (master - before[f"master/{name}"]).abs().max() < 1e-5
        assert torch.equal(value, master.bfloat16()), "passes use the rounded masters"
    published = trainer.weights()
    assert all(torch.equal(published[name], after[f"master/{name}"]) for name in published if f"master/{name}" in after)


def test_a_step_is_that_of_float32_weights_but_for_rounding(model_path: str, batch: MakeBatch) -> None:
    exact = ModelTrainer(model_path, TrainerSettings(bf16="off", device="cpu", **LARGE))
    trainer = halved(model_path, **LARGE)
    begun = exact.weights()
    expected, metrics = exact.train(batch(0)), trainer.train(batch(0))
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    assert metrics["entropy_estimate"] == pytest.approx(expected["entropy_estimate"], rel=0.02)
    moved = [torch.cat([(w[name] - begun[name]).flatten() for name in begun]) for w in (exact.weights(),
                                                                                        trainer.weights())]  # fmt: skip
    assert torch.cosine_similarity(*moved, dim=0) > 0.9


def test_gradients_of_passes_are_summed_in_float32() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    masters = Masters()
    masters.divide(model)
    for gradient in (256.0, 1.0):  # 257 has no bfloat16
        model(torch.tensor([[gradient]], dtype=BF16)).sum().backward()
    [master] = masters.trained(model)
    assert master.grad is not None and master.grad.item() == 257 and model.weight.grad is None


def test_a_checkpoint_has_the_masters_and_a_resume_is_exact_to_the_bit(
    model_path: str, batch: MakeBatch, tmp_path: Path
) -> None:
    straight, stopped, resumed = (halved(model_path, **LARGE) for _ in range(3))
    for step in range(3):
        straight.train(batch(step))
    for step in range(2):
        stopped.train(batch(step))
    stopped.save(str(tmp_path / "step-2"), 2)
    saved = load_file(tmp_path / "step-2" / "model.safetensors")
    masters = state_of(stopped)
    assert all(torch.equal(value, masters[f"master/{name}"]) for name, value in saved.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    assert AutoConfig.from_pretrained(tmp_path / "step-2").dtype == torch.float32
    resumed.train(batch(9))
    assert resumed.load(str(tmp_path / "step-2")) == 2
    assert same(state_of(resumed), masters)
    resumed.train(batch(2))
    assert same(state_of(resumed), state_of(straight))


@pytest.mark.parametrize("bf16", ["on", "off"])
def test_a_trainer_from_a_checkpoint_publishes_and_samples_in_the_first_models_type(
    model_path: str, batch: MakeBatch, tmp_path: Path, bf16: str
) -> None:
    """The files have the masters, and config.json the type of the model that the first run began with."""
    half = shutil.copytree(model_path, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(model_path, dtype=BF16).save_pretrained(half)
    trainer = ModelTrainer(str(half), TrainerSettings(bf16=bf16, publish_dtype="float32", **LARGE))
    for number in (1, 2):
        trainer.train(batch(number))
        trainer.save(str(tmp_path / f"step-{number}"), number)
        trainer = ModelTrainer(str(tmp_path / f"step-{number}"), TrainerSettings(bf16=bf16, **LARGE))
        saved = load_file(tmp_path / f"step-{number}" / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        assert all(torch.equal(trainer.policy.masters.of(trainer.model.get_parameter(name)), value)
                   for name, value in saved.items())  # fmt: skip
    published, sampled = trainer.weights(), AutoModelForCausalLM.from_pretrained(tmp_path / "step-2").state_dict()
    assert same(published, sampled) and {value.dtype for value in published.values()} == {BF16}


def test_the_reference_is_computed_as_the_model_is(model_path: str, batch: MakeBatch) -> None:
    trainer = halved(model_path, kl_loss_coef=0.1, learning_rate=1e-6)
    assert trainer.train(batch(0))["reference_kl_k3"] == 0.0
    assert trainer.reference is not None and not trainer.reference.model.training
    assert {value.dtype for value in trainer.reference.model.parameters()} == {BF16}


@pytest.mark.gpu
def test_the_optimizer_of_one_rank_may_stay_in_host_memory(model_path: str, batch: MakeBatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    settings = {**LARGE, "bf16": "on", "device": "cuda"}
    there, here = (ModelTrainer(model_path, TrainerSettings(cpu_offload=off, **settings)) for off in (False, True))
    for step in range(2):
        expected, metrics = there.train(batch(step)), here.train(batch(step))
        # After an update the two round differently: on an H200 the second norms differed by 0.4 %.
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3 if step == 0 else 2e-2)
    assert {value.device.type for value in here.model.parameters()} == {"cuda"}
    state = [value for one in here.optimizer.state.values() for value in one.values() if value.dim()]
    assert {value.device.type for value in (*here.policy.trained, *state)} == {"cpu"}
    for one, other in zip(there.policy.trained, here.policy.trained, strict=True):
        assert torch.allclose(one.detach().cpu(), other.detach(), atol=1e-3)
