"""Separate processes for a reward function, with limits on time and memory.

`config.reward_functions` makes one `RewardProcesses` for each function that asks for processes; calls come from the
threads of `rollout.scoring`. A process that hangs, crashes or runs out of memory is killed with everything that it has
started. Its call fails, and the next call starts a new process. No call may ever wait longer than its time limit plus
`GRACE_S` for an answer.
"""

import os
import queue
import select
import signal
import subprocess
import sys
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, RLock, Thread
from time import monotonic
from typing import IO, Any

from engine.errors import DataFailure, RewardFailure, visible
from engine.tasks.reward_child import LENGTH, pack, plain_call, unpack, value_from
from engine.tasks.reward_forms import Unit, Value
from engine.trajectory import Prompt, Trajectory

START_S = 300.0
"""Time limit for a new process to import the function, in seconds."""
GRACE_S = 5.0
"""Seconds beyond its time limit after which a process that has not ended itself is killed."""
LONGEST_REPLY = 64 << 20
"""Maximum bytes of a reply: about seven million numbers."""
TAIL_BYTES = 8 << 10
"""Bytes of a process's output that the error of its failure shows: the last ones."""
ECHO_BYTES = 16 << 10
"""Bytes of what a call prints that are shown: the first ones."""
PIECE_BYTES = 64 << 10


class ProcessStory(Exception):
    """The last output of a reward process, or the traceback in it. The cause of a `RewardFailure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The settings of a process. `spec`: module:function. `threads`: import the function on another thread and call it
    on others, as a replica does, the first time on so many at once; 0: on the main thread."""

    spec: str
    directory: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 30.0
    memory_mb: int | None = None
    threads: int = 0


class RewardProcess:
    """One process. One thread at a time calls its function; any thread may end it."""

    def __init__(self, settings: ProcessSettings) -> None:
        """Raises: `OSError` if no process can be started."""
        self._settings = settings
        self._tail = b""
        self._calls = 0
        path = os.pathsep.join([os.getcwd(), *(part for part in sys.path if part)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.tasks.reward_child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        os.set_blocking(self._in.fileno(), False)  # a process that does not read must not block the call
        self._out: IO[bytes] = self._process.stdout
        self._exit: IO[bytes] = os.fdopen(os.pidfd_open(self._process.pid), "rb", buffering=0)
        """Readable once the process has exited."""
        self._reaping = Lock()
        self._streams = RLock()
        """Held while a call uses the streams, and while they are closed."""
        self._reader = Thread(target=self._echo, name="reward output", daemon=True)
        self._reader.start()
        self._is_new = True

    def call(self, data: bytes) -> Any:
        """The first call imports the function. Raises: `RewardFailure`. The process may have ended then."""
        with self._streams:
            if self.has_ended:
                raise RewardFailure("its process was ended before the call")
            self._calls += 1
            if self._is_new:
                self._is_new = False
                self._import()
            return self._exchange(data, self._settings.timeout_s + GRACE_S, "")

    def _import(self) -> None:
        settings = self._settings
        setup = {
            "spec": settings.spec, "directory": settings.directory, "arguments": dict(settings.arguments),
            "path": list(sys.path), "memory_bytes": (settings.memory_mb or 0) << 20,
            "threads": settings.threads,
        }  # fmt: skip
        try:
            self._exchange(pack(setup), START_S, "to import the function")
        except BaseException:
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def end(self) -> None:
        """Kill the process and everything that it has started. A running call fails first."""
        with self._reaping:
            if not self.has_ended:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # before `wait`, after which its id may be reused
                self._process.wait()
        self._reader.join(1.0)  # for its last output; a grandchild outside its process group may hold the pipe longer
        with self._streams:
            for stream in (self._in, self._out, self._exit):
                stream.close()

    def _exchange(self, data: bytes, limit_s: float, aim: str) -> Any:
        began = monotonic()
        try:
            reply = self._read(began + limit_s) if self._write(data, began + limit_s) else None
        except OSError:
            reply = None
        if reply is None:
            self._fail(monotonic() - began, limit_s, aim)
        assert reply is not None
        if reply[0] == "failed":
            raise RewardFailure(reply[1])
        if reply[0] != "raised":
            return reply[1] if len(reply) > 1 else None
        _, described, trace, out_of_memory = reply
        if out_of_memory:
            self.end()
        raise RewardFailure(f"raised {described}") from ProcessStory(trace)

    def _write(self, data: bytes, deadline: float) -> bool:
        """Whether the process took all before the deadline."""
        left = memoryview(data)
        while left and self._is_ready(self._in, select.POLLOUT, deadline):
            left = left[self._in.write(left) or 0 :]
        return not left

    def _read(self, deadline: float) -> Any:
        """The next message; None if the process closes its end or the deadline passes. Raises: `RewardFailure` if it is
        longer than `LONGEST_REPLY`."""
        head = self._bytes(LENGTH.size, deadline)
        if head is None:
            return None
        (size,) = LENGTH.unpack(head)
        if size > LONGEST_REPLY:
            self.end()
            law = f"its reply has {size >> 20} MiB, but may have at most {LONGEST_REPLY >> 20} MiB"
            raise RewardFailure(f"{law}; return one number for each response, turn or token, and lower batch_size")
        body = self._bytes(size, deadline)
        return None if body is None else unpack(body)

    def _bytes(self, count: int, deadline: float) -> bytes | None:
        parts: list[bytes] = []
        while count:
            part = self._out.read(count) if self._is_ready(self._out, select.POLLIN, deadline) else None
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _is_ready(self, stream: IO[bytes], event: int, deadline: float) -> bool:
        """Wait for the stream. False if the deadline passes, or if the process exits and leaves nothing to read."""
        poll = select.poll()
        poll.register(stream, event)
        poll.register(self._exit, select.POLLIN)  # a grandchild may hold the pipe open
        ready = poll.poll(max(0.0, deadline - monotonic()) * 1000)
        return stream.fileno() in {descriptor for descriptor, _ in ready}

    def _fail(self, seconds: float, limit_s: float, aim: str) -> None:
        """End the process and say why it gave no answer."""
        if self._has_exited(1.0):
            self.end()
            code: int | None = self._process.returncode
        else:
            self.end()
            code = None
        timeout_s = self._settings.timeout_s if not aim else limit_s
        if seconds >= timeout_s or code is None:
            reason = f"took longer than {timeout_s:g} s" + (f" {aim}" if aim else "") + "; its process was killed"
        elif code < 0:
            name = signal.Signals(-code).name if -code in {one.value for one in signal.Signals} else str(-code)
            hint = "; the machine may be short of memory" if -code == signal.SIGKILL else ""
            reason = f"crashed: its process was killed by {name}{hint}"
        else:
            reason = f"crashed: its process ended with exit code {code}"
        last = self._tail.decode("utf-8", "replace")
        raise RewardFailure(reason) from ProcessStory(last or "the process wrote nothing")

    def _has_exited(self, seconds: float) -> bool:
        """Whether the process exits within `seconds`. Its exit code is left for `wait`."""
        poll = select.poll()
        poll.register(self._exit, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _echo(self) -> None:
        """Copy the output of the process, which includes what the reward prints: of each call the first `ECHO_BYTES`.
        Reads it as fast as it comes: a full pipe would stop the process."""
        assert self._process.stderr is not None
        decode = getincrementaldecoder("utf-8")("replace").decode
        calls, room = 0, ECHO_BYTES
        with self._process.stderr as stream:
            while piece := stream.read(PIECE_BYTES):
                self._tail = (self._tail + piece)[-TAIL_BYTES:]
                if calls != self._calls:
                    calls, room = self._calls, ECHO_BYTES
                if room > 0:
                    more = "" if len(piece) <= room else "\n[the rest of what this call prints is not shown]\n"
                    sys.stderr.write(visible(decode(piece[:room])) + more)
                    room -= len(piece)


class RewardProcesses:
    """Calls a reward function in `count` processes, which start when they are first needed."""

    def __init__(self, settings: ProcessSettings, count: int) -> None:
        self._settings = settings
        self._free: queue.LifoQueue[RewardProcess | None] = queue.LifoQueue()
        self._running: dict[RewardProcess, None] = {}
        self._lock = Lock()
        for _ in range(count):
            self._free.put(None)
        module, _, name = settings.spec.partition(":")
        self.__module__, self.__qualname__ = module, name

    def __call__(
        self,
        prompts: Sequence[Prompt],
        trajectories: Sequence[Trajectory],
        unit: Unit = "response",
        optional: bool = False,
    ) -> list[Value | str]:
        """The values of `reward_forms.checked_values`. First waits for a free process, which does not count as call
        time.

        Raises: `RewardFailure`; `DataFailure` for a prompt that is not plain data.
        """
        try:
            data = pack([self._settings.timeout_s, unit, optional, plain_call(prompts, trajectories)])
        except (TypeError, ValueError, OverflowError) as error:
            row = prompts[0].row
            law = f"row {row} cannot be sent to the process of the reward: {error}"
            raise DataFailure(law, row=row) from error
        process = self._free.get()
        try:
            if process is None or process.has_ended:
                process = RewardProcess(self._settings)
                with self._lock:
                    self._running[process] = None
            return [value_from(value) for value in process.call(data)]
        finally:
            if process is not None and process.has_ended:
                with self._lock:
                    self._running.pop(process, None)
                process = None
            self._free.put(process)

    def close(self) -> None:
        """End all processes. Running calls fail; a later call starts a new process."""
        with self._lock:
            processes = list(self._running)
            self._running.clear()
        for process in processes:
            process.end()
