"""Weights on disk, read and written part by part: no rank holds a whole model."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import OfRanks
from safetensors.torch import load_file, save_file
from test_ranks import close_to
from transformers import (
    AutoModelForCausalLM,
    HrmTextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from engine.cli import main
from engine.protocols import Batch
from engine.storage.checkpoints import save_checkpoint
from engine.training import model_files
from engine.training.lora import Lora
from engine.training.model_files import fill_model, load_model
from engine.training.model_trainer import ModelTrainer
from engine.training.ranks import ALONE, Ranks, Sharded
from engine.training.stored_tensors import matching, named_tensors, stored_tensors
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]
SMALL: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip


class Several(Ranks):
    """As if there were others, for what each rank does alone."""

    count = 2


def made(config: Any, folder: Path, **options: Any) -> str:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)
    return str(folder)


EXPERTS: dict[str, Any] = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
MODELS = {
    "tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "untied": Qwen2Config(**SMALL, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**EXPERTS, num_experts=12, mlp_only_layers=[0]),
    "renamed": MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=1),
}


ADAPTER = Lora(rank=2, target_modules=("q_proj",))


@pytest.mark.parametrize(
    ("kind", "lora"), [*((kind, None) for kind in MODELS), ("tied", ADAPTER), ("experts", ADAPTER)]
)
def test_a_model_filled_tensor_by_tensor_is_the_one_that_transformers_loads(
    tmp_path: Path, kind: str, lora: Lora | None
) -> None:
    """The files of the last two have several tensors for each expert, the model two for all."""
    path = made(MODELS[kind], tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    expected, loaded = load_model(path, ALONE, lora, 3), load_model(path, Several(), lora, 3)
    assert loaded.files and expected.files and not expected.missing
    assert {value.is_meta for name, value in loaded.model.named_parameters() if "lora_" not in name} == {True}
    model = loaded.model
    kept = {name: value.clone() for name, value in model.named_parameters() if "lora_" in name}
    model.to_empty(device="cpu")
    for name, value in kept.items():
        model.get_parameter(name).data.copy_(value)
    for name, buffer in load_model(path, Several()).model.named_buffers():
        model.get_buffer(name).copy_(buffer)
    model.tie_weights()
    fill_model(model, loaded.missing, ALONE)
    one, other = named_tensors(model), named_tensors(expected.model)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (kind == "tied")
    for each in (model.config, expected.model.config):
        each._name_or_path = ""
    assert model.config.to_dict() == expected.model.config.to_dict()
    assert model.generation_config.to_dict() == expected.model.generation_config.to_dict()
    ids = torch.tensor([[2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected.model(ids).logits)


def test_shards_have_the_values_of_the_files_and_frozen_ones_may_be_bfloat16(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    loaded, expected = (load_model(model_path, each, Lora(rank=2)) for each in (Several(), ALONE))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = Sharded(torch.device("cpu"))
        ranks.shard(loaded.model, torch.device("cpu"), bf16=True)
        fill_model(loaded.model, loaded.missing, ranks)
        found = {name: ranks.whole(value) for name, value in loaded.model.named_parameters()}
    finally:
        dist.destroy_process_group()
    for name, value in expected.model.named_parameters():
        kind = torch.float32 if "lora_" in name else torch.bfloat16
        assert found.pop(name).equal(value.detach().to(kind)), name
    assert not found


@pytest.mark.parametrize("same", [True, False])
def test_tied_tensors_that_are_stored_twice_must_be_equal(tmp_path: Path, same: bool) -> None:
    path = made(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0.0 if same else 1.0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=True))
    assert (matching(stored_tensors(path), model) is not None) == same
    loaded = load_model(path, Several())
    assert bool(loaded.missing) == same
    assert (loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight) == same


def test_ranks_train_a_model_with_experts_and_save_it_under_the_names_of_its_files(
    batch: MakeBatch, tmp_path: Path, of_ranks: OfRanks
) -> None:
    """One of two ranks has two of the three experts."""
    path = made(MODELS["renamed"], tmp_path / "model")
    weights, saved = [], []
    for count in (1, 2):
        folder = tmp_path / f"saved-{count}"
        with of_ranks(count, path) as trainer:
            trainer.train(batch(0))
            trainer.save(str(folder), 1)
            weights.append({name: value.clone() for name, value in trainer.weights().items()})
        saved.append(load_file(folder / "model.safetensors"))
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        with of_ranks(3 - count, path) as trainer:
            trainer.load(str(folder))
            assert all(torch.equal(value, weights[-1][name]) for name, value in trainer.weights().items())
        assert all(torch.equal(value, weights[-1][name]) for name, value in loaded.items())
    assert close_to(*weights)
    assert saved[0].keys() == saved[1].keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in saved[0]


def test_a_model_that_transformers_converts_in_another_way_is_loaded_and_saved_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files have one tensor for what the model has in several."""
    path = made(HrmTextConfig(**SMALL), tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        loaded = load_model(path, Several())
    assert loaded.files is None and not any(value.is_meta for value in loaded.model.parameters())
    assert "each rank loads the whole model" in caplog.text
    trainer = ModelTrainer(path, TrainerSettings())
    trainer.save(str(tmp_path / "saved"), 1)
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "model" / "model.safetensors").keys()
    again = ModelTrainer(path, TrainerSettings(seed=1))
    again.load(str(tmp_path / "saved"))
    assert all(torch.equal(again.weights()[name], value) for name, value in trainer.weights().items())


def test_a_checkpoint_is_written_and_read_in_files_of_bounded_size(
    model_path: str, batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "run"
    (run / "schedule").mkdir(parents=True)
    monkeypatch.setattr(model_files, "FILE_BYTES", 3000)
    trainer = ModelTrainer(model_path, TrainerSettings())
    trainer.train(batch(0))
    saved = save_checkpoint(trainer, run / "checkpoints", 1)
    weights = trainer.weights()
    files = sorted(path.name for path in saved.glob("*.safetensors") if path.name != "random.safetensors")
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    places = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(places.values())) == files and "lm_head.weight" not in places, "tied tensors once"
    assert len(list((saved / "optimizer").glob("*.safetensors"))) > 3
    assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0, capsys.readouterr().err
    for folder in (saved, tmp_path / "exported"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert close_to(dict(model.state_dict()), weights)
    again = ModelTrainer(model_path, TrainerSettings())
    again.load(str(saved))
    assert close_to(again.weights(), weights)
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {1}
