"""Runs tests in a copy of the repository, a forked process for each run. Started by `make mutants` in that copy.

Reads one request a line from standard input, {"tests", "output", "log"} and what the plugin needs, and writes the exit
status of pytest for each. Forking after the slow imports of other people's packages saves a second for each mutant.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp  # noqa: F401
import hypothesis  # noqa: F401
import msgpack  # noqa: F401
import pydantic  # noqa: F401
import pytest
import transitions  # noqa: F401

from tests.mutants.tracing import TIMED_OUT, Chosen, Plugin, Reached

MEMORY_BYTES = 6 << 30
"""What a mutant that never stops allocating may take."""


def run(request: dict[str, Any]) -> int:
    """pytest's exit status, in a process that ends with everything it started."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(stream, target)
        status = pytest.main([*request["arguments"], "-q", "-p", "no:cacheprovider"], [plugin(request)])
        sys.stdout.flush()
        os._exit(status)
    status = TIMED_OUT
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(int(request["limit_s"]))
    _, ended = os.waitpid(child, 0)
    signal.alarm(0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test left behind
    return os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else status


def plugin(request: dict[str, Any]) -> Plugin:
    output = Path(request["output"])
    if "folders" in request:
        return Reached(Path.cwd(), request["folders"], output)
    return Chosen(request["limits"], output)


if __name__ == "__main__":
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)
