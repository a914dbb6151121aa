"""The memory that `engine check` expects, against sums worked out by hand and against a real model's files."""

import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import save_chat_model
from safetensors.torch import save_file
from torch.autograd.profiler import profile
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.config.inputs import check_inputs, known_directory, object_store_bytes
from engine.config.loading import parse_config
from engine.config.memory import (
    Device,
    Model,
    adapter_estimate,
    checkpoints_activations,
    devices_of,
    host_memory,
    memory_lines,
    replica_memory,
    scorer_memory,
    start_memory,
    trainer_memory,
    worker_memory,
)
from engine.config.model_description import tensor_shapes
from engine.config.trainer import adapter_numbers
from engine.errors import ConfigError
from engine.hardware import gpu_memory_gb, smallest_memory_gb
from engine.tasks.tokenizer import save_character_tokenizer
from engine.training.device import checkpoints_activations as checkpoints_on
from engine.training.gradients import Policy
from engine.training.lora import Lora
from engine.training.trainer_settings import TrainerSettings

MODEL = Model(
    parameters=1_000_000, layers=10, hidden=64, intermediate=128, heads_width=64, kv_width=32, vocabulary=1000,
    context=512, head=16, largest=64_000,
)  # fmt: skip
TEACHER = replace(MODEL, parameters=7_000_000, layers=20, hidden=128, intermediate=512)


def config(**sections: Any) -> Any:
    """On a CPU, unless the trainer's section names a device."""
    trainer = {"device": "cpu", **sections.pop("trainer", {})}
    return parse_config({"model": {"make": "arithmetic"}, "trainer": trainer, **sections})


def test_the_parts_of_the_trainer_by_hand() -> None:
    # A layer keeps 6 · 64 + 2 · 64 + 2 · 32 + 4 · 128 = 1088 numbers of a token. 100 tokens, 10 layers, 4 bytes.
    parts = trainer_memory(MODEL, config(trainer={"micro_batch_tokens": 100}))
    assert parts == {
        "weights": 4e6, "gradients": 4e6, "moments": 8e6, "activations": 4 * 100 * 10 * 1088, "logits": 3 * 4e5,
    }  # fmt: skip
    less = trainer_memory(MODEL, config(trainer={"micro_batch_tokens": 100, "activation_checkpointing": True}))
    assert less["activations"] == 4 * 100 * (10 * 64 + 1088)
    anchored = config(trainer={"kl_loss_coef": 0.1})
    assert trainer_memory(MODEL, anchored, MODEL)["reference"] == 4e6
    assert trainer_memory(MODEL, anchored, TEACHER)["reference"] == 28e6
    assert "reference" not in trainer_memory(MODEL, anchored, None), "its size is not known"
    assert "reference" not in trainer_memory(MODEL, config(trainer={"kl_loss_coef": 0.1}, pools=APART), MODEL)


APART = [{"tasks": ["rollout"]}, {"tasks": ["train"]}, {"tasks": ["ref_logprobs"]}]


def test_a_scorer_holds_the_whole_models_of_its_tasks() -> None:
    shared = {"micro_batch_tokens": 100, "kl_loss_coef": 0.1, "ranks": 2}
    layer = 6 * 128 + 2 * 64 + 2 * 32 + 4 * 512
    given = config(trainer=shared, pools=APART)
    assert scorer_memory(MODEL, given, ["ref_logprobs"], TEACHER) == {
        "reference": 28e6, "activations of a layer": 4 * 100 * layer, "logits": 3 * 4e5
    }  # fmt: skip
    assert "the scorer of ref_logprobs needs about 30.4 MB (28.0 MB reference" in "\n".join(
        memory_lines(MODEL, given, TEACHER)
    )
    halved = scorer_memory(MODEL, config(trainer=shared | {"bf16": "on"}, pools=APART), ["old_logprobs"], TEACHER)
    assert halved["weights"] == 2e6 and "reference" not in halved
    small = config(trainer=shared | {"device_memory_gb": 0.025, "bf16": "off"}, pools=APART)
    with pytest.raises(ConfigError, match=r"device_memory_gb is 0\.025: the scorer of ref_logprobs needs about 30"):
        list(memory_lines(MODEL, small, TEACHER))
    adapted = config(trainer={"lora": {"rank": 4}, "kl_loss_coef": 0.1}, pools=APART)
    assert scorer_memory(MODEL, adapted, ["ref_logprobs"], MODEL)["reference"] == 4e6


def test_ranks_share_what_they_hold_and_gather_a_layer_at_a_time() -> None:
    alone, of_four = (trainer_memory(MODEL, config(trainer={"ranks": ranks})) for ranks in (1, 4))
    for part in ("weights", "gradients", "moments"):
        assert of_four[part] == alone[part] / 4
    # Embeddings and head are 2 · 1000 · 64 of the parameters; of the rest two layers of ten are there at a time.
    assert of_four["gathered parameters"] == 4 * (128_000 + 2 * 872_000 / 10)
    several = {"train_batch_size": 8, "policy_mini_batch_size": 4}
    given = config(scheduler=several, trainer={"ranks": 4})
    copies = {"a version being published": 4e6, "weights being saved": 4e6}
    assert host_memory(MODEL, given) == {**copies, "the copy that undoes a failed step": 12e6}, "each copies its part"
    large = replace(MODEL, parameters=7_000_000_000)
    assert host_memory(large, given)["weights being saved"] == 1 << 30, "a checkpoint is written file by file"
    wide = replace(large, largest=1_000_000_000)
    assert host_memory(wide, given)["weights being saved"] == 4e9, "a tensor is in one file"
    anchored = config(trainer={"ranks": 4, "kl_loss_coef": 0.1})
    outside = 2 * 1000 * 128
    with_teacher = trainer_memory(MODEL, anchored, TEACHER)
    assert with_teacher["gathered parameters"] == 4 * (outside + 2 * (7_000_000 - outside) / 20)
    assert with_teacher["reference"] == 7e6
    offloaded = config(trainer={"ranks": 4, "kl_loss_coef": 0.1, "cpu_offload": True})
    assert "reference" not in trainer_memory(MODEL, offloaded, TEACHER)
    assert host_memory(MODEL, offloaded, TEACHER)["reference"] == 28e6


def test_ranks_load_their_shards_and_one_process_the_whole_model() -> None:
    alone, of_four = (config(trainer={"device": "cuda", "ranks": ranks, "kl_loss_coef": 0.1}) for ranks in (1, 4))
    assert start_memory(MODEL, alone) == {"float32 weights": 4e6, "bfloat16 copies": 2e6}
    assert start_memory(MODEL, alone, TEACHER)["float32 weights"] == 28e6, "one model after the other"
    assert start_memory(MODEL, of_four) == {"rows of a tensor in each rank": 4 * 64_000}
    assert trainer_memory(MODEL, of_four, TEACHER)["reference"] == 2 * 7e6 / 4, "frozen shards are bfloat16"
    assert host_memory(MODEL, alone)["weights being saved"] == 4e6


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
    parts = trainer_memory(MODEL, config(trainer={"bf16": "on", "kl_loss_coef": 0.1}), MODEL)
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


@pytest.mark.parametrize(
    ("trainer", "halved"),
    [
        ({"device": "auto", "device_memory_gb": 80.0}, True),
        ({"device": "auto", "device_memory_gb": 80.0, "bf16": "off"}, False),
        ({"device": "cuda:1"}, True),
        ({"device": "cpu", "device_memory_gb": 80.0}, False),
    ],
)
def test_a_device_with_a_size_computes_in_bfloat16_unless_it_is_a_cpu(trainer: dict[str, Any], halved: bool) -> None:
    parts = trainer_memory(MODEL, config(trainer=trainer))
    assert sum(parts[name] for name in parts if name not in ("activations", "logits")) == (18e6 if halved else 16e6)


@pytest.mark.parametrize("head_norms", [False, True], ids=["Qwen2", "Qwen3"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_activations_are_what_a_model_stores_for_its_backward_pass(bf16: bool, head_norms: bool) -> None:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 192, "vocab_size": 64,
    }  # fmt: skip
    model: Any = (
        Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)) if head_norms else Qwen2ForCausalLM(Qwen2Config(**sizes))
    ).eval()
    policy = Policy(model, TrainerSettings(device="cpu", packing="off"), torch.device("cpu"), bf16)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stored: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in parameters:
            stored[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), policy.autocast():
        hidden = model.model(input_ids=torch.arange(256)[None] % 64, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    measured = sum(tensor.untyped_storage().nbytes() for tensor in stored.values())
    counted = Model(
        parameters=sum(value.numel() for value in model.parameters()), layers=4, hidden=64, intermediate=192,
        heads_width=64, kv_width=32, vocabulary=64, context=256, head_norms=head_norms,
    )  # fmt: skip
    given = config(trainer={"micro_batch_tokens": 256, "bf16": "on" if bf16 else "off"})
    assert trainer_memory(counted, given)["activations"] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_logits_are_what_a_head_and_its_entropy_hold_at_a_time(bf16: bool) -> None:
    sizes = Qwen2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, intermediate_size=16,
        vocab_size=4000,
    )  # fmt: skip
    model = Qwen2ForCausalLM(sizes).eval()
    policy = Policy(model, TrainerSettings(device="cpu", packing="off", entropy_coef=0.1), torch.device("cpu"), bf16)
    hidden, targets = torch.randn(256, 16, requires_grad=True), torch.zeros(256, dtype=torch.int64)
    for coefficient in (0.1, 0.0):
        with profile(profile_memory=True) as measured:
            chosen, entropies = policy._of_hidden(
                hidden, targets, model.lm_head, lambda: model.lm_head.weight, coefficient > 0
            )
            (chosen.sum() + entropies.sum()).backward()
        changes = [event.nbytes() for event in measured.kineto_results.events() if event.name() == "[memory]"]
        given = config(trainer={"micro_batch_tokens": 256, "entropy_coef": coefficient})
        counted = trainer_memory(replace(MODEL, vocabulary=4000), given)["logits"]
        assert counted == pytest.approx(max(accumulate(changes)), rel=0.1)


@pytest.mark.parametrize(
    ("choice", "device", "kept"),
    [("auto", "cuda", False), ("auto", "cpu", True), (True, "cpu", False), (False, "cuda", True)],
)
def test_activations_are_checkpointed_on_gpus_unless_the_choice_is_explicit(
    choice: bool | str, device: str, kept: bool
) -> None:
    assert checkpoints_on(choice, torch.device(device)) is not kept
    given = config(trainer={"activation_checkpointing": choice, "device": device, "micro_batch_tokens": 100})
    assert checkpoints_activations(given) is not kept
    number = 2 if device == "cuda" else 4
    layer = number * 1088 + (4 * 64 if device == "cuda" else 0)
    whole, saved = 100 * 10 * layer, 100 * (10 * 64 * number + layer)
    assert trainer_memory(MODEL, given)["activations"] == (whole if kept else saved)


def test_the_memory_of_the_smallest_visible_gpu_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "0, GPU-aa11, 81559\n1, GPU-bb22, 24576\n2, GPU-cc33, [N/A]\n"
    assert smallest_memory_gb(listed, None) == smallest_memory_gb(listed, "1,0") == pytest.approx(25.77, abs=0.01)
    assert smallest_memory_gb(listed, "0") == smallest_memory_gb(listed, "GPU-aa") == pytest.approx(85.52, abs=0.01)
    assert smallest_memory_gb(listed, "") == smallest_memory_gb(listed, "2") == smallest_memory_gb("", None) == 0.0
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu_memory_gb.cache_clear()
    assert gpu_memory_gb() == 0.0, "there is no such program"
    program.write_text("#!/bin/sh\necho '0, GPU-aa11, 24576'\n")
    program.chmod(0o755)
    gpu_memory_gb.cache_clear()
    assert gpu_memory_gb() == pytest.approx(25.77, abs=0.01)
    gpu_memory_gb.cache_clear()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two GPUs of 0.03 GB, and enough host memory."""
    monkeypatch.setattr("engine.config.memory.gpu_count", lambda: 2)
    monkeypatch.setattr("engine.config.memory.gpu_memory_gb", lambda: 0.03)
    monkeypatch.setattr("engine.config.memory.memory_bytes", lambda: 10**12)


def test_the_devices_are_those_of_this_machine_unless_they_are_declared(two_gpus: None) -> None:
    shared = {"trainer": {"device": "auto"}, "rollout": {"replicas": 2}}
    devices = devices_of(config(**shared))
    assert (devices.trainer, devices.replica) == (Device(0.015, False, 0.5), Device(0.015, False, 0.5))
    assert devices_of(config(trainer={"device": "auto"}, rollout={"replicas": 1})).trainer == Device(0.03, False, 1.0)
    turns = config(**shared, pools=[{"tasks": ["rollout", "train"]}])
    assert devices_of(turns).trainer == devices_of(turns).replica == Device(0.03, False, 1.0)
    declared = config(trainer={"device_memory_gb": 80.0, "device": "auto"}, rollout={"device_memory_gb": 24.0})
    assert (devices_of(declared).trainer, devices_of(declared).replica) == (Device(80.0), Device(24.0))
    joined = devices_of(config(cluster={"address": "auto"}, trainer={"device": "auto"}))
    assert joined.trainer.gigabytes == 0.0, "other nodes may have other GPUs"
    on_cpu = config(rollout={"replicas": 1})
    assert devices_of(on_cpu).trainer.gigabytes == 0.0


@pytest.mark.parametrize(
    ("args", "share"),
    [
        ({}, "0.46 * 0.03"),
        ({"enable_sleep_mode": True}, "0.46 * 0.03"),
        ({"gpu_memory_utilization": 0.3}, "0.3 * 0.03"),
    ],
)
def test_vllm_takes_its_part_of_a_gpu_that_it_shares(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], share: str
) -> None:
    monkeypatch.setattr("engine.config.memory.gpu_count", lambda: 1)
    monkeypatch.setattr("engine.config.memory.built_for_cpu", lambda: False)
    sections = {"trainer": {"device": "auto", "micro_batch_tokens": 10, "lora": {"rank": 4}}}
    given = config(rollout={"backend": "vllm", "replicas": 1, "engine_args": args}, **sections)
    assert f"of its device ({share} GB)" in "\n".join(memory_lines(replace(MODEL, adapter=1000), given))


def refusal(model: Model, **trainer: Any) -> str:
    given = config(trainer={"device": "auto", "micro_batch_tokens": 1000, **trainer}, rollout={"replicas": 1})
    with pytest.raises(ConfigError) as caught:
        list(memory_lines(model, given))
    return str(caught.value)


def test_a_trainer_that_does_not_fit_is_refused_with_the_settings_that_would(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 18 MB of states, 12 MB of logits, 24.3 MB of activations (3.7 MB with checkpoints), each for 1000 tokens.
    assert refusal(MODEL, activation_checkpointing=False, device_memory_gb=0.05).endswith(
        "; use trainer.activation_checkpointing: true"
    )
    assert refusal(MODEL, activation_checkpointing=False).startswith(
        "trainer.device is 'auto': the trainer needs about "
    )
    assert "but has 0.03 GB; use trainer.activation_checkpointing: true, trainer.micro_batch_tokens: 500" in refusal(
        MODEL, activation_checkpointing=False
    )
    large = replace(MODEL, parameters=5_000_000)
    monkeypatch.setattr("engine.config.memory.gpu_memory_gb", lambda: 0.08)
    assert refusal(large).endswith("; use trainer.cpu_offload: true; or trainer.lora: {rank: 16}"), "no GPU for a rank"
    monkeypatch.setattr("engine.config.memory.gpu_count", lambda: 3)
    assert refusal(large).endswith("; use trainer.ranks: 2; or trainer.cpu_offload: true; or trainer.lora: {rank: 16}")
    assert refusal(replace(MODEL, parameters=10**9)).endswith("; use a larger device, or a smaller model")


def test_offload_is_not_suggested_where_the_host_has_no_memory_for_it(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.config.memory.memory_bytes", lambda: 10**7)
    assert "cpu_offload" not in refusal(replace(MODEL, parameters=5_000_000), device_memory_gb=0.08)


def test_the_size_of_an_adapter_of_all_layers_is_estimated(tmp_path: Path) -> None:
    shapes = {}
    for layer in range(MODEL.layers):
        for name, shape in {
            "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "gate_proj": (128, 64),
            "up_proj": (128, 64), "down_proj": (64, 128),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    assert adapter_estimate(MODEL, 8) == adapter_numbers(Lora(rank=8), shapes)


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


def served(engine_args: dict[str, Any], **rollout: Any) -> Any:
    return config(rollout={"backend": "vllm", "slots": 2, "engine_args": engine_args, **rollout})


def test_a_worker_of_vllm_by_hand() -> None:
    one = worker_memory(MODEL, served({"dtype": "float32", "max_model_len": 300}))
    assert one == {"weights": 4e6, "KV cache of 300 tokens": 2 * 4 * 10 * 300 * 32}
    assert worker_memory(MODEL, served({}))["weights"] == 2e6, "vLLM computes float32 files in 2 bytes"
    split = worker_memory(MODEL, served({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}))
    assert split == {"weights": 5e5, "KV cache of 512 tokens": 2 * 2 * 5 * 512 * 16}
    eighths = worker_memory(MODEL, served({"tensor_parallel_size": 8, "kv_cache_dtype": "fp8"}))
    assert eighths["KV cache of 512 tokens"] == 2 * 10 * 512 * 16, "at least one head"


def test_vllm_takes_a_share_of_its_device_and_what_is_left_is_cache() -> None:
    said = "\n".join(memory_lines(MODEL, served({"tensor_parallel_size": 2, "max_num_seqs": 9})))
    assert "ok: each of the 2 workers of a replica needs at least 1.3 MB (1.0 MB weights + 0.3 MB KV cache" in said
    assert "; 9 requests of that length at once fill 2.9 MB of cache" in said
    assert "holds 2 versions in shared memory, 8.0 MB" in said
    said = "\n".join(memory_lines(MODEL, served({}, transport="distributed")))
    assert "holds 2 versions in shared memory, 8.0 MB" in said
    said = "\n".join(memory_lines(MODEL, served({}, transport="vllm")))
    assert "the trainer's machine also holds the newest version in shared memory, 4.0 MB, and one more" in said
    args = {"gpu_memory_utilization": 0.5}
    said = "\n".join(memory_lines(MODEL, served(args, device_memory_gb=0.01)))
    assert "vLLM takes 5.0 MB of its device (0.5 * 0.01 GB): 3.0 MB of cache, 4 requests of that length" in said
    with pytest.raises(
        ConfigError, match=r"rollout\.device_memory_gb is 0\.005: a replica needs at least 2\.7 MB .*2\.5"
    ):
        list(memory_lines(MODEL, served(args, device_memory_gb=0.005)))
    assert "not estimated" in "\n".join(memory_lines(MODEL, served({"quantization": "fp8"}, device_memory_gb=0.001)))


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
    said = "\n".join(check_inputs(on_disk(directory, trainer={"device": "cpu"})))
    assert re.search(
        r"ok: the trainer needs about .* \(4\.0 MB weights \+ 4\.0 MB gradients \+ 8\.0 MB moments \+ ", said
    )
    assert re.search(r"ok: a replica needs about .* KV cache\), with the cache at full length", said)
    with pytest.raises(
        ConfigError, match=r"trainer\.device_memory_gb is 0\.01: the trainer needs about .* MB bfloat16 weights"
    ):
        list(check_inputs(on_disk(directory, trainer={"device_memory_gb": 0.01})))
    with pytest.raises(ConfigError, match=r"rollout\.device_memory_gb is 0\.001: a replica needs about"):
        list(check_inputs(on_disk(directory, rollout={"device_memory_gb": 0.001})))


def test_a_model_with_other_names_is_not_estimated(directory: Path) -> None:
    (directory / "config.json").write_text('{"n_embd": 8}')
    assert Model.of(directory, tensor_shapes(directory)) is None
    assert f"note: the memory is not estimated: the files of model.path {directory}" in "\n".join(
        check_inputs(on_disk(directory))
    )


def test_a_teacher_is_counted_with_its_own_size(directory: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (teacher / name).write_bytes((directory / name).read_bytes())
    save_file({"w": torch.zeros(2000, 1500)}, teacher / "model.safetensors")
    trainer = {"kl_loss_coef": 0.1, "reference_path": str(teacher), "device": "cpu"}
    said = "\n".join(check_inputs(on_disk(directory, trainer=trainer)))
    assert "+ 12.0 MB reference +" in said
    assert f"ok: trainer.reference_path {teacher} has the tokenizer of model.path" in said
    said = "\n".join(check_inputs(on_disk(directory, trainer=trainer | {"reference_path": "some/teacher"})))
    assert (
        "note: the memory estimates below leave out trainer.reference_path some/teacher: it is not downloaded yet"
        in said
    )
    assert "note: trainer.reference_path some/teacher has no tokenizer.json on this machine" in said


def test_a_reference_that_is_no_model_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    refused = {name: "is not a directory" for name in ("./nowhere", "../nowhere", str(tmp_path / "nowhere"), "file")}
    refused["empty"] = r"has no config\.json"
    for path, law in refused.items():
        trainer = {"kl_loss_coef": 0.1, "reference_path": path, "device": "cpu"}
        with pytest.raises(ConfigError, match=rf"trainer\.reference_path '{(tmp_path / path).resolve()}' {law}"):
            list(check_inputs(on_disk(directory, trainer=trainer)))
    (tmp_path / "empty" / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"trainer\.reference_path .* is an adapter"):
        list(check_inputs(on_disk(directory, trainer=trainer)))


def test_the_object_store_holds_versions_in_the_type_of_the_samplers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.config.inputs.LEAST_STORE_BYTES", 0)
    assert object_store_bytes(on_disk(directory), directory) == 3 * 4_000_000
    plain = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(plain | {"dtype": "bfloat16"}))
    assert object_store_bytes(on_disk(directory), directory) == 3 * 2_000_000
    assert object_store_bytes(on_disk(directory, trainer={"publish_dtype": "float32"}), directory) == 3 * 4_000_000


def in_hub_cache(cache: Path, name: str, family: str) -> Path:
    """The files of a model as a download leaves them."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    return Path(save_chat_model(folder / "snapshots" / ("0" * 40), family))


def test_a_model_in_the_hub_cache_is_estimated_and_its_teacher_compared(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files = in_hub_cache(tmp_path / "hub", "some/student", "chatml")
    in_hub_cache(tmp_path / "hub", "some/teacher", "chatml")
    in_hub_cache(tmp_path / "hub", "another/teacher", "llama")
    trainer = {"advantage": "distillation", "reference_path": "some/teacher", "device": "cpu"}
    given: dict[str, Any] = {
        "model": {"path": "some/student"}, "trainer": trainer, "rollout": {"max_tokens": 4},
        "scheduler": {"policies": {"filter": "none"}},
    }  # fmt: skip
    assert known_directory(on_disk(directory, **given)) == files
    said = "\n".join(check_inputs(on_disk(directory, **given)))
    assert "ok: model.path some/student is a model of the hub" in said
    assert re.search(r"ok: the trainer needs about .* MB reference \+ ", said)
    assert "ok: trainer.reference_path some/teacher has the tokenizer of model.path" in said
    with pytest.raises(ConfigError, match=r"trainer\.reference_path 'another/teacher' has another tokenizer"):
        list(check_inputs(on_disk(directory, **given | {"trainer": trainer | {"reference_path": "another/teacher"}})))
    (files / "model.safetensors").unlink()
    said = "\n".join(check_inputs(on_disk(directory, **given)))
    assert "note: the memory cannot be estimated before model.path some/student is downloaded" in said


def test_half_a_download_says_no_sizes(directory: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensor_shapes(directory) == {}
