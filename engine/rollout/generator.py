"""The built-in `Generator`: prompt groups in, trajectories with text, log-probs, versions and rewards out.

Hosted by `actors/` and `runtime/local/`, one per replica, over any `RolloutBackend`. It turns prompts into token ids
and groups into requests, keeps what earlier attempts left behind, and scores what is finished. Must never block the
event loop, never sample a token that an earlier attempt already has, and never let an
attempt change a trajectory's random numbers.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import DataFailure, EngineError
from engine.ids import GroupId, Version
from engine.protocols import Generated, GroupWork, Sleeper
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, SamplingParams, derive_seed
from engine.rollout.scoring import Reward, Scorer, first_failure
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

# -- what every built-in generator has ---------------------------------------------------------------------------------


class OverBackend:
    """Part of a `protocols.Generator`, and all of a `protocols.Fallible` and a `protocols.Sleeper`."""

    def __init__(self, backend: RolloutBackend, scorer: Scorer) -> None:
        self._backend = backend
        self._scorer = scorer

    async def stage(self, version: Version, weights: Any) -> None:
        await self._backend.stage(version, weights)

    async def install(self, version: Version) -> None:
        await self._backend.install(version)

    async def sleep(self) -> None:
        """See `protocols.Sleeper`: as far as the backend can."""
        if isinstance(self._backend, Sleeper):
            await self._backend.sleep()

    async def wake(self) -> None:
        if isinstance(self._backend, Sleeper):
            await self._backend.wake()

    async def close(self) -> None:
        await self._backend.close()

    async def failed(self) -> str:
        """See `protocols.Fallible`: the backend can sample no more, or too many rewards are stuck."""
        return await first_failure(self._backend.failed(), self._scorer.failed())

    def tokens_sampled(self) -> int:
        """Tokens sampled since the start, for metrics."""
        return self._backend.tokens_sampled()


# -- single-turn rollouts ----------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """What is asked of a tokenizer; Hugging Face's have it. One with a `chat_template` is also asked to apply it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


PROGRESS_EVERY_TOKENS = 256
"""How often a trajectory reports progress, if its prefixes are not stored."""


@dataclass(slots=True)
class Attempt:
    """One running `generate` call."""

    work: GroupWork
    group: TrajectoryGroup
    cut: str = ""
    """`abort` or `truncate` once somebody asked for it; the first one stands."""
    dispatched: bool = False
    """Whether it passed the gate that `pause` closes."""
    so_far: dict[int, SampleResult] = field(default_factory=dict)
    """Of unfinished trajectories, by index: new tokens that the backend has told of."""
    told: int = 0
    """How often it has since the group was last saved."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gate opens or the attempt is cut: what it waits for before its first token."""
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing more will be sampled for it."""

    def request_ids(self) -> list[str]:
        return [request_id(self.work, index) for index in range(len(self.group.trajectories))]


class ModelGenerator(OverBackend):
    """Samples with `backend`, scores with `reward`. One request per unfinished trajectory, all of a group at once.

    `reward` is called on threads, `reward_threads` calls at once; one that takes longer than `reward_timeout_s` has
    failed and is waited for no more. With `rewards_later` it is not called at all.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        tokenizer: Tokenizer,
        reward: Reward,
        *,
        params: SamplingParams,
        seed: int,
        reward_threads: int = 4,
        reward_timeout_s: float | None = None,
        rewards_later: bool = False,
    ) -> None:
        scorer = Scorer(tokenizer, reward, threads=reward_threads, timeout_s=reward_timeout_s, later=rewards_later)
        super().__init__(backend, scorer)
        self._tokenizer = tokenizer
        self._params = params
        self._seed = seed
        self._attempts: dict[GroupId, Attempt] = {}
        self._paused = False
        self._frozen = False

    async def generate(self, work: GroupWork) -> Generated:
        """Sample what `work.partial` lacks, then score. Raises `DataFailure` when prompt or reward is at fault."""
        if work.group in self._attempts:
            raise EngineError(f"group {work.group} is already being generated", group=work.group)
        attempt = Attempt(work, self._group_of(work), cut="truncate" if work.truncate else "")
        self._attempts[work.group] = attempt
        try:
            try:
                await self._sample_group(attempt)
            finally:
                attempt.sampled.set()
            if attempt.cut == "abort" and not attempt.group.finished:
                return Generated(group=attempt.group, aborted=True)
            for trajectory in attempt.group.trajectories:
                trajectory.finish_reason = trajectory.finish_reason or "truncated"
            await self._scorer.score(attempt.group, work.progress)
            return Generated(group=attempt.group)
        finally:
            del self._attempts[work.group]

    async def abort(self, groups: Sequence[GroupId]) -> None:
        await self._cut([self._attempts[group] for group in groups if group in self._attempts], "abort")

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        await self._cut([self._attempts[group] for group in groups if group in self._attempts], "truncate")

    async def pause(self, mode: str) -> None:
        """See `protocols.Generator`. Groups that have not sampled yet wait for `resume`, except that `abort` returns
        them too."""
        self._paused = True
        if mode == "abort":
            running = list(self._attempts.values())
            for attempt in running:
                self._mark(attempt, "abort")
            await self._backend.pause("abort")
            await _all_sampled(running)
        elif mode == "wait" and not self._frozen:
            await _all_sampled([attempt for attempt in self._attempts.values() if attempt.dispatched])
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
            for attempt in self._attempts.values():
                attempt.released.set()

    # Sampling.

    def _group_of(self, work: GroupWork) -> TrajectoryGroup:
        """The group to work on: copies of what `partial` holds, so that a failed attempt leaves it as it was."""
        partial = work.partial.trajectories[: work.samples] if work.partial is not None else []
        trajectories = [trajectory.copy() for trajectory in partial]
        prompt_ids = trajectories[0].prompt_ids if trajectories else prompt_ids_of(self._tokenizer, work.prompt)
        trajectories += [Trajectory(prompt_ids=list(prompt_ids)) for _ in range(work.samples - len(trajectories))]
        return TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=trajectories)

    async def _sample_group(self, attempt: Attempt) -> None:
        while self._paused and not attempt.cut:
            attempt.released.clear()
            await attempt.released.wait()
        if attempt.cut:
            return
        attempt.dispatched = True
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
                params=self._params,
                seed=derive_seed(self._seed, work.group, index),
                tell_every=work.save_every_tokens if work.save is not None else PROGRESS_EVERY_TOKENS,
                tell=lambda so_far: self._told(attempt, index, so_far),
            )
        )
        attempt.so_far.pop(index, None)
        trajectory.extend(result.token_ids, result.logprobs, result.spans)
        if result.finish_reason != "abort":
            trajectory.finish_reason = result.finish_reason

    def _told(self, attempt: Attempt, index: int, so_far: SampleResult) -> None:
        """Save the group once as many news have come as trajectories are on their way: about one of each."""
        attempt.work.progress()
        attempt.so_far[index] = so_far
        attempt.told += 1
        save, trajectories = attempt.work.save, attempt.group.trajectories
        if save is None or attempt.told < sum(not trajectory.finished for trajectory in trajectories):
            return
        attempt.told = 0
        group = TrajectoryGroup(
            group=attempt.group.group, prompt=attempt.group.prompt, trajectories=[t.copy() for t in trajectories]
        )
        for place, result in attempt.so_far.items():
            group.trajectories[place].extend(result.token_ids, result.logprobs, result.spans)
        save(group)

    async def _cut(self, attempts: Sequence[Attempt], how: str) -> None:
        for attempt in attempts:
            self._mark(attempt, how)
        await self._backend.abort([name for attempt in attempts for name in attempt.request_ids()])

    def _mark(self, attempt: Attempt, how: str) -> None:
        attempt.cut = attempt.cut or how
        attempt.released.set()

    def _named(self, error: Exception, prompt: Prompt) -> Exception:
        """A backend knows no prompts: add which one it was."""
        if isinstance(error, DataFailure):
            return DataFailure(f"prompt row {prompt.row}: {error}", row=prompt.row, **error.details)
        return error


def request_id(work: GroupWork, index: int) -> str:
    """Names a trajectory's request; the attempt keeps a late answer of an earlier one apart."""
    return f"{work.group}.{index}.{work.attempt}"


def prompt_ids_of(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: its `messages` through the tokenizer's chat template if it has both, else its text."""
    messages = prompt.fields.get("messages")
    if messages and getattr(tokenizer, "chat_template", None):
        chat: Any = tokenizer
        ids = chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer.encode(prompt.text)
    if not ids:
        raise DataFailure(f"prompt row {prompt.row} encodes to no tokens", row=prompt.row)
    return list(ids)


def first_of(failures: BaseExceptionGroup[BaseException]) -> Exception:
    """One exception of a nested group: a data failure if there is one, for it needs no further attempt to
    show again."""
    leaves: list[BaseException] = []
    for error in failures.exceptions:
        leaves += [first_of(error)] if isinstance(error, BaseExceptionGroup) else [error]
    chosen = next((error for error in leaves if isinstance(error, DataFailure)), leaves[0])
    return chosen if isinstance(chosen, Exception) else EngineError(f"sampling ended with {chosen!r}")


async def _all_sampled(attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        await attempt.sampled.wait()
