"""Collects the stacks of a hung process, or its kernel state if it cannot write them.

Every actor calls `register_stacks` when it starts. Call `dump_stacks` before killing a silent process of this node.
Must never raise: a hung process is killed even if its stacks cannot be written.
"""

import faulthandler
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.record.files import make_directory, open_private

log = logging.getLogger(__name__)

SIGNAL = signal.SIGUSR1
PATIENCE_S = 5.0
LEAST_PATIENCE_S = 1.0
"""Seconds that each process which another has started has to answer, however many there are."""
QUIET_S = 0.2
"""Seconds without growth after which the file counts as complete: stacks are many small writes without an end mark."""
POLL_S = 0.05
PROCESSES = Path("/proc")
_registered: BinaryIO | None = None
"""The file to which this process writes its stacks."""


def stacks_file(run_dir: Path, name: str) -> Path:
    """The file for the stacks of a process, beside its log."""
    return run_dir / "logs" / f"{name}.stacks"


def register_stacks(file: Path) -> None:
    """Make this process append the stacks of all its threads to a file whenever it gets SIGUSR1. It does so even while
    Python code loops or a library holds the interpreter's lock."""
    global _registered
    try:
        make_directory(file.parent)
        stream = open_private(file, "ab")
    except OSError as error:
        log.warning("this process cannot write its stacks to %s if it hangs: %s", file, error)
        return
    faulthandler.register(SIGNAL, file=stream, all_threads=True)
    _registered = stream


def stacks_descriptor() -> int | None:
    """The open file to which this process writes its stacks, for the processes that it starts; None if it has none."""
    return None if _registered is None else _registered.fileno()


def dump_stacks(pid: int, file: Path, patience_s: float = PATIENCE_S) -> str:
    """Make a process of this node write its stacks to its registered file, and then the processes that it has started
    with the same file, such as a trainer's ranks, one after another. Returns a line that says where they are.

    If there are none within `patience_s`, which the started processes share, the file and the line give the process's
    state and the kernel function that it waits in. A process that has not registered is not signaled, because the
    signal would end it. Blocks.
    """
    said = _dump(pid, file, patience_s, f"process {pid}")
    children = [child for child in _children(pid) if writes_to(child, file)]
    for child in children:
        share_s = max(LEAST_PATIENCE_S, patience_s / len(children))
        _dump(child, file, share_s, f"process {child}, started by process {pid},")
    return said


def _dump(pid: int, file: Path, patience_s: float, who: str) -> str:
    """As `dump_stacks`, of one process."""
    state = process_state(pid)
    if state is None:
        return "it has ended"
    failure = _append(file, f"{who} is asked for its stacks")
    if failure is None and can_answer(pid) and _signal_and_wait(pid, file, patience_s):
        return f"its stacks are in {file}"
    story = f"it wrote no stacks: {process_state(pid) or state}"
    failure = failure or _append(file, f"process {pid}: {story}")
    return f"{story} ({file} cannot be written: {failure})" if failure else f"{story} (see {file})"


def _children(pid: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    return sorted(child for child in _processes() if _parent(child) == pid)


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(entry.name) for entry in PROCESSES.iterdir() if entry.name.isdigit()]
    return []


def _parent(pid: int) -> int | None:
    with suppress(OSError, KeyError, ValueError):
        return int(_status(pid)["PPid"])
    return None


def writes_to(pid: int, file: Path) -> bool:
    """Whether a process of this node has registered this file. A process of another node may have the same id."""
    registered = str(file.resolve())
    with suppress(OSError):
        return any(_target(entry) == registered for entry in (PROCESSES / str(pid) / "fd").iterdir())
    return False


def _target(entry: Path) -> str:
    """The path of an open file; empty if it has just been closed."""
    with suppress(OSError):
        return os.readlink(entry)
    return ""


def process_state(pid: int) -> str | None:
    """The kernel's state of a process, such as `state T (stopped), waiting in do_signal_stop`; None if there is no such
    process."""
    try:
        state = _status(pid)["State"]
    except (OSError, KeyError):
        return None
    try:
        channel = (PROCESSES / str(pid) / "wchan").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        channel = ""
    return f"state {state}" + (f", waiting in {channel}" if channel.strip("0") else "")


def _status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status. Raises: `OSError`."""
    lines = (PROCESSES / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in fields}


def can_answer(pid: int) -> bool:
    """Whether a process has a handler for the signal, and is not stopped."""
    try:
        status = _status(pid)
        caught = int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1
    except (OSError, KeyError, ValueError):
        return False
    return bool(caught) and status.get("State", "")[:1] not in ("T", "t", "Z")


def _signal_and_wait(pid: int, file: Path, patience_s: float) -> bool:
    """Signal a process and wait until the file has stopped growing; whether it has grown."""
    last = time.monotonic() + patience_s
    look = threading.Event()
    try:
        before = size = file.stat().st_size
        os.kill(pid, SIGNAL)
        grown = time.monotonic()
        while (now := time.monotonic()) < last and (size == before or now < grown + QUIET_S):
            look.wait(POLL_S)
            if file.stat().st_size > size:
                size, grown = file.stat().st_size, time.monotonic()
    except OSError:
        return False
    return size > before


def _append(file: Path, text: str) -> OSError | None:
    """Append a line with the time. Returns the error, if any."""
    try:
        make_directory(file.parent)
        with open_private(file, "ab") as stream:
            stream.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} {text} ---\n".encode())
    except OSError as error:
        return error
    return None
