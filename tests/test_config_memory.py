"""The memory that `engine check` expects, against sums worked out by hand and against a real model's files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config.inputs import check_inputs
from engine.config.loading import parse_config
from engine.config.memory import Model, host_memory, replica_memory, trainer_memory
from engine.errors import ConfigError
from engine.tasks.tokenizer import save_character_tokenizer

MODEL = Model(
    parameters=1_000_000, layers=10, hidden=64, intermediate=128, heads_width=64, kv_width=32, vocabulary=1000,
    context=512,
)  # fmt: skip


def config(**sections: Any) -> Any:
    return parse_config({"model": {"make": "arithmetic"}, **sections})


def test_the_parts_of_the_trainer_by_hand() -> None:
    # A layer keeps 6 · 64 + 2 · 64 + 2 · 32 + 4 · 128 = 1088 numbers of a token. 100 tokens, 10 layers, 4 bytes.
    parts = trainer_memory(MODEL, config(trainer={"micro_batch_tokens": 100}))
    assert parts == {
        "weights": 4e6, "gradients": 4e6, "moments": 8e6, "activations": 4 * 100 * 10 * 1088, "logits": 3 * 4e5,
    }  # fmt: skip
    less = trainer_memory(MODEL, config(trainer={"micro_batch_tokens": 100, "activation_checkpointing": True}))
    assert less["activations"] == 4 * 100 * (10 * 64 + 1088)
    anchored = config(trainer={"kl_loss_coef": 0.1})
    assert trainer_memory(MODEL, anchored)["reference"] == 4e6
    apart = [{"tasks": ["rollout"]}, {"tasks": ["train"]}, {"tasks": ["ref_logprobs"]}]
    assert "reference" not in trainer_memory(MODEL, config(trainer={"kl_loss_coef": 0.1}, pools=apart))


def test_ranks_share_what_they_hold_and_gather_a_layer_at_a_time() -> None:
    alone, of_four = (trainer_memory(MODEL, config(trainer={"ranks": ranks})) for ranks in (1, 4))
    for part in ("weights", "gradients", "moments"):
        assert of_four[part] == alone[part] / 4
    # Embeddings and head are 2 · 1000 · 64 of the parameters; of the rest two layers of ten are there at a time.
    assert of_four["gathered parameters"] == 4 * (128_000 + 2 * 872_000 / 10)
    several = {"train_batch_size": 8, "policy_mini_batch_size": 4}
    assert sum(host_memory(MODEL, config(scheduler=several, trainer={"ranks": 4})).values()) == 4e6


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("trainer.ranks", {"trainer": {"ranks": 2}, "rollout": {"deterministic": True}}),
        ("trainer.ranks", {"trainer": {"ranks": 20}, "scheduler": {"train_batch_size": 4, "samples_per_prompt": 4}}),
        ("trainer.cpu_offload", {"trainer": {"cpu_offload": True, "bf16": "off"}}),
        ("trainer.device", {"trainer": {"ranks": 2, "device": "cuda:1"}}),
    ],
)
def test_ranks_that_cannot_work_are_refused(field: str, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(field)):
        config(**sections)


def test_bfloat16_weights_are_halves_beside_float32_masters() -> None:
    parts = trainer_memory(MODEL, config(trainer={"bf16": "on", "kl_loss_coef": 0.1}))
    expected = {"bfloat16 weights": 2e6, "float32 masters": 4e6, "gradients": 4e6, "moments": 8e6, "reference": 2e6}
    assert {name: parts[name] for name in expected} == expected and "weights" not in parts
    offloaded = config(trainer={"bf16": "on", "cpu_offload": True})
    assert trainer_memory(MODEL, offloaded).keys() == {"bfloat16 weights", "activations", "logits"}
    assert host_memory(MODEL, offloaded)["masters, gradients and moments"] == 16e6
    gathered = [
        trainer_memory(MODEL, config(trainer={"ranks": 4, "bf16": bf16}))["gathered parameters"]
        for bf16 in ("on", "off")
    ]
    assert 2 * gathered[0] == gathered[1]


def test_the_copy_that_undoes_a_step_is_counted_where_it_is_made() -> None:
    several = {"train_batch_size": 8, "policy_mini_batch_size": 4}
    assert sum(host_memory(MODEL, config()).values()) == 4e6
    assert sum(host_memory(MODEL, config(scheduler=several)).values()) == 16e6
    assert sum(host_memory(MODEL, config(scheduler=several, trainer={"rollback": False})).values()) == 4e6


def test_the_cache_of_a_replica_by_hand() -> None:
    # Keys and values of 10 layers, 4 bytes, 2 slots of 4 trajectories, 300 columns, 32 wide.
    given = config(
        rollout={"slots": 2, "context": 300, "max_tokens": 100},
        scheduler={"samples_per_prompt": 4, "train_batch_size": 2, "max_concurrent_groups": 2},
    )
    assert replica_memory(MODEL, given)["KV cache"] == 2 * 4 * 10 * 8 * 300 * 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    plain = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(plain))
    save_character_tokenizer(tmp_path, "1+ ")
    save_file({"w": torch.zeros(1000, 1000)}, tmp_path / "model.safetensors")
    (tmp_path / "judge_for_memory.py").write_text("def score(prompt, trajectory): return 0.0\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1"}\n')
    return tmp_path


def on_disk(directory: Path, **sections: Any) -> Any:
    given = {
        "model": {"path": str(directory)}, "data": {"path": str(directory / "data.jsonl")},
        "run": {"code_dir": str(directory)}, "reward": {"function": "judge_for_memory:score"}, **sections,
    }  # fmt: skip
    return parse_config(given)


def test_a_check_shows_the_sums_and_refuses_a_device_that_is_too_small(directory: Path) -> None:
    said = "\n".join(check_inputs(on_disk(directory)))
    assert re.search(
        r"ok: the trainer needs about .* \(4\.0 MB weights \+ 4\.0 MB gradients \+ 8\.0 MB moments \+ ", said
    )
    assert re.search(r"ok: a replica needs about .* KV cache\), the cache at full length", said)
    with pytest.raises(ConfigError, match=r"trainer\.device_memory_gb is 0\.01: the trainer needs about .* MB weights"):
        list(check_inputs(on_disk(directory, trainer={"device_memory_gb": 0.01})))
    with pytest.raises(ConfigError, match=r"rollout\.device_memory_gb is 0\.001: a replica needs about"):
        list(check_inputs(on_disk(directory, rollout={"device_memory_gb": 0.001})))


def test_a_model_with_other_names_is_left_out(directory: Path) -> None:
    (directory / "config.json").write_text('{"n_embd": 8}')
    assert Model.of(directory, 1) is None
