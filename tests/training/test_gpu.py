"""What only a GPU can show: it computes what the CPU computes, and what leaves it returns with the same bits.

`benchmarks/gpu_smoke.py` runs these tests, and measures the same on larger models.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.protocols import Batch
from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend
from engine.training.batch import sample_of_answer
from engine.training.layout import Layout, Prefix, buckets_of
from engine.training.lora import Lora
from engine.training.model_checkpoint import optimizer_tensors
from engine.training.model_trainer import ModelTrainer
from engine.training.packed_attention import packed_attention, why_not_varlen
from engine.training.ranks import ALONE, Ranks, Sharded, own_part
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]
Tensors = dict[str, torch.Tensor]
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "policy_mini_batch_size": 2, "max_grad_norm": 0.0}
GPU = "cuda"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def trainer_of(model_path: str, device: str = GPU, ranks: Ranks = ALONE, **settings: Any) -> ModelTrainer:
    return ModelTrainer(model_path, TrainerSettings(device=device, **{**SETTINGS, **settings}), ranks=ranks)


def gradient_of(trainer: ModelTrainer, batch: Batch) -> torch.Tensor:
    """Of a train step's first minibatch, all parameters end to end."""
    found: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        gradients = [parameter.grad for parameter in trainer.policy.trained if parameter.grad is not None]
        found.append(torch.cat([gradient.flatten().cpu() for gradient in gradients]))

    trainer.optimizer.register_step_pre_hook(keep)
    trainer.train(batch)
    return found[0]


def state_of(trainer: ModelTrainer) -> Tensors:
    """Copies of this rank's weights, masters and moments."""
    masters = trainer.policy.masters
    own = dict(trainer.model.named_parameters())
    every = own | {f"master/{name}": masters.of(value) for name, value in own.items()}
    every |= optimizer_tensors(trainer.model, trainer.optimizer, masters)
    return {name: own_part(value).to("cpu", copy=True) for name, value in every.items()}


def differing(one: Tensors, other: Tensors) -> list[str]:
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize(("bf16", "tolerance"), [("off", 1e-4), ("on", 0.1)])
def test_gradients_are_those_of_the_cpu(
    model_path: str, batch: MakeBatch, bf16: str, tolerance: float, packing: str
) -> None:
    exact = gradient_of(trainer_of(model_path, "cpu", bf16="off"), batch(0))
    found = gradient_of(trainer_of(model_path, bf16=bf16, packing=packing), batch(0))
    assert (found - exact).norm() < tolerance * exact.norm()


@pytest.mark.parametrize("bf16", ["off", "on"])
def test_a_trainer_that_left_the_gpu_returns_with_the_same_bits(model_path: str, batch: MakeBatch, bf16: str) -> None:
    moved, stayed = (trainer_of(model_path, bf16=bf16, kl_loss_coef=0.1) for _ in range(2))
    for trainer in (moved, stayed):
        trainer.train(batch(0))
    before, held = state_of(moved), torch.cuda.memory_allocated()
    moved.offload()
    assert torch.cuda.memory_allocated() < held
    assert {value.device.type for value in (*moved.model.parameters(), *moved.policy.trained)} == {"cpu"}
    moved.onload()
    assert differing(before, state_of(moved)) == []
    norms = [trainer.train(batch(1))["grad_norm"] for trainer in (moved, stayed)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """The only rank of a process group over NCCL: its model is sharded as that of several."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield Sharded(torch.device(GPU))
    dist.destroy_process_group()


def test_a_sharded_rank_that_left_the_gpu_returns_with_the_same_bits(
    model_path: str, batch: MakeBatch, sharded: Ranks
) -> None:
    trainer, alone = trainer_of(model_path, ranks=sharded, bf16="off"), trainer_of(model_path, bf16="off")
    expected = alone.train(batch(0))["grad_norm"]
    assert trainer.train(batch(0))["grad_norm"] == pytest.approx(expected, rel=1e-3)
    before = state_of(trainer)
    trainer.offload()
    assert {own_part(value).device.type for value in trainer.policy.trained} == {"cpu"}
    trainer.onload()
    assert differing(before, state_of(trainer)) == []
    expected = alone.train(batch(1))["grad_norm"]
    assert trainer.train(batch(1))["grad_norm"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("options", [{}, {"lora": Lora(rank=2)}])
def test_a_sharded_rank_that_is_made_in_host_memory_comes_to_the_gpu(
    model_path: str, batch: MakeBatch, sharded: Ranks, options: dict[str, Any]
) -> None:
    """As those that take turns with replicas. An adapter, and the buffers, have values before the model is sharded."""
    trainer = trainer_of(model_path, ranks=Sharded(torch.device(GPU), on_host=True), bf16="off", **options)
    alone = trainer_of(model_path, bf16="off", **options)
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    assert {own_part(value).device.type for value in tensors} == {"cpu"}
    assert {own_part(value).device.type for value in trainer.policy.trained} == {"cpu"}
    for step in (0, 1):
        trainer.onload()
        assert {own_part(value).device.type for value in trainer.policy.trained} == {"cuda"}
        assert trainer.train(batch(step))["grad_norm"] == pytest.approx(alone.train(batch(step))["grad_norm"], rel=1e-2)
        trainer.offload()


@pytest.mark.parametrize("bf16", ["off", "on"])
def test_a_checkpoint_of_a_gpu_resumes_with_the_same_bits(
    model_path: str, batch: MakeBatch, tmp_path: Path, bf16: str
) -> None:
    trainer, resumed = (trainer_of(model_path, bf16=bf16) for _ in range(2))
    trainer.train(batch(0))
    trainer.save(str(tmp_path / "step-1"), 1)
    resumed.train(batch(5))
    resumed.load(str(tmp_path / "step-1"))
    assert differing(state_of(trainer), state_of(resumed)) == []


def test_published_weights_are_those_on_the_gpu(model_path: str, batch: MakeBatch) -> None:
    trainer = trainer_of(model_path, bf16="on", publish_dtype="float32")
    masters, pointers = trainer.policy.masters, set()
    for step in (1, 2, 3):
        trainer.train(batch(step))
        published = trainer.weights()
        for name, value in trainer.model.named_parameters():
            assert published[name].device.type == "cpu" and published[name].is_pinned()
            assert torch.equal(published[name], masters.of(value).cpu())
        pointers.add(published[name].data_ptr())
        del published
    assert len(pointers) == 1, "the memory is used again"


def test_the_samplers_logprobs_are_those_of_the_trainer(model_path: str) -> None:
    async def sample() -> tuple[list[int], list[float]]:
        backend = TorchBackend(model_path, device=GPU, rows=2)
        request = SampleRequest(id="a", prompt_ids=[2, 3, 4], params=SamplingParams(max_tokens=40), seed=1)
        result = await backend.sample(request)
        await backend.pause("keep")
        await backend.sleep()
        await backend.wake()
        await backend.close()
        return result.token_ids, result.logprobs

    ids, logprobs = asyncio.run(sample())
    [scored] = trainer_of(model_path, bf16="off").policy.score([sample_of_answer([2, 3, 4], ids)])
    assert torch.allclose(scored, torch.tensor(logprobs), atol=1e-4)


@pytest.mark.parametrize(("kernel", "compiled"), [("sdpa", False), ("varlen", False), ("varlen", True)])
def test_gradients_are_those_of_the_cpu_with_each_kernel(
    model_path: str, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, kernel: str, compiled: bool
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    exact = gradient_of(trainer_of(model_path, "cpu", bf16="off"), batch(0))
    options = {"bf16": "on", "packing": "on", "shared_prompts": "on", "attention": kernel, "compile": compiled}
    found = gradient_of(trainer_of(model_path, **options), batch(0))
    assert (found - exact).norm() < 0.1 * exact.norm()


def random_row(generator: random.Random) -> tuple[Layout, int]:
    """Pieces behind prefixes and others, and the number of their tokens."""
    roots = sorted((generator.randint(1, 300) for _ in range(4)), reverse=True)
    buckets, start, place = [*buckets_of(roots, 0)], 0, sum(roots)
    for length in roots:
        own = sorted((generator.randint(1, 200) for _ in range(generator.randint(0, 5))), reverse=True)
        buckets += buckets_of(own, place, Prefix(start, length))
        start, place = start + length, place + sum(own)
    return Layout(buckets=tuple(buckets)), place


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_the_kernel_for_different_lengths_computes_what_sdpa_does(size: int, window: int | None) -> None:
    assert why_not_varlen(torch.device(GPU), torch.bfloat16) is None
    layout, tokens = random_row(random.Random(size))
    layout = layout.to(torch.device(GPU))
    torch.manual_seed(size)
    module: Any = torch.nn.Identity()
    module.num_key_value_groups = 4
    inputs = [
        torch.randn(1, heads, tokens, size, device=GPU, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
    ]
    weights = torch.randn(1, tokens, 8, size, device=GPU)
    found, expected = (
        packed_attention(module, *inputs, None, sliding_window=window, layout=layout, varlen=varlen)[0]
        for varlen in (True, False)
    )
    gradients = [torch.autograd.grad((one * weights).sum(), inputs) for one in (found, expected)]
    for one, other in [(found, expected), *zip(*gradients, strict=True)]:
        assert (one - other).norm() < 2e-2 * other.norm()
