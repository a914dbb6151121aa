"""The gap between the log-probs of sampler and trainer: of a dense model, of a mixture of experts, and of the latter
with `trainer.router_replay`. Models are made on the spot, sampled in bfloat16 and scored in float32, on the CPU.

    python benchmarks/router_replay.py [--tokens 100]
"""

import argparse
import asyncio
import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend
from engine.training.batch import samples_of
from engine.training.model_trainer import ModelTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DENSE = Qwen3Config(**SHAPE)
EXPERTS = Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=2)
TRAJECTORIES = 8


async def sample(path: str, tokens: int, notes_routes: bool) -> TrajectoryGroup:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    backend = TorchBackend(model, notes_routes=notes_routes)

    async def one(index: int) -> Trajectory:
        trajectory = Trajectory(prompt_ids=[3, 4, 5 + index], reward=0.0, finish_reason="length")
        params = SamplingParams(max_tokens=tokens)
        request = SampleRequest(id=str(index), prompt_ids=trajectory.prompt_ids, seed=index, params=params)
        result = await backend.sample(request)
        trajectory.extend(result.token_ids, result.logprobs, result.spans, routes=result.routes)
        return trajectory

    found = await asyncio.gather(*map(one, range(TRAJECTORIES)))
    await backend.close()
    return TrajectoryGroup(group=0, prompt=Prompt(row=0, text=""), trajectories=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100, help="response tokens of each of 8 trajectories")
    tokens = parser.parse_args().tokens
    print(f"{'model':34}{'mean gap':>10}{'p99':>8}{'largest':>9}")
    for name, config, replay in (
        ("dense", DENSE, False),
        ("16 experts", EXPERTS, False),
        ("16 experts, router_replay", EXPERTS, True),
    ):
        with tempfile.TemporaryDirectory() as path:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
            samples = samples_of(asyncio.run(sample(path, tokens, replay)))
            scored = ModelTrainer(path, TrainerSettings(bf16="off", router_replay=replay)).policy.score(samples)
        gaps = torch.cat([(own - each.behavior).abs() for own, each in zip(scored, samples, strict=True)])
        print(f"{name:34}{gaps.mean():10.3f}{gaps.quantile(0.99):8.2f}{gaps.max():9.2f}")


if __name__ == "__main__":
    main()
