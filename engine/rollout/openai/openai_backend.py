"""The HTTP rollout backend: a `RolloutBackend` that samples on an OpenAI-compatible server, or on SGLang's.

`rollout.generator` calls it on its event loop. Every trajectory is one streamed request, so after any interruption the
tokens so far are known with their log-probs. While it is paused, it holds requests back. A request that fails is sent
again with the tokens received so far, at most `RETRIES` times in a row; if the server is lost, `failed` returns. It
must never label a token with a newer version than sampled it, never sample a received token again, and never hang.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import ConfigError, DataFailure, EngineError
from engine.ids import Version
from engine.rollout.backend import (
    RemoteEngine,
    SampleRequest,
    SampleResult,
    budget_of,
    derive_seed,
    over_already,
    refusal_of,
)
from engine.rollout.openai.completions import TokenRequest
from engine.rollout.openai.server_probe import Abilities, abilities_of, check_training
from engine.rollout.openai.weight_files import ServerAdapters, ServerWeights, SglangWeights
from engine.tasks.http_client import Http, RefusedRequest, Unavailable
from engine.training.lora import Lora
from engine.trajectory import Span

# -- one trajectory ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SentRequest:
    """One request, from its arrival to its result."""

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cut: bool = False
    asked: int = 0
    """Number of HTTP requests made for it."""
    fresh: bool = True
    """No token of the newest HTTP request has arrived."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    tokens_reported: int = 0
    """Number of new tokens at the last call of `request.report`."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reader: "asyncio.Future[str] | None" = None

    def was_cut(self) -> bool:
        return self.cut

    def rest(self) -> SampleRequest:
        """A request for the tokens that are still missing."""
        return replace(self.request, prefix_ids=[*self.request.prefix_ids, *self.token_ids])

    def mark(self, first: int, began: Version, reported: Sequence[Span] | None) -> None:
        """Add the spans of the tokens from `first` on, which one HTTP request returned.

        `reported` are the spans according to the server. If it reports none, the tokens get `began`, the installed
        version when the request was sent, which is never too new.
        """
        for start, stop, version in reported if reported is not None else [Span(0, len(self.token_ids) - first, began)]:
            last = self.spans[-1] if self.spans else None
            if stop == start:
                continue
            if last is not None and last.version == version:
                self.spans[-1] = Span(last.start, first + stop, version)
            else:
                self.spans.append(Span(first + start, first + stop, version))

    def report(self, first: int, version: Version) -> None:
        """Call `request.report` if `report_every` new tokens have arrived. Tokens from `first` on are of `version`."""
        request, tokens = self.request, len(self.token_ids)
        if request.report is None or not 0 < request.report_every <= tokens - self.tokens_reported:
            return
        self.tokens_reported = tokens
        so_far = replace(self, spans=[*self.spans])
        so_far.mark(first, version, None)
        request.report(
            SampleResult(token_ids=[*self.token_ids], logprobs=[*self.logprobs], spans=so_far.spans, finish_reason="")
        )

    def result(self, reason: str) -> SampleResult:
        return SampleResult(token_ids=self.token_ids, logprobs=self.logprobs, spans=self.spans, finish_reason=reason)


def complaint_of(error: RefusedRequest, request: SampleRequest) -> EngineError:
    """The error for the caller of `sample`: a `DataFailure` if the server says that the context is too small."""
    said = str(error.details.get("said", ""))
    if error.details.get("status") == 400 and "context" in said:
        return DataFailure(
            f"a prompt of {len(request.prompt_ids)} tokens and a prefix of {len(request.prefix_ids)} do not fit into "
            f"the model's context: {error.message}", prompt_tokens=len(request.prompt_ids),
        )  # fmt: skip
    return error


# -- the backend -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

RETRIES = 5
"""Retries of a request since its last received token. After one more failure, the request fails."""
BACKOFF_S = 0.2
"""Seconds before the first retry. Doubled for each further one; times 0.5 to 1.5, derived from the request's seed."""
ABORT_TIMEOUT_S = 5.0
"""Seconds that a server may take to end an aborted request. Then the backend disconnects."""
UNBOUNDED = 2**31
"""Context or vocabulary of a server that does not report one. The server itself refuses what does not fit."""


class OpenAIBackend(RemoteEngine):
    """A `RolloutBackend`. Its constructor asks the server what it can do, which blocks: call it on a thread. `url` may
    end in `/v1`.

    `model` is the model's directory or hub name here. Its `initial` weights (tensors by name) become version 0 on the
    server, whatever weights it has. With `weights_dir=None`, the backend only samples and cannot install versions.
    `served_model_name` may be None if the server serves one model. `encode` is the local tokenizer; it must agree with
    the server's /tokenize, if it has that route. `timeout_s` bounds every call, and in a stream each wait for the next
    token. `install_timeout_s` bounds an install, whose files have at most `bucket_mb` MiB each. `wait_s` bounds the
    wait for the server's first answer.

    `api` is `openai` or `sglang`. `keep` freezes requests inside the server. It requires a server that can pause and
    that reports the version of each token (vLLM in development mode, SGLang); `abort` and `wait` do not. Each HTTP
    request has the seed (seed, length of the prefix), so a resumed request draws other random numbers than an
    uninterrupted one.

    With `lora`, every version is an adapter, the first one all zeros, and `initial` is not read. A request ends with
    the adapter it began with, so `keep` is not possible.

    Raises: `ConfigError` if the server cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        served_model_name: str | None = None,
        key: str | None = None,
        key_field: str = "rollout.api_key_env",
        weights_dir: str | None = None,
        initial: Any = None,
        sync_mode: str = "keep",
        kv: str = "keep",
        vocabulary: int | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        timeout_s: float = 120.0,
        install_timeout_s: float = 300.0,
        bucket_mb: float = 64,
        wait_s: float = 10.0,
        lora: Lora | None = None,
        api: str = "openai",
    ) -> None:
        super().__init__()
        self._http = Http(url.rstrip("/").removesuffix("/v1"), key, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._recompute = kv == "recompute"
        self._vocabulary = vocabulary or UNBOUNDED
        self._runs: dict[str, SentRequest] = {}
        self._weights: ServerWeights | None = None
        options: dict[str, Any] = {"model": served_model_name, "key_field": key_field, "wait_s": wait_s}
        options |= {"adapter": lora is not None, "api": api}
        self.abilities: Abilities = _wait_for(abilities_of(self._http, encode=encode, **options), self._http)
        self._sleeps = self.abilities.sleeps
        if weights_dir is not None:
            check_training(self._http, self.abilities, sync_mode, adapter=lora is not None)
            place = (self._http, model, weights_dir)
            limits: dict[str, Any] = {"limit_s": install_timeout_s, "bucket_mb": bucket_mb}
            if lora is None:
                kind = SglangWeights if api == "sglang" else ServerWeights
                self._weights = kind(*place, labeled=self.abilities.wire.tells_weights, **limits)
            else:
                self._weights = adapters = ServerAdapters(*place, lora=lora, **limits)
                initial = adapters.zeros()
            _wait_for(self._give_first_weights(initial), self._http)

    async def _give_first_weights(self, initial: Any) -> None:
        """Install version 0. An earlier run may have left other weights on the server, or left it paused."""
        assert self._weights is not None
        try:
            await self._weights.stage(0, initial)
            if self.abilities.pauses:
                await self.abilities.controls.pause("abort", clear=True)
            await self._weights.load(0)
            if self.abilities.pauses:
                await self.abilities.controls.resume()
        except EngineError as error:
            self._weights.close()
            law = f"{self._http.url} cannot load the initial weights: {error.message}"
            fix = "use a directory that the server sees under the same path, and serve the model of model.path"
            raise ConfigError("rollout.weights_dir", None, law, fix) from None

    # Sampling.

    async def sample(self, request: SampleRequest) -> SampleResult:
        self._check_open()
        context = self.abilities.context or UNBOUNDED
        running = request.id in self._runs
        refusal = refusal_of(request, context=context, vocabulary=self._vocabulary, running=running)
        if refusal is not None:
            raise refusal
        run = self._runs[request.id] = SentRequest(request)
        try:
            return await self._sample_until_done(run, context)
        finally:
            del self._runs[request.id]
            run.ended.set()

    async def _sample_until_done(self, run: SentRequest, context: int) -> SampleResult:
        failures = 0
        while True:
            over = over_already(run.rest(), context)
            if over is not None:
                return run.result(over.finish_reason)
            while self._paused and not run.cut and not self._reason:
                run.woken.clear()
                await run.woken.wait()
            self._check_open()
            if run.cut:
                return run.result("abort")
            before = len(run.token_ids)
            try:
                reason = await self._stream(run, context)
                if reason == "stop" and run.token_ids[before:] and run.token_ids[-1] not in run.request.params.stop_ids:
                    continue  # SGLang also stops at end tokens of its own
                if reason != "abort" or run.was_cut():
                    return run.result(reason)
                raise Unavailable(f"{self._http.url} aborted a request that the engine did not cancel")
            except Unavailable as error:
                failures = 1 if len(run.token_ids) > before else failures + 1
                await self._after_failure(run, error, failures)

    async def _stream(self, run: SentRequest, context: int) -> str:
        """Send one HTTP request and read its stream. Returns the finish reason; `abort` if the stream was cut here."""
        run.asked += 1
        run.fresh = True
        run.reader = asyncio.ensure_future(self._read(run, context))
        try:
            await asyncio.wait([run.reader])
        except asyncio.CancelledError:
            run.reader.cancel()
            raise
        if run.reader.cancelled():
            self._check_open()
            return "abort"
        return run.reader.result()

    async def _read(self, run: SentRequest, context: int) -> str:
        wire, rest, first, began = self.abilities.wire, run.rest(), len(run.token_ids), self._version
        ask = TokenRequest(
            id=self._id_of(run),
            model=self.abilities.model if self._weights is None else self._weights.model(began, self.abilities.model),
            token_ids=[*rest.prompt_ids, *rest.prefix_ids],
            max_tokens=budget_of(rest, context) - len(rest.prefix_ids),
            seed=derive_seed(rest.seed, len(rest.prefix_ids)) >> 1,
            params=rest.params,
            salt=self._label(began),
        )
        labels: list[tuple[str, int, int]] | None = None
        reason = ""
        try:
            async with contextlib.aclosing(self._http.events(wire.path, wire.body(ask))) as events:
                async for event in events:
                    piece = wire.piece(event, len(run.token_ids) - first)
                    if piece is None:
                        continue
                    run.fresh = False
                    run.token_ids += piece.token_ids
                    run.logprobs += piece.logprobs
                    self._sampled += len(piece.token_ids)
                    reason = piece.finish_reason or reason
                    if not reason and self._version == began:  # after an install, the version of a token is unknown
                        run.report(first, began)
                    labels = piece.labels if piece.labels is not None else labels
        except RefusedRequest as error:
            if isinstance(self._weights, ServerAdapters) and error.details.get("status") == 404:
                # The server does not know the adapter: it may have started again.
                raise Unavailable(error.message) from None
            raise complaint_of(error, run.request) from None
        finally:
            run.mark(first, began, self._versions(labels))
        if reason not in ("stop", "length", "abort"):
            raise Unavailable(f"{self._http.url} ended a request with the finish reason {reason or 'None'}")
        return reason

    def _versions(self, labels: list[tuple[str, int, int]] | None) -> list[Span] | None:
        if labels is None or self._weights is None:
            return None
        return [Span(start, stop, self._weights.version_of(label)) for label, start, stop in labels]

    async def _after_failure(self, run: SentRequest, error: EngineError, failures: int) -> None:
        """Wait before the next retry. Raises: `EngineError` if there were too many or the server is lost."""
        if run.cut or self._paused:
            return
        if failures > RETRIES:
            await self._check_alive(error)
            raise EngineError(f"the request failed after {RETRIES} retries: {error.message}")
        log.warning("request %s, failure %d: %s", run.request.id, failures, error.message)
        jitter = random.Random(derive_seed(run.request.seed, len(run.token_ids), failures)).uniform(0.5, 1.5)
        run.woken.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.woken.wait(), BACKOFF_S * 2 ** (failures - 1) * jitter)
        self._check_open()
        if self._weights is not None:
            with contextlib.suppress(Unavailable):
                if not self._paused and not await self._weights.in_force(self._version):
                    self._fail(f"{self._http.url} was restarted or was given other weights")

    async def _check_alive(self, error: EngineError) -> None:
        try:
            await self._http.call("GET", self.abilities.health)
        except EngineError:
            self._fail(f"the server is lost: {error.message}")
        self._check_open()

    async def abort(self, ids: Sequence[str]) -> None:
        self._check_open()
        await self._cut([self._runs[name] for name in ids if name in self._runs])

    async def _cut(self, runs: Sequence[SentRequest]) -> None:
        """End requests: through the server if it has the route, because it then returns the last tokens and their
        versions; else by disconnecting."""
        for run in runs:
            run.cut = True
            run.woken.set()
        readers = [run.reader for run in runs if run.reader is not None and not run.reader.done()]
        begun = [run for run in runs if run.reader in readers and not run.fresh]
        names = [name for run in begun if (name := self.abilities.wire.server_id(self._id_of(run))) is not None]
        if names:
            with contextlib.suppress(EngineError):
                await self.abilities.controls.abort(names)
                await asyncio.wait([run.reader for run in begun if run.reader], timeout=ABORT_TIMEOUT_S)
        for reader in readers:
            reader.cancel()
        for run in runs:
            await run.ended.wait()

    # Weights.

    async def pause(self, mode: str) -> None:
        """See `protocols.Generator`. Raises: `EngineError` if the server cannot pause requests (`keep`), or if `resume`
        was called before `wait` ended."""
        self._check_open()
        if mode == "keep" and not self.abilities.pauses and any(run.reader for run in self._runs.values()):
            raise EngineError(f"{self._http.url} cannot pause requests")
        self._paused = True
        if mode == "wait" and not self._frozen:
            resumes = self._resumes
            for run in [run for run in self._runs.values() if run.asked]:
                await run.ended.wait()
            self._check_open()
            if resumes != self._resumes:
                raise EngineError("resumed before the running requests had ended")
        if mode == "abort":
            await self._cut(list(self._runs.values()))
        if self.abilities.pauses:
            wanted = "keep" if self._frozen else mode
            await self.abilities.controls.pause(wanted, clear=self._recompute or mode != "keep")
        self._frozen = True

    async def stage(self, version: Version, weights: Any) -> None:
        """See `protocols.Generator`. Raises `EngineError` for weights that do not fit the model."""
        self._check_open()
        held = self._held_weights()
        await held.stage(version, weights)
        held.keep_only(self._version, version)

    async def install(self, version: Version) -> None:
        """See `protocols.Generator`. Raises: `EngineError` if the install failed. Then the version before it is loaded
        again; if that fails, too, the backend has failed."""
        self._check_open()
        held = self._held_weights()
        self._check_install(version, held.staged(version))
        try:
            await held.load(version)
        except EngineError as error:
            await self._restore_installed(version, error)
            raise EngineError(f"version {version} could not be installed: {error.message}", version=version) from None
        self._version = version
        held.keep_only(version)

    async def _restore_installed(self, version: Version, why: EngineError) -> None:
        try:
            await self._held_weights().load(self._version)
        except EngineError as error:
            self._fail(
                f"after version {version} ({why.message}) the one before it could not be restored: {error.message}"
            )

    async def resume(self) -> None:
        self._check_open()
        if self.abilities.pauses:
            await self.abilities.controls.resume()
        self._paused = self._frozen = False
        self._resumes += 1
        self._wake()

    async def sleep(self) -> None:
        """See `protocols.Sleeper`. If the server refuses, it is not asked again and keeps its memory."""
        self._check_open()
        if self._sleeps:
            try:
                await self._http.call("POST", "/sleep", query={"level": "1"}, further_s=self._timeout_s)
            except EngineError as error:
                if "status" not in error.details:
                    raise
                self._sleeps = False
                log.warning("%s keeps its memory: %s", self._http.url, error.message)

    async def wake(self) -> None:
        self._check_open()
        if self._sleeps:
            await self._http.call("POST", "/wake_up", further_s=self._timeout_s)
            await self.abilities.controls.pause("keep", clear=False)

    # The end of the backend.

    async def close(self) -> None:
        """Disconnect from the server; running requests fail. A second call does nothing."""
        if not self._reason:
            self._reason = "the rollout backend is closed"
            if self._paused and self.abilities.pauses:
                with contextlib.suppress(EngineError):
                    await self.abilities.controls.resume()
        self._disconnect()
        for run in list(self._runs.values()):
            await run.ended.wait()
        await self._http.close()
        if self._weights is not None:
            await asyncio.to_thread(self._weights.close)

    def _fail(self, reason: str) -> None:
        if not self._ends(reason):
            return
        log.error("the server %s is lost: %s", self._http.url, reason)
        self._disconnect()

    def _disconnect(self) -> None:
        for run in self._runs.values():
            if run.reader is not None:
                run.reader.cancel()
        self._wake()

    def _wake(self) -> None:
        for run in self._runs.values():
            run.woken.set()

    def _held_weights(self) -> ServerWeights:
        if self._weights is None:
            raise EngineError("this backend cannot install weights: set rollout.weights_dir")
        return self._weights

    def _label(self, version: Version) -> str:
        return f"step-engine:{version}" if self._weights is None else self._weights.label(version)

    def _id_of(self, run: SentRequest) -> str:
        return f"{self._label(0)}:{run.request.id}:{run.asked}"


def _wait_for(work: Coroutine[Any, Any, Any], http: Http) -> Any:
    """Run a coroutine on a new event loop and thread, and close the connections that belong to that loop."""

    async def whole() -> Any:
        try:
            return await work
        finally:
            await http.close()

    with ThreadPoolExecutor(1, thread_name_prefix="server") as thread:
        return thread.submit(asyncio.run, whole()).result()
