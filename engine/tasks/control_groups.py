"""Control groups of Linux (cgroup v2) that limit all processes of a response together, if the user may create them.

`code_grading.py` uses it. Never fails: without a delegated group, the limits of single processes remain. Built, but not
tested on a machine with a delegated group.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from time import time

PREFIX = "engine-code-"
OWN_PROCESSES = 16
"""Processes of the engine in a group, and their memory."""
OWN_BYTES = 128 << 20
STALE_S = 60.0
"""Age of a group after which it is removed if it is empty."""


class ControlGroup:
    """A group for the processes of one response. Does nothing if it cannot be created."""

    def __init__(
        self, *, memory_bytes: int, processes: int, root: Path = Path("/sys/fs/cgroup"),
        own: Path = Path("/proc/self/cgroup"),
    ) -> None:  # fmt: skip
        self.path: Path | None = None
        limits = {"memory.max": memory_bytes + OWN_BYTES, "pids.max": processes + OWN_PROCESSES}
        with suppress(OSError, StopIteration):
            parent = _delegated(root, own)
            _sweep(parent)
            path = parent / f"{PREFIX}{secrets.token_hex(8)}"
            path.mkdir()
            self.path = path
            for name, most in limits.items():
                (path / name).write_text(str(most))

    def add(self, pid: int) -> None:
        """Move a process into the group. Its later children belong to it, too."""
        if self.path is not None:
            with suppress(OSError):
                (self.path / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Kill all processes in the group and remove it. If it is still ending, a later group removes it."""
        if self.path is not None:
            with suppress(OSError):
                (self.path / "cgroup.kill").write_text("1")
            with suppress(OSError):
                self.path.rmdir()


def _delegated(root: Path, own: Path) -> Path:
    """The group of this process, or the one around it, if the user may make groups with limits there. Raises:
    `StopIteration`, `OSError`."""
    name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    mine = root / name.strip("/")
    for group in (mine, mine.parent):
        if group == root.parent or not os.access(group / "cgroup.procs", os.W_OK) or not os.access(group, os.W_OK):
            continue
        if {"memory", "pids"} <= set((group / "cgroup.subtree_control").read_text().split()):
            return group
    raise StopIteration


def _sweep(parent: Path) -> None:
    for group in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time() - group.stat().st_mtime > STALE_S:
                group.rmdir()
