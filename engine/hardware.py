"""What the machine has: for `config.inputs`, which says what does not fit, and for `actors`, which keep to it."""

import os
from pathlib import Path

SHARE = 0.3
"""Of memory, for Ray's object store: Ray's own default."""
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SHARED = Path("/dev/shm")


def object_store_limit() -> int:
    """Bytes that an object store may take here at most: a share of memory, and what shared memory has free."""
    share = int(SHARE * memory_bytes())
    try:
        free = os.statvfs(SHARED)
    except OSError:
        return share
    return min(share, int(0.95 * free.f_bavail * free.f_frsize))


def gpu_count(devices: Path = Path("/dev")) -> int | None:
    """NVIDIA GPUs of this machine; None where there may be some that are not counted so (AMD's, or under WSL)."""
    if any((devices / name).exists() for name in ("kfd", "dxg")):
        return None
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))


def gpus_of_their_own(replicas: int, each: int, scorers: int) -> tuple[int, str]:
    """GPUs that a run needs whose weights travel from GPU to GPU, between processes that must not share one: how many,
    and who needs them. Replicas have `each`."""
    needed = replicas * each + 1 + scorers + 1
    whose = f"{replicas} replicas of {each} GPUs" if each > 1 else "each replica"
    scoring = {0: "", 1: "the scorer, "}.get(scorers, f"{scorers} scorers, ")
    of_their_own = "" if each > 1 else " a GPU of their own:"
    return needed, f"{whose}, {scoring}the trainer and the weights store need{of_their_own} {needed}"


def memory_bytes() -> int:
    """Of this machine, or of the container this process is in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in CGROUPS:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):
            continue  # no such limit: "max"
    return min(limits)
