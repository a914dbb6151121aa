"""LoRA: only the adapter is trained, published and saved; the model without it is the reference."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import OfRanks
from peft import PeftModel
from safetensors.torch import load_file
from test_ranks import close_to
from test_trainer_steps import same
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.cli import main
from engine.errors import ConfigError
from engine.protocols import Batch
from engine.storage.checkpoints import save_checkpoint
from engine.training import model_checkpoint
from engine.training.lora import Lora, adapter_tensors
from engine.training.model_trainer import ModelTrainer
from engine.training.shared_weights import ReusedMemory
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]
LORA = Lora(rank=4, alpha=8.0)
EVERY = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
BF16 = torch.bfloat16
IDS = torch.tensor([[2, 3, 4, 5, 9, 6]])


def adapted(model_path: str, **changes: Any) -> ModelTrainer:
    given = {"learning_rate": 1e-2, "policy_mini_batch_size": 2, "weight_decay": 0.1, "lora": LORA}
    return ModelTrainer(model_path, TrainerSettings(**{**given, **changes}))


def base_of(trainer: ModelTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_only_the_adapter_is_trained_and_held_by_the_optimizer(model_path: str, batch: MakeBatch) -> None:
    trainer = adapted(model_path)
    own, base = adapter_tensors(trainer.model), base_of(trainer)
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    assert len(own) == 2 * 7 * 2, "A and B of seven layers in two blocks"
    trainer.train(batch(0))
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(tensor) for tensor in own.values()}
    assert all(name in base and torch.equal(value, base[name]) for name, value in base_of(trainer).items())
    assert not any(torch.equal(own[name], before[name]) for name in own)
    memory = ReusedMemory(pins=False)
    snapshot = model_checkpoint.ModelSnapshot(trainer.model, trainer.optimizer, trainer.policy.masters, memory)
    assert len(snapshot._live) == len(own) + len(list(trainer.model.buffers()))


def test_the_first_gradient_follows_from_that_of_the_whole_model(model_path: str, batch: MakeBatch) -> None:
    """With B = 0: the gradient of B is alpha / rank times that of W, times A transposed, and the gradient of A is 0."""
    whole = ModelTrainer(model_path, TrainerSettings(max_grad_norm=0.0))
    trainer = adapted(model_path, max_grad_norm=0.0)
    gradients: list[dict[str, torch.Tensor]] = []
    for each in (whole, trainer):
        each.optimizer.step = lambda each=each: gradients.append(  # type: ignore[method-assign]
            {name: p.grad.clone() for name, p in each.model.named_parameters() if p.grad is not None}
        )
        each.settings = whole.settings
        each.train(batch(0))
    of_whole, of_adapter = gradients
    for name, gradient in of_adapter.items():
        layer, _, part = name.partition(".lora_")
        if part.startswith("A"):
            assert not gradient.any()
            continue
        matrix = trainer.model.get_parameter(f"{layer}.lora_A.default.weight").detach()
        expected = LORA.alpha / LORA.rank * of_whole[f"{layer}.weight"] @ matrix.T
        assert torch.allclose(gradient, expected, atol=1e-6), name


def test_in_bfloat16_only_the_adapter_has_masters(model_path: str, batch: MakeBatch) -> None:
    trainer = adapted(model_path, bf16="on", kl_loss_coef=0.1)
    assert {value.dtype for value in trainer.model.parameters()} == {BF16}
    trainer.train(batch(0))
    moved = trainer.weights()
    assert {value.dtype for value in trainer.policy.trained} == {torch.float32}
    assert len(trainer.policy.trained) == len(moved)
    trained = [name for name, value in trainer.model.named_parameters() if value.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_named_layers_alone_are_adapted(model_path: str) -> None:
    trainer = adapted(model_path, lora=Lora(rank=2, target_modules=("q_proj", "v_proj")))
    layers = {name.split(".")[-3] for name in trainer.weights()}
    assert layers == {"q_proj", "v_proj"}


def test_an_error_about_missing_layers_names_those_that_the_model_has(model_path: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.target_modules") as caught:
        adapted(model_path, lora=Lora(target_modules=("q_proj", "query_key_value")))
    said = str(caught.value)
    assert "no linear layer named query_key_value" in said and ", ".join(EVERY) in said and "lm_head" not in said


@pytest.mark.parametrize("names", [(), ("all-linear", "q_proj")])
def test_layers_that_cannot_be_meant_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.target_modules"):
        Lora(target_modules=names)


# -- the reference -----------------------------------------------------------------------------------------------------


def test_the_reference_is_the_model_without_its_adapter_and_no_second_copy(model_path: str, batch: MakeBatch) -> None:
    trainer, plain = adapted(model_path, kl_loss_coef=0.1), ModelTrainer(model_path, TrainerSettings())
    first = trainer.train(batch(0))
    assert trainer.reference is not None and trainer.reference.model is trainer.model
    assert first["reference_kl_k3"] >= 0 and trainer.train(batch(1))["reference_kl_k3"] > 1e-5
    samples = [sample for group in trainer._samples(batch(2)) for sample in group]
    ours, theirs, adapted_ones = (each.score(samples) for each in (trainer.reference, plain.policy, trainer.policy))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(ours, adapted_ones, strict=True))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_resuming_is_exact_to_the_bit(model_path: str, batch: MakeBatch, tmp_path: Path) -> None:
    straight, stopped, resumed = (adapted(model_path) for _ in range(3))
    for trainer, steps in ((straight, 3), (stopped, 2)):
        for step in range(steps):
            trainer.train(batch(step))
    stopped.save(str(tmp_path / "step-2"), 2)
    resumed.train(batch(9))
    assert resumed.load(str(tmp_path / "step-2")) == 2
    resumed.train(batch(2))
    assert same(straight.weights(), resumed.weights())
    moments = [model_checkpoint.optimizer_tensors(each.model, each.optimizer) for each in (straight, resumed)]
    assert len(moments[0]) == 3 * 28 and same(*moments)
    heir = adapted(model_path)
    heir.start_from(straight.weights(), 6)
    assert same(heir.weights(), straight.weights())


def test_a_checkpoint_is_an_adapter_that_peft_and_transformers_load(
    model_path: str, batch: MakeBatch, tmp_path: Path
) -> None:
    trainer = adapted(model_path)
    trainer.train(batch(0))
    trainer.save(str(tmp_path / "saved"), 1)
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    assert same(load_file(tmp_path / "saved" / "adapter_model.safetensors"), trainer.weights())
    described = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["target_modules"]) == (4, 8.0, EVERY)
    expected = logits(trainer.model)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert torch.equal(logits(PeftModel.from_pretrained(base, str(tmp_path / "saved"))), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), expected)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(model_path)), expected)


def test_a_checkpoint_of_the_other_kind_is_refused_before_anything_changes(model_path: str, tmp_path: Path) -> None:
    trainers = {"adapter": adapted(model_path), "whole": ModelTrainer(model_path, TrainerSettings())}
    for name, trainer in trainers.items():
        trainer.save(str(tmp_path / name), 1)
    for name, says in {"whole": "has an adapter, but the whole", "adapter": "has a whole model"}.items():
        before = trainers[name].weights()
        other = next(one for one in trainers if one != name)
        with pytest.raises(ConfigError, match=says):
            trainers[name].load(str(tmp_path / other))
        assert same(trainers[name].weights(), before)
    with pytest.raises(ConfigError, match=r"of another model: .* has shape \[4, 32\] there and \[2, 32\] here"):
        adapted(model_path, lora=Lora(rank=2)).load(str(tmp_path / "adapter"))


def test_export_merges_the_adapter_or_writes_it_alone(
    model_path: str, batch: MakeBatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "schedule").mkdir(parents=True)
    trainer = adapted(model_path)
    trainer.train(batch(0))
    save_checkpoint(trainer, run / "checkpoints", 1)
    export = ["export", str(run), "--to"]
    assert main([*export, str(tmp_path / "model")]) == 0
    assert "the model after 1 train steps" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert merged.state_dict().keys() == AutoModelForCausalLM.from_pretrained(model_path).state_dict().keys()
    assert torch.allclose(logits(merged), logits(trainer.model), atol=1e-5)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(model_path)), logits(merged), atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w3 w5").input_ids == [3, 5]

    assert main([*export, str(tmp_path / "alone"), "--adapter", "--dtype", "bfloat16"]) == 0
    assert "the adapter after 1 train steps" in capsys.readouterr().out
    written = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert same(written, {name: value.bfloat16() for name, value in trainer.weights().items()})
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    alone = PeftModel.from_pretrained(base, str(tmp_path / "alone"))
    assert torch.allclose(logits(alone), logits(trainer.model), atol=3e-2)


def test_an_export_that_cannot_be_says_what_is_missing(
    model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(model_path).save_pretrained(base)
    for name, trainer in {"whole": ModelTrainer(model_path), "adapter": adapted(str(base))}.items():
        (tmp_path / name / "schedule").mkdir(parents=True)
        save_checkpoint(trainer, tmp_path / name / "checkpoints", 1)
    to = ["--to", str(tmp_path / "target")]
    assert main(["export", str(tmp_path / "whole"), *to, "--adapter"]) == 2
    assert "the checkpoint has a whole model" in capsys.readouterr().err
    os.rename(base, tmp_path / "moved")
    assert main(["export", str(tmp_path / "adapter"), *to]) == 2
    assert f"belongs to the model at {base}, which cannot be loaded" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "moved", "whole"], "nothing is left behind"


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_ranks_train_the_adapter_that_one_trains_and_resume_on_any_number(
    of_ranks: OfRanks, batch: MakeBatch, tmp_path: Path
) -> None:
    """Frozen and trained parameters are sharded together; the reference is scored between the steps."""
    settings = {"lora": LORA, "learning_rate": 1e-2}
    with of_ranks(1, **settings) as alone:
        expected = [alone.train(batch(step)) for step in range(2)]
        weights = alone.weights()
    for count, begins in ((1, 0), (2, 1)):
        with of_ranks(count, **settings) as trainer:
            if begins:
                assert trainer.load(str(tmp_path / f"step-{begins}")) == begins
            for task in ("ref_logprobs", "old_logprobs"):
                trainer.score(batch(begins), task)
            metrics = trainer.train(batch(begins))
            for name in ("loss", "grad_norm", "reference_kl_k3"):
                assert metrics[name] == pytest.approx(expected[begins][name], rel=1e-3, abs=1e-5), name
            trainer.save(str(tmp_path / f"step-{begins + 1}"), begins + 1)
            final = {name: value.clone() for name, value in trainer.weights().items()}
    assert close_to(final, weights)
    assert close_to(load_file(tmp_path / "step-2" / "adapter_model.safetensors"), weights)
