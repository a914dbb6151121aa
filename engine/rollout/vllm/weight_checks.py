"""Finds installs that went wrong without an error: parameters without new weights, engines with different weights.

`rollout.vllm.worker_extension` calls it in a worker, `rollout.vllm.weight_receiver` in the replica. Pure.
"""

from collections.abc import Mapping, Sequence, Set


def not_loaded(parameters: Set[str], loaded: Set[str] | None, *, quantized: bool) -> list[str]:
    """The parameters of a model that an install left as they were, by vLLM's names (`qkv_proj` for its three parts).

    `loaded`: what the model's `load_weights` returned; a few models return None, and cannot be checked. Of a quantized
    model, a layer counts as loaded with any of its parameters, because vLLM computes the others (scales).
    """
    if loaded is None:
        return []
    if quantized:
        layers = {name.rpartition(".")[0] for name in loaded}
        return sorted(name for name in parameters if name.rpartition(".")[0] not in layers)
    return sorted(parameters - loaded)


def differing(checksums: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of parameters whose checksums differ between engines. `checksums`: of each worker, by
    `dp<engine>:<rank in the engine>:<name>`."""
    found: dict[str, set[str]] = {}
    for worker in checksums:
        for name, checksum in worker.items():
            found.setdefault(name.partition(":")[2], set()).add(checksum)
    return sorted(name for name, different in found.items() if len(different) > 1)
