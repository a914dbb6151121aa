"""Agents and their conversations by group, and the replica that each group samples on.

`gateway_server.py` calls it for every request, `agents.py` for every order about a group. If a group's replica fails,
its agents keep running: their calls wait, and continue from their prefixes on the next replica. Two attempts of a group
must never answer each other's orders.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from engine.errors import DataFailure, EngineError
from engine.ids import Version
from engine.rollout.agents.agent_generator import AgentCall, GroupOutcome, OpenGroup, RolloutOutcome
from engine.rollout.agents.conversation import Call, CallHistory, Conversation, HistoryTooLong, find_continuation
from engine.rollout.backend import SampleResult
from engine.trajectory import RolloutResult

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """The sampling side: one replica."""

    def sample(self, call: AgentCall) -> Coroutine[Any, Any, SampleResult]:
        """See `RolloutBackend.sample`. Raises: `DataFailure` if no replica could sample the request. Any other
        exception is a failure of this replica, and the call continues on another replica."""


class SessionOver(Exception):
    """The session ended during a call."""


class ContextSpent(DataFailure):
    """The history leaves no room for an answer within the model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBounds:
    """Limits of every agent. `context` is in tokens; None if only the sampling side knows it. `top_logprobs`: maximum
    number of likeliest tokens that the backend can return for each sampled token."""

    max_tokens: int
    context: int | None
    timeout_s: float
    top_logprobs: int = 20
    forced_calls: str = "refuse"
    """How a request for a forced tool call is answered: `refuse`, `constrain` or `as_auto`."""


@dataclass(slots=True, eq=False)
class ReplicaLink:
    """The connection to the replica on which an attempt runs."""

    sampler: Sampler
    attempt: int
    replaced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the group is opened on another replica. Calls that still run on this one are repeated there."""


class AgentSession:
    """One agent: its key, its conversation and its result."""

    def __init__(self, group: "AgentGroup", index: int, key: str) -> None:
        self.group = group
        self.index = index
        self.key = key
        self.conversation = Conversation()
        self.calls_begun = 0
        self.ended = False
        self.result = RolloutResult()
        self.own_s: float | None = None
        """See `RolloutOutcome.own_s`."""
        self.agent: asyncio.Task[None] | None = None
        self._sampling: dict[asyncio.Task[None], None] = {}
        self._beginning = asyncio.Lock()
        self._closed = False
        self._own_since: float | None = asyncio.get_running_loop().time()
        """Since when the agent has not waited for an answer; None: it waits for one."""

    async def begin(self, asked: CallHistory) -> Call:
        """Start a call with a history. Raises: `ContextSpent` if it leaves no room for an answer, `SessionOver`."""
        context = self.group.bounds.context
        async with self._beginning:  # two calls must not continue one segment
            segments = self.conversation.open_segments(asked)
            try:
                found = await asyncio.to_thread(find_continuation, segments, asked, context)
            except HistoryTooLong as error:
                self._spent(str(error))
            self.refuse_closed()
            call = self.conversation.begin(asked, found)
        self.calls_begun += 1
        tokens = len(call.prompt_ids)
        if context is not None and tokens >= context:
            self.drop(call)
            self._spent(f"the conversation has {tokens} tokens, but the model's context is {context} tokens")
        return call

    def refuse_closed(self) -> None:
        """Raises: `SessionOver` after `end`."""
        if self._closed:
            raise SessionOver

    async def sample(self, call: Call, limit: int | None, top_logprobs: int = 0, structure: str = "") -> None:
        """Sample an answer of at most `limit` tokens, on several replicas in turn if necessary, with the log-probs of
        the `top_logprobs` likeliest tokens at each place, and with `structure` (`SamplingParams.structure`).

        Raises: `SessionOver`, `ContextSpent`, `DataFailure`; the call is then dropped.
        """
        bounds = self.group.bounds
        most = min(bounds.max_tokens, limit or bounds.max_tokens)
        task = asyncio.get_running_loop().create_task(
            self.group.sample(self, call, most, self.calls_begun, top_logprobs, structure)
        )
        self._sampling[task] = None
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise SessionOver
            task.result()
        except BaseException as error:
            task.cancel()
            self.drop(call)
            if isinstance(error, DataFailure) and "context_tokens" in error.details:
                self._spent(str(error))
            raise
        finally:
            del self._sampling[task]
            if not self._sampling:
                self._own_since = asyncio.get_running_loop().time()

    def take_own_s(self) -> float | None:
        """The seconds that the agent has worked since its last answer; None if they were taken already."""
        since, self._own_since = self._own_since, None
        return None if since is None else asyncio.get_running_loop().time() - since

    def drop(self, call: Call) -> None:
        self.conversation.drop(call)

    def end(self) -> None:
        """Refuse further calls, and cancel the agent if it still runs."""
        self._closed = True
        if self.agent is not None and self.agent is not asyncio.current_task():
            self.agent.cancel()
        for task in self._sampling:
            task.cancel()
        for call in list(self.conversation.running):
            self.drop(call)

    def outcome(self, finish: str) -> RolloutOutcome:
        """The trajectories so far. `finish`: why an agent that still runs counts as finished; empty if it does not."""
        if self.ended:
            trajectories = self.conversation.finished(self.result)
            return RolloutOutcome(trajectories=trajectories, reward=self.result.reward, own_s=self.own_s)
        trajectories = self.conversation.trajectories()
        for trajectory in trajectories:
            trajectory.finish_reason = finish
        return RolloutOutcome(trajectories=trajectories, reward=None)

    def _spent(self, story: str) -> NoReturn:
        self.conversation.finish_reason = "length"
        raise ContextSpent(story)


class AgentGroup:
    """The agents of one prompt group, from the attempt that started them until they end."""

    def __init__(self, work: OpenGroup, bounds: SessionBounds) -> None:
        self.id = work.group
        self.prompt = work.prompt
        self.bounds = bounds
        self.sessions: list[AgentSession] = []
        self.failure: Exception | None = None
        self.over = False
        self._link: ReplicaLink | None = None
        self._gate = asyncio.Event()
        self._outcome: asyncio.Future[GroupOutcome] | None = None
        self._open_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._left_s = bounds.timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._cuts: list[asyncio.Task[None]] = []

    # orders of the scheduler

    @property
    def attempt(self) -> int:
        """The newest attempt."""
        return self._link.attempt if self._link is not None else 0

    def open(self, link: ReplicaLink) -> "asyncio.Future[GroupOutcome]":
        """Let calls sample on a replica. The future is done when every agent has ended; or, with the partial result,
        when the replica is taken away."""
        self._resolve(self._story(aborted=True))
        if self._link is not None:
            self._link.replaced.set()
        self._link = link
        self._outcome = asyncio.get_running_loop().create_future()
        self._gate.set()
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._left_s, self._time_out)
        self.look()
        return self._outcome

    def cut(self, attempt: int, how: str) -> None:
        """Block further calls to the replica of an attempt, and answer its `open` once the running calls return. `park`
        answers with the partial result, and the agents stay; `truncate` answers with a finished group."""
        if self._link is not None and self._link.attempt == attempt:
            self._shut()
            task = asyncio.get_running_loop().create_task(self._answer_cut(self._link, how))
            self._cuts.append(task)

    async def _answer_cut(self, link: ReplicaLink, how: str) -> None:
        await self._idle.wait()
        if self._link is not link or self.over:
            return
        if how == "truncate":
            self.over = True
            self._resolve(self._story(finish="truncated"))
        else:
            self._resolve(self._story(aborted=True))

    def newer_than(self, version: Version) -> bool:
        """Whether any token comes from weights newer than `version`. A replica with `version` cannot continue it."""
        seen = [session.conversation.newest_version for session in self.sessions]
        return any(newest is not None and newest > version for newest in seen)

    # calls of the agents

    async def sample(
        self, session: AgentSession, call: Call, most: int, number: int, top_logprobs: int, structure: str
    ) -> None:
        """Sample for a call until it has its answer, on the replica where the group is open at the time. With a
        structure, an aborted answer begins anew: its beginning could not be matched again."""
        own_s = session.take_own_s()
        while True:
            await self._gate.wait()
            link = self._link
            assert link is not None
            asked = AgentCall(
                id=f"{self.id}.{session.index}.{link.attempt}.{number}",
                group=self.id,
                attempt=link.attempt,
                prompt_ids=call.prompt_ids,
                prefix_ids=list(call.token_ids),
                max_tokens=most,
                top_logprobs=top_logprobs,
                structure=structure,
                place=(session.index, call.segment.number, call.segment.calls),
                ended=sum(one.ended for one in self.sessions),
                own_s=own_s,
            )
            own_s = None
            try:
                result = await self._call_replica(link, asked)
            except DataFailure:
                raise
            except Exception as error:
                self._broken(link, error)
                continue
            if result is None:
                continue
            if not structure or result.finish_reason != "abort":
                call.take(result)
            if result.finish_reason != "abort":
                return
            if self._link is link:
                self._gate.clear()  # the next order says how the group continues

    async def _call_replica(self, link: ReplicaLink, asked: AgentCall) -> SampleResult | None:
        """The answer of a replica to a call; None if another replica has replaced it meanwhile."""
        self._open_calls += 1
        self._idle.clear()
        loop = asyncio.get_running_loop()
        call, replaced = loop.create_task(link.sampler.sample(asked)), loop.create_task(link.replaced.wait())
        try:
            await asyncio.wait([call, replaced], return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            call.cancel()
            replaced.cancel()
            self._open_calls -= 1
            if not self._open_calls:
                self._idle.set()

    def _broken(self, link: ReplicaLink, error: Exception) -> None:
        """A replica failed a call: the attempt ends, and the agents wait for another replica."""
        log.warning("group %d cannot sample in attempt %d: %s", self.id, link.attempt, error)
        if self._link is link:
            self._shut()
            if self._outcome is not None and not self._outcome.done():
                failure = error if isinstance(error, EngineError) else EngineError(f"sampling failed: {error!r}")
                self._outcome.set_exception(failure)

    def end_session(self, session: AgentSession, result: RolloutResult) -> None:
        session.ended = True
        session.result = result
        session.own_s = session.take_own_s()
        session.end()
        self.look()

    def fail(self, error: Exception) -> None:
        """An agent failed: the attempt fails, and the next attempt starts the group again."""
        if self.failure is None:
            self.failure = error
            self._shut()
            for session in self.sessions:
                session.end()
            self.look()

    def look(self) -> None:
        """Answer `open` if no agent is left to wait for."""
        if self._outcome is None or self._outcome.done():
            return
        if self.failure is not None:
            self.over = True
            self._outcome.set_exception(self.failure)
        elif all(session.ended for session in self.sessions):
            self.over = True
            self._resolve(self._story())

    def end(self) -> None:
        self._shut()
        for session in self.sessions:
            session.end()
        for task in self._cuts:
            task.cancel()
        self._resolve(self._story(aborted=True))

    # inside

    def _story(self, finish: str = "", aborted: bool = False) -> GroupOutcome:
        return GroupOutcome(rollouts=[session.outcome(finish) for session in self.sessions], aborted=aborted)

    def _resolve(self, outcome: GroupOutcome) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)

    def _shut(self) -> None:
        self._gate.clear()
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        late = [session.index for session in self.sessions if not session.ended]
        limit = f"agent.timeout_s = {self.bounds.timeout_s:g} s"
        story = f"agents {late} of prompt row {self.prompt.row} took longer than {limit}"
        self.fail(DataFailure(story, row=self.prompt.row))
