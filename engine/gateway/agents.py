"""Which agent is whose: every group of agents of a run, begun, cut short and ended, and their keys.

Called by `server.py` to know a key and by `actors.gateway` for every order about a group. It must never leave an agent
or a key behind when their group ends.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from engine.gateway.sessions import AgentGroup, Bounds, Line, Sampler, Session
from engine.ids import GroupId
from engine.rollout.agent import GroupOutcome, OpenGroup
from engine.trajectory import Prompt

Launch = Callable[[str, Prompt], Coroutine[Any, Any, float | None]]
"""Runs one agent to its end: (its key, its prompt) → its own reward, or None."""


class Agents:
    """Every group of agents of a run. `launch` runs one agent."""

    def __init__(self, bounds: Bounds, launch: Launch) -> None:
        self.bounds = bounds
        self._launch = launch
        self._groups: dict[GroupId, AgentGroup] = {}
        self._keys: dict[str, Session] = {}
        self._early: dict[GroupId, tuple[int, str]] = {}
        """Orders to cut that came before the opening they are about."""
        self._tasks: dict[asyncio.Task[None], None] = {}

    def session(self, key: str) -> Session | None:
        """Whose key it is; None for a key that no living agent has."""
        session = self._keys.get(key)
        return session if session is not None and not session.ended else None

    async def open(self, work: OpenGroup, sampler: Sampler) -> GroupOutcome:
        """Begin the agents of a group, or let them go on, on a replica; returns when `AgentGroup.open` is answered.

        Raises: what an agent failed of: `DataFailure` if it raised or took too long, else `EngineError`.
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
        outcome = group.open(Line(sampler, work.attempt))
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
        """See `AgentGroup.cut`. For an attempt that is not open yet, as soon as it is."""
        known = self._groups.get(group)
        if known is not None and known.attempt >= attempt:
            known.cut(attempt, how)
        else:
            self._early[group] = (attempt, how)

    def discard(self, groups: Sequence[GroupId]) -> None:
        """End groups that nobody wants any more."""
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
            session = Session(group, index, f"sk-engine-{secrets.token_hex(16)}")
            group.sessions.append(session)
            self._keys[session.key] = session
            session.agent = asyncio.get_running_loop().create_task(self._run(session))
            self._tasks[session.agent] = None
            session.agent.add_done_callback(lambda task: self._tasks.pop(task, None))
        return group

    async def _run(self, session: Session) -> None:
        try:
            reward = await self._launch(session.key, session.group.prompt)
        except asyncio.CancelledError:
            return
        except Exception as error:
            session.group.fail(error)
        else:
            session.group.ended(session, reward)

    def _end(self, group: AgentGroup) -> None:
        if self._groups.get(group.id) is group:
            del self._groups[group.id]
        group.end()
        for session in group.sessions:
            self._keys.pop(session.key, None)
