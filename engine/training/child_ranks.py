"""`ChildRanks`: the ranks of a trainer that are processes of this machine.

Started by `ranked_trainer` for its own machine, and by `actors.rank_hosts` for the other machines of a trainer. They
end with the process that started them, even if that process is killed.
"""

import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO


class ChildRanks:
    """Starts `count` processes, each of which waits for its `Job`. Raises: `OSError`."""

    def __init__(self, count: int, stacks: int | None = None) -> None:
        """`stacks`: an open file to which each rank appends the stacks of its threads whenever it gets SIGUSR1."""
        self.links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stacks = () if stacks is None else (stacks,)
        self._closed = threading.Event()
        self._shared: IO[bytes] | None = None
        """The memory that `share` filled last."""
        self._start(count)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in order."""
        return [process.pid for process in self._processes]

    def has_ended(self, place: int) -> bool:
        return self._processes[place].poll() is not None

    def end_of(self, place: int) -> str:
        """Kill a rank that no longer answers. Returns how it ended."""
        self._processes[place].kill()
        status = self._processes[place].wait()
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def share(self, message: bytes) -> str:
        """Keep a message in memory until the next one. Returns a path where the ranks find it. Raises: `OSError`."""
        self._shared = os.fdopen(os.memfd_create("step-engine-call"), "wb")
        self._shared.write(message)
        self._shared.flush()
        return f"/proc/{os.getpid()}/fd/{self._shared.fileno()}"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._closed.set()

    def _start(self, count: int) -> None:
        """Starts them from a thread that lives as long as they do: Linux kills them when this thread ends."""
        started = threading.Event()
        failures: list[Exception] = []

        def work() -> None:
            try:
                for _ in range(count):
                    self.links.append(self._start_one())
            except Exception as error:  # the thread that waits for this one raises it
                failures.append(error)
            started.set()
            self._closed.wait()

        threading.Thread(target=work, name="ranks", daemon=True).start()
        started.wait()
        if failures:
            self.close()
            raise failures[0]

    def _start_one(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            numbers = [theirs.fileno(), os.getpid(), *self._stacks]
            command = [sys.executable, "-m", "engine.training.rank_process", *map(str, numbers)]
            process = subprocess.Popen(
                command, env={**os.environ}, pass_fds=[theirs.fileno(), *self._stacks], stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return ours
