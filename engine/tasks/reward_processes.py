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
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock, Thread
from time import monotonic
from typing import IO, Any

from engine.errors import DataFailure, RewardFailure
from engine.tasks.reward_child import LENGTH, pack, plain_call, unpack, value_from
from engine.trajectory import Prompt, Trajectory

START_S = 300.0
"""Time limit for a new process to import the function, in seconds."""
GRACE_S = 5.0
"""Seconds beyond its time limit after which a process that has not ended itself is killed."""
TAIL_LINES = 60
"""Lines of a process's error output that the error of its failure shows."""


class ProcessStory(Exception):
    """The last output of a reward process, or the traceback in it. The cause of a `RewardFailure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The settings of a process. `spec`: module:function."""

    spec: str
    directory: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 30.0
    memory_mb: int | None = None


class RewardProcess:
    """One process. Its methods are called by one thread at a time."""

    def __init__(self, settings: ProcessSettings) -> None:
        """Raises: `RewardFailure` if the function cannot be imported, `OSError` if no process can be started."""
        self._settings = settings
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        path = os.pathsep.join([os.getcwd(), *(part for part in sys.path if part)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.tasks.reward_child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out = self._process.stdout.fileno()
        self._exit = os.pidfd_open(self._process.pid)
        """Readable once the process has exited."""
        self._reader = Thread(target=self._echo, name="reward output", daemon=True)
        self._reader.start()
        memory = (settings.memory_mb or 0) << 20
        setup = {
            "spec": settings.spec, "directory": settings.directory, "arguments": dict(settings.arguments),
            "path": list(sys.path), "memory_bytes": memory,
        }  # fmt: skip
        try:
            self._exchange(pack(setup), START_S, "to import the function")
        except BaseException:
            self.end()
            raise

    def call(self, data: bytes) -> Any:
        """Raises: `RewardFailure`. The process may have ended then."""
        limit_s = self._settings.timeout_s
        return self._exchange(data, limit_s + GRACE_S, "")

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def end(self) -> None:
        """Kill the process and everything that it has started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # before `wait`, after which its id may be reused
            self._process.wait()
            os.close(self._exit)
        self._reader.join(1.0)  # for its last output; a grandchild outside its process group may hold the pipe longer
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _exchange(self, data: bytes, limit_s: float, aim: str) -> Any:
        began = monotonic()
        try:
            self._in.write(data)
            reply = self._read(began + limit_s)
        except OSError:
            reply = None
        if reply is None:
            self._fail(monotonic() - began, limit_s, aim)
        assert reply is not None
        if reply[0] == "failed":
            raise RewardFailure(reply[1])
        if reply[0] != "raised":
            return reply[1] if len(reply) > 1 else None
        _, name, message, trace, out_of_memory = reply
        if out_of_memory:
            self.end()
        failure = RewardFailure(f"raised {name}: {message}" if message else f"raised {name}")
        raise failure from ProcessStory(trace)

    def _read(self, deadline: float) -> Any:
        """The next message; None if the process closes its end or the deadline passes."""
        head = self._bytes(LENGTH.size, deadline)
        body = None if head is None else self._bytes(LENGTH.unpack(head)[0], deadline)
        return None if body is None else unpack(body)

    def _bytes(self, count: int, deadline: float) -> bytes | None:
        parts: list[bytes] = []
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        poll.register(self._exit, select.POLLIN)  # a grandchild may hold the pipe open
        while count:
            ready = {descriptor for descriptor, _ in poll.poll(max(0.0, deadline - monotonic()) * 1000)}
            if self._out not in ready:
                return None
            part = os.read(self._out, count)
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

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
        raise RewardFailure(reason) from ProcessStory("".join(self._tail) or "the process wrote nothing")

    def _has_exited(self, seconds: float) -> bool:
        """Whether the process exits within `seconds`. Its exit code is left for `wait`."""
        poll = select.poll()
        poll.register(self._exit, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _echo(self) -> None:
        """Copy the error output of the process, which includes what the reward prints."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in iter(stream.readline, b""):
                text = line.decode("utf-8", "replace")
                self._tail.append(text)
                sys.stderr.write(text)


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

    def __call__(self, prompts: Prompt | Sequence[Prompt], trajectories: Trajectory | Sequence[Trajectory]) -> Any:
        """Takes and returns what the function does. First waits for a free process, which does not count as call time.

        Raises: `RewardFailure`; `DataFailure` for a prompt that is not plain data.
        """
        several = [prompts] if isinstance(prompts, Prompt) else list(prompts)
        responses = [trajectories] if isinstance(trajectories, Trajectory) else list(trajectories)
        try:
            data = pack([self._settings.timeout_s, plain_call(several, responses)])
        except (TypeError, ValueError, OverflowError) as error:
            row = several[0].row
            law = f"row {row} cannot be sent to the process of the reward: {error}"
            raise DataFailure(law, row=row) from error
        process = self._free.get()
        try:
            if process is None or process.has_ended:
                process = RewardProcess(self._settings)
                with self._lock:
                    self._running[process] = None
            return value_from(process.call(data))
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
