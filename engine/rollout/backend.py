"""The `RolloutBackend` protocol, for an engine that samples tokens, and the code that all backends share.

The embedded torch sampler, vLLM and HTTP servers implement the protocol; the generators call it. This module must not
import any of them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import DataFailure, EngineError
from engine.ids import Version
from engine.protocols import SamplingSettings
from engine.trajectory import Span

# -- seeds -------------------------------------------------------------------------------------------------------------


MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB


def mix(value: int) -> int:
    """The 64-bit finalizer of splitmix64: a bijection in which every input bit affects every output bit."""
    value &= MASK
    value = ((value ^ (value >> 30)) * FIRST_MULTIPLIER) & MASK
    value = ((value ^ (value >> 27)) * SECOND_MULTIPLIER) & MASK
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """One 64-bit seed from several numbers, whose order matters: `derive_seed(run_seed, group, sample)`."""
    state = 0
    for part in parts:
        state = mix((state + GOLDEN) ^ mix(part + GOLDEN))
    return state


# -- engines in another process ----------------------------------------------------------------------------------------


class RemoteEngine:
    """Base class of `RolloutBackend`s whose engine runs in another process: version, pause state and failure."""

    def __init__(self) -> None:
        self._version: Version = 0
        self._sampled = 0
        self._paused = self._frozen = False
        self._resumes = 0
        """Number of `resume` calls. A pause that waits compares it to detect a `resume` in between."""
        self._reason = ""
        """Why the backend has ended; empty while it can sample."""
        self._over: asyncio.Future[str] | None = None

    def tokens_sampled(self) -> int:
        return self._sampled

    def cache_used(self) -> float:
        return 0.0

    async def failed(self) -> str:
        """Wait until the backend has failed and return the reason. `close` does not count as a failure."""
        return await asyncio.shield(self._end())

    def _end(self) -> "asyncio.Future[str]":
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def _ends(self, reason: str) -> bool:
        """Let `failed` return `reason`. Returns False if the backend had already ended."""
        if self._reason:
            return False
        self._reason = reason
        self._end().set_result(reason)
        return True

    def _check_open(self) -> None:
        if self._reason:
            raise EngineError(self._reason)

    def _check_install(self, version: Version, staged: bool) -> None:
        if not staged:
            raise EngineError(f"version {version} cannot be installed: stage it first", version=version)
        if version < self._version:
            raise EngineError(f"version {version} is older than the installed version {self._version}", version=version)
        if not self._frozen:
            law = f"version {version} cannot be installed while tokens are sampled: call pause first"
            raise EngineError(law, version=version)


# -- the protocol ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingSettings):
    """How a backend samples."""

    top_logprobs: int = 0
    """Return the log-probs of this many likeliest tokens at each place (0 to 20). Backends whose `TOP_LOGPROBS` is 0
    return none."""
    structure: str = ""
    """A structural tag of xgrammar that the response must match; empty: any response. Only vLLM can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One trajectory to sample, or to continue sampling."""

    id: str
    prompt_ids: Sequence[int]
    prefix_ids: Sequence[int] = ()
    """Response tokens already sampled by an earlier attempt; they count towards `params.max_tokens` and are not
    returned again."""
    params: SamplingParams
    seed: int
    """Seed of this trajectory only. The torch backend draws at response position i with (seed, i), so a resumed request
    has the same random numbers. Other backends use (seed, length of the prefix) for each request."""
    session: int | None = None
    """Requests of one session have a common prefix. A backend may keep the keys and values of this prefix for the next
    request."""
    report_every: int = 0
    """Tokens between two calls of `report`; 0 for none."""
    report: "Callable[[SampleResult], None] | None" = None
    """Called on the event loop with all new tokens so far and an empty `finish_reason`, about every `report_every`
    tokens. A backend may skip calls while it does not know which version sampled which token."""


@dataclass(slots=True, kw_only=True)
class SampleResult:
    """New tokens of a request. `spans` count from the first new token. `finish_reason`: `stop`, `length` or `abort`."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: str
    top: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    """For each token, (id, log-prob) of the likeliest tokens at its place, the likeliest first; empty if
    `SamplingParams.top_logprobs` is 0."""
    routes: list[bytes] = field(default_factory=list)
    """Of each position from the prompt's first token on, but the last sampled token: see `Trajectory.routes`."""


class RolloutBackend(Protocol):
    """Samples trajectories. Its methods run on the caller's event loop and must not block it: the sampling itself runs
    on the backend's thread or in its process. `pause` to `resume`: see `protocols.Generator`."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample until the response ends or is aborted. A stop id is part of the response.

        Raises: `DataFailure` if the prompt does not fit into the model's context or has unknown token ids.
        `EngineError` if the backend has ended.
        """

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests with the tokens sampled so far (`finish_reason="abort"`). Unknown ids are ignored."""

    async def pause(self, mode: str) -> None: ...

    async def stage(self, version: Version, weights: Any) -> None: ...

    async def install(self, version: Version) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...

    async def failed(self) -> str:
        """Wait until the backend has failed and return the reason. `close` does not count as a failure."""

    def tokens_sampled(self) -> int:
        """Response tokens sampled since the start, for metrics."""

    def cache_used(self) -> float:
        """Share of the KV cache in use, from 0 to 1; 0 if it is not known."""


# -- checks of a request -----------------------------------------------------------------------------------------------


def nothing_new(finish_reason: str) -> SampleResult:
    """The result of a request that ended before its next token."""
    return SampleResult(token_ids=[], logprobs=[], spans=[], finish_reason=finish_reason)


def refusal_of(request: SampleRequest, *, context: int, vocabulary: int, running: bool) -> Exception | None:
    """The error for a request that a model with `context` tokens and `vocabulary` ids cannot sample; None if it can.
    `running`: whether a request with its id is."""
    prompt = len(request.prompt_ids)
    if prompt == 0:
        return DataFailure("the prompt has no tokens", request=request.id)
    if prompt + 1 > context:
        return DataFailure(
            f"the prompt has {prompt} tokens, but the model's context of {context} must have room for a response",
            prompt_tokens=prompt, context_tokens=context,
        )  # fmt: skip
    foreign = [i for i in (*request.prompt_ids, *request.prefix_ids) if not 0 <= i < vocabulary]
    if foreign:
        return DataFailure(
            f"token id {foreign[0]} is not in the model's vocabulary of {vocabulary} ids", token=foreign[0]
        )
    return EngineError(f"request {request.id} is running already", request=request.id) if running else None


def budget_of(request: SampleRequest, context: int) -> int:
    """Maximum number of tokens of the whole response, including the prefix."""
    return min(request.params.max_tokens, context - len(request.prompt_ids))


def over_already(request: SampleRequest, context: int) -> SampleResult | None:
    """The result of a request whose prefix already ends the response; None if there are tokens to sample."""
    prefix = request.prefix_ids
    if len(prefix) and prefix[-1] in request.params.stop_ids:
        return nothing_new("stop")
    return nothing_new("length") if len(prefix) >= budget_of(request, context) else None
