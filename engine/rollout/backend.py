"""A rollout backend: the protocol of one engine that samples tokens, and what all backends share.

The embedded torch sampler, vLLM and HTTP servers implement it; the generators call it. It imports none of them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import ConfigError, DataFailure, EngineError
from engine.ids import Version
from engine.trajectory import Span

# -- seeds -------------------------------------------------------------------------------------------------------------


MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB


def mix(value: int) -> int:
    """The 64-bit finaliser of splitmix64: a bijection in which every input bit moves every output bit."""
    value &= MASK
    value = ((value ^ (value >> 30)) * FIRST_MULTIPLIER) & MASK
    value = ((value ^ (value >> 27)) * SECOND_MULTIPLIER) & MASK
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """One 64-bit seed out of several numbers, in order: `derive_seed(run_seed, group, sample)`."""
    state = 0
    for part in parts:
        state = mix((state + GOLDEN) ^ mix(part + GOLDEN))
    return state


# -- engines in another process ----------------------------------------------------------------------------------------


PAUSE_MODES = ("keep", "abort", "wait")


class RemoteEngine:
    """Part of a `RolloutBackend`."""

    def __init__(self) -> None:
        self._version: Version = 0
        self._sampled = 0
        self._paused = self._frozen = False
        self._resumes = 0
        """Counted, so that a pause that waits knows when it was called off."""
        self._reason = ""
        """Why nothing can be sampled any more, once that is so."""
        self._over: asyncio.Future[str] | None = None

    def tokens_sampled(self) -> int:
        return self._sampled

    async def failed(self) -> str:
        """Return once nothing can be sampled any more, with the reason; never while all is well, nor for `close`."""
        return await asyncio.shield(self._end())

    def _end(self) -> "asyncio.Future[str]":
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
        return self._over

    def _ends(self, reason: str) -> bool:
        """Tell whoever awaits `failed`, the first time; whether this was it."""
        if self._reason:
            return False
        self._reason = reason
        self._end().set_result(reason)
        return True

    def _check_open(self) -> None:
        if self._reason:
            raise EngineError(self._reason)

    def _check_mode(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise ConfigError("rollout.sync_mode", mode, f"must be one of {', '.join(PAUSE_MODES)}")

    def _check_install(self, version: Version, staged: bool) -> None:
        if not staged:
            raise EngineError(f"version {version} cannot be installed: it is not staged", version=version)
        if version < self._version:
            raise EngineError(f"version {version} is older than the installed version {self._version}", version=version)
        if not self._frozen:
            raise EngineError(f"version {version} cannot be installed while tokens are sampled", version=version)


# -- the protocol ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy; `top_p` 1 keeps every token; `max_tokens` bounds the whole response."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()


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
    """Seeds this trajectory alone. The draw at response position i depends on (seed, i) only, so a resumed request goes
    on with the random numbers it would have had."""
    tell_every: int = 0
    tell: "Callable[[SampleResult], None] | None" = None
    """Called on the loop with all new tokens so far, and no `finish_reason`, about each time `tell_every` more have
    been sampled; perhaps less often where it is not certain which version sampled which."""


@dataclass(slots=True, kw_only=True)
class SampleResult:
    """New tokens of a request. `spans` count from the first new token. `finish_reason`: `stop`, `length` or `abort`."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: str


class RolloutBackend(Protocol):
    """Asynchronous on the caller's event loop; sampling itself runs on a thread or in a process of the
    backend's own."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample to the end, or until aborted. A stop id is part of the response. Raises `DataFailure` when the prompt
        does not fit the model's context."""

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests with what they have (`finish_reason="abort"`). Unknown ids are ignored."""

    async def pause(self, mode: str) -> None: ...

    async def stage(self, version: Version, weights: Any) -> None: ...

    async def install(self, version: Version) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...

    async def failed(self) -> str:
        """Return once nothing can be sampled any more, with the reason; never while all is well, nor for `close`."""

    def tokens_sampled(self) -> int:
        """Response tokens sampled since the start, for metrics."""


# -- checks of a request -----------------------------------------------------------------------------------------------


def nothing_new(finish_reason: str) -> SampleResult:
    """The result of a request that ended before its next token."""
    return SampleResult(token_ids=[], logprobs=[], spans=[], finish_reason=finish_reason)


def refusal_of(request: SampleRequest, *, context: int, vocabulary: int) -> Exception | None:
    """Why a model of `context` tokens and `vocabulary` ids cannot take a request; None if it can."""
    params = request.params
    if not 0.0 <= params.temperature < float("inf"):
        return ConfigError("rollout.temperature", params.temperature, "must be 0 (greedy) or more")
    if not 0.0 < params.top_p <= 1.0:
        return ConfigError("rollout.top_p", params.top_p, "must be above 0 and at most 1", "use 1 to keep every token")
    prompt = len(request.prompt_ids)
    if prompt == 0:
        return DataFailure("the prompt has no tokens", request=request.id)
    if prompt + 1 > context:
        return DataFailure(
            f"the prompt has {prompt} tokens and leaves no room for a response in the model's context of {context}",
            prompt_tokens=prompt, context_tokens=context,
        )  # fmt: skip
    foreign = [i for i in (*request.prompt_ids, *request.prefix_ids) if not 0 <= i < vocabulary]
    if foreign:
        return DataFailure(
            f"token id {foreign[0]} lies outside the model's vocabulary of {vocabulary}", token=foreign[0]
        )
    return None


def budget_of(request: SampleRequest, context: int) -> int:
    """Tokens the whole response may have, the prefix included."""
    return min(request.params.max_tokens, context - len(request.prompt_ids))


def over_already(request: SampleRequest, context: int) -> SampleResult | None:
    """The result of a request whose prefix has ended the response; None while there is something to sample."""
    prefix = request.prefix_ids
    if len(prefix) and prefix[-1] in request.params.stop_ids:
        return nothing_new("stop")
    return nothing_new("length") if len(prefix) >= budget_of(request, context) else None
