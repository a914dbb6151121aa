"""Runs one agent: the user's coroutine, or the user's program in a separate process group.

`actors.gateway_actor` calls it once for every agent. Coroutines run on a separate thread and event loop, so the
gateway still answers while an agent blocks. If an agent never stops blocking, later agents get another thread. When
an agent ends, every process that it started must end too.
"""

import asyncio
import contextlib
import ctypes
import errno
import json
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from tempfile import NamedTemporaryFile
from typing import Any, Protocol
from urllib.parse import urlsplit

from engine.control.proxies import exemption
from engine.errors import DataFailure, EngineError, message_of, place_of
from engine.protocols.user_code import awaited, stack_of
from engine.protocols.user_values import checked_result
from engine.trajectory import Prompt, RolloutResult, RolloutReturn

log = logging.getLogger(__name__)

QUOTED = 2000
"""Number of characters of a program's standard error that a failure quotes."""
ANSWER_S = 5.0
"""Time limit for the agents' event loop to answer after an agent is cancelled. After it, the thread counts as
blocked."""
MOST_BLOCKED = 16
"""Maximum number of blocked threads. Python cannot end a blocked thread."""
EXHAUSTED = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Error numbers that mean that the machine cannot start another program. Other errors concern the program."""
PDEATHSIG, DUMPABLE = 1, 4
_LIBC = ctypes.CDLL(None, use_errno=True)


class Runner(Protocol):
    """Runs agents, one `run` call per agent."""

    async def run(self, base_url: str, key: str, prompt: Prompt) -> RolloutResult:
        """Run one agent to its end. Returns its result, checked. Raises: `DataFailure` if the agent fails. When
        cancelled, it returns once every process of the agent has ended."""

    async def failed(self) -> str:
        """Wait until no more agents can run, then return the reason."""

    def close(self) -> None: ...


class AgentThread:
    """A thread with an event loop for agents."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.closed = asyncio.Event()
        """Set on the thread. Its agents are then cancelled, and the thread ends after them."""
        self.thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self.thread.start()
        self.check: asyncio.Task[None] | None = None
        self.blocked = asyncio.Event()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.closed.wait())


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

    async def run(self, base_url: str, key: str, prompt: Prompt) -> RolloutResult:
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
                    returned = await agent
                    break
            except asyncio.CancelledError:
                if thread.check is None or thread.check.done():
                    thread.check = asyncio.get_running_loop().create_task(self._replace_if_blocked(thread))
                raise
            except Exception as error:
                story = f"agent {self._name} raised {type(error).__name__} on prompt row {prompt.row}"
                raise DataFailure(f"{story}: {message_of(error)}{place_of(error)}", row=prompt.row) from error
            finally:
                agent.cancel()
                blocked.cancel()
        return checked_result(returned, f"agent {self._name}", prompt.row)

    async def _begin(self, begun: threading.Event, base_url: str, key: str, prompt: Prompt) -> RolloutReturn:
        begun.set()
        return await awaited(self._function, base_url, key, prompt)

    async def _replace_if_blocked(self, thread: AgentThread) -> None:
        """If the thread does not answer, start another thread for new agents. Its agents continue if it recovers."""
        answer: Future[None] = Future()
        try:
            thread.loop.call_soon_threadsafe(answer.set_result, None)
        except RuntimeError:
            return  # its loop is closed, so nothing blocks it
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
            with contextlib.suppress(RuntimeError):  # its loop is closed
                thread.loop.call_soon_threadsafe(thread.closed.set)


BASE_URL, API_KEY, PROMPT_FILE = "OPENAI_BASE_URL", "OPENAI_API_KEY", "STEP_ENGINE_PROMPT_FILE"
"""Variables that every program gets."""
INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
    "PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
"""Variables of the run's environment that every program inherits: those needed to start programs, and no secrets."""
PROMPT_COLUMNS = ("messages", "tools")
"""Columns that are part of the prompt."""


class CommandRunner:
    """Runs a program in a directory. With exit code 0 the rollout is scored.

    A model with a shell can read everything that its program receives, so a program must not receive the answer or the
    run's secrets. It receives `INHERITED` and `environment`, and of the row's columns `PROMPT_COLUMNS` and `fields`.
    This process gets undumpable: its environment and its memory are not readable through `/proc`, except for root.
    """

    def __init__(
        self,
        command: list[str],
        directory: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        fields: Sequence[str] = (),
    ) -> None:
        self._command = command
        self._directory = directory
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self._environment = {**inherited, **(environment or {})}
        self._fields = (*PROMPT_COLUMNS, *fields)
        _LIBC.prctl(DUMPABLE, 0, 0, 0, 0)

    async def run(self, base_url: str, key: str, prompt: Prompt) -> RolloutResult:
        shown = {name: prompt.fields[name] for name in self._fields if name in prompt.fields}
        said = {"row": prompt.row, "text": prompt.text, "fields": shown}
        with NamedTemporaryFile("w", encoding="utf-8", prefix="step-engine-prompt-", suffix=".json") as file:
            json.dump(said, file, ensure_ascii=False, default=str)
            file.flush()
            return await self._run({BASE_URL: base_url, API_KEY: key, PROMPT_FILE: file.name}, prompt)

    async def _run(self, variables: Mapping[str, str], prompt: Prompt) -> RolloutResult:
        environment = {**self._environment, **variables}
        environment |= exemption(environment, urlsplit(variables[BASE_URL]).hostname or "")
        try:
            process = subprocess.Popen(  # not asyncio's, which reaps the process before its group can be killed
                self._command, env=environment, cwd=self._directory, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        except OSError as error:
            story = f"agent {self._command[0]} cannot be started in {self._directory}: {error}"
            raise (EngineError if error.errno in EXHAUSTED else DataFailure)(story, row=prompt.row) from error
        try:
            output = await _tail(process.stderr)
            await _exited(process)
        finally:
            code = await _end(process)
        if code == 0:
            return RolloutResult()
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


async def _tail(output: Any) -> str:
    """The last `QUOTED` characters of a program's output. Returns when the program closes it."""
    stream, kept = asyncio.StreamReader(), deque[bytes](maxlen=2)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), output)
    try:
        while piece := await stream.read(2 * QUOTED):
            kept.append(piece)
    finally:
        pipe.close()
    return b"".join(kept).decode(errors="replace")[-QUOTED:]


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process exits. Its exit code is left for `_end`."""
    loop, exited, descriptor = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(process.pid)
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill every process that remains in the process group. Returns the exit code of the program."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # before `wait`, after which its id may be reused
    await _exited(process)
    return process.wait()
