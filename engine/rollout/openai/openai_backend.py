"""The HTTP rollout backend: an OpenAI-compatible server (vLLM, SGLang, ...) somewhere else, behind `RolloutBackend`.

Called by `rollout.generator` on its event loop. Every trajectory is one streamed request, so that whatever cuts it
short leaves the tokens so far with their log-probs. Dispatch is held here while paused. Must never label a token with
newer weights than sampled it, never sample a received token again, and never wait without an end: a request that fails
is asked again from where it broke off, a bounded number of times, and a server that is gone is told to whoever awaits
`failed`.
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
from engine.rollout.openai.completions import Ask
from engine.rollout.openai.http_client import Http, Refused, Unavailable
from engine.rollout.openai.server_probe import Abilities, abilities_of, check_training
from engine.rollout.openai.weight_files import ServerWeights
from engine.trajectory import Span

# -- one trajectory ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Running:
    """One request, from its arrival to its result."""

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cut: bool = False
    asked: int = 0
    """HTTP requests made for it."""
    fresh: bool = True
    """Nothing of the newest of them has come."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0
    """New tokens when it was last told of."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reader: "asyncio.Future[str] | None" = None

    def was_cut(self) -> bool:
        return self.cut

    def rest(self) -> SampleRequest:
        """What is still to be sampled, as a request."""
        return replace(self.request, prefix_ids=[*self.request.prefix_ids, *self.token_ids])

    def mark(self, first: int, began: Version, told: Sequence[Span] | None) -> None:
        """Add the spans of the tokens from `first` on, which one HTTP request brought.

        Where the server did not tell them, or could not in the end, they count as sampled under `began`, the version
        in force when it was asked: never newer than they are.
        """
        for start, stop, version in told if told is not None else [Span(0, len(self.token_ids) - first, began)]:
            last = self.spans[-1] if self.spans else None
            if stop == start:
                continue
            if last is not None and last.version == version:
                self.spans[-1] = Span(last.start, first + stop, version)
            else:
                self.spans.append(Span(first + start, first + stop, version))

    def tell(self, first: int, version: Version) -> None:
        """Tell whoever wants to know, if it is time; the tokens from `first` on are of `version`."""
        request, tokens = self.request, len(self.token_ids)
        if request.tell is None or not 0 < request.tell_every <= tokens - self.told:
            return
        self.told = tokens
        so_far = replace(self, spans=[*self.spans])
        so_far.mark(first, version, None)
        request.tell(
            SampleResult(token_ids=[*self.token_ids], logprobs=[*self.logprobs], spans=so_far.spans, finish_reason="")
        )

    def result(self, reason: str) -> SampleResult:
        return SampleResult(token_ids=self.token_ids, logprobs=self.logprobs, spans=self.spans, finish_reason=reason)


def complaint_of(error: Refused, request: SampleRequest) -> EngineError:
    """A server's refusal as its caller should see it: what does not fit the context is the prompt's fault."""
    said = str(error.details.get("said", ""))
    if error.details.get("status") == 400 and "context" in said:
        return DataFailure(
            f"a prompt of {len(request.prompt_ids)} and a prefix of {len(request.prefix_ids)} tokens do not fit: "
            f"{error.message}", prompt_tokens=len(request.prompt_ids),
        )  # fmt: skip
    return error


# -- the backend -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

RETRIES = 5
"""Failures in a row, none of which brought a token, after which a request is given up."""
BACKOFF_S = 0.2
"""Wait before the first retry; doubled for each further one, times 0.5 to 1.5 by the request's seed."""
LAST_WORDS_S = 5.0
"""How long a server may take to end an aborted request itself; then it is disconnected from."""
UNBOUNDED = 2**31
"""Context or vocabulary of a server that names none: it refuses by itself what does not fit."""


class OpenAIBackend(RemoteEngine):
    """A `RolloutBackend`. Constructing it asks the server who it is, and waits: do that on a thread.

    `model` is the model's directory or hub name on this side, whose `initial` weights (by name) become version 0 on the
    server, whatever it held before. With `weights_dir=None` the backend only samples: no version can be installed.
    `served_model_name` may be None where the server serves one model. `encode` is this side's tokenizer, compared with
    the server's where it has /tokenize. `timeout_s` bounds every call, and in a stream each wait for the next token;
    `install_timeout_s` the swap of weights, which are written in files of at most `bucket_mb`;
    `wait_s` how long the server may take to answer at all.

    `keep` freezes requests inside the server, so it needs one that can, and that says which weights sampled which token
    (vLLM in development mode). `abort` and `wait` need neither. Seeds: (seed, length of the prefix) for each request;
    one that was aborted and resumed draws other random numbers than one left alone.

    Raises: `ConfigError` for a server that cannot be used.
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
    ) -> None:
        super().__init__()
        self._http = Http(url, key, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._recompute = kv == "recompute"
        self._vocabulary = vocabulary or UNBOUNDED
        self._runs: dict[str, Running] = {}
        self._weights: ServerWeights | None = None
        options: dict[str, Any] = {"model": served_model_name, "key_field": key_field, "wait_s": wait_s}
        self._can = _wait_for(abilities_of(self._http, encode=encode, **options), self._http)
        self._sleeps = self._can.sleeps
        if weights_dir is not None:
            check_training(self._http, self._can, sync_mode)
            told = self._can.wire.tells_weights
            self._weights = ServerWeights(
                self._http, model, weights_dir, told=told, limit_s=install_timeout_s, bucket_mb=bucket_mb
            )
            _wait_for(self._give_first_weights(self._http, initial), self._http)

    async def _give_first_weights(self, http: Http, initial: Any) -> None:
        """A server may hold anything: an earlier run's weights, or be paused by one that was killed."""
        assert self._weights is not None
        try:
            await self._weights.stage(0, initial)
            if self._can.pauses:
                await http.call("POST", "/pause", query={"mode": "abort", "clear_cache": "true"})
            await self._weights.load(0)
            if self._can.pauses:
                await http.call("POST", "/resume")
        except EngineError as error:
            self._weights.close()
            law = f"{http.url} cannot load the initial weights: {error.message}"
            fix = "set a directory that the server sees under the same path, and serve the model of model.path"
            raise ConfigError("rollout.weights_dir", None, law, fix) from None

    @property
    def abilities(self) -> Abilities:
        """What the server was found to be able to do."""
        return self._can

    # Sampling.

    async def sample(self, request: SampleRequest) -> SampleResult:
        self._check_open()
        context = self._can.context or UNBOUNDED
        refusal = refusal_of(request, context=context, vocabulary=self._vocabulary)
        if refusal is None and request.id in self._runs:
            refusal = EngineError(f"request {request.id} is running already", request=request.id)
        if refusal is not None:
            raise refusal
        run = self._runs[request.id] = Running(request)
        try:
            return await self._to_the_end(run, context)
        finally:
            del self._runs[request.id]
            run.ended.set()

    async def _to_the_end(self, run: Running, context: int) -> SampleResult:
        failures = 0
        while True:
            over = over_already(run.rest(), context)
            if over is not None:
                return run.result(over.finish_reason)
            while self._holds(run):
                run.woken.clear()
                await run.woken.wait()
            self._check_open()
            if run.cut:
                return run.result("abort")
            before = len(run.token_ids)
            try:
                reason = await self._stream(run, context)
                if reason != "abort" or run.was_cut():
                    return run.result(reason)
                raise Unavailable(f"{self._http.url} aborted a request that the engine did not cancel")
            except Unavailable as error:
                failures = 1 if len(run.token_ids) > before else failures + 1
                await self._after_failure(run, error, failures)

    async def _stream(self, run: Running, context: int) -> str:
        """Ask once, and read; why it ended. Being cut by disconnecting is an end too."""
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

    async def _read(self, run: Running, context: int) -> str:
        wire, rest, first, began = self._can.wire, run.rest(), len(run.token_ids), self._version
        ask = Ask(
            id=self._id_of(run),
            model=self._can.model,
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
                    piece = wire.piece(event)
                    if piece is None:
                        continue
                    run.fresh = False
                    run.token_ids += piece.token_ids
                    run.logprobs += piece.logprobs
                    self._sampled += len(piece.token_ids)
                    reason = piece.finish_reason or reason
                    if not reason and self._version == began:  # later it is not certain which tokens are whose
                        run.tell(first, began)
                    labels = piece.labels if piece.labels is not None else labels
        except Refused as error:
            raise complaint_of(error, run.request) from None
        finally:
            run.mark(first, began, self._versions(labels))
        if reason not in ("stop", "length", "abort"):
            raise Unavailable(f"{self._http.url} ended a request with {reason or 'nothing'}")
        return reason

    def _holds(self, run: Running) -> bool:
        return self._paused and not run.cut and not self._reason

    def _versions(self, labels: list[tuple[str, int, int]] | None) -> list[Span] | None:
        if labels is None or self._weights is None:
            return None
        return [Span(start, stop, self._weights.version_of(label)) for label, start, stop in labels]

    async def _after_failure(self, run: Running, error: EngineError, failures: int) -> None:
        """Wait before the next try. Raises: `EngineError` when there is none."""
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
                    self._fail(f"{self._http.url} started again, or was given other weights")

    async def _check_alive(self, error: EngineError) -> None:
        try:
            await self._http.call("GET", self._can.health)
        except EngineError:
            self._fail(f"the server is lost: {error.message}")
        self._check_open()

    async def abort(self, ids: Sequence[str]) -> None:
        self._check_open()
        await self._cut([self._runs[name] for name in ids if name in self._runs])

    async def _cut(self, runs: Sequence[Running]) -> None:
        """By the server where it then says its last tokens and their weights, else by disconnecting."""
        for run in runs:
            run.cut = True
            run.woken.set()
        readers = [run.reader for run in runs if run.reader is not None and not run.reader.done()]
        begun = [run for run in runs if run.reader in readers and not run.fresh]
        prefix = self._can.wire.id_prefix
        if begun and prefix is not None:
            with contextlib.suppress(EngineError):
                names = [prefix + self._id_of(run) for run in begun]
                await self._http.call("POST", "/abort_requests", {"request_ids": names})
                await asyncio.wait([run.reader for run in begun if run.reader], timeout=LAST_WORDS_S)
        for reader in readers:
            reader.cancel()
        for run in runs:
            await run.ended.wait()

    # Weights.

    async def pause(self, mode: str) -> None:
        self._check_mode(mode)
        self._check_open()
        if mode == "keep" and not self._can.pauses and any(run.reader for run in self._runs.values()):
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
        if self._can.pauses:
            clear = "true" if self._recompute or mode != "keep" else "false"
            wanted = "keep" if self._frozen else mode
            await self._http.call("POST", "/pause", query={"mode": wanted, "clear_cache": clear})
            await self._http.call("GET", "/is_paused")  # behind the last tokens on their way here
        self._frozen = True

    async def stage(self, version: Version, weights: Any) -> None:
        """See `protocols.Generator`. Raises `EngineError` for weights that do not fit the model."""
        self._check_open()
        held = self._held_weights()
        await held.stage(version, weights)
        held.keep_only(self._version, version)

    async def install(self, version: Version) -> None:
        self._check_open()
        held = self._held_weights()
        self._check_install(version, held.staged(version))
        try:
            await held.load(version)
        except EngineError as error:
            await self._go_back(version, error)
            raise EngineError(f"version {version} could not be installed: {error.message}", version=version) from None
        self._version = version
        held.keep_only(version)

    async def _go_back(self, version: Version, why: EngineError) -> None:
        try:
            await self._held_weights().load(self._version)
        except EngineError as error:
            self._fail(
                f"after version {version} ({why.message}) the one before it could not be restored: {error.message}"
            )

    async def resume(self) -> None:
        self._check_open()
        if self._can.pauses:
            await self._http.call("POST", "/resume")
        self._paused = self._frozen = False
        self._resumes += 1
        self._wake()

    async def sleep(self) -> None:
        """See `protocols.Sleeper`. A server that says that it cannot keeps its memory from then on."""
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
            await self._http.call("POST", "/pause", query={"mode": "keep", "clear_cache": "false"})

    # The server's life, as far as it is known here.

    async def close(self) -> None:
        """Let go of the server; requests still running fail. Closing twice is closing once."""
        if not self._reason:
            self._reason = "the rollout backend is closed"
            if self._paused and self._can.pauses:
                with contextlib.suppress(EngineError):
                    await self._http.call("POST", "/resume")
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
            raise EngineError("this backend cannot install weights: rollout.weights_dir is not set")
        return self._weights

    def _label(self, version: Version) -> str:
        return f"step-engine:{version}" if self._weights is None else self._weights.label(version)

    def _id_of(self, run: Running) -> str:
        return f"{self._label(0)}:{run.request.id}:{run.asked}"


def _wait_for(work: Coroutine[Any, Any, Any], http: Http) -> Any:
    """Run on a loop of its own, and leave no connection that belongs to it."""

    async def whole() -> Any:
        try:
            return await work
        finally:
            await http.close()

    with ThreadPoolExecutor(1, thread_name_prefix="server") as thread:
        return thread.submit(asyncio.run, whole()).result()
