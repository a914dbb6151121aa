"""The vLLM rollout backend: a `RolloutBackend` around an `AsyncLLM`, whose engine runs in a separate process.

`rollout.generator` calls it on its event loop. While it is paused, it holds requests back, because vLLM would queue
them without a report. It must never report a token under another version than vLLM does, never leave a partly
installed version, and never let a call hang: if the engine ends, every pending call fails and `failed` returns.
"""

import asyncio
import logging
import math
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from engine.errors import ConfigError, EngineError
from engine.ids import Version
from engine.rollout.backend import (
    RemoteEngine,
    SampleRequest,
    SampleResult,
    budget_of,
    derive_seed,
    nothing_new,
    over_already,
    refusal_of,
)
from engine.rollout.vllm.engine_args import all_engine_args, prepare_environment
from engine.rollout.vllm.engine_load import CacheUse, SessionEngines
from engine.rollout.vllm.engine_log import EngineLog
from engine.rollout.vllm.staged_weights import StagingArea
from engine.rollout.vllm.weight_checks import WeightChecks
from engine.rollout.vllm.weight_receiver import Incoming, IncomingAdapter
from engine.training.lora import Lora
from engine.trajectory import Span

log = logging.getLogger(__name__)

OWNER = "STEP_ENGINE_VLLM_OWNER"
CLOSE_TIMEOUT_S = 2.0
"""Seconds that the engine gets to end by itself."""
CONTROL_S = 120.0
"""Seconds that vLLM gets to answer any call but an install. Then it counts as stuck, and the backend has failed."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One request, from its arrival to its result."""

    request: SampleRequest
    versions: list[Version] = field(default_factory=list)
    """Versions that were installed since it was sent to vLLM; empty while it is held back."""
    starts: list[int] = field(default_factory=list)
    """Number of new tokens when each of these versions was installed."""
    sampled: int = 0
    """Number of new tokens received so far."""
    cut: bool = False
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request may be sent, or was cut."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    work: "asyncio.Future[SampleResult] | None" = None

    def continue_under(self, version: Version, start: int) -> None:
        self.versions.append(version)
        self.starts.append(start)

    def spans(self) -> list[Span]:
        """The version of each token so far, as counted here. vLLM reports it only at the end: see `spans_of`."""
        stops = [min(stop, self.sampled) for stop in [*self.starts[1:], self.sampled]]
        spans = map(Span, self.starts, stops, self.versions)
        return [span for span in spans if span.start < span.stop]


class VllmBackend(RemoteEngine):
    """A `RolloutBackend` and `protocols.Sleeper`. The constructor takes many seconds: call it on a thread, and use the
    backend on one event loop.

    At most `rows` trajectories are sampled at a time, unless `engine_args` has another bound; the others wait inside
    vLLM. `kv` says what happens to the keys and values of frozen requests at a pause: `keep` them, or `recompute` them
    after it. The prefix cache is separate for each version, so new requests never use keys and values of older weights.

    Published tensors that lie in shared memory are installed from there, unless a worker once could not do it; other
    weights are staged in files of at most `bucket_mb` MiB. An install may take `install_timeout_s`. After a
    failed install, the version before it is loaded again; if that fails too, the backend has failed. `check_weights`
    says after which installs every worker must prove that it holds the published weights. With
    `weight_transfer` (`gloo` or `nccl`), `stage` also accepts `SentWeights`, which arrive during the install. With
    `lora`, each version consists of the tensors of an adapter.

    Each request has a seed made of (seed, length of its prefix). A request is repeatable, but a resumed request draws
    other random numbers than an uninterrupted one, because the state of vLLM's generators cannot be set.

    With `notes_routes`, results say which experts computed each token; vLLM needs a GPU for that.

    With data parallelism, requests of one session go to one engine. With `measures_cache`, vLLM counts how full its
    KV cache is.

    With `structures`, requests may have a structure; their log-probs are those of the constrained distribution.

    At temperature 0, the log-probs are those of the softmax at temperature 1, as vLLM defines it.

    `log`: file for what vLLM's processes write to stderr; None: this process's stderr.

    Raises: `ConfigError` for invalid arguments, `EngineError` if vLLM does not start.
    """

    def __init__(
        self,
        model: str,
        *,
        rows: int = 64,
        kv: str = "keep",
        threads: int = 1,
        seed: int = 0,
        engine_args: Mapping[str, Any] | None = None,
        bucket_mb: float = 128,
        install_timeout_s: float = 300.0,
        check_weights: WeightChecks = "first",
        weight_transfer: str | None = None,
        lora: Lora | None = None,
        structures: bool = False,
        notes_routes: bool = False,
        measures_cache: bool = False,
        log: Path | None = None,
    ) -> None:
        self._cache_use = CacheUse() if measures_cache else None
        self._recompute = kv == "recompute"
        self.install_timeout_s = install_timeout_s
        rank = None if lora is None else lora.rank
        arguments = all_engine_args(
            model, rows, seed, engine_args or {}, weight_transfer, rank, structures, notes_routes
        )
        self._log = EngineLog(log)
        prepare_environment(threads, logged=log is not None)
        self._area = StagingArea(model, bucket_mb, lora=lora, maps=True)
        try:
            with self._log.inherited():
                os.environ[OWNER] = f"{os.getpid()}:{self._area.root}"
                self._engine: Any = _start(arguments, self._log, self._cache_use)
            from vllm import __version__ as version

            runner = "V2" if self._engine.vllm_config.use_v2_model_runner else "V1"
            self._log.note(f"vLLM {version} samples with model runner {runner}")
        except BaseException:
            self._area.close()
            raise
        incoming = Incoming if lora is None else IncomingAdapter
        self._incoming = incoming(self._area, self._engine, self._control, CONTROL_S, check_weights)
        config = self._engine.model_config
        self._context: int = config.max_model_len
        self._vocabulary: int = config.get_vocab_size()
        super().__init__()
        self._sleep_mode = bool(arguments.get("enable_sleep_mode"))
        self._dropped = False
        """Whether its weights were dropped by a sleep and not loaded since."""
        self._sessions = SessionEngines(arguments.get("data_parallel_size", 1))
        self._runs: dict[str, RunningRequest] = {}
        self._opening: asyncio.Task[None] | None = None
        self._ending = threading.Lock()

    @property
    def context(self) -> int:
        """Tokens of prompt plus response that a request may have."""
        return self._context

    @property
    def version(self) -> Version:
        """The installed version."""
        return self._version

    @property
    def staging(self) -> Path:
        """Directory of staged weights."""
        return self._area.root

    # Sampling.

    def cache_used(self) -> float:
        return 0.0 if self._cache_use is None else self._cache_use.used

    async def sample(self, request: SampleRequest) -> SampleResult:
        await self._open()
        running = request.id in self._runs
        refusal = refusal_of(request, context=self._context, vocabulary=self._vocabulary, running=running)
        if refusal is not None:
            raise refusal
        over = over_already(request, self._context)
        if over is not None:
            return over
        run = self._runs[request.id] = RunningRequest(request)
        run.work = asyncio.ensure_future(self._run(run))
        try:
            return await run.work
        except asyncio.CancelledError:
            if self._reason:
                raise EngineError(self._reason) from None
            raise
        finally:
            del self._runs[request.id]
            run.ended.set()

    async def _run(self, run: RunningRequest) -> SampleResult:
        while self._paused and not run.cut:
            run.turn.clear()
            await run.turn.wait()
        if run.cut:
            return nothing_new("abort")
        run.continue_under(self._version, 0)
        engine = self._sessions.enter(run.request.session)
        try:
            return await self._stream(run, engine)  # no await before the send, so no pause can happen in between
        except EngineError:
            raise
        except Exception as error:
            raise self._refused(error) from error
        finally:
            self._sessions.leave(engine)

    async def _stream(self, run: RunningRequest, engine: int | None) -> SampleResult:
        """`engine`: the data-parallel engine that samples; None: vLLM chooses."""
        from vllm.inputs.engine import tokens_input

        request, tokens, logprobs = run.request, [], []
        top: list[Sequence[tuple[int, float]]] = []
        known = [*request.prompt_ids, *request.prefix_ids]
        budget = budget_of(request, self._context) - len(request.prefix_ids)
        last: Any = None
        reported = 0
        async for output in self._engine.generate(
            tokens_input(known, cache_salt=str(self._version)), _sampling_params(request, budget), request.id,
            lora_request=self._incoming.adapter(self._version), data_parallel_rank=engine,
        ):  # fmt: skip
            last = output.outputs[0]
            tokens += last.token_ids
            logprobs += _of_sampled(last.logprobs)
            top += _likeliest(request, last.logprobs or ())
            self._sampled += len(last.token_ids)
            run.sampled = len(tokens)
            due = 0 < request.report_every <= run.sampled - reported and not last.finish_reason
            if request.report is not None and due:
                reported = run.sampled
                result = SampleResult(token_ids=[*tokens], logprobs=[*logprobs], spans=run.spans(), finish_reason="")
                request.report(result)
        if last is None or last.finish_reason not in ("stop", "length", "abort"):
            raise EngineError(f"vLLM ended a request with the finish reason {getattr(last, 'finish_reason', None)}")
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(f"weights of version {self._version} give logits that are not finite")
        spans = spans_of(last.weight_versions, len(tokens), run.versions)
        reason = last.finish_reason
        routes = [] if last.routed_experts is None else [route.tobytes() for route in last.routed_experts]
        return SampleResult(
            token_ids=tokens, logprobs=logprobs, spans=spans, finish_reason=reason, top=top, routes=routes
        )

    async def abort(self, ids: Sequence[str]) -> None:
        await self._open()
        await self._cut([self._runs[name] for name in ids if name in self._runs])

    async def _cut(self, runs: Sequence[RunningRequest]) -> None:
        for run in runs:
            run.cut = True
            run.turn.set()
        sent = [run.request.id for run in runs if run.versions]
        if sent:
            await self._control(self._engine.abort(sent))

    # Weights.

    async def pause(self, mode: str) -> None:
        """See `protocols.Generator`. Raises: `EngineError` if `resume` was called before `wait` ended."""
        await self._open()
        self._paused = True
        if mode == "wait" and self._frozen:
            mode = "keep"  # vLLM would let them continue
        if mode == "wait":
            resumes = self._resumes
            await self._all_ended([run for run in self._runs.values() if run.versions])
            if resumes != self._resumes:
                raise EngineError("resumed before the running requests had ended")
        running = list(self._runs.values())
        await self._control(self._engine.pause_generation(mode=mode, clear_cache=self._recompute))
        if mode == "abort":
            await self._cut([run for run in running if not run.ended.is_set()])
            await self._all_ended(running)
        self._frozen = True

    async def stage(self, version: Version, weights: Any) -> None:
        """See `protocols.Generator`. Raises `EngineError` for weights that do not fit the model."""
        await self._open()
        await self._incoming.stage(version, weights)
        self._incoming.keep_only(self._version, version)

    async def install(self, version: Version) -> None:
        """See `protocols.Generator`. Raises: `EngineError` if the install failed. Then the version before it is loaded
        again; if that fails, too, the backend has failed."""
        await self._open()
        self._check_install(version, staged=self._incoming.holds(version))
        wrong = await self._incoming.install(version, self.install_timeout_s)
        if wrong:
            undone = await self._incoming.swap(self._version, self.install_timeout_s + CONTROL_S)
            if undone:
                self._fail(f"after version {version} ({wrong}) the one before it could not be restored: {undone}")
            raise EngineError(f"version {version} could not be installed: {wrong}", version=version)
        if self._dropped:
            await self._wake_completely()
        await self._control(self._engine.update_weight_version(str(version)))
        self._version = version
        for run in self._runs.values():
            if run.versions:
                run.continue_under(version, self._sampled_by(run))
        self._incoming.keep_only(version)

    def _sampled_by(self, run: RunningRequest) -> int:
        """Number of new tokens of a request, while paused. This process has all tokens from before the pause, but vLLM
        returns several at a time."""
        processor = self._engine.output_processor
        states = map(processor.request_states.get, processor.external_req_ids.get(run.request.id, ()))
        return max([run.sampled, *(state.detokenizer.num_output_tokens() for state in states if state is not None)])

    async def resume(self) -> None:
        """See `protocols.Generator`. Raises: `EngineError` if weights that were dropped cannot be loaded again."""
        await self._open()
        if self._dropped:
            wrong = await self._incoming.swap(self._version, self.install_timeout_s)
            if wrong:
                raise EngineError(f"version {self._version} could not be loaded again after the sleep: {wrong}")
            await self._wake_completely()
        await self._control(self._engine.resume_generation())
        self._paused = self._frozen = False
        self._resumes += 1
        for run in self._runs.values():
            run.turn.set()

    async def sleep(self) -> None:
        """Free memory: keys and values are dropped. So are weights if an install has shown that it replaces them all
        (level 2); otherwise, they move to host memory (level 1), like the model under an adapter. Without sleep mode,
        only cached prefixes are dropped. Raises: `EngineError` if the engine is not paused."""
        self._check_open()
        if not self._frozen:
            raise EngineError("vLLM can sleep only when paused")
        if not self._sleep_mode:
            await self._control(self._engine.reset_prefix_cache())
            return
        self._dropped = await self._incoming.replaces_everything()
        await self._control(self._engine.sleep(level=2 if self._dropped else 1))

    async def wake(self) -> None:
        """Allocate the memory again. If the weights were dropped, only theirs: the install that follows needs room to
        load them, and without an install `resume` loads the last ones."""
        self._check_open()
        if self._dropped:
            await self._control(self._engine.wake_up(["weights"]))
        elif self._sleep_mode:
            await self._wake_completely()

    async def _wake_completely(self) -> None:
        """The engine stays paused; vLLM's own wake-up would let it sample."""
        if not await self._control(self._engine.wake_up()):
            raise EngineError("vLLM did not wake up completely")
        await self._control(self._engine.pause_generation(mode="keep", clear_cache=False))
        self._dropped = False

    # The start and the end of the engine.

    async def close(self) -> None:
        """End the engine; requests that still run fail. Can be called twice."""
        if self._engine is None:
            return
        if not self._reason:
            self._reason = "the rollout backend was closed"
            self._unwatch()
        self._cancel_runs()
        if self._engine.output_handler is not None:
            self._engine.output_handler.cancel()
        await asyncio.to_thread(self._shut_down)
        self._engine = None  # otherwise it would shut down again at the interpreter's exit, and fail

    async def _open(self) -> None:
        """Before the first call on the event loop: watch the engine's process and set the first version. Later calls
        only check that the backend has not ended."""
        self._check_open()
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._begin())
        if not self._opening.done():
            await asyncio.shield(self._opening)

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels():
            loop.add_reader(sentinel, self._died)
        await self._control(self._engine.get_supported_tasks())  # cached: from now on no send waits for it
        await self._control(self._engine.update_weight_version(str(self._version)))
        await self._incoming.open(self._version)

    def _died(self) -> None:
        self._fail(self._log.with_causes("vLLM's engine process died"))

    def _fail(self, reason: str) -> None:
        """Fail every waiting call, and shut the engine down."""
        self._unwatch()
        if not self._ends(reason):
            return
        log.error("the vLLM backend failed: %s", reason)
        self._cancel_runs()
        asyncio.get_running_loop().run_in_executor(None, self._shut_down)

    def _cancel_runs(self) -> None:
        for run in self._runs.values():
            if run.work is not None:
                run.work.cancel()

    def _shut_down(self) -> None:
        with self._ending:  # `close` waits for the end that a failure began
            owned = self._engine.engine_core.resources
            try:
                self._engine.shutdown(timeout=CLOSE_TIMEOUT_S)
            except psutil.NoSuchProcess:  # vLLM stops half-way if a process ends by itself while it is being killed
                for process in owned.engine_manager.processes:
                    process.kill()
                owned()
            self._area.close()

    def _sentinels(self) -> list[int]:
        sentinels: list[int] = self._engine.engine_core.resources.engine_manager.sentinels()
        return sentinels

    def _unwatch(self) -> None:
        if self._opening is not None:
            loop = asyncio.get_running_loop()
            for sentinel in self._sentinels():
                loop.remove_reader(sentinel)

    async def _all_ended(self, runs: Sequence[RunningRequest]) -> None:
        for run in runs:
            await run.ended.wait()
        self._check_open()

    async def _control(self, call: Coroutine[Any, Any, Any], timeout_s: float = CONTROL_S) -> Any:
        """vLLM's answer to a call. Raises: `EngineError` if it refuses, dies or does not answer in time."""
        if self._reason:
            call.close()
            raise EngineError(self._reason)
        asked = asyncio.ensure_future(call)
        over = self._end()
        await asyncio.wait([asked, over], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self._fail(f"vLLM did not answer for {timeout_s:g} s")
            raise EngineError(self._reason)
        error = asked.exception()
        if error is not None:
            raise self._refused(error) from error
        return asked.result()

    def _refused(self, error: BaseException) -> EngineError:
        """The error for the caller. If it shows that the engine has failed, the backend fails before the engine's
        process ends."""
        said = f"{type(error).__name__}: {error}"
        if self._engine is not None and self._engine.errored:
            self._fail(self._log.with_causes(f"vLLM's engine failed: {said}"))
        return EngineError(self._reason or f"vLLM refused: {said}")


def spans_of(reported: Any, tokens: int, in_force: Sequence[Version]) -> list[Span]:
    """The version of each of `tokens` tokens, as vLLM reports it, checked against the versions installed meanwhile.

    Raises: `EngineError` if they differ.
    """
    spans = [Span(one.start, one.end, int(one.version)) for one in reported or () if one.end > one.start]
    versions = [span.version for span in spans]
    ends = [0, *(span.stop for span in spans)]
    gapless = [span.start for span in spans] == ends[:-1] and ends[-1] == tokens
    if not gapless or versions != [version for version in in_force if version in versions]:
        raise EngineError(f"vLLM reports the spans {spans} for {tokens} tokens under the versions {list(in_force)}")
    return spans


def _of_sampled(scores: Any) -> list[float]:
    """The log-probs of the sampled tokens, which vLLM lists first at each place."""
    return [] if scores is None else [scores.logprobs[first] for first in scores.start_indices]


def _likeliest(request: SampleRequest, steps: Sequence[Mapping[int, Any]]) -> list[Sequence[tuple[int, float]]]:
    """Of each token, the likeliest tokens at its place, if they were requested."""
    most = request.params.top_logprobs
    if not most:
        return []
    ranked = ([(id, one.logprob) for id, one in step.items() if one.rank <= most] for step in steps)
    return [sorted(some, key=lambda pair: -pair[1]) for some in ranked]


def _sampling_params(request: SampleRequest, budget: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    params = request.params
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=budget,
        stop_token_ids=list(params.stop_ids),
        ignore_eos=True,  # the request's stop ids are the only ones
        logprobs=params.top_logprobs,  # besides that of the token sampled
        flat_logprobs=True,  # lists of numbers instead of two objects for each token
        detokenize=False,
        structured_outputs=StructuredOutputsParams(structural_tag=params.structure) if params.structure else None,
        seed=derive_seed(request.seed, len(request.prefix_ids)) >> 1,
        output_kind=RequestOutputKind.DELTA,
    )


def _start(arguments: Mapping[str, Any], log: EngineLog, cache_use: CacheUse | None) -> Any:
    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise ConfigError("rollout.backend", "vllm", f"vLLM cannot be imported: {error}") from error
    try:
        loggers: Any = None if cache_use is None else [cache_use]
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers)
    except TypeError as error:
        raise ConfigError("rollout.engine_args", dict(arguments), f"vLLM does not accept them: {error}") from error
    except Exception as error:
        raise EngineError(log.with_causes(f"vLLM does not start: {type(error).__name__}: {error}")) from error
