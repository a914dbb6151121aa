"""Ranks that are forked from a process which has imported torch: they start in a moment, not in seconds.

`starts_of(faults)` has each `RankedTrainer` in its body start its ranks so. They fail where the files of the folder
`faults` say: see `failing_rank`. Ranks of their own processes, as users have them, are started without it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import failing_rank
import pytest
import torch

from engine.training import rank_process
from engine.training.child_ranks import ChildRanks
from engine.training.shared_weights import Manifest, PublishedTensors

OfRanks = Callable[..., AbstractContextManager[Any]]
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3, "adam_eps": 1e-6, "policy_mini_batch_size": 2, "micro_batch_tokens": 40,
    "old_policy": "proximal", "kl_loss_coef": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.1,
}  # fmt: skip

IMPORTED = (
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
"""What a rank would import late."""
SIZE = 1 << 20
"""More bytes than a message has."""


class ForkServer:
    """Forks ranks, which end with it, and tells how each of them ended."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Two threads may wait for one rank: the one that calls it, and one that closes its trainer."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> "Forked":
        """In place of `subprocess.Popen`: `command` runs `rank_process`."""
        message = json.dumps((command[3:], dict(env), list(pass_fds))).encode()
        with self.lock:
            socket.send_fds(self._link, [message], list(pass_fds))
            return Forked(self, json.loads(self._link.recv(SIZE)))

    def wait(self, pid: int) -> int:
        self._link.send(json.dumps(pid).encode())
        code: int = json.loads(self._link.recv(SIZE))
        return code

    def close(self) -> None:
        self._link.close()
        self._process.kill()
        self._process.wait()


class Forked:
    """What `RankedTrainer` asks of a process."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # as `subprocess` does: another thread has waited for it meanwhile
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with self._server.lock:
            if self.returncode is None:
                self.returncode = self._server.wait(self.pid)
            return self.returncode

    def poll(self) -> int | None:
        return self.returncode


class LocalRanks(ChildRanks):
    """Of another node, which has the same memory."""

    def hold(self, weights: PublishedTensors, manifest: Manifest) -> None:
        """The ranks find them in the trainer's own memory."""

    def drop(self) -> None:
        pass


class LocalNodes:
    """Nodes that are all this machine. `directory`: where the ranks of the others work."""

    address = "127.0.0.1"

    def __init__(self, count: int, directory: Path | None = None) -> None:
        self.count = count
        self.started: list[LocalRanks] = []
        self._directory = {} if directory is None else {"DIRECTORY": str(directory)}

    def start(self, ranks: int) -> list[LocalRanks]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._directory.items():
                patch.setenv(name, value)
            self.started = [LocalRanks(ranks) for _ in range(1, self.count)]
        return self.started


@contextmanager
def starts_of(server: ForkServer, faults: Path | None = None) -> Iterator[None]:
    def start(command: list[str], env: dict[str, str], **options: Any) -> Forked:
        return server.start(command, env=env if faults is None else {**env, "FAULTS": str(faults)}, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", start)
        yield


def serve(link: socket.socket) -> None:
    """Fork a rank for each (arguments, environment, files), and wait for the end of each process id."""
    while True:
        message, files, *_ = socket.recv_fds(link, SIZE, 8)
        if not message:
            return
        asked = json.loads(message)
        if isinstance(asked, int):
            _, status = os.waitpid(asked, 0)
            link.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            link.close()
            be_rank(*asked, files)
        for file in files:
            os.close(file)
        link.send(json.dumps(pid).encode())


def be_rank(arguments: list[str], environment: dict[str, str], numbers: list[int], files: list[int]) -> None:
    """`rank_process`, whose arguments are its connection, its parent and perhaps a file for its stacks."""
    try:
        os.setsid()
        os.environ |= environment
        os.chdir(environment.get("DIRECTORY", "."))
        own = dict(zip(map(str, numbers), map(str, files), strict=True))
        sys.argv = ["rank", own[arguments[0]], str(os.getppid()), *(own[name] for name in arguments[2:])]
        if "FAULTS" in environment:
            failing_rank.fail_as_told()
        rank_process.main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for module in IMPORTED:
        import_module(module)
    torch.set_num_threads(1)
    serve(socket.socket(fileno=int(sys.argv[1])))
