"""Watches the scheduler from the launching process: kills it if it hangs, so that Ray restarts it.

Ray detects that the scheduler's process has ended, but not that it hangs (stopped, or in an endless loop on its event
loop). `launch.RunHandle` begins a watch once the run has begun, and stops it before it ends the run. Must never kill a
scheduler that works: a restarted one answers while it replays its record.
"""

import logging
import os
import select
import shlex
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication import authentication_token_setup as authentication
from ray.exceptions import RayError

from engine.actors.failures import Pulse
from engine.errors import RayProcessEnded
from engine.record.files import make_directory, write_private
from engine.runtime.stacks import dump_stacks, process_state, stacks_file

# -- Ray's own processes -----------------------------------------------------------------------------------------------


RAYLET, GCS = "raylet", "gcs_server"
PROCESSES = Path("/proc")

_starting_ray = threading.local()


@contextmanager
def separate_sessions() -> Iterator[None]:
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
        ended = self._find_dead_process()
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
        return self._find_dead_process() != GCS

    def close(self) -> None:
        """Stop watching. End the cluster if this process started it. A second call does nothing."""
        ended = self._find_dead_process()
        handles, self._handles = self._handles, {}
        for handle in handles:
            os.close(handle)
        if not self.own:
            return
        self.own = False
        if ended is not None:
            self._kill_actors()
        end_ray()

    def _find_dead_process(self) -> str | None:
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


def reload_token() -> None:
    """Have Ray read again from the environment whether it needs a token, and which."""
    authentication.Config.initialize("")
    authentication.AuthenticationTokenLoader.instance().reset_cache()


def end_ray() -> None:
    """Disconnect from Ray and end a cluster that this process started. What it starts next needs another token."""
    ray.shutdown()
    reload_token()


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


# -- the scheduler -----------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

NAME = "scheduler"
PID_FILE = "scheduler.pid"
"""File beside the logs with the process id of the newest scheduler, and its launch."""
GONE_S = 10.0
"""Seconds that the kernel may take to end a killed process."""
STOP_S = 2.0
"""Seconds that `stop` waits for a watch that is writing stacks."""


def announce_process(run_dir: Path, launch: str) -> None:
    """Write down the process id of a new scheduler, because it may hang before its first answer. `launch`: the prefix
    of its launch. If this fails, the run continues: the watch learns the process id from the first answer."""
    file = _pid_file(run_dir)
    try:
        make_directory(file.parent)
        write_private(file, f"{os.getpid()} {launch}\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)


def _pid_file(run_dir: Path) -> Path:
    return run_dir / "logs" / PID_FILE


class SchedulerWatch:
    """Sends the scheduler heartbeats as `pulse` says, on a separate thread, from `begin` to `stop`."""

    def __init__(
        self,
        actor: Any,
        process: int,
        pulse: Pulse,
        node: RayNode,
        run_dir: Path | None,
        launch: str,
        note: Callable[[str], None],
    ) -> None:
        """`process`: the scheduler's process id on this node; 0: nothing is watched. `launch`: as in
        `announce_process`. `note` receives a line for the user."""
        self.killed = ""
        """Why the scheduler was killed, if it has not answered since then."""
        self._actor = actor
        self._pulse = pulse
        self._node = node
        self._run_dir = run_dir
        self._launch = launch
        self._note = note
        self._pid = 0
        self._process: WatchedProcess | None = None
        """The process that answered last; None if this process cannot signal it."""
        self._ordered = False
        """Whether Ray was asked to kill a process that this one cannot signal, and whose end it cannot see."""
        self._stopped = threading.Event()
        self._woken = threading.Event()
        """Set when the scheduler answers the beat, or the watch stops."""
        self._thread: threading.Thread | None = None
        if process:
            self._know(process)

    def begin(self) -> None:
        if not self._pulse.every_s or not self._pid:
            return
        given = (weakref.ref(self), self._stopped, self._pulse.every_s)
        self._thread = threading.Thread(target=_watch, args=given, name="scheduler watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more heartbeats, and kill nothing."""
        self._stopped.set()
        self._woken.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def check(self) -> bool:
        """Send one heartbeat. Returns whether a scheduler answered. A scheduler that does not answer is killed, and Ray
        sends the same call to its successor. Blocks until the answer, or until the watch is stopped."""
        woken = self._woken = threading.Event()
        if self._stopped.is_set():
            return False
        try:
            beat: Future[int] = self._actor.beat.remote().future()
        except Exception as error:  # of several classes, if Ray has been shut down in this process
            log.info("no heartbeat can be sent to the scheduler: %s", error)
            return False
        beat.add_done_callback(lambda _: woken.set())
        while not self._answers_in_time(woken):
            self._end_silent(beat)
        return beat.done() and self._answered(beat)

    def _answers_in_time(self, woken: threading.Event) -> bool:
        """Whether the answer arrives within the limit, or the watch is stopped. It waits in several parts: if this
        process itself was stopped, a single wait would be over when it continues."""
        return any(woken.wait(self._pulse.every_s) for _ in range(self._pulse.missed))

    def _answered(self, beat: "Future[int]") -> bool:
        try:
            pid = beat.result()
        except RayError:  # Ray will not restart it
            return False
        self.killed, self._ordered = "", False
        self._know(pid)
        return True

    def _know(self, pid: int) -> None:
        if pid != self._pid:
            self._pid, self._ordered = pid, False
            self._process = WatchedProcess.found(pid) if self._node.started(pid) else None

    def _end_silent(self, beat: "Future[int]") -> None:
        """Kill the silent scheduler, unless it is being replaced or Ray itself has ended."""
        try:
            self._node.require_ray()
        except RayProcessEnded:
            return  # the call that waits for an update raises
        announced = self._announced()
        if announced not in (0, self._pid):
            self._know(announced)  # a new process: give it the whole limit
            return
        process, pid = self._process, self._pid
        if self._ordered or not pid or (process is not None and process.has_ended()):
            return  # Ray restarts it
        where = self._story_of(process)
        if beat.done() or self._stopped.is_set():
            return
        silent = f"the scheduler (process {pid}) gave no sign of life for {self._pulse.limit_s:g} s"
        before, self.killed = self.killed, f"{silent} and was killed{where}"
        if process is None:
            self._ordered = True
            ray.kill(self._actor, no_restart=False)
        elif not process.kill(GONE_S):
            self.killed = f"{silent}, was killed and has not ended{where}"
        if self.killed != before:  # report a process that the kernel does not end only once
            self._note(self.killed)

    def _announced(self) -> int:
        """The process id that the newest scheduler of this launch has announced; 0 if none can be read."""
        if self._run_dir is None:
            return 0
        try:
            pid, _, launch = _pid_file(self._run_dir).read_text(encoding="utf-8").strip().partition(" ")
            return int(pid) if launch == self._launch else 0
        except (OSError, ValueError):
            return 0

    def _story_of(self, process: "WatchedProcess | None") -> str:
        """The end of a sentence that says where the stacks of a silent process are, or its state."""
        if process is None:
            return ""
        if self._run_dir is None:
            return f"; {process_state(process.pid)}"
        return f"; {dump_stacks(process.pid, stacks_file(self._run_dir, NAME))}"


class WatchedProcess:
    """A process of this node, held by a handle that stays valid only for it, even if its id is reused."""

    def __init__(self, pid: int) -> None:
        """Raises: `OSError` if there is no such process, or on Linux before 5.3."""
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)

    @classmethod
    def found(cls, pid: int) -> "WatchedProcess | None":
        try:
            return cls(pid)
        except OSError as error:
            log.info("process %d has no handle: %s", pid, error)
            return None

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended, or ends within `timeout_s`."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self, timeout_s: float) -> bool:
        """Send SIGKILL, which also ends a stopped process; whether it ends within `timeout_s`."""
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except OSError as error:
            log.warning("process %d cannot be killed: %s", self.pid, error)
        return self.has_ended(timeout_s)


def _watch(reference: "weakref.ref[SchedulerWatch]", stopped: threading.Event, every_s: float) -> None:
    """Check until the watch is stopped or garbage-collected. It holds no reference, which would keep the run alive."""
    while not stopped.wait(every_s):
        watch = reference()
        if watch is None:
            return
        try:
            watch.check()
        except Exception:  # from Ray or `note`; the next check may succeed
            log.exception("the scheduler could not be checked")
        del watch
