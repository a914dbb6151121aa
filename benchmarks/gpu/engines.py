"""The parts with vLLM: an engine alone, and a whole run of `configs/gpu_1.yaml`.

They need no network: the model has random weights in the shape of the configured model, its tokenizer maps bytes, and
the program makes the rows. The reward is the share of even tokens.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.record.checked_lines import object_of
from engine.rollout.backend import SampleRequest, SamplingParams
from engine.tasks.tokenizer import save_chat_tokenizer
from engine.training.batch import Sample, sample_of_answer
from engine.training.model_trainer import ModelTrainer
from engine.training.packed_attention import why_not_varlen
from engine.training.trainer_settings import TrainerSettings
from gpu.bench import Bench, Figures
from gpu.sampling import TRAINERS, gaps, plain_logprobs

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "gpu_1.yaml"
FIGURES = (
    "step", "elapsed_s", "tokens", "reward_mean", "loss", "grad_norm", "seconds", "trainer_seconds", "staleness_mean",
    "ratio_mean", "tis_truncated_share", "behavior_kl_k3", "logprob_gap_max", "logprob_gap_max_fresh",
    "logprob_gap_mean_fresh", "logprob_gap_mean_stale",
)  # fmt: skip
"""Figures of a train step in `metrics.jsonl`."""
AFTERWARDS_S, LAST_S, INTERRUPTED_S = 45.0, 10.0, 20.0
"""What is left of a part's time for the replay and the logs; for the logs; and for a run that is interrupted."""


def with_tokenizer(path: str) -> str:
    """Add a tokenizer to the directory of a model if it has none. Returns the directory."""
    if not (Path(path) / "tokenizer.json").exists():
        save_chat_tokenizer(path)
    return path


def missing() -> Figures | None:
    """Why a part with vLLM is skipped."""
    return {"skipped": "vLLM is not installed"} if find_spec("vllm") is None else None


# -- an engine alone ---------------------------------------------------------------------------------------------------


def engine_alone(bench: Bench) -> Iterator[Figures]:
    """A vLLM engine without a run: its start, speed, installations of weights and sleep. Compares its log-probs with
    those of a plain forward pass and of the trainer, before and after new weights."""
    if skipped := missing():
        yield skipped
        return
    path = with_tokenizer(bench.model("0.5b"))
    found: list[tuple[str, list[Sample], list[Any]]] = []
    measured = measure(bench, path, found)
    with asyncio.Runner() as runner, suppress(StopAsyncIteration):
        while True:
            yield runner.run(next_of(measured))
    for model, samples, sampled in found:
        bench.empty()
        compared = {"plain forward, bfloat16": gaps(plain_logprobs(bench, model, samples), sampled)}
        bench.empty()
        trainer = ModelTrainer(model, TrainerSettings(device=bench.device.type, **TRAINERS["trainer, bfloat16"]))
        compared["trainer, bfloat16"] = gaps(trainer.policy.score(samples), sampled)
        del trainer
        yield {f"log-probs, {'first' if model == path else 'installed'} weights": compared}


async def next_of(steps: AsyncIterator[Figures]) -> Figures:
    return await anext(steps)


def moved(bench: Bench, path: str) -> dict[str, torch.Tensor]:
    """Other weights for the same model. Also writes them to a directory."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.02 * tensor.std() * torch.randn_like(tensor)) if tensor.ndim > 1 else None
    model.save_pretrained(bench.folder / "changed")
    return load_file(bench.folder / "changed" / "model.safetensors")


async def measure(bench: Bench, path: str, found: list[tuple[str, list[Sample], list[Any]]]) -> AsyncIterator[Figures]:
    """Adds to `found`, for the first and for installed weights: their directory, samples and their log-probs."""
    from engine.rollout.vllm.vllm_backend import VllmBackend

    rows, tokens = bench.sized(32, 4), bench.sized(256, 8)
    arguments = {"max_model_len": 1024, "enable_sleep_mode": bench.gpu}
    arguments |= {"gpu_memory_utilization": 0.4} if bench.gpu else {"dtype": "bfloat16", "enforce_eager": True}
    began = time.perf_counter()
    log = bench.folder / "vllm.log"
    backend = await asyncio.to_thread(lambda: VllmBackend(path, rows=rows, engine_args=arguments, log=log))
    yield {"start": {"s": time.perf_counter() - began, "gb": used_gb(bench)}}
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (64,), generator=drawn).tolist() for _ in range(rows)]

    async def sample(seed: int) -> list[Any]:
        params = SamplingParams(max_tokens=tokens)
        return await asyncio.gather(*(
            backend.sample(SampleRequest(id=f"{seed}-{row}", prompt_ids=ids, params=params, seed=seed * rows + row))
            for row, ids in enumerate(prompts)
        ))  # fmt: skip

    async def timed(work: Any) -> tuple[dict[str, float], Any]:
        began = time.perf_counter()
        result = await work
        return {"s": time.perf_counter() - began, "gb": used_gb(bench)}, result

    def samples_in(results: list[Any]) -> tuple[list[Sample], list[Any]]:
        pairs = zip(prompts, results, strict=True)
        return [sample_of_answer(ids, one.token_ids) for ids, one in pairs], [torch.tensor(r.logprobs) for r in results]

    try:
        await sample(0)
        figures, first = await timed(sample(1))
        figures["tokens_per_s"] = sum(len(one.token_ids) for one in first) / figures["s"]
        again = await sample(1)
        yield {"sample": figures, "repeats": [one.token_ids for one in first] == [one.token_ids for one in again]}
        found.append((path, *samples_in(first)))
        sums = await backend._engine.compute_weight_checksums()
        weights = await asyncio.to_thread(moved, bench, path)
        await backend.pause("keep")
        yield {"stage": (await timed(backend.stage(1, weights)))[0]}
        yield {"install": (await timed(backend.install(1)))[0]}
        others = await backend._engine.compute_weight_checksums()
        yield {"weights": {"parameters": len(flat(sums)), "changed by the install": differing(sums, others)}}
        yield {"sleep": (await timed(backend.sleep()))[0], "wake": (await timed(backend.wake()))[0]}
        yield {"changed by sleep": differing(others, await backend._engine.compute_weight_checksums())}
        await backend.resume()
        second = await sample(1)
        yield {"versions": sorted({span.version for one in second for span in one.spans})}
        found.append((str(bench.folder / "changed"), *samples_in(second)))
    finally:
        await backend.close()


def flat(sums: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested mappings and lists."""
    if isinstance(sums, dict):
        pairs = [(f"{name}/{key}", value) for key, value in sums.items()]
    elif isinstance(sums, list | tuple):
        pairs = [(f"{name}/{index}", value) for index, value in enumerate(sums)]
    else:
        return {name: sums}
    return {inner: leaf for key, value in pairs for inner, leaf in flat(value, key).items()}


def differing(one: Any, other: Any) -> int:
    before, after = flat(one), flat(other)
    return sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())


def used_gb(bench: Bench) -> float:
    """Used memory of the device, by all processes."""
    if not bench.gpu:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


# -- a whole run -------------------------------------------------------------------------------------------------------


def whole_run(bench: Bench) -> Iterator[Figures]:
    """Three steps of `configs/gpu_1.yaml`, made small, and the replay of their record. A run that does not end in time
    is interrupted, then killed; whatever it has written so far is shown, and its logs."""
    if skipped := missing():
        yield skipped
        return
    runs = bench.folder / "runs"
    yield {"varlen": why_not_varlen(bench.device, torch.bfloat16) or "used"}
    began = time.perf_counter()
    status, said = command(bench, max(10.0, bench.left_s() - AFTERWARDS_S), "run", str(CONFIG), *changes(bench, runs))
    yield {"status": status, "run_s": time.perf_counter() - began, "output": said[-1000:]}
    yield {
        "model runner": [line for log in sorted(runs.rglob("*.vllm.log")) for line in lines_with(log, "samples with")]
    }
    rows = [object_of(line) for file in runs.rglob("metrics.jsonl") for line in file.read_bytes().splitlines()]
    yield {"steps": [{name: row[name] for name in FIGURES if name in row} for row in rows]}
    for record in runs.rglob("schedule"):
        same, found = command(bench, max(5.0, bench.left_s() - LAST_S), "replay", str(record.parent))
        yield {"replay": found[-300:], "identical": same == 0}
    if status != 0:
        yield {"logs": {log.name: log.read_text(errors="replace")[-1500:] for log in sorted(runs.rglob("logs/*"))}}
        raise SystemExit(f"engine run ended with {status}")


def lines_with(file: Path, words: str) -> list[str]:
    return [line for line in file.read_text(errors="replace").splitlines() if words in line]


def command(bench: Bench, limit_s: float, *words: str) -> tuple[int | None, str]:
    """Run an `engine` command so that its actors find the reward. Its exit status, None if it exceeded the limit, and
    what it said."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.cli", *words], stdout=said, stderr=said, cwd=bench.folder,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPTED_S)
            process.kill()
            process.wait()
        said.seek(0)
        return status, said.read().decode(errors="replace")


def changes(bench: Bench, runs: Path, steps: int = 3) -> list[str]:
    """Settings that must differ without a network; on a CPU, also settings that make the run small."""
    rows = bench.folder / "rows.jsonl"
    asked = "Tom has {n} apples and buys {m} more on each of {d} days. How many has he?"
    rows.write_text("".join(
        json.dumps({"question": asked.format(n=n, m=n % 7, d=n % 5 + 2)}) + "\n"
        for n in range(1, 513)
    ))  # fmt: skip
    fields: dict[str, Any] = {
        "run.max_steps": steps, "run.dir": runs, "model.path": with_tokenizer(bench.model("0.5b")), "data.path": rows,
        "data.validation_path": rows, "reward.function": "gpu.rewards:even_share", "validation.at_start": "false",
        "validation.at_end": "false", "validation.every": 0, "scheduler.train_batch_size": 16,
        "scheduler.samples_per_prompt": 4, "scheduler.max_concurrent_groups": 24, "rollout.slots": 16,
        "rollout.max_tokens": 128, "rollout.engine_args.max_model_len": 512,
        "rollout.engine_args.enforce_eager": "true",
    }  # fmt: skip
    if not bench.gpu:
        fields |= {
            "scheduler.train_batch_size": 2, "scheduler.samples_per_prompt": 2, "scheduler.max_concurrent_groups": 3,
            "rollout.max_tokens": 8, "rollout.engine_args.kv_cache_memory_bytes": "null",
            "rollout.engine_args.dtype": "float32", "trainer.micro_batch_tokens": 512,
        }  # fmt: skip
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
