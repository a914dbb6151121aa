"""Starts vLLM's processes as forks of one that has imported vLLM, which takes longer than most tests.

Used by tests that make engines, and by each of these processes for those that it starts.
"""

import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from engine.rollout.vllm.engine_args import prepare_environment

SERVER = "vllm.entrypoints.openai.api_server"
PRELOADED = [SERVER, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2"]


class Forked(ForkServerProcess):
    """Has the environment and the log of the process that starts it, not of the one that it is a fork of, and ends with
    it. What it starts is forked from the same one."""

    ends_with_owner = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        server = forkserver._forkserver  # type: ignore[attr-defined]
        server.ensure_running()
        self._address = server._forkserver_address
        self._environment = dict(os.environ)
        self._owner = os.getpid()
        self._ends_with_owner = Forked.ends_with_owner

    def run(self) -> None:
        Forked.ends_with_owner = self._ends_with_owner
        if self._ends_with_owner:
            threading.Thread(target=end_with, args=(self._owner,), daemon=True).start()
        stderr = Path(f"/proc/{self._owner}/fd/2")
        if stderr.readlink().suffix == ".log":
            os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
        here = dict(os.environ)
        os.environ.update({k: v for k, v in self._environment.items() if here.get(k) != v})  # a title needs the rest
        server = forkserver._forkserver  # type: ignore[attr-defined]
        server._forkserver_address, server.ensure_running = self._address, lambda: None
        start_by_fork()
        super().run()


def end_with(owner: int) -> None:
    """End this process, and at once, when another one has ended."""
    with suppress(ProcessLookupError):
        watch = select.poll()
        watch.register(os.pidfd_open(owner), select.POLLIN)
        watch.poll()
    os.kill(os.getpid(), signal.SIGKILL)


class Forks(ForkServerContext):
    Process = Forked


CONTEXT = Forks()


def start_by_fork() -> list[tuple[Any, Any]]:
    """Have vLLM start processes so from now on. Returns what it used before, by module. After their first second, its
    processes sleep while they wait for each other: two that spin take both cores from the other tests."""
    import vllm.distributed.device_communicators.shm_broadcast
    import vllm.v1.engine.coordinator
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor

    vllm.distributed.device_communicators.shm_broadcast.SpinCondition.record_read = lambda self: None
    modules = [vllm.v1.engine.coordinator, vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor]
    before = [(module, module.get_mp_context) for module in modules]
    for module in modules:
        module.get_mp_context = lambda: CONTEXT
    return before


@contextmanager
def forked_engines() -> Iterator[None]:
    """vLLM starts the processes of an engine that is made meanwhile as forks."""
    prepare_environment(1)
    CONTEXT.set_forkserver_preload(PRELOADED)  # unless tests forked other processes before
    forkserver.ensure_running()
    before = start_by_fork()
    try:
        yield
    finally:
        for module, context in before:
            module.get_mp_context = context


def serve(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """What a `Forked` process does that is vLLM's server."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environment, STEP_ENGINE_VLLM_OWNER=f"{os.getpid()}:{log.parent / 'left'}")
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__")
