"""Starts the workers of a local Ray cluster as forks of one that has imported Ray and the engine, because these imports
take longer than most tests.

Ray starts each worker through a program that prepares its environment. `forked_workers` puts this file in its place:
the first worker of a node becomes the one that the others are forked from, and ends with the node.
"""

import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

PRELOADED = ["ray._private.workers.default_worker", "engine.actors.scheduler_actor", "engine.runtime.local"]
MODEL = ("torch", "engine.rollout.torch.host_weights", "engine.training.model_trainer")
"""What a worker with a model imports in addition."""
ALSO = "FORKED_WORKERS_IMPORT"
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""Options of the program that this file replaces."""
NODE = "--node-id="
"""An option of workers, by which those of a node find each other."""
SIZE = 1 << 20
"""More bytes than arguments and environment have."""


@contextmanager
def forked_workers(*also: str) -> Iterator[None]:
    """A cluster that this process starts in this context forks its workers from one that has also imported `also`."""
    import pytest
    from ray._private import ray_constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", __file__)
        patch.setenv(ALSO, " ".join(also))
        yield


def serve(requests: socket.socket, raylet: int) -> dict[str, Any] | None:
    """Fork a worker for each request. Returns its request in the worker, and None in this process once the node has
    ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    node = os.pidfd_open(raylet)
    watch = select.poll()
    watch.register(node, select.POLLIN)
    watch.register(requests, select.POLLIN)
    while node not in {ready for ready, _ in watch.poll()}:
        connection, _ = requests.accept()
        with connection:
            request: dict[str, Any] = json.loads(connection.recv(SIZE))
        if os.fork() == 0:
            os.close(node)
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return request
    return None


def be_worker(request: dict[str, Any]) -> None:
    os.setpgid(0, 0)  # as Ray does: it ends a worker's process group with the worker
    os.chdir(request["directory"])
    environment = request["environment"]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({k: v for k, v in environment.items() if os.environ.get(k) != v})  # a title needs the rest
    sys.argv = request["arguments"]
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(sys.argv[0], run_name="__main__")


def request_of(arguments: list[str]) -> dict[str, Any]:
    """What a worker needs. Of Ray's runtime environments, tests use variables only."""
    environment = dict(os.environ)
    own = [argument for argument in arguments if not argument.startswith((CONTEXT, LANGUAGE))]
    for argument in arguments:
        if argument.startswith(CONTEXT):
            environment |= json.loads(argument.removeprefix(CONTEXT)).get("env_vars", {})
    return {"arguments": own, "environment": environment, "directory": os.getcwd()}


def ask(address: str, request: bytes) -> socket.socket | None:
    """Send a request to the process that forks workers. If there is none, this process becomes it: then returns the
    socket from which it accepts requests, this one first."""
    while True:
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            requests.bind(address)
            requests.listen(100)
        except OSError:  # another process has the address
            requests.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(ConnectionRefusedError):
            connection.connect(address)
            connection.send(request)
            return None if requests.fileno() < 0 else requests


def main() -> None:
    raylet = os.getppid()
    if raylet == 1:  # the node has ended before this worker began
        return
    (node,) = (argument for argument in sys.argv if argument.startswith(NODE))
    requests = ask(f"\0{node}", json.dumps(request_of(sys.argv[1:])).encode())
    if requests is None:
        return
    for module in PRELOADED + os.environ[ALSO].split():
        import_module(module)
    own = serve(requests, raylet)
    if own is not None:
        be_worker(own)


if __name__ == "__main__":
    main()
