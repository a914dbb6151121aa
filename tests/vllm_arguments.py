"""Whether tests of vLLM can run, and the engine arguments with which theirs start soonest."""

from importlib.util import find_spec
from typing import Any

import pytest

ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The worker in the engine's process, as on a GPU. By its path: for "uni", vLLM takes a second process on a CPU."""
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "distributed_executor_backend": ONE_PROCESS,
    "stream_interval": 1,  # tests count tokens one by one
}  # fmt: skip


def require_vllm() -> None:
    """Skip the test or the file that calls this where vLLM is not installed. Nothing is imported: it would take seconds
    in each process of pytest-xdist."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed", allow_module_level=True)
