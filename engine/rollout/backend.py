"""The protocol of a rollout backend: one engine that samples tokens (embedded torch, vLLM, an HTTP server).

Called by `rollout.generator.ModelGenerator`, one backend per replica. A backend knows token ids and weights versions;
it knows nothing of prompts, groups, rewards or the scheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.ids import Version
from engine.trajectory import Span


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
