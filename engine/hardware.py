"""Memory and GPUs of this machine. `config.inputs` checks a configuration against them; `actors` stay within them."""

import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

SHARE = 0.3
"""Share of memory that Ray's object store gets by default."""
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SHARED = Path("/dev/shm")
LEAST_SHARED_BYTES = 256 << 20
"""Docker's default is a quarter of it, too little for the processes of vLLM and for NCCL."""
NVIDIA_SMI_S = 20.0
"""Seconds that `nvidia-smi` may take."""


def object_store_limit() -> int:
    """Maximum size of an object store in bytes: `SHARE` of memory, but no more than 95 % of free shared memory."""
    share = int(SHARE * memory_bytes())
    try:
        free = os.statvfs(SHARED)
    except OSError:
        return share
    return min(share, int(0.95 * free.f_bavail * free.f_frsize))


def why_no_kernels(shared: Path = SHARED) -> tuple[str, str] | None:
    """What this machine lacks to run GPU programs that compile their kernels when they start, and how to get it; None:
    nothing. Triton and Inductor compile with a C compiler and the headers of Python."""
    compiler = os.environ.get("CC") or "gcc"
    if not any(map(shutil.which, (compiler, "clang"))):
        return f"this machine has no C compiler ({compiler})", "install gcc, or name a compiler by the variable CC"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return f"{headers} has no Python.h", "install the headers of this Python, for example python3-dev"
    size = os.statvfs(shared) if shared.exists() else None
    if size is not None and size.f_blocks * size.f_frsize < LEAST_SHARED_BYTES:
        has = f"{shared} has {size.f_blocks * size.f_frsize / 1e6:.0f} MB"
        return has, "give the container more: docker run --shm-size=8g, or --ipc=host"
    return None


def gpu_count(devices: Path = Path("/dev")) -> int | None:
    """Number of NVIDIA GPUs; None if the machine may have GPUs that this cannot count (AMD, or under WSL)."""
    if any((devices / name).exists() for name in ("kfd", "dxg")):
        return None
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


@cache
def gpu_memory_gb() -> float:
    """Memory of the smallest NVIDIA GPU that this process may use, in GB; 0 if it cannot be read."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0.0
    return smallest_memory_gb(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))


def smallest_memory_gb(listed: str, visible: str | None) -> float:
    """Memory of the smallest visible GPU, in GB; 0 if there is none. `listed`: a line for each GPU, with number, UUID
    and MiB. `visible`: the numbers or UUIDs that CUDA sees; None: all."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.count(",") == 2]
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    seen = [
        float(memory) * (1 << 20) / 1e9
        for number, uuid, memory in rows
        if memory.isdigit() and (names is None or any(name == number or uuid.startswith(name) for name in names))
    ]
    return min(seen, default=0.0)


def memory_bytes() -> int:
    """Memory of this machine, or of the container that this process runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in CGROUPS:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):
            continue  # no file, or "max": no limit
    return min(limits)
