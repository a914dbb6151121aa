"""The part about the embedded sampler: its log-probs against those of the trainer, its speed, its sleep."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend
from engine.training.batch import Sample, sample_of_answer
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings
from gpu.bench import Bench, Figures
from gpu.training import samples_in

TRAINERS: dict[str, dict[str, Any]] = {
    "trainer, bfloat16": {"bf16": "on"},
    "trainer, bfloat16, padded": {"bf16": "on", "packing": "off"},
    "trainer, bfloat16, float32 head": {"bf16": "on", "fp32_head": True},
    "trainer, float32": {"bf16": "off"},
}


def agreement(bench: Bench) -> Iterator[Figures]:
    """Log-probs of sampled tokens with equal weights: of the sampler, of a plain forward pass, and of the trainer. A
    gap is |log-prob − the sampler's|; `clipped` is the share of tokens whose ratio is outside of 0.8 to 1.28."""
    path = bench.model("0.6b")
    figures, samples, sampled = asyncio.run(sample(bench, path))
    yield {"sampler": figures}
    bench.empty()
    yield {"plain forward, bfloat16": gaps(plain_logprobs(bench, path, samples), sampled)}
    for name, options in TRAINERS.items():
        bench.empty()
        trainer = ModelTrainer(path, TrainerSettings(device=bench.device.type, **options))
        yield {name: gaps(trainer.policy.score(samples), sampled)}
        del trainer


async def sample(bench: Bench, path: str) -> tuple[Figures, list[Sample], list[Tensor]]:
    """Sample responses in bfloat16. Returns figures, the samples, and their log-probs."""
    rows, tokens = bench.sized(16, 2), bench.sized(128, 4)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    backend = TorchBackend(model, device=bench.device.type, rows=rows, context=1024)
    prompts = [one.input_ids[:32].tolist() for one in samples_in(bench.batch(0, rows, 1, 32, 64))]
    results: list[Any] = []

    async def respond(seed: int) -> None:
        params = SamplingParams(max_tokens=tokens)
        requests = [
            SampleRequest(id=f"{seed}-{row}", prompt_ids=prompt, params=params, seed=seed * rows + row)
            for row, prompt in enumerate(prompts)
        ]
        results[:] = await asyncio.gather(*map(backend.sample, requests))

    async def seconds(work: Any) -> float:
        clock = asyncio.get_running_loop().time
        began = clock()
        await work
        bench.synchronize()
        return clock() - began

    try:
        await respond(0)
        sampling = await seconds(respond(1))
        await backend.pause("keep")
        asleep = await seconds(backend.sleep())
        left = bench.allocated()
        figures = {
            "tokens_per_s": len(prompts) * tokens / sampling, "rows": len(prompts), "sleep_s": asleep,
            "left_while_asleep_gb": left / 1e9, "wake_s": await seconds(backend.wake()),
        }  # fmt: skip
    finally:
        await backend.close()
    samples = [sample_of_answer(prompt, one.token_ids) for prompt, one in zip(prompts, results, strict=True)]
    return figures, samples, [torch.tensor(one.logprobs) for one in results]


def plain_logprobs(bench: Bench, path: str, samples: Sequence[Sample]) -> list[Tensor]:
    """By transformers alone, row by row."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().to(bench.device)
    found = []
    with torch.no_grad():
        for one in samples:
            logits = model(input_ids=one.input_ids[None].to(bench.device), use_cache=False).logits[0].float().cpu()
            found.append(logits[one.positions].log_softmax(-1).gather(1, one.targets[:, None]).squeeze(1))
    return found


def gaps(found: Sequence[Tensor], sampled: Sequence[Tensor]) -> Figures:
    difference = torch.cat(list(found)) - torch.cat(list(sampled))
    size, ratio = difference.abs(), difference.exp()
    return {
        "mean": float(size.mean()), "p99": float(size.quantile(0.99)), "max": float(size.max()),
        "bias": float(difference.mean()), "clipped": float(((ratio < 0.8) | (ratio > 1.28)).float().mean()),
        "logprob": float(torch.cat(list(found)).mean()),
    }  # fmt: skip
