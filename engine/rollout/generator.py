"""The built-in `Generator`: turns prompt groups into trajectories with text, log-probs, versions and rewards.

`actors/` and `runtime/local/` host one per replica, on any `RolloutBackend`. It encodes prompts, sends one request per
trajectory, continues the tokens of earlier attempts, and scores finished groups. It must never block the event loop,
never sample a token again that an earlier attempt has sampled, and never let the number of attempts change the seed of
a trajectory.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.errors import DataFailure, EngineError
from engine.ids import GroupId, Version
from engine.protocols import CallFigures, Generated, GroupWork, Sleeper
from engine.rollout.agents.agent_calls import AgentCalls
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, SamplingParams, derive_seed
from engine.rollout.scoring import Grader, first_failure
from engine.tasks.chat import PromptRenderer
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

# -- the base class of the built-in generators -------------------------------------------------------------------------


TRAINING = ""
"""The name that `GroupWork.validation_set` has for training prompts."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the prompts of training or of a validation set are sampled and judged."""

    params: SamplingParams
    grader: Grader


class BackendGenerator:
    """Base class of the built-in generators: the parts of `protocols.Generator` that only call the backend. Implements
    `protocols.Fallible`, `Sleeper`, `MeasuresCalls` and `MeasuresCache`. `_cut(groups, how)` of its subclasses ends the
    requests of groups."""

    park: ClassVar[str] = "abort"
    """How an abort cuts groups."""

    def __init__(self, backend: RolloutBackend, ways: Mapping[str, Way], agent: AgentCalls | None = None) -> None:
        """`ways`: by validation set, and under `TRAINING`. `agent`: measures the calls of the user's code between the
        answers of the model."""
        self._backend = backend
        self._ways = ways
        self._graders = list(dict.fromkeys(way.grader for way in ways.values()))
        self._agent = agent
        self._groups: dict[GroupId, Any] = {}
        """The running `generate` call of each group."""

    @contextmanager
    def _running(self, running: Any) -> Iterator[None]:
        """Context manager around a `generate` call. Raises: `EngineError` if its group is already being generated."""
        group = running.work.group
        if group in self._groups:
            raise EngineError(f"group {group} is already being generated", group=group)
        self._groups[group] = running
        try:
            yield
        finally:
            running.done.set()
            del self._groups[group]

    async def _cut(self, groups: Sequence[GroupId], how: str) -> None:
        raise NotImplementedError

    async def abort(self, groups: Sequence[GroupId]) -> None:
        await self._cut(groups, self.park)

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        await self._cut(groups, "truncate")

    def way_of(self, work: GroupWork) -> Way:
        """Raises: `EngineError` for a validation set that has none."""
        if work.validation_set not in self._ways:
            raise EngineError(f"there is no validation set {work.validation_set!r}")
        return self._ways[work.validation_set]

    async def stage(self, version: Version, weights: Any) -> None:
        await self._backend.stage(version, weights)

    async def install(self, version: Version) -> None:
        await self._backend.install(version)

    async def sleep(self) -> None:
        """See `protocols.Sleeper`. Does nothing if the backend cannot sleep."""
        if isinstance(self._backend, Sleeper):
            await self._backend.sleep()

    async def wake(self) -> None:
        if isinstance(self._backend, Sleeper):
            await self._backend.wake()

    async def close(self) -> None:
        for grader in self._graders:
            grader.close()
        await self._backend.close()

    async def failed(self) -> str:
        """See `protocols.Fallible`. The backend has failed, or too many reward calls hang."""
        return await first_failure(self._backend.failed(), *(grader.failed() for grader in self._graders))

    def call_figures(self) -> list[CallFigures]:
        """See `protocols.MeasuresCalls`."""
        own = [self._agent.figures()] if self._agent is not None else []
        return own + [figures for grader in self._graders for figures in grader.call_figures()]

    def watch_calls(self, changed: Callable[[], None]) -> None:
        for grader in self._graders:
            grader.watch_calls(changed)
        if self._agent is not None:
            self._agent.changed = changed

    def tokens_sampled(self) -> int:
        """Tokens sampled since the start, for metrics."""
        return self._backend.tokens_sampled()

    def cache_used(self) -> float:
        """See `protocols.MeasuresCache`."""
        return self._backend.cache_used()


class GeneratorOfCalls(BackendGenerator):
    """Base class of generators whose groups sample in several calls."""

    def __init__(self, backend: RolloutBackend, ways: Mapping[str, Way], agent: AgentCalls) -> None:
        super().__init__(backend, ways, agent)
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    async def pause(self, mode: str) -> None:
        """See `protocols.Generator`. `wait` returns when all open groups have ended."""
        if mode == "abort":
            await self.abort(list(self._groups))
        elif mode == "wait":
            await all_set([one.done for one in self._groups.values()])
        else:
            self._unpaused.clear()
        await self._backend.pause(mode)

    async def resume(self) -> None:
        await self._backend.resume()
        self._unpaused.set()

    async def close(self) -> None:
        self._unpaused.set()
        await super().close()


async def all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


# -- single-turn rollouts ----------------------------------------------------------------------------------------------


PROGRESS_EVERY_TOKENS = 256
"""New tokens between two progress reports of a trajectory whose prefixes are not stored."""


@dataclass(slots=True)
class Attempt:
    """One running `generate` call."""

    work: GroupWork
    way: Way
    group: TrajectoryGroup
    cut: str = ""
    """`abort` or `truncate` if one was requested, else empty. The first request wins."""
    dispatched: bool = False
    """Whether its requests were sent to the backend. A paused generator sends none."""
    so_far: dict[int, SampleResult] = field(default_factory=dict)
    """New tokens of unfinished trajectories that the backend has reported, by trajectory index."""
    reports: int = 0
    """Number of these reports since the group was last saved."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by `resume` and by a cut. An attempt waits for it while the generator is paused."""
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing more will be sampled for this attempt."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def request_ids(self) -> list[str]:
        return [request_id(self.work, index) for index in range(len(self.group.trajectories))]

    def report_finished(self) -> None:
        self.work.finished(sum(trajectory.finished for trajectory in self.group.trajectories))


class ModelGenerator(BackendGenerator):
    """Samples with `backend`. Sends the requests of all unfinished trajectories of a group at once. `renderer` turns
    prompts into token ids."""

    def __init__(
        self, backend: RolloutBackend, renderer: PromptRenderer, ways: Mapping[str, Way], *, seed: int
    ) -> None:
        super().__init__(backend, ways)
        self._renderer = renderer
        self._seed = seed
        self._paused = False
        self._frozen = False

    async def generate(self, work: GroupWork) -> Generated:
        """Sample the tokens that `work.partial` does not have, then score.

        Raises: `DataFailure` if the prompt cannot be sampled or the reward fails. `EngineError` if the group is already
        being generated or the backend failed.
        """
        attempt = Attempt(work, self.way_of(work), self._group_of(work), cut="truncate" if work.truncate else "")
        with self._running(attempt):
            try:
                await self._sample_group(attempt)
            finally:
                attempt.sampled.set()
            if attempt.cut == "abort" and not attempt.group.finished:
                return Generated(group=attempt.group, aborted=True)
            for trajectory in attempt.group.trajectories:
                trajectory.finish_reason = trajectory.finish_reason or "truncated"
            await attempt.way.grader.score(attempt.group, work.progress)
            return Generated(group=attempt.group)

    async def pause(self, mode: str) -> None:
        """See `protocols.Generator`. Groups whose sampling has not started wait for `resume`; `abort` returns them
        too. Raises: `EngineError` if `resume` was called before `wait` ended."""
        self._paused = True
        if mode == "abort":
            running = list(self._groups.values())
            for attempt in running:
                self._mark(attempt, "abort")
            await self._backend.pause("abort")
            await all_set([attempt.sampled for attempt in running])
        elif mode == "wait" and not self._frozen:
            await all_set([attempt.sampled for attempt in self._groups.values() if attempt.dispatched])
            if not self._paused:
                raise EngineError("resumed before the running groups had ended")
            await self._backend.pause("wait")
        else:
            await self._backend.pause(mode)
        self._frozen = self._paused

    async def resume(self) -> None:
        self._paused = self._frozen = False
        await self._backend.resume()
        if not self._paused:
            for attempt in self._groups.values():
                attempt.released.set()

    # Sampling.

    def _group_of(self, work: GroupWork) -> TrajectoryGroup:
        """The group to work on. It copies the trajectories of `work.partial`, so that a failed attempt does not change
        them."""
        partial = work.partial.trajectories[: work.samples] if work.partial is not None else []
        trajectories = [trajectory.copy() for trajectory in partial]
        prompt_ids = trajectories[0].prompt_ids if trajectories else self._renderer.ids(work.prompt)
        trajectories += [Trajectory(prompt_ids=list(prompt_ids)) for _ in range(work.samples - len(trajectories))]
        return TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=trajectories)

    async def _sample_group(self, attempt: Attempt) -> None:
        while self._paused and not attempt.cut:
            attempt.released.clear()
            await attempt.released.wait()
        if attempt.cut:
            return
        attempt.dispatched = True
        attempt.report_finished()
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, trajectory in enumerate(attempt.group.trajectories):
                    if not trajectory.finished:
                        tasks.create_task(self._sample_one(attempt, index, trajectory))
        except* Exception as failures:
            raise self._named(first_of(failures), attempt.work.prompt) from None

    async def _sample_one(self, attempt: Attempt, index: int, trajectory: Trajectory) -> None:
        if attempt.cut:
            return
        work = attempt.work
        result = await self._backend.sample(
            SampleRequest(
                id=request_id(work, index),
                prompt_ids=trajectory.prompt_ids,
                prefix_ids=trajectory.token_ids,
                params=attempt.way.params,
                seed=derive_seed(self._seed, work.group, index),
                session=work.group,
                report_every=work.save_every_tokens if work.save is not None else PROGRESS_EVERY_TOKENS,
                report=lambda so_far: self._take_report(attempt, index, so_far),
            )
        )
        attempt.so_far.pop(index, None)
        trajectory.extend(result.token_ids, result.logprobs, result.spans, routes=result.routes)
        if result.finish_reason != "abort":
            trajectory.finish_reason = result.finish_reason
            attempt.report_finished()
            self._save_if_due(attempt)

    def _take_report(self, attempt: Attempt, index: int, so_far: SampleResult) -> None:
        attempt.work.progress()
        attempt.so_far[index] = so_far
        attempt.reports += 1
        self._save_if_due(attempt)

    def _save_if_due(self, attempt: Attempt) -> None:
        """Save the group after as many reports of the backend as it has unfinished trajectories."""
        save, trajectories = attempt.work.save, attempt.group.trajectories
        unfinished = sum(not trajectory.finished for trajectory in trajectories)
        if save is None or not 0 < unfinished <= attempt.reports:
            return
        attempt.reports = 0
        group = TrajectoryGroup(
            group=attempt.group.group, prompt=attempt.group.prompt, trajectories=[t.copy() for t in trajectories]
        )
        for place, result in attempt.so_far.items():
            group.trajectories[place].extend(result.token_ids, result.logprobs, result.spans, routes=result.routes)
        save(group)

    async def _cut(self, groups: Sequence[GroupId], how: str) -> None:
        attempts: list[Attempt] = [self._groups[group] for group in groups if group in self._groups]
        for attempt in attempts:
            self._mark(attempt, how)
        await self._backend.abort([name for attempt in attempts for name in attempt.request_ids()])

    def _mark(self, attempt: Attempt, how: str) -> None:
        attempt.cut = attempt.cut or how
        attempt.released.set()

    def _named(self, error: Exception, prompt: Prompt) -> Exception:
        """Add the prompt row to a data failure of the backend, which does not know it."""
        if isinstance(error, DataFailure):
            return DataFailure(f"prompt row {prompt.row}: {error}", row=prompt.row, **error.details)
        return error


def request_id(work: GroupWork, index: int) -> str:
    """The id of a trajectory's request. It has the attempt, so that a late answer to an earlier attempt is not mistaken
    for this one."""
    return f"{work.group}.{index}.{work.attempt}"


def first_of(failures: BaseExceptionGroup[BaseException]) -> Exception:
    """One exception of a nested group. A data failure comes first, because another attempt would not help."""
    leaves: list[BaseException] = []
    for error in failures.exceptions:
        leaves += [first_of(error)] if isinstance(error, BaseExceptionGroup) else [error]
    chosen = next((error for error in leaves if isinstance(error, DataFailure)), leaves[0])
    return chosen if isinstance(chosen, Exception) else EngineError(f"sampling ended with {chosen!r}")
