"""Base classes for a user's generator and trainer, with defaults for all but the essential methods.

For more (prefixes that survive an abort, requests frozen in place), implement all of `engine.protocols.Generator`.
"""

import asyncio
import inspect
from collections.abc import Sequence
from operator import index
from typing import Any

from engine.ids import GroupId, StepId, Version
from engine.protocols import Batch, Generated, GroupWork
from engine.protocols.user_code import awaited
from engine.trajectory import Span, Trajectory, TrajectoryGroup


def response(
    token_ids: Sequence[int],
    *,
    reward: float | None = None,
    version: Version,
    logprobs: Sequence[float] | None = None,
    prompt_ids: Sequence[int] = (),
    text: str = "",
) -> Trajectory:
    """A finished trajectory whose tokens were all sampled under one weights version. Log-probs default to 0.
    `reward`: None if the engine computes it (`rollout.backend`)."""
    tokens = list(token_ids)
    return Trajectory(
        prompt_ids=list(prompt_ids),
        token_ids=tokens,
        logprobs=[0.0] * len(tokens) if logprobs is None else list(logprobs),
        loss_mask=[1] * len(tokens),
        spans=[Span(0, len(tokens), index(version))] if tokens else [],
        text=text,
        finish_reason="stop",
        reward=reward,
    )


class SimpleGenerator:
    """A generator that needs only a `sample` method. It samples each group under the weights that it began with.

    In the sync mode `keep`, new weights are installed while groups are being sampled; `wait` waits for the groups;
    `abort` cancels them, and they are sampled again from the start.
    """

    def __init__(self) -> None:
        self.version: Version = 0
        self.weights: Any = None
        """The result of the trainer's `weights()` for `version`; None at version 0."""
        self._staged: dict[Version, Any] = {}
        self._sampling: dict[GroupId, asyncio.Future[Sequence[Trajectory]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not inspect.iscoroutinefunction(cls.sample):
            raise TypeError(f"{cls.__name__} must define: async def sample(self, work, weights, version)")

    async def sample(self, work: GroupWork, weights: Any, version: Version) -> Sequence[Trajectory]:
        """Sample and score `work.samples` trajectories (`response` makes one) under `weights`, which are `version`.

        Raise `DataFailure` if the prompt or its reward is at fault. It may be canceled at any `await`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define: async def sample(self, work, weights, version)")

    async def generate(self, work: GroupWork) -> Generated:
        sampling = asyncio.ensure_future(awaited(self.sample, work, self.weights, self.version))
        self._sampling[work.group] = sampling
        try:
            await asyncio.wait([sampling])
        finally:
            del self._sampling[work.group]
            sampling.cancel()
        trajectories = [] if sampling.cancelled() else list(sampling.result())
        group = TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=trajectories)
        return Generated(group=group, aborted=sampling.cancelled())

    async def abort(self, groups: Sequence[GroupId]) -> None:
        for group in groups:
            if group in self._sampling:
                self._sampling[group].cancel()

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        """Does nothing: running groups finish."""

    async def pause(self, mode: str) -> None:
        if mode == "abort":
            await self.abort(list(self._sampling))

    async def stage(self, version: Version, weights: Any) -> None:
        self._staged = {version: weights}

    async def install(self, version: Version) -> None:
        self.weights = self._staged.pop(version)
        self.version = version

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class SimpleTrainer:
    """A trainer that needs only `train` and `weights`, and `save` for checkpoints."""

    def score(self, batch: Batch, task: str) -> None: ...

    def train(self, batch: Batch) -> dict[str, float]:
        """One outer step over `batch.groups`, in order; returns metrics."""
        raise NotImplementedError(f"{type(self).__name__} must define: def train(self, batch)")

    def weights(self) -> Any:
        """A copy of the current weights, in any form that the generators' `sample` takes."""
        raise NotImplementedError(f"{type(self).__name__} must define: def weights(self)")

    def save(self, directory: str, step: StepId) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} must define: def save(self, directory, step), to save checkpoints"
        )

    # A trainer that also defines `load(self, directory)` can be resumed from its checkpoints: `protocols.Restorable`.
