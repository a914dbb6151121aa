"""Rewards of finished groups: calls the user's functions, each call on a thread of its own.

The generators of this package and the state that scores groups use it. It must never block the event loop, never let a
call that hangs delay other calls or the end of the process, and never lose the outcome of a call.
"""

import asyncio
import contextlib
import inspect
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

from engine.errors import DataFailure, EngineError, RewardFailure, message_of, place_of
from engine.protocols import CallFigures
from engine.protocols.call_threads import CallThreads
from engine.protocols.user_code import CALLS, HangingCalls, stack_of
from engine.protocols.user_values import ResultFailure
from engine.rollout.reward_parts import RewardPart, RewardParts
from engine.tasks.response_text import text_of_response
from engine.tasks.reward_forms import Value, checked_values
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

Reward = Callable[[Prompt, Trajectory], float]

THREADS = CallThreads("reward")
CALLS_AT_ONCE = 4
"""Number of concurrent calls of a function that sets none."""


def _nobody() -> None:
    """The default for `progress`: does nothing."""


# -- one call ----------------------------------------------------------------------------------------------------------


class Overdue(Exception):
    """A coroutine was cancelled because its call exceeded the timeout."""


def call_part(
    part: RewardPart, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], timeout_s: float | None
) -> list[Value | str]:
    """Call a reward function: for each response its value, or a description of what it returned instead. A coroutine
    runs on an event loop of its own and is cancelled after `timeout_s`.

    Raises: whatever the function raises; `Overdue`; `RewardFailure` for another number of values than of responses.
    """
    if part.limits_itself:
        values: list[Value | str] = part.function(prompts, trajectories, part.unit, bool(part.name))
        return values
    single = part.form == "response"
    found = part.function(prompts[0], trajectories[0]) if single else part.function(prompts, trajectories)
    if inspect.isawaitable(found):
        found = asyncio.run(_bounded(found, timeout_s))
    return checked_values(found, part.form, part.unit, bool(part.name), trajectories)


async def _bounded(found: Awaitable[Any], timeout_s: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await found
    except TimeoutError:
        if limit.expired():
            raise Overdue from None
        raise


def failure_of(who: str, outcome: BaseException | str | None, where: str, timeout_s: float | None) -> str:
    """What a reward did, in a sentence. `outcome`: an exception, a value's description, or None: it is overdue."""
    if outcome is None or isinstance(outcome, Overdue):
        return f"{who} took longer than {timeout_s} s {where}"
    if isinstance(outcome, str):
        return f"{who} returned {outcome.replace('WHERE', where)}"
    if isinstance(outcome, RewardFailure):
        verb, _, rest = message_of(outcome).partition(": ")
        return f"{who} {verb} {where}" + (f": {rest}" if rest else "")
    told = f"{who} raised {type(outcome).__name__} {where}: {message_of(outcome)}{place_of(outcome)}"
    return "; ".join(filter(None, [told, remedy_of(outcome)]))


NEEDS_MAIN_THREAD = re.compile(r"main thread|signal\.alarm")


def remedy_of(error: BaseException) -> str:
    """What helps a function that takes signals, which Python allows only on the main thread; else empty."""
    if NEEDS_MAIN_THREAD.search(message_of(error)) is None:
        return ""
    return "it is called on a thread: name it in reward.functions with processes: 1, whose main thread takes signals"


# -- calls of one function ---------------------------------------------------------------------------------------------


Outcome = list[Value | str] | BaseException | None
"""Values of the responses; or the exception that was raised; or None if the call exceeded its timeout."""


@dataclass(slots=True, eq=False)
class Request:
    """Responses of one group that are to be judged by one call."""

    prompt: Prompt
    trajectories: Sequence[Trajectory]
    group: "Waiting"
    outcome: asyncio.Future[Outcome]
    begun: bool = False


@dataclass(slots=True, eq=False)
class ScoringCall:
    """One call of the reward, from its thread to its return."""

    requests: list[Request]
    started_at: float
    timer: asyncio.TimerHandle | None = None
    stuck: bool = False


@dataclass(slots=True, eq=False)
class Waiting:
    """A group that waits for rewards."""

    progress: Callable[[], None]
    begun: int = 0
    """Number of its running calls."""
    pending: int = 0
    """Number of its requests without an outcome."""


class RewardCalls:
    """Calls one reward function, at most `threads` calls at a time. The clock of a call starts when it gets a thread.

    A call that exceeds `timeout_s` has failed and no longer counts towards `threads`. Its thread runs until it returns,
    and counts in `hanging`. Requests of the form `batch` that wait at the same time share a call.
    """

    def __init__(self, part: RewardPart, *, threads: int, timeout_s: float | None, hanging: HangingCalls) -> None:
        self._part = part
        self._timeout_s = part.timeout_s or timeout_s
        self._at_once = part.concurrency or threads
        self._places = asyncio.Semaphore(self._at_once)
        self._hanging = hanging
        self._queue: deque[Request] = deque()
        self._waiting: dict[Waiting, None] = {}
        self._running: dict[ScoringCall, None] = {}
        """Oldest first."""
        self._ended, self._ended_s = 0, 0.0
        """Calls that have ended, and the sum of their durations."""
        self.changed: Callable[[], None] = _nobody
        """Called when a group begins to wait, and when a call ends."""

    @contextlib.contextmanager
    def waiting(self, progress: Callable[[], None]) -> Iterator[Waiting]:
        """Register a group that waits for rewards. `progress` is called when one of its calls starts or returns, and,
        while none of its calls runs, when another group gets a reward."""
        group = Waiting(progress)
        self._waiting[group] = None
        try:
            yield group
        finally:
            del self._waiting[group]

    def figures(self) -> CallFigures:
        """See `protocols.MeasuresCalls`."""
        oldest = next(iter(self._running), None)
        return CallFigures(
            function=self._part.title, at_once=self._at_once, setting=self._part.setting,
            groups=sum(group.pending > 0 for group in self._waiting), queued=len(self._queue),
            calls=self._ended, seconds=self._ended_s,
            running_s=0.0 if oldest is None else asyncio.get_running_loop().time() - oldest.started_at,
        )  # fmt: skip

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory], group: Waiting) -> list[Value]:
        """The values of responses to one prompt.

        Raises: `DataFailure` if the reward raises, exceeds the timeout or returns something else than its values, after
        all calls for the group have returned. `EngineError` if too many calls hang."""
        whole = [trajectories] if self._part.form != "response" else [[one] for one in trajectories]
        outcomes = await asyncio.gather(
            *(self._judge(prompt, responses, group) for responses in whole), return_exceptions=True
        )
        values: list[Value] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            values += outcome
        return values

    async def _judge(self, prompt: Prompt, trajectories: Sequence[Trajectory], group: Waiting) -> list[Value]:
        group.pending += 1
        try:
            return await self._outcome(Request(prompt, trajectories, group, asyncio.get_running_loop().create_future()))
        finally:
            group.pending -= 1

    async def _outcome(self, request: Request) -> list[Value]:
        group = request.group
        self._queue.append(request)
        self.changed()
        try:
            await self._places.acquire()
        except BaseException:
            if request in self._queue:
                self._queue.remove(request)
            raise
        requests = self._next_requests()
        if self._hanging.story or not requests:
            self._places.release()
        if self._hanging.story:
            raise EngineError(self._hanging.story)
        if requests:
            self._begin(requests)
        try:
            outcome = await request.outcome
        finally:
            group.begun -= request.begun
        if isinstance(outcome, list):
            group.progress()
            for other in self._waiting:
                if not other.begun:
                    other.progress()
        return self._values_of(outcome, request.prompt)

    def _next_requests(self) -> list[Request]:
        """The oldest request, with as many of the next as fit into one call; none if another call took them all."""
        taken: list[Request] = []
        room = self._part.batch_size if self._part.form == "batch" else 0
        while self._queue and (not taken or len(self._queue[0].trajectories) <= room):
            taken.append(self._queue.popleft())
            room -= len(taken[-1].trajectories)
        return taken

    def _values_of(self, outcome: Outcome, prompt: Prompt) -> list[Value]:
        where = f"on prompt row {prompt.row}"
        odd = outcome if isinstance(outcome, BaseException) else None
        if isinstance(outcome, list):
            problem = next((value for value in outcome if isinstance(value, str)), None)
            if problem is None:
                return [value for value in outcome if not isinstance(value, str)]
            raise DataFailure(failure_of(self._part.who, problem, where, self._timeout_s), row=prompt.row)
        raise DataFailure(failure_of(self._part.who, odd, where, self._timeout_s), row=prompt.row) from odd

    def _begin(self, requests: list[Request]) -> None:
        """Start a call. The caller has acquired a place of `threads` for it."""
        loop = asyncio.get_running_loop()
        call = ScoringCall(requests, loop.time())
        self._running[call] = None
        prompts = [request.prompt for request in requests for _ in request.trajectories]
        trajectories = [trajectory for request in requests for trajectory in request.trajectories]

        def judge() -> Outcome:
            noted = contextlib.nullcontext() if self._part.limits_itself else CALLS.of(self._part.who)
            try:
                with noted:
                    return call_part(self._part, prompts, trajectories, self._timeout_s)
            except Overdue:
                return None
            except BaseException as error:  # `SystemExit` also fails only this call
                return error

        def returned(outcome: Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(self._returned, call, outcome)

        for request in requests:
            request.begun = True
            request.group.begun += 1
            request.group.progress()
        try:
            thread = THREADS.run(judge, returned)
        except BaseException as error:
            self._end(call, error)
            return
        if self._timeout_s is not None and not self._part.limits_itself:
            call.timer = loop.call_later(self._timeout_s, self._overdue, call, thread, self._timeout_s)

    def _returned(self, call: ScoringCall, outcome: Outcome) -> None:
        if call.stuck:
            self._hanging.remove()
            return
        if call.timer is not None:
            call.timer.cancel()
        self._end(call, outcome)

    def _overdue(self, call: ScoringCall, thread: Thread, timeout_s: float) -> None:
        log.warning("%s took longer than %s s; it is in\n%s", self._part.who, timeout_s, stack_of(thread))
        call.stuck = True
        self._hanging.add(self._part.who, timeout_s)
        self._end(call, None)

    def _end(self, call: ScoringCall, outcome: Outcome) -> None:
        """Release the call's place, even if its callers were cancelled."""
        self._places.release()
        del self._running[call]
        self._ended += 1
        self._ended_s += asyncio.get_running_loop().time() - call.started_at
        self.changed()
        start = 0
        for request in call.requests:
            stop = start + len(request.trajectories)
            if not request.outcome.done():
                request.outcome.set_result(outcome[start:stop] if isinstance(outcome, list) else outcome)
            start = stop


# -- groups ------------------------------------------------------------------------------------------------------------


class Grader:
    """Sets the texts and rewards of groups. Calls the functions of `reward` with `RewardCalls`. It is also the work of
    the state that scores groups; implements `protocols.Fallible`, `Closable` and `MeasuresCalls`.

    With `reward=None`, rollouts must have returned a reward; a truncated one without a reward gets 0. With `later`,
    missing rewards stay None. `decoder`: a tokenizer. `ends`: tokens that a text omits if it ends with one.
    """

    def __init__(
        self,
        decoder: Any,
        reward: Reward | RewardParts | None,
        *,
        threads: int = CALLS_AT_ONCE,
        timeout_s: float | None = None,
        later: bool = False,
        ends: Collection[int] = (),
    ) -> None:
        self.ends = ends
        self._later = later
        self.judges = later or reward is not None
        """Whether a function gives missing rewards, here or later."""
        self._decoder = decoder
        self._reward = None
        if reward is not None:
            self._reward = reward if isinstance(reward, RewardParts) else RewardParts((RewardPart(function=reward),))
        self._hanging = HangingCalls()
        self._calls = [
            RewardCalls(part, threads=threads, timeout_s=timeout_s, hanging=self._hanging)
            for part in (self._reward.parts if self._reward is not None else ())
        ]

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        await self.score(group)
        return group

    async def score(self, group: TrajectoryGroup, progress: Callable[[], None] = _nobody) -> None:
        """Set the text of every trajectory and the reward of every rollout that has none.

        The reward judges the last segment of a rollout; all its segments get the same reward. For `progress`, see
        `RewardCalls.waiting`.

        Raises: see `RewardCalls.score`.
        """
        unscored = [rollout for rollout in group.rollouts if rollout[-1].reward is None]
        for rollout in group.rollouts:
            for trajectory in rollout:
                if trajectory.reward is None or not trajectory.text:
                    trajectory.text = text_of_response(self._decoder, trajectory.token_ids, self.ends)
        if self._later or not unscored:
            return
        if self._reward is None:
            self._refuse_unfinished(group.prompt, unscored)
            return
        responses = [rollout[-1] for rollout in unscored]
        with contextlib.ExitStack() as registered:
            groups = [registered.enter_context(calls.waiting(progress)) for calls in self._calls]
            outcomes = await asyncio.gather(
                *(
                    calls.score(group.prompt, responses, waiting)
                    for calls, waiting in zip(self._calls, groups, strict=True)
                ),
                return_exceptions=True,
            )
        columns: list[list[Value]] = []
        try:
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                columns.append(outcome)
            for rollout, values in zip(unscored, zip(*columns, strict=True), strict=True):
                self._reward.assign(group.prompt, rollout, values)
        except DataFailure as failure:
            failure.judged = group
            raise

    async def failed(self) -> str:
        """Wait until too many calls hang and return this as the reason."""
        return await self._hanging.failed()

    def call_figures(self) -> list[CallFigures]:
        """See `protocols.MeasuresCalls`."""
        return [calls.figures() for calls in self._calls]

    def watch_calls(self, changed: Callable[[], None]) -> None:
        for calls in self._calls:
            calls.changed = changed

    def close(self) -> None:
        """End the processes of the reward."""
        if self._reward is not None:
            self._reward.close()

    def _refuse_unfinished(self, prompt: Prompt, rollouts: Sequence[Sequence[Trajectory]]) -> None:
        for rollout in rollouts:
            if rollout[-1].finish_reason != "truncated":
                raise ResultFailure(
                    f"the rollout of prompt row {prompt.row} returned no reward, and reward.function is not set: "
                    "return a reward or set the function",
                    row=prompt.row,
                )
            for trajectory in rollout:
                trajectory.reward = 0.0


async def first_failure(*failures: Awaitable[str]) -> str:
    """The reason of the first of these to return. The others are cancelled."""
    ends = [asyncio.ensure_future(failure) for failure in failures]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for end in ends:
            end.cancel()
