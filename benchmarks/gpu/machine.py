"""Parts about the machine and what is installed there: versions, the tests for GPUs, a run with vLLM."""

import os
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.hardware import memory_bytes
from gpu.bench import Bench, Figures

ROOT = Path(__file__).resolve().parents[2]

# -- versions ----------------------------------------------------------------------------------------------------------


def describe(bench: Bench) -> Iterator[Figures]:
    yield {
        "device": bench.device.type, "python": platform.python_version(), "torch": torch.__version__,
        "transformers": version("transformers"), "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(), "memory_gb": memory_bytes() / 1e9,
        "shared_memory_gb": shutil.disk_usage("/dev/shm").free / 1e9 if Path("/dev/shm").is_dir() else 0.0,
        "packages": {name: find_spec(name) is not None for name in ("flash_attn", "vllm", "ray", "peft", "accelerate")},
    }  # fmt: skip
    if not bench.gpu:
        return
    properties = torch.cuda.get_device_properties(0)
    yield {
        "gpu": properties.name, "gpus": torch.cuda.device_count(), "gpu_memory_gb": properties.total_memory / 1e9,
        "capability": f"{properties.major}.{properties.minor}", "multiprocessors": properties.multi_processor_count,
        "free_gb": torch.cuda.mem_get_info()[0] / 1e9, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "nccl": list(torch.cuda.nccl.version()), "driver": driver(),
        "sdp": {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
                for name in ("flash", "mem_efficient", "cudnn", "math")},
    }  # fmt: skip
    size = 8192
    one, other = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))

    def multiply() -> None:
        for _ in range(10):
            torch.mm(one, other)

    bench.seconds(multiply)
    copy = torch.empty_like(one)
    bench.seconds(lambda: copy.copy_(one))
    yield {
        "matmul_tflops": 10 * 2 * size**3 / bench.seconds(multiply) / 1e12,
        "copy_tb_per_s": 2 * one.nbytes / min(bench.seconds(lambda: copy.copy_(one)) for _ in range(5)) / 1e12,
    }


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"


# -- tests -------------------------------------------------------------------------------------------------------------


def tests(bench: Bench) -> Iterator[Figures]:
    """The tests that are marked `gpu`."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    report = bench.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    yield {"status": done.returncode, "last_line": done.stdout.strip().splitlines()[-1:]}
    if done.returncode:
        print(done.stderr, done.stdout, file=sys.stderr)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = [f"{kind.tag}: {kind.get('message', '')[:300]}" for kind in case if kind.tag != "properties"]
        yield {str(case.get("name")): found[0] if found else "passed"}
    if done.returncode:
        raise SystemExit(f"pytest ended with {done.returncode}")
