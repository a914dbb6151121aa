"""Rewards of finished groups: the user's function, each call on a thread of its own, each rollout once.

Used by the generators of this package. It must never block the event loop, never let a stuck call hold up the others or
the end of the process, and never lose a call's outcome, whatever the call raises.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, Protocol

from engine.errors import DataFailure, EngineError, message_of
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.user_code import stack_of

log = logging.getLogger(__name__)

Reward = Callable[[Prompt, Trajectory], float]

MOST_STUCK = 64
"""Calls past their time that may still run at once: each keeps a thread, and none can be ended."""


def _nobody() -> None:
    """Nobody wants to know of progress."""


Outcome = float | str | BaseException
"""The reward; or what the call returned instead, in words; or what it raised."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of the reward, from the start of its thread to its return."""

    outcome: asyncio.Future[Outcome | None]
    """None once the call is past its time."""
    timer: asyncio.TimerHandle | None = None
    stuck: bool = False


@dataclass(slots=True, eq=False)
class Waiting:
    """A group that waits for rewards."""

    progress: Callable[[], None]
    begun: int = 0
    """Its calls that have begun and not returned."""


class RewardCalls:
    """Calls `reward`, `threads` at a time. A call's time is counted from its own start, not from when it was asked for.

    One that is past `timeout_s` is given up and its place goes to the next; its thread runs on until it returns.
    """

    def __init__(self, reward: Reward, *, threads: int, timeout_s: float | None) -> None:
        self._reward = reward
        self._name = name_of(reward)
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(threads)
        self._stuck = 0
        self._lost = asyncio.Event()
        self._waiting: dict[Waiting, None] = {}

    @contextlib.contextmanager
    def waiting(self, progress: Callable[[], None]) -> Iterator[Waiting]:
        """While a group waits for rewards, it progresses with each call of its own that begins or returns, and as long
        as all of its calls are queued, with each reward of the groups ahead."""
        group = Waiting(progress)
        self._waiting[group] = None
        try:
            yield group
        finally:
            del self._waiting[group]

    async def score(self, prompt: Prompt, trajectory: Trajectory, group: Waiting) -> float:
        """Raises: `DataFailure` naming whatever the reward did wrong, `EngineError` once `failed` has returned."""
        await self._places.acquire()
        if self._lost.is_set():
            self._places.release()
            raise EngineError(self._loss())
        group.begun += 1
        group.progress()
        try:
            outcome = await self._begin(prompt, trajectory).outcome
        finally:
            group.begun -= 1
        if isinstance(outcome, float):
            group.progress()
            for other in self._waiting:
                if not other.begun:
                    other.progress()
            return outcome
        where = f"on prompt row {prompt.row}"
        if outcome is None:
            story = f"took longer than {self._timeout_s} s {where}"
        elif isinstance(outcome, str):
            story = f"returned {outcome} {where}, not a finite number"
        else:
            story = f"raised {type(outcome).__name__} {where}: {message_of(outcome)}"
        cause = outcome if isinstance(outcome, BaseException) else None
        raise DataFailure(f"reward {self._name} {story}", row=prompt.row) from cause

    async def failed(self) -> str:
        """Return once `MOST_STUCK` calls are stuck, with that as the reason; never before."""
        await self._lost.wait()
        return self._loss()

    def _begin(self, prompt: Prompt, trajectory: Trajectory) -> Call:
        """Start a call in the place that the caller has taken."""
        loop = asyncio.get_running_loop()
        call = Call(loop.create_future())

        def run() -> None:
            try:
                outcome: Outcome = number_in(self._reward(prompt, trajectory))
            except BaseException as error:  # one that wants to end the process has only failed
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._returned, call, outcome)

        thread = Thread(target=run, name="reward", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._places.release()
            raise
        if self._timeout_s is not None:
            call.timer = loop.call_later(self._timeout_s, self._overdue, call, thread)
        return call

    def _returned(self, call: Call, outcome: Outcome) -> None:
        if call.stuck:
            self._stuck -= 1
            return
        if call.timer is not None:
            call.timer.cancel()
        self._end(call, outcome)

    def _overdue(self, call: Call, thread: Thread) -> None:
        log.warning("reward %s took longer than %s s; it is in\n%s", self._name, self._timeout_s, stack_of(thread))
        call.stuck = True
        self._stuck += 1
        if self._stuck >= MOST_STUCK:
            self._lost.set()
        self._end(call, None)

    def _end(self, call: Call, outcome: Outcome | None) -> None:
        """Give back its place, also where whoever asked for it was cancelled meanwhile."""
        self._places.release()
        if not call.outcome.done():
            call.outcome.set_result(outcome)

    def _loss(self) -> str:
        return f"{MOST_STUCK} calls of reward {self._name} took longer than {self._timeout_s} s and have not returned"


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class Scorer:
    """Gives groups their texts and rewards, by calls as `RewardCalls` makes them. `reward` None: rollouts bring their
    own, and one that was cut short before it could is worth 0. `later`: rewards that are missing are left out."""

    def __init__(
        self,
        decoder: Decoder,
        reward: Reward | None,
        *,
        threads: int = 4,
        timeout_s: float | None = None,
        later: bool = False,
    ) -> None:
        self._later = later
        self._decoder = decoder
        self._calls = None if reward is None else RewardCalls(reward, threads=threads, timeout_s=timeout_s)

    async def score(self, group: TrajectoryGroup, progress: Callable[[], None] = _nobody) -> None:
        """Give every trajectory its text, and every rollout that has none its reward: that of its last segment.
        `progress` is called as rewards come in."""
        unscored = [rollout for rollout in group.rollouts if rollout[-1].reward is None]
        for rollout in group.rollouts:
            for trajectory in rollout:
                if trajectory.reward is None or not trajectory.text:
                    trajectory.text = self._decoder.decode(trajectory.token_ids, skip_special_tokens=True)
        if self._later:
            return
        with contextlib.nullcontext() if self._calls is None else self._calls.waiting(progress) as waiting:
            outcomes = await asyncio.gather(
                *(self._score_one(group.prompt, rollout[-1], waiting) for rollout in unscored), return_exceptions=True
            )
        for rollout, outcome in zip(unscored, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            for trajectory in rollout:
                trajectory.reward = outcome

    async def failed(self) -> str:
        """As `RewardCalls.failed`."""
        if self._calls is None:
            await asyncio.Event().wait()  # no call, no failure
            raise AssertionError
        return await self._calls.failed()

    async def _score_one(self, prompt: Prompt, trajectory: Trajectory, waiting: Waiting | None) -> float:
        if self._calls is not None and waiting is not None:
            return await self._calls.score(prompt, trajectory, waiting)
        if trajectory.finish_reason == "truncated":
            return 0.0
        raise DataFailure(
            f"the rollout of prompt row {prompt.row} returned no reward, and reward.function is not set", row=prompt.row
        )


class Rewarding:
    """The work of the state in which groups are rewarded; a `protocols.Fallible`."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        await self._scorer.score(group)
        return group

    async def failed(self) -> str:
        """As `RewardCalls.failed`."""
        return await self._scorer.failed()


async def first_failure(*failures: Awaitable[str]) -> str:
    """The reason of whichever fails first; the others are no longer waited for."""
    ends = [asyncio.ensure_future(failure) for failure in failures]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for end in ends:
            end.cancel()


def number_in(value: Any) -> float | str:
    """A finite number as a float; anything else in words."""
    try:
        if math.isfinite(value):
            return float(value)
    except Exception:  # whatever the value's own conversion raises
        with contextlib.suppress(Exception):
            return f"{value!r:.80} of type {type(value).__name__}"
        return f"a {type(value).__name__}"
    return str(float(value))


def name_of(function: Callable[..., Any]) -> str:
    """`module.function`, as a user would look for it."""
    module = getattr(function, "__module__", "") or ""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}.{name}" if module else name
