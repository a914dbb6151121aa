"""Runs one agent: the user's coroutine, or the user's program in a separate process group.

`actors.gateway_actor` calls it once for every agent. Coroutines run on a separate thread and event loop, so the
gateway still answers while an agent blocks. If an agent never stops blocking, later agents get another thread. When
an agent ends, every process that it started must end too.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

from engine.errors import DataFailure, EngineError, message_of
from engine.trajectory import Prompt, RolloutReturn
from engine.user_code import awaited, stack_of

log = logging.getLogger(__name__)

QUOTED = 2000
"""Number of characters of a program's standard error that a failure quotes."""
ANSWER_S = 5.0
"""Time limit for the agents' event loop to answer after an agent is cancelled. After it, the thread counts as
blocked."""
MOST_BLOCKED = 16
"""Maximum number of blocked threads. Python cannot end a blocked thread."""
PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Runner(Protocol):
    """Runs agents, one `run` call per agent."""

    async def run(self, base_url: str, key: str, prompt: Prompt) -> RolloutReturn:
        """Run one agent to its end. Returns what the agent returned. Raises: `DataFailure` if the agent fails. When
        cancelled, it returns once every process of the agent has ended."""

    async def failed(self) -> str:
        """Wait until no more agents can run, then return the reason."""

    def close(self) -> None: ...


class AgentThread:
    """A thread with an event loop for agents."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self.thread.start()
        self.check: asyncio.Task[None] | None = None
        self.blocked = asyncio.Event()


class FunctionRunner:
    """`async def run(base_url, api_key, prompt) -> float | RolloutResult | None`. A thread is blocked if it does not
    answer for `answer_s` after an agent on it was cancelled."""

    def __init__(
        self, function: Callable[[str, str, Prompt], Coroutine[Any, Any, RolloutReturn]], *, answer_s: float = ANSWER_S
    ) -> None:
        self._function = function
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._answer_s = answer_s
        self._threads = [AgentThread()]
        self._blocked: list[Future[None]] = []
        """Tasks for blocked threads. Each is done when its thread is no longer blocked."""
        self._lost = asyncio.Event()

    async def run(self, base_url: str, key: str, prompt: Prompt) -> RolloutReturn:
        while True:
            thread, begun = self._threads[-1], threading.Event()
            agent = asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._begin(begun, base_url, key, prompt), thread.loop)
            )
            blocked = asyncio.ensure_future(thread.blocked.wait())
            either: list[asyncio.Future[Any]] = [agent, blocked]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if agent.done() or begun.is_set():
                    return await agent
            except asyncio.CancelledError:
                if thread.check is None or thread.check.done():
                    thread.check = asyncio.get_running_loop().create_task(self._replace_if_blocked(thread))
                raise
            except Exception as error:
                story = f"agent {self._name} raised {type(error).__name__} on prompt row {prompt.row}"
                raise DataFailure(f"{story}: {message_of(error)}", row=prompt.row) from error
            finally:
                agent.cancel()
                blocked.cancel()

    async def _begin(self, begun: threading.Event, base_url: str, key: str, prompt: Prompt) -> RolloutReturn:
        begun.set()
        return await awaited(self._function, base_url, key, prompt)

    async def _replace_if_blocked(self, thread: AgentThread) -> None:
        """If the thread does not answer, start another thread for new agents. Its agents continue if it recovers."""
        answer: Future[None] = Future()
        thread.loop.call_soon_threadsafe(answer.set_result, None)
        await asyncio.wait([asyncio.wrap_future(answer)], timeout=self._answer_s)
        if answer.done() or thread.blocked.is_set():
            return
        log.warning("agent %s blocks its thread; it is in\n%s", self._name, stack_of(thread.thread))
        self._threads.append(AgentThread())
        thread.blocked.set()
        self._blocked = [*(other for other in self._blocked if not other.done()), answer]
        if len(self._blocked) >= MOST_BLOCKED:
            self._lost.set()

    async def failed(self) -> str:
        """Return once `MOST_BLOCKED` threads are blocked."""
        await self._lost.wait()
        return f"agent {self._name} blocks {MOST_BLOCKED} threads and does not return"

    def close(self) -> None:
        for thread in self._threads:
            thread.loop.call_soon_threadsafe(thread.loop.stop)


class CommandRunner:
    """Runs a program in a directory. With exit code 0 the rollout is scored."""

    def __init__(self, command: list[str], directory: str | None = None) -> None:
        self._command = command
        self._directory = directory

    async def run(self, base_url: str, key: str, prompt: Prompt) -> RolloutReturn:
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
                cwd=self._directory,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise EngineError(f"agent {self._command[0]} cannot be started in {self._directory}: {error}") from error
        try:
            output = await _tail(process.stderr)
            code = await process.wait()
        finally:
            await _end(process)
        if code == 0:
            return None
        story = f"agent {self._command[0]} on prompt row {prompt.row}"
        last = f": {output.strip()}" if output.strip() else ""
        if code < 0:
            raise EngineError(f"{story} was killed by {signal.Signals(-code).name}{last}", row=prompt.row)
        raise DataFailure(f"{story} ended with exit code {code}{last}", row=prompt.row)

    async def failed(self) -> str:
        return await asyncio.Event().wait() and ""

    def close(self) -> None: ...


def _die_with_parent() -> None:
    """Called in the new process: makes the kernel kill it when the gateway's process ends."""
    _LIBC.prctl(PDEATHSIG, signal.SIGKILL)


async def _tail(stream: asyncio.StreamReader | None) -> str:
    """The last `QUOTED` characters of a program's output. Returns when the program closes it."""
    kept: deque[bytes] = deque(maxlen=2)
    while stream is not None and (piece := await stream.read(2 * QUOTED)):
        kept.append(piece)
    return b"".join(kept).decode(errors="replace")[-QUOTED:]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill every process that remains in the process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
