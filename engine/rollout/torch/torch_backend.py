"""The embedded rollout backend: samples any Hugging Face causal language model in this process, on its own thread.

Called by `rollout.generator` on its event loop. The loop puts orders into the thread's inbox. The thread carries them
out between two tokens and answers through the loop. Must never block the loop, and never poll: the thread sleeps on its
inbox when it has nothing to sample. Must never leave a caller waiting: if the thread ends, every pending call fails.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.errors import EngineError
from engine.ids import Version
from engine.rollout.backend import SampleRequest, SampleResult, nothing_new
from engine.rollout.torch.batch_sampler import BatchSampler, Report
from engine.rollout.torch.causal_model import CausalModel
from engine.rollout.torch.host_weights import StagedWeights, stage, swap_in
from engine.training.lora import Lora

log = logging.getLogger(__name__)


class Reply:
    """A future of the caller's loop that the sampling thread may complete; later completions are ignored."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def send(self, outcome: Any) -> None:
        """Complete the future: with the exception if `outcome` is one, else with the value. Any thread."""
        try:
            self._loop.call_soon_threadsafe(self._complete, outcome)
        except RuntimeError:
            log.debug("a reply of the sampling thread was dropped: its event loop is closed")

    def report(self, report: Report, result: SampleResult) -> None:
        """Call `report` on the loop, unless the future is already complete. Any thread."""
        try:
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else report(result))
        except RuntimeError:
            log.debug("a reply of the sampling thread was dropped: its event loop is closed")

    def _complete(self, outcome: Any) -> None:
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


Order = tuple[Callable[[Reply], None], Reply]


class TorchBackend:
    """A `RolloutBackend`. It owns the model: it moves it, sets evaluation mode, and nothing else may train it.

    At most `rows` trajectories are sampled at a time; the others wait. At an install, `kv` either keeps the keys and
    values of frozen requests (`keep`) or computes them again with the new weights (`recompute`). `deterministic`
    decodes at one fixed shape on one CPU thread. A trajectory's tokens and log-probs are then the same bit for bit,
    whatever else is in the batch and however many rows there are. This mode is slower, and allocates a cache of `rows`
    times `context` at the start. With `lora` the model gets an adapter, and every version consists only of the
    adapter's tensors.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        device: str = "cpu",
        rows: int = 64,
        context: int | None = None,
        kv: str = "keep",
        threads: int = 1,
        deterministic: bool = False,
        version: Version = 0,
        lora: Lora | None = None,
        notes_routes: bool = False,
        fp32_head: bool = False,
    ) -> None:
        """`notes_routes`: results say which experts computed each token. `fp32_head`: logits are computed in
        float32."""
        self._threads = threads
        self._recompute = kv == "recompute"
        self._model = CausalModel(
            model, rows=rows, context=context, device=device, fixed_shapes=deterministic, lora=lora,
            notes_routes=notes_routes, fp32_head=fp32_head,
        )  # fmt: skip
        self._sampler = BatchSampler(self._model, rows=rows, version=version, deterministic=deterministic)
        self._staged: StagedWeights | None = None
        self._inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._gate = threading.Lock()  # for posting and closing, so that no order arrives after the thread's last check
        self._closed = False
        self._frozen = False
        self._draining: Reply | None = None
        self._backlog: list[tuple[SampleRequest, Reply]] = []
        self._crash = ""
        self._watchers: list[Reply] = []
        self._thread = threading.Thread(target=self._run, name="rollout-torch", daemon=True)
        self._thread.start()

    @property
    def context(self) -> int:
        """Maximum number of tokens of a request: prompt plus response."""
        return self._model.context

    def tokens_sampled(self) -> int:
        return self._sampler.tokens_sampled

    def cache_used(self) -> float:
        return self._sampler.cache_used()

    async def sample(self, request: SampleRequest) -> SampleResult:
        try:
            result: SampleResult = await self._ask(lambda reply: self._submit(request, reply))
        except asyncio.CancelledError:
            self._post((lambda reply: self._abort([request.id], reply), Reply()), strict=False)
            raise
        return result

    async def abort(self, ids: Sequence[str]) -> None:
        wanted = list(ids)
        await self._ask(lambda reply: self._abort(wanted, reply))

    async def pause(self, mode: str) -> None:
        await self._ask(lambda reply: self._pause(mode, reply))

    async def stage(self, version: Version, weights: Any) -> None:
        self._staged = await asyncio.to_thread(stage, self._model.installable(), version, weights)

    async def install(self, version: Version) -> None:
        await self._ask(lambda reply: self._install(version, reply))

    async def resume(self) -> None:
        await self._ask(self._resume)

    async def sleep(self) -> None:
        """See `protocols.Sleeper`. Frees the keys and values, and moves weights from a GPU to the CPU."""
        await self._ask(self._sleep)

    async def wake(self) -> None:
        await self._ask(self._wake)

    async def close(self) -> None:
        """End the thread. Requests that are still running fail. A second call does nothing."""
        self._post((self._stop, Reply()), strict=False)
        await asyncio.to_thread(self._thread.join)

    async def failed(self) -> str:
        reply = Reply()
        with self._gate:
            self._watchers.append(reply)
            crash = self._crash
        return crash or await reply.future

    # The caller's side of the inbox.

    async def _ask(self, act: Callable[[Reply], None]) -> Any:
        reply = Reply()
        self._post((act, reply))
        return await reply.future

    def _post(self, order: Order, strict: bool = True) -> None:
        with self._gate:
            if not self._closed:
                self._inbox.put(order)
                return
        if strict:
            raise EngineError("the rollout backend is closed")

    # Everything below runs on the sampling thread.

    def _run(self) -> None:
        cause: BaseException = EngineError("the rollout backend was closed")
        crash = ""
        try:
            torch.set_num_threads(self._threads)
            while not self._closed:
                self._turn()
        except BaseException as error:
            log.exception("the sampling thread ended")
            crash = f"the sampling thread ended: {type(error).__name__}: {error}"
            cause = EngineError(crash)
        with self._gate:
            self._closed = True
            self._crash = crash
        for watcher in self._watchers if crash else ():
            watcher.send(crash)
        self._fail_pending(cause)

    def _turn(self) -> None:
        """Carry out one order; if there is none, sample one token of every request."""
        if self._sampler.busy and not self._frozen and self._inbox.empty():
            self._sample_once()
        else:
            self._obey(*self._inbox.get())
        if self._draining is not None and not self._sampler.busy:
            self._freeze(self._draining)

    def _obey(self, act: Callable[[Reply], None], reply: Reply) -> None:
        try:
            act(reply)
        except Exception as error:
            reply.send(error)

    def _sample_once(self) -> None:
        """Sample one token of every request. If that fails, the requests fail, and the thread continues."""
        try:
            self._sampler.step()
        except Exception as error:
            log.exception("a sampling step failed")
            failure = error if isinstance(error, EngineError) else EngineError(f"sampling failed: {error!r}")
            failure.__cause__ = error if failure is not error else None
            self._sampler.fail(failure)

    def _submit(self, request: SampleRequest, reply: Reply) -> None:
        if self._draining is not None:
            self._backlog.append((request, reply))
        else:
            self._enter(request, reply)

    def _enter(self, request: SampleRequest, reply: Reply) -> None:
        report = request.report
        self._sampler.submit(
            request, reply.send, None if report is None else lambda result: reply.report(report, result)
        )

    def _abort(self, ids: list[str] | None, reply: Reply) -> None:
        self._sampler.abort(ids)
        remaining = []
        for request, waiting in self._backlog:
            if ids is None or request.id in ids:
                waiting.send(nothing_new("abort"))
            else:
                remaining.append((request, waiting))
        self._backlog = remaining
        reply.send(None)

    def _pause(self, mode: str, reply: Reply) -> None:
        if mode == "wait" and not self._frozen:
            if self._draining is not None:
                self._draining.send(EngineError("another pause replaced this one"))
            self._draining = reply  # `_turn` answers it when no request is running
            return
        if mode == "abort":
            self._abort(None, reply)
        self._freeze(reply)

    def _freeze(self, reply: Reply) -> None:
        """Stop sampling. This also completes a pause that waits for running requests to end."""
        self._frozen = True
        if self._draining is not None and self._draining is not reply:
            self._draining.send(None)
        self._draining = None
        backlog, self._backlog = self._backlog, []
        for request, waiting in backlog:
            self._enter(request, waiting)
        reply.send(None)

    def _install(self, version: Version, reply: Reply) -> None:
        staged = self._staged
        if staged is None or staged.version != version:
            found = "nothing is" if staged is None else f"version {staged.version} is"
            raise EngineError(f"version {version} cannot be installed: {found} staged", version=version)
        if version < self._sampler.version:
            raise EngineError(
                f"version {version} is older than the installed version {self._sampler.version}", version=version
            )
        swap_in(self._model.installable(), staged)
        self._staged = None
        self._sampler.weights_changed(version, recompute=self._recompute)
        reply.send(None)

    def _sleep(self, reply: Reply) -> None:
        if not self._frozen or self._sampler.running:
            raise EngineError("the backend can sleep only when paused and without started requests")
        self._model.sleep()
        if self._staged is not None:  # it leaves the device, too
            model, staged = self._model.installable(), self._staged
            self._staged = stage(model, staged.version, staged.tensors, shares=True)
        reply.send(None)

    def _wake(self, reply: Reply) -> None:
        self._model.wake()
        reply.send(None)

    def _resume(self, reply: Reply) -> None:
        if self._draining is not None:
            draining, self._draining = self._draining, None
            draining.send(EngineError("resumed before the running requests had ended"))
            self._freeze(reply)  # submit the requests that this pause held back
        self._frozen = False
        reply.send(None)

    def _stop(self, reply: Reply) -> None:
        self._closed = True
        reply.send(None)

    def _fail_pending(self, cause: BaseException) -> None:
        """Called when the thread ends: fail every call that still waits."""
        self._sampler.fail(cause)
        for _, waiting in self._backlog:
            waiting.send(cause)
        if self._draining is not None:
            self._draining.send(cause)
        while True:
            try:
                _, reply = self._inbox.get_nowait()
            except queue.Empty:
                return
            reply.send(cause)
