"""The agents of a run, by group: starts, cuts short and ends them, and issues their keys.

`gateway_server.py` calls it to check a key, `actors.gateway_actor` for every order about a group. No agent and no key
may remain when their group ends.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from engine.gateway.runners import Runner
from engine.gateway.sessions import AgentGroup, AgentSession, ReplicaLink, Sampler, SessionBounds
from engine.ids import GroupId
from engine.rollout.agents.agent_generator import GroupOutcome, OpenGroup
from engine.rollout.agents.conversation import Chat
from engine.rollout.agents.tool_calls import Parser
from engine.trajectory import Prompt, RolloutResult

# -- the parts of a gateway, without its HTTP server -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """The parts of a gateway. `Plan.make_gateway` creates them in the gateway's actor."""

    chat: Chat
    runner: Runner
    bounds: SessionBounds
    model: str
    parser: Parser
    max_body_bytes: int
    host: str = "127.0.0.1"
    port: int = 0


# -- the agents of a run -----------------------------------------------------------------------------------------------


Launch = Callable[[str, Prompt], Coroutine[Any, Any, RolloutResult]]
"""Runs one agent to its end: (key, prompt) → its result."""


class Agents:
    """The agents of a run, by group. `launch` runs one agent."""

    def __init__(self, bounds: SessionBounds, launch: Launch) -> None:
        self.bounds = bounds
        self._launch = launch
        self._groups: dict[GroupId, AgentGroup] = {}
        self._keys: dict[str, AgentSession] = {}
        self._early: dict[GroupId, tuple[int, str]] = {}
        """Orders to cut a group that arrived before the `open` of its attempt."""
        self._tasks: dict[asyncio.Task[None], None] = {}

    def session(self, key: str) -> AgentSession | None:
        """The session of a key; None if no running agent has the key."""
        session = self._keys.get(key)
        return session if session is not None and not session.ended else None

    async def open(self, work: OpenGroup, sampler: Sampler) -> GroupOutcome:
        """Start the agents of a group on a replica, or continue them there. Returns when `AgentGroup.open` is answered.

        Raises: the failure of an agent: `DataFailure` if it raised or exceeded its time limit, else `EngineError`.
        """
        group = self._groups.get(work.group)
        carried = group is not None
        if group is not None and group.newer_than(work.version):
            self._end(group)
            group, carried = None, False
        if group is None:
            if work.truncate:
                return GroupOutcome(missing=True)
            group = self._begin(work)
        outcome = group.open(ReplicaLink(sampler, work.attempt))
        attempt, how = self._early.pop(work.group, (0, ""))
        if work.truncate or attempt >= work.attempt:
            group.cut(work.attempt, "truncate" if work.truncate else how)
        try:
            answer = await outcome
        finally:
            if group.over:
                self._end(group)
        answer.carried = carried
        return answer

    def cut(self, group: GroupId, attempt: int, how: str) -> None:
        """See `AgentGroup.cut`. For an attempt that is not open yet, the cut happens when it opens."""
        known = self._groups.get(group)
        if known is not None and known.attempt >= attempt:
            known.cut(attempt, how)
        else:
            self._early[group] = (attempt, how)

    def discard(self, groups: Sequence[GroupId]) -> None:
        """End the agents of groups that are no longer needed."""
        for id in groups:
            self._early.pop(id, None)
            if id in self._groups:
                self._end(self._groups[id])

    async def close(self) -> None:
        """End every agent."""
        self.discard(list(self._groups))
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _begin(self, work: OpenGroup) -> AgentGroup:
        group = AgentGroup(work, self.bounds)
        self._groups[work.group] = group
        for index in range(work.samples):
            session = AgentSession(group, index, f"sk-engine-{secrets.token_hex(16)}")
            group.sessions.append(session)
            self._keys[session.key] = session
            session.agent = asyncio.get_running_loop().create_task(self._run(session))
            self._tasks[session.agent] = None
            session.agent.add_done_callback(lambda task: self._tasks.pop(task, None))
        return group

    async def _run(self, session: AgentSession) -> None:
        try:
            result = await self._launch(session.key, session.group.prompt)
        except asyncio.CancelledError:
            return
        except Exception as error:
            session.group.fail(error)
        else:
            session.group.end_session(session, result)

    def _end(self, group: AgentGroup) -> None:
        if self._groups.get(group.id) is group:
            del self._groups[group.id]
        group.end()
        for session in group.sessions:
            self._keys.pop(session.key, None)
