"""Runs one agent: the user's coroutine, or the user's program in a separate process group.

`actors.gateway` calls it once for every agent. Coroutines run on a separate thread and event loop, so a blocking one
cannot stop the gateway from answering. No process that an agent started may outlive it.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from engine.errors import DataFailure, EngineError, message_of
from engine.trajectory import Prompt
from engine.user_code import awaited

TOLD = 2000
"""Number of characters of a program's standard error that a failure quotes."""
PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Runner(Protocol):
    async def run(self, base_url: str, key: str, prompt: Prompt) -> float | None:
        """Run one agent to its end. Returns its reward, or None. Raises: `DataFailure` if the agent fails. When
        cancelled, it returns once every process of the agent has ended."""

    def close(self) -> None: ...


class FunctionRunner:
    """Runs `async def run(base_url, api_key, prompt) -> float | None`."""

    def __init__(self, function: Callable[[str, str, Prompt], Coroutine[Any, Any, float | None]]) -> None:
        self._function = function
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    async def run(self, base_url: str, key: str, prompt: Prompt) -> float | None:
        call = asyncio.run_coroutine_threadsafe(awaited(self._function, base_url, key, prompt), self._loop)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            name = f"{self._function.__module__}.{self._function.__qualname__}"
            story = f"agent {name} raised {type(error).__name__} on prompt row {prompt.row}: {message_of(error)}"
            raise DataFailure(story, row=prompt.row) from error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


class CommandRunner:
    """Runs a program. With exit code 0 the rollout is scored."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def run(self, base_url: str, key: str, prompt: Prompt) -> float | None:
        said = {"row": prompt.row, "text": prompt.text, "fields": dict(prompt.fields)}
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
            "STEP_ENGINE_PROMPT": json.dumps(said, ensure_ascii=False, default=str),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise EngineError(f"agent {self._command[0]} cannot be started: {error}") from error
        try:
            told = await _tail(process.stderr)
            code = await process.wait()
        finally:
            await _end(process)
        if code == 0:
            return None
        story = f"agent {self._command[0]} on prompt row {prompt.row}"
        last = f": {told.strip()}" if told.strip() else ""
        if code < 0:
            raise EngineError(f"{story} was killed by {signal.Signals(-code).name}{last}", row=prompt.row)
        raise DataFailure(f"{story} ended with exit code {code}{last}", row=prompt.row)

    def close(self) -> None: ...


def _die_with_parent() -> None:
    """Called in the new process: makes the kernel kill it when the gateway's process ends."""
    _LIBC.prctl(PDEATHSIG, signal.SIGKILL)


async def _tail(stream: asyncio.StreamReader | None) -> str:
    """The last output of a program that has ended."""
    kept: deque[bytes] = deque(maxlen=2)
    while stream is not None and (piece := await stream.read(2 * TOLD)):
        kept.append(piece)
    return b"".join(kept).decode(errors="replace")[-TOLD:]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the whole process group, whichever of its processes remain."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
