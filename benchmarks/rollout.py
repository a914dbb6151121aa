"""The gain from continuous batching: tokens/s of `TorchBackend` against a `generate` loop over single prompts.

Run by hand: `python benchmarks/rollout.py [--trajectories 32] [--threads 1]`. Both use one model in one process and are
measured in turn; figures are medians of three. The model is of the quickstart's kind, and so small that a token mostly
costs Python's time, not arithmetic.
"""

import argparse
import asyncio
import statistics
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.torch.torch_backend import TorchBackend

PROMPT_TOKENS = 16


def quickstart_model() -> Qwen2ForCausalLM:
    """A model with about half a million parameters and random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=384,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    ).eval()


def prompts(count: int) -> list[list[int]]:
    return [[(row * 7 + column * 5 + 3) % 32 for column in range(PROMPT_TOKENS)] for row in range(count)]


def generate_loop(model: Qwen2ForCausalLM, trajectories: int, tokens: int) -> float:
    """Tokens/s of the library's own `generate`, one prompt after the other."""
    started = time.perf_counter()
    made = 0
    for ids in prompts(trajectories):
        output = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=True, top_k=0,
            min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
        made += output.shape[1] - len(ids)
    return made / (time.perf_counter() - started)


async def batched(backend: TorchBackend, trajectories: int, tokens: int) -> float:
    """Tokens/s of the backend with all trajectories requested at once."""
    before, started = backend.tokens_sampled(), time.perf_counter()
    params = SamplingParams(max_tokens=tokens)
    await asyncio.gather(
        *(
            backend.sample(SampleRequest(id=str(row), prompt_ids=ids, params=params, seed=row))
            for row, ids in enumerate(prompts(trajectories))
        )
    )
    return (backend.tokens_sampled() - before) / (time.perf_counter() - started)


async def compare(trajectories: int, tokens: int, threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    reference = quickstart_model()
    plain = TorchBackend(quickstart_model(), threads=threads, rows=trajectories)
    fixed = TorchBackend(quickstart_model(), deterministic=True, rows=trajectories)
    speeds: dict[str, list[float]] = {"generate loop": [], "TorchBackend": [], "TorchBackend, deterministic": []}
    for _ in range(rounds):
        speeds["TorchBackend"].append(await batched(plain, trajectories, tokens))
        speeds["TorchBackend, deterministic"].append(await batched(fixed, trajectories, tokens))
        torch.set_num_threads(threads)
        speeds["generate loop"].append(generate_loop(reference, min(trajectories, 8), tokens))
    await plain.close()
    await fixed.close()
    base = statistics.median(speeds["generate loop"])
    for name, values in speeds.items():
        median = statistics.median(values)
        print(
            f"{name:30} {median:10.0f} tokens/s   {median / base:6.1f} x   (of {', '.join(f'{v:.0f}' for v in values)})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=32, help="concurrent trajectories")
    parser.add_argument("--tokens", type=int, default=128, help="response tokens of each")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, for both sides")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; figures are medians")
    chosen = parser.parse_args()
    asyncio.run(compare(chosen.trajectories, chosen.tokens, chosen.threads, chosen.rounds))
