"""Ray's own processes on the launching node: shields them from signals to the launcher, and detects their death.

Used by `run`. If the raylet dies, Ray's client hangs. If the GCS dies, the client exits a minute later. Neither reports
the cause. The launcher therefore watches Ray's processes whenever it waits for an answer.
"""

import os
import select
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from engine.errors import RayProcessEnded

RAYLET, GCS = "raylet", "gcs_server"
PROCESSES = Path("/proc")

_starting_ray = threading.local()


@contextmanager
def sessions_of_their_own() -> Iterator[None]:
    """Start each Ray process of this thread in a separate session. A signal to the launcher's process group (Ctrl-C,
    `timeout`) then reaches only the launcher. Ray's processes still end when the launcher dies."""
    _starting_ray.now = True
    try:
        yield
    finally:
        _starting_ray.now = False


def _begin_session() -> None:
    if getattr(_starting_ray, "now", False):
        os.setsid()


os.register_at_fork(after_in_child=_begin_session)  # runs before exec if `Popen` has a preexec_fn, as Ray's does


class RayNode:
    """Ray on the launching node, while one run uses it.

    `own`: this process started the cluster and ends it. `run_dir`: the run to resume if a Ray process ends.
    `processes`: process ids of Ray's processes here, by name.
    """

    def __init__(self, own: bool, run_dir: Path | None, processes: Mapping[str, int]) -> None:
        self.own = own
        self._run_dir = run_dir
        self._processes = dict(processes)
        self._handles: dict[int, str] = {}
        for name, process in processes.items():
            with suppress(OSError):  # an old kernel, or a sandbox: the run continues without this watch
                self._handles[os.pidfd_open(process)] = name

    @classmethod
    def joined(cls, own: bool, run_dir: Path | None) -> "RayNode":
        """The node of this process. Ray must be connected."""
        return cls(own, run_dir, ray_processes())

    def answer(self, reference: Any) -> Any:
        """The result of `ray.get`. Raises: `RayProcessEnded` if Ray ends here first; else what `ray.get` raises."""
        future = reference.future()
        receiver, sender = os.pipe()
        try:
            future.add_done_callback(lambda _: os.close(sender))
            self._wait(receiver)
        finally:
            os.close(receiver)
        if not future.done():
            self.require_ray()
        try:
            return future.result()
        except RayError:
            self.require_ray()
            raise

    def require_ray(self) -> None:
        """Raises: `RayProcessEnded` if a Ray process has ended on this node."""
        ended = self._ended()
        if ended is None:
            return
        what = f"the Ray process on this node ({ended}) ended"
        if self._run_dir is None:
            raise RayProcessEnded(f"{what}; the run has no directory (Plan.run_dir) and cannot be resumed")
        raise RayProcessEnded(f"{what}; the run can be resumed with `engine resume {shlex.quote(str(self._run_dir))}`")

    def started(self, process: int) -> bool:
        """Whether a process of this node is one of Ray's workers here. False if that cannot be known: another PID
        namespace may have another process of the same number."""
        raylet = self._processes.get(RAYLET)
        try:
            while process > 1 and process != raylet:
                process = _parent_of(process)
        except OSError:
            return False
        return process == raylet

    @property
    def takes_orders(self) -> bool:
        """Whether Ray can still start and end actors. The GCS does this."""
        return self._ended() != GCS

    def close(self) -> None:
        """Stop watching. End the cluster if this process started it. A second call does nothing."""
        ended = self._ended()
        handles, self._handles = self._handles, {}
        for handle in handles:
            os.close(handle)
        if not self.own:
            return
        self.own = False
        if ended is not None:
            self._kill_actors()
        ray.shutdown()

    def _ended(self) -> str | None:
        """The process that has ended, if any; the GCS if both have."""
        names = [self._handles[handle] for handle in self._wait(timeout_ms=0)]
        return GCS if GCS in names else next(iter(names), None)

    def _wait(self, *others: int, timeout_ms: int | None = None) -> list[int]:
        poll = select.poll()
        for handle in (*self._handles, *others):
            poll.register(handle, select.POLLIN)
        return [handle for handle, _ in poll.poll(timeout_ms)]

    def _kill_actors(self) -> None:
        """Kill the raylet's session, which includes the actors. Ray's shutdown would wait up to a minute for them."""
        for process in _process_ids():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(process) == self._processes.get(RAYLET):
                    os.kill(process, signal.SIGKILL)


def ray_processes() -> dict[str, int]:
    """The raylet of this process's node and, in a cluster that this process started, the GCS. Processes in another PID
    namespace, such as a container's, are not found."""
    here = ray.get_runtime_context().get_node_id()
    sockets = [f"--raylet_socket_name={node['RayletSocketName']}" for node in ray.nodes() if node["NodeID"] == here]
    found = {}
    for process in _process_ids():
        with suppress(OSError):
            command = (PROCESSES / str(process) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            name = Path(command[0]).name
            if name == RAYLET and any(socket in command for socket in sockets):
                found[RAYLET] = process
            if name == GCS and _parent_of(process) == os.getpid():
                found[GCS] = process
    return found


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in PROCESSES.iterdir() if entry.name.isdigit()] if PROCESSES.is_dir() else []


def _parent_of(process: int) -> int:
    """Raises: OSError."""
    stat = (PROCESSES / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[1])
