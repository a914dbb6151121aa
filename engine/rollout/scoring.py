"""Rewards of finished groups: the user's function, on threads, each rollout once.

Used by the generators of this package. Whatever a reward does wrong is a `DataFailure` that names it; it must never
block the event loop.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from engine.errors import DataFailure
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

Reward = Callable[[Prompt, Trajectory], float]


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class Scorer:
    """`reward` is called on one of `threads` threads, at most `timeout_s` long. None: rollouts bring their own, and one
    that was cut short before it could is worth 0."""

    def __init__(
        self, decoder: Decoder, reward: Reward | None, *, threads: int = 4, timeout_s: float | None = None
    ) -> None:
        self._decoder = decoder
        self._reward = reward
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reward")

    async def score(self, group: TrajectoryGroup) -> None:
        """Give every trajectory its text, and every rollout that has none its reward: that of its last segment."""
        unscored = [rollout for rollout in group.rollouts if rollout[-1].reward is None]
        for rollout in group.rollouts:
            for trajectory in rollout:
                if trajectory.reward is None or not trajectory.text:
                    trajectory.text = self._decoder.decode(trajectory.token_ids, skip_special_tokens=True)
        outcomes = await asyncio.gather(
            *(self._score_one(group.prompt, rollout[-1]) for rollout in unscored), return_exceptions=True
        )
        for rollout, outcome in zip(unscored, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            for trajectory in rollout:
                trajectory.reward = outcome

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _score_one(self, prompt: Prompt, trajectory: Trajectory) -> float:
        if self._reward is None:
            if trajectory.finish_reason == "truncated":
                return 0.0
            raise DataFailure(
                f"the rollout of prompt row {prompt.row} returned no reward, and reward.function is not set",
                row=prompt.row,
            )
        name = name_of(self._reward)
        call = asyncio.get_running_loop().run_in_executor(self._threads, self._reward, prompt, trajectory)
        await asyncio.wait([call], timeout=self._timeout_s)
        if not call.done():
            call.cancel()
            raise DataFailure(
                f"reward {name} took longer than {self._timeout_s} s on prompt row {prompt.row}", row=prompt.row
            )
        error = call.exception()
        if error is not None:
            raise DataFailure(
                f"reward {name} raised {type(error).__name__} on prompt row {prompt.row}: {error}", row=prompt.row
            ) from error
        value: Any = call.result()
        if not _is_finite(value):
            raise DataFailure(
                f"reward {name} returned {value!r} on prompt row {prompt.row}, not a finite number",
                row=prompt.row,
                value=repr(value),
            )
        return float(value)


def name_of(function: Callable[..., Any]) -> str:
    """`module.function`, as a user would look for it."""
    module = getattr(function, "__module__", "") or ""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}.{name}" if module else name


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False
