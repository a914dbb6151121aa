"""`trainer.lora` in a configuration: what it may be, what it cannot go with, and the memory it needs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import load_config
from engine.config.inputs import check_inputs, object_store_bytes
from engine.config.loading import parse_config
from engine.config.memory import Model, host_memory, replica_memory, trainer_memory
from engine.config.resumption import resumed
from engine.errors import ConfigError
from engine.tasks.tokenizer import save_character_tokenizer
from engine.training.lora import Lora

MADE: dict[str, Any] = {"model": {"make": "arithmetic"}}


def made(lora: Any, **sections: Any) -> Any:
    trainer = {"lora": lora, **sections.pop("trainer", {})}
    return parse_config({**MADE, "trainer": trainer, **sections})


def test_the_section_is_the_trainers_settings() -> None:
    assert parse_config(MADE).trainer_settings.lora is None
    assert made({}).trainer_settings.lora == Lora()
    given = made({"rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]})
    assert given.trainer_settings.lora == Lora(rank=8, alpha=16.0, target_modules=("q_proj", "v_proj"))
    assert made({"target_modules": "all-linear"}).trainer == made({}).trainer


def test_a_resume_cannot_change_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({**MADE, "trainer": {"lora": {"rank": 8}}}))
    adapted = load_config(file).model_dump(mode="json")
    whole = {**adapted, "trainer": {**adapted["trainer"], "lora": None}}
    assert resumed(file, adapted)[1] == ()
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (whole, []), (adapted, ["trainer.lora.rank=4"]), (adapted, ["trainer.lora=null"]),
    ]  # fmt: skip
    for recorded, overrides in cases:
        with pytest.raises(ConfigError, match=r"trainer\.lora"):
            resumed(file, recorded, overrides)


# -- a model on disk ---------------------------------------------------------------------------------------------------

LAYERS = {"q_proj": (64, 64), "v_proj": (32, 64), "up_proj": (128, 64)}
NUMBERS = sum(4 * (rows + columns) for rows, columns in LAYERS.values()) * 2
"""Of an adapter of rank 4, in two blocks."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    plain = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
        "vocab_size": 50, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(plain))
    save_character_tokenizer(tmp_path, "1+ ")
    tensors = {
        f"model.layers.{block}.part.{name}.weight": torch.zeros(shape)
        for block in range(2)
        for name, shape in LAYERS.items()
    }
    tensors |= {"model.embed_tokens.weight": torch.zeros(50, 64), "model.layers.0.norm.weight": torch.zeros(64)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "judge_for_lora.py").write_text("def score(prompt, trajectory): return 0.0\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1"}\n')
    return tmp_path


def on_disk(directory: Path, trainer: dict[str, Any] | None = None, **lora: Any) -> Any:
    return parse_config(
        {
            "model": {"path": str(directory)}, "data": {"path": str(directory / "data.jsonl")},
            "run": {"code_dir": str(directory)}, "reward": {"function": "judge_for_lora:score"},
            "trainer": {"lora": {"rank": 4, **lora}, **(trainer or {})},
        }
    )  # fmt: skip


def test_a_check_counts_the_adapter_of_the_models_layers(directory: Path) -> None:
    whole = 2 * sum(rows * columns for rows, columns in LAYERS.values()) + 50 * 64 + 64
    said = "\n".join(check_inputs(on_disk(directory)))
    assert (
        f"ok: trainer.lora trains {NUMBERS:,} parameters in addition to the model's {whole:,} ({NUMBERS / whole:.2%})"
        in said
    )
    fewer = "\n".join(check_inputs(on_disk(directory, target_modules=["v_proj"])))
    assert f"ok: trainer.lora trains {2 * 4 * 96:,} parameters" in fewer


def test_a_check_names_the_layers_that_the_model_has(directory: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        list(check_inputs(on_disk(directory, target_modules=["q_proj", "c_attn", "embed_tokens"])))
    assert "the model has no linear layer named c_attn, embed_tokens" in str(caught.value)
    assert "use all-linear, or names from q_proj, up_proj, v_proj" in str(caught.value)


def test_router_replay_is_refused_for_a_model_without_experts(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.router_replay is True: model\.path .* has no experts; use false"):
        list(check_inputs(on_disk(directory, {"router_replay": True})))


def test_a_rank_that_no_layer_can_have_is_refused(directory: Path) -> None:
    assert any("trains" in line for line in check_inputs(on_disk(directory, rank=64)))
    for targets, highest in ("all-linear", 64), (["v_proj"], 32):
        says = rf"trainer\.lora\.rank is 65, but must be at most {highest}, .*; use {highest} or less"
        with pytest.raises(ConfigError, match=says):
            list(check_inputs(on_disk(directory, rank=65, target_modules=targets)))


def test_an_adapter_is_no_model_to_train(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path .* is an adapter"):
        list(check_inputs(on_disk(directory)))


def test_only_the_adapter_has_gradients_moments_and_copies(directory: Path) -> None:
    model = Model(
        parameters=1_000_000, adapter=10_000, layers=10, hidden=64, intermediate=128, heads_width=64, kv_width=32,
        vocabulary=1000, context=512,
    )  # fmt: skip
    several = {"train_batch_size": 8, "policy_mini_batch_size": 4}
    config = made({}, trainer={"kl_loss_coef": 0.1, "device": "cpu"}, scheduler=several)
    parts = trainer_memory(model, config, model)
    assert (parts["weights"], parts["gradients"], parts["moments"]) == (4.04e6, 4e4, 8e4)
    assert "reference" not in parts, "it is the model without its adapter"
    teacher = made({}, trainer={"kl_loss_coef": 0.1, "reference_path": "teacher", "device": "cpu"})
    assert trainer_memory(model, teacher, model)["reference"] == 4e6
    assert host_memory(model, config) == {"a version being published": 4e4, "the copy that undoes a failed step": 12e4}
    replica = replica_memory(model, config)
    assert (replica["weights"], replica["a version being installed"]) == (4.04e6, 4e4)
    of_four = trainer_memory(model, made({}, trainer={"ranks": 4, "device": "cpu"}))
    assert (of_four["weights"], of_four["gradients"]) == (1.01e6, 1e4)


def test_the_object_store_holds_adapters(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.config.inputs.LEAST_STORE_BYTES", 0)
    assert object_store_bytes(on_disk(directory), directory) == 3 * 4 * NUMBERS
