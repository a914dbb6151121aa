"""vLLM engines that tests share: starting one takes many seconds, so each test rents one and gives it back as it was.

A rented engine counts versions and tokens from 0, as a fresh one does.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from forked_engines import forked_engines
from gate import Counted, Gate, gated
from transformers import PreTrainedModel
from vllm_arguments import ENGINE_ARGS

from engine.ids import Version
from engine.rollout.backend import SampleRequest, SampleResult
from engine.trajectory import Span

RUNNER = asyncio.Runner()
CONTEXT = ENGINE_ARGS["max_model_len"]
ROWS = 8
IDLE: list[Any] = []
STARTED: list[Any] = []
DIRECTORIES: list[tempfile.TemporaryDirectory[str]] = []


def start(model: PreTrainedModel, **options: Any) -> Any:
    """A backend of its own on a model, whose requests stop where its gate says. `process`: its engine's."""
    from engine.rollout.vllm.vllm_backend import VllmBackend

    class Held(Counted, VllmBackend):
        pass

    directory = tempfile.TemporaryDirectory()
    DIRECTORIES.append(directory)
    model.save_pretrained(directory.name)
    gate = Path(directory.name) / "gate"
    arguments = ENGINE_ARGS | gated(gate)
    before = processes()
    with forked_engines():
        backend = Held(directory.name, **{"rows": ROWS, "engine_args": arguments, "measures_cache": True, **options})
    backend.gate = Gate(gate)
    backend.process = min(processes() - before)
    STARTED.append(backend)
    return backend


def rent(model: PreTrainedModel, kind: Any = None) -> "Rented":
    """An engine with the weights of `model`, the same one each time but for them. `kind`: of `Rented`."""
    return (kind or Rented)(IDLE.pop() if IDLE else start(model), model.state_dict())


def processes() -> set[int]:
    """The engines' own processes, of all that run."""
    return {child.pid for child in psutil.Process().children(recursive=True) if "EngineCor" in child.name()}


def open_gates() -> None:
    for backend in STARTED:
        backend.go_on()


def close_all() -> None:
    for backend in STARTED:
        RUNNER.run(backend.close())
    RUNNER.close()
    STARTED.clear()
    IDLE.clear()
    for directory in DIRECTORIES:
        directory.cleanup()


class Rented:
    """A `RolloutBackend` as a test sees it, over an engine that has had a life before."""

    def __init__(self, engine: Any, weights: Any) -> None:
        self.engine = engine
        self._weights = weights
        self._base: Version = 0
        self._sampled = 0
        self._ready: asyncio.Future[None] | None = None

    async def _begin(self) -> None:
        self._base = self.engine.version + 1
        await self.engine.stage(self._base, self._weights)
        await self.engine.pause("abort")
        await self.engine.install(self._base)
        await self.engine.resume()
        self._sampled = self.engine.tokens_sampled()

    async def _open(self) -> None:
        if self._ready is None:
            self._ready = asyncio.ensure_future(self._begin())
        await asyncio.shield(self._ready)

    async def sample(self, request: SampleRequest) -> SampleResult:
        if self._ready is None or not self._ready.done():
            await self._open()
        report = request.report
        if report is not None:
            request = replace(request, report=lambda result: report(self._rebased(result)))
        return self._rebased(await self.engine.sample(request))

    def _rebased(self, result: SampleResult) -> SampleResult:
        spans = [Span(start, stop, version - self._base) for start, stop, version in result.spans]
        return replace(result, spans=spans)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._open()
        await self.engine.abort(ids)

    async def pause(self, mode: str) -> None:
        await self._open()
        await self.engine.pause(mode)

    async def stage(self, version: Version, weights: Any) -> None:
        await self._open()
        await self.engine.stage(version + self._base, weights)

    async def install(self, version: Version) -> None:
        await self._open()
        await self.engine.install(version + self._base)

    async def resume(self) -> None:
        await self._open()
        await self.engine.resume()

    def hold(self, tokens: int) -> Awaitable[None]:
        """See `gate.Counted`."""
        reached: Awaitable[None] = self.engine.hold(tokens)
        return reached

    def go_on(self) -> None:
        self.engine.go_on()

    async def close(self) -> None:
        """Give it back: nothing runs, nothing is paused or held."""
        await self._open()
        self.go_on()
        await self.engine.pause("abort")
        await self.engine.resume()
        IDLE.append(self.engine)

    async def failed(self) -> str:
        return str(await self.engine.failed())

    def tokens_sampled(self) -> int:
        if self._ready is None or not self._ready.done():
            return 0
        return int(self.engine.tokens_sampled()) - self._sampled
