"""The process of one rank: `python -m engine.training.rank_process FD PARENT [STACKS]`, started by `ranked_trainer`.

It reads a `Job` and then calls from the connection FD, makes each in its `ModelTrainer`, and answers (True, result) or
(False, exception). Before the answer, the first rank sends its log, and `PROGRESS` whenever its trainer has progressed.
It ends with its parent, even when it hangs or is stopped. On SIGUSR1 it appends the stacks of its threads to the open
file STACKS.
"""

import copy
import ctypes
import faulthandler
import logging
import mmap
import os
import pickle
import signal
import socket
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

PR_SET_PDEATHSIG = 1
SHARED = "shared"
"""Stands in place of the name of a call. The argument is the path of a file that has the packed call."""
PROGRESS = (None, None)
"""Sent before the answer: the call has progressed."""


class SentLog(logging.Handler):
    """Sends what the engine logs in this process to its parent, which has a log: (None, (logger, level, text))."""

    def __init__(self, link: Connection) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send((None, (record.name, record.levelno, self.format(record))))
        except Exception:  # as in every handler of logging: a record that cannot be sent must not end the rank
            self.handleError(record)


def main() -> None:
    link, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    for stacks in sys.argv[3:]:
        faulthandler.register(signal.SIGUSR1, file=int(stacks), all_threads=True)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before this process asked to die with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    try:
        job = link.recv()
        rank = Rank(job, link)
        link.send((True, rank.manifest))
    except EOFError:
        return
    except Exception as error:
        link.send((False, sendable(error)))
        return
    while True:
        try:
            name, arguments = link.recv()
        except EOFError:
            return
        try:
            if name == SHARED:
                name, arguments = unpacked(arguments)
            answer = (True, rank.call(name, arguments))
        except Exception as error:
            answer = (False, sendable(error))
        link.send(answer)


def unpacked(path: str) -> Any:
    """Unpack what the parent of this process has packed into a file in memory, as `Connection.recv` unpacks a message,
    but without a copy of the file."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return pickle.loads(memory)


class Rank:
    """One rank's `ModelTrainer`."""

    def __init__(self, job: Any, link: Connection) -> None:
        from engine.training.model_trainer import ModelTrainer
        from engine.training.ranks import ALONE

        self._link = link
        if job.index == 0:  # the others say the same
            logging.getLogger("engine").addHandler(SentLog(link))
        ranks = ALONE if job.count == 1 else join_ranks(job, link)
        self.trainer = ModelTrainer(job.model_path, job.settings, scored_apart=job.scored_apart, ranks=ranks)
        self.manifest = self.trainer.manifest()
        if job.index == 0:
            self.trainer.watch_progress(lambda: link.send(PROGRESS))

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "weights":
            return self.trainer.weights().publication
        if name == "start_from":
            return self._start_from(*arguments)
        return getattr(self.trainer, name)(*arguments)

    def _start_from(self, manifest: Any, publication: str, optimizer_steps: int) -> None:
        """Begin with weights in the memory of the process that started this one."""
        from engine.errors import EngineError
        from engine.training.shared_weights import find

        weights = find(manifest, publication)
        if weights is None:
            raise EngineError("this rank may not read the memory of the trainer's process under /proc")
        self.trainer.start_from(weights, optimizer_steps)


def join_ranks(job: Any, link: Connection) -> Any:
    """Give this rank its GPU, and connect it to the others. Raises: `ConfigError` if there are too few GPUs."""
    import torch
    import torch.distributed as dist

    from engine.errors import ConfigError
    from engine.training.device import device_named
    from engine.training.ranks import Sharded

    if job.settings.device in ("auto", "cuda") and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if gpus < job.on_node:
            law = f"each rank needs a GPU of its own; this process has {gpus} for {job.on_node} ranks"
            raise ConfigError("trainer.ranks", job.count, law, f"use at most {gpus}, or trainer.device: cpu")
        torch.cuda.set_device(job.index % job.on_node * (gpus // job.on_node))
    device = device_named(job.settings.device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = store_of(job, link)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=job.index, world_size=job.count, device_id=bound)
    shards = job.on_node if job.settings.hybrid_sharding else 0
    return Sharded(device, cpu_offload=job.settings.cpu_offload, shards=shards, on_host=job.in_turns)


def store_of(job: Any, link: Connection) -> Any:
    """The store in which the ranks find each other. Gloo and NCCL use the network of this store's address; NCCL its own
    choice of fast links."""
    import torch.distributed as dist

    if isinstance(job.rendezvous, str):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return dist.FileStore(job.rendezvous, job.count)
    host, port = job.rendezvous
    name = interface_to(host, port)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    first = {"is_master": True, "master_listen_fd": recv_handle(link)} if job.index == 0 else {}
    return dist.TCPStore(host, port, job.count, wait_for_workers=False, **first)


def interface_to(host: str, port: int) -> str:
    """The name of the network interface by which this machine reaches an address. Sends no packet. Raises:
    `EngineError` if no interface has the address that the system would use."""
    import psutil

    from engine.errors import EngineError

    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    raise EngineError(f"no network interface has the address {own}, by which this node reaches {host}")


def family_of(host: str) -> socket.AddressFamily:
    """The address family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def sendable(error: Exception) -> Exception:
    """The error, or an `EngineError` with its words if it cannot be built again from its arguments."""
    from engine.errors import EngineError, reason_of

    try:
        copy.copy(error)
    except Exception:
        return EngineError(reason_of(error))
    return error


if __name__ == "__main__":
    main()
