"""The `Generator` of runs with agents: a gateway runs the agents, and this replica samples the answers to their calls.

The rollout actor hosts one per replica, on any `RolloutBackend`. `generate` opens a group at the gateway and waits
until its agents have ended; the gateway sends their calls here, to `sample`. It must never sample for an attempt that
has ended, or after `pause` has returned.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.errors import EngineError
from engine.ids import GroupId, Version
from engine.protocols import Generated, GroupWork
from engine.rollout.agents.agent_calls import AgentCalls, GroupCalls
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, derive_seed
from engine.rollout.generator import GeneratorOfCalls, Way
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A request of the gateway to sample the answer to one call of an agent."""

    id: str
    group: GroupId
    attempt: int
    prompt_ids: list[int]
    prefix_ids: list[int]
    """Tokens of this answer that were sampled before an abort. They count towards `max_tokens`."""
    max_tokens: int
    place: tuple[int, ...]
    """Sample index, segment number and call number. With the group, they determine the call's random numbers."""
    top_logprobs: int = 0
    """Return the log-probs of this many likeliest tokens at each place."""
    structure: str = ""
    """See `SamplingParams.structure`."""
    ended: int = 0
    """Agents of the group that have ended."""
    own_s: float | None = None
    """Seconds that the agent worked since its last answer, or since its start; None: it has another call, or another
    replica got the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A request to let a group sample on this replica from now on."""

    group: GroupId
    attempt: int
    prompt: Prompt
    samples: int
    version: Version
    """A lower bound of the replica's weights version."""
    truncate: bool = False
    """Sample nothing more: end the group with the tokens that it has."""


@dataclass(slots=True, kw_only=True)
class RolloutOutcome:
    """The result of one agent: the segments of its conversation."""

    trajectories: list[Trajectory]
    reward: float | None
    """The reward that the agent returned; None if it returned none."""
    own_s: float | None = None
    """Seconds that the agent worked from its last answer to its end; None if it has not ended."""


@dataclass(slots=True, kw_only=True)
class GroupOutcome:
    """The result of `Gateway.open`."""

    rollouts: list[RolloutOutcome] = field(default_factory=list)
    aborted: bool = False
    carried: bool = False
    """Its agents were started before this `open`."""
    missing: bool = False
    """`OpenGroup.truncate` was set and the gateway has no agents of the group."""


class Gateway(Protocol):
    """The gateway as a replica sees it."""

    async def open(self, work: OpenGroup) -> GroupOutcome:
        """Let a group sample on this replica. Returns when its agents have ended or `cut` was called."""

    async def cut(self, group: GroupId, attempt: int, how: str) -> None:
        """Stop all calls of an attempt, so that its `open` returns. `how` is `park` or `truncate`."""


@dataclass(slots=True, eq=False)
class OpenedGroup:
    """One running `generate` call."""

    work: GroupWork
    way: Way
    cut: str = ""
    running: dict[str, None] = field(default_factory=dict)
    """Ids of the requests that the backend is running."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    calls: GroupCalls | None = None
    """Set while its agents run."""


class AgentGenerator(GeneratorOfCalls):
    """Samples for agents with `backend` and scores their trajectories. Each call has its own `max_tokens`.

    `connect` must be called once, before the first group. `name`: the agent's name in messages.
    """

    park = "park"

    def __init__(self, backend: RolloutBackend, ways: Mapping[str, Way], *, seed: int, name: str = "agent") -> None:
        self._agent_calls = AgentCalls(name)
        super().__init__(backend, ways, self._agent_calls)
        self._seed = seed
        self._gateway: Gateway | None = None
        self._version: Version = 0

    def connect(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def generate(self, work: GroupWork) -> Generated:
        """Let the group's agents sample here until they end.

        Raises: `EngineError` if no gateway is connected or the group is already being generated. `DataFailure` if the
        reward function fails. The error of an agent that failed.
        """
        if self._gateway is None:
            raise EngineError("no gateway is connected; call connect() before generate()")
        opened = OpenedGroup(work, self.way_of(work), cut="truncate" if work.truncate else "")
        with self._running(opened):
            asked = OpenGroup(
                group=work.group,
                attempt=work.attempt,
                prompt=work.prompt,
                samples=work.samples,
                version=self._version,
                truncate=work.truncate,
            )
            with self._agent_calls.group(work.samples) as opened.calls:
                outcome = await self._gateway.open(asked)
            group = self._group_of(work, outcome)
            oldest = group.versions() if outcome.carried else None
            if not outcome.aborted:
                for rollout in outcome.rollouts:
                    self._count(rollout.own_s)
                work.finished(work.samples)
                await opened.way.grader.score(group, work.progress)
            return Generated(group=group, aborted=outcome.aborted, oldest_version=None if oldest is None else oldest[0])

    async def sample(self, call: AgentCall) -> SampleResult:
        """Sample the answer to an agent's call. If its attempt has ended or was cut, there are no tokens and
        `finish_reason` is `abort`."""
        opened = self._groups.get(call.group)
        self._count(call.own_s)
        with opened.calls.sampling() if opened is not None and opened.calls is not None else contextlib.nullcontext():
            return await self._sample(opened, call)

    def _count(self, own_s: float | None) -> None:
        if own_s is not None:
            self._agent_calls.count(own_s)

    async def _sample(self, opened: OpenedGroup | None, call: AgentCall) -> SampleResult:
        await self._unpaused.wait()
        if opened is None or opened.work.attempt != call.attempt or opened.cut or opened.done.is_set():
            return SampleResult(token_ids=[], logprobs=[], spans=[], finish_reason="abort")
        opened.work.finished(call.ended)
        params = replace(
            opened.way.params, max_tokens=call.max_tokens, top_logprobs=call.top_logprobs, structure=call.structure
        )
        opened.running[call.id] = None
        try:
            result = await self._backend.sample(
                SampleRequest(
                    id=call.id,
                    prompt_ids=call.prompt_ids,
                    prefix_ids=call.prefix_ids,
                    params=params,
                    seed=derive_seed(self._seed, call.group, *call.place),
                    session=call.group,
                )
            )
            opened.work.progress()
            return result
        finally:
            del opened.running[call.id]

    async def install(self, version: Version) -> None:
        await super().install(version)
        self._version = version

    async def _cut(self, groups: Sequence[GroupId], how: str) -> None:
        opened = [self._groups[group] for group in groups if group in self._groups and not self._groups[group].cut]
        for one in opened:
            one.cut = how
        if opened:
            await self._backend.abort([id for one in opened for id in one.running])
        assert self._gateway is not None or not opened
        for one in opened:
            await self._gateway.cut(one.work.group, one.work.attempt, how)  # type: ignore[union-attr]

    def _group_of(self, work: GroupWork, outcome: GroupOutcome) -> TrajectoryGroup:
        """The agents' conversations as a group. If the agents no longer exist, the trajectories of `work.partial`."""
        group = TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[])
        for rollout in outcome.rollouts:
            for trajectory in rollout.trajectories:
                trajectory.reward = rollout.reward
            group.trajectories += rollout.trajectories
        if outcome.missing:
            kept = work.partial.trajectories if work.partial is not None else []
            group.trajectories = [trajectory.copy() for trajectory in kept]
            count = len(group.rollouts)
            group.trajectories += [Trajectory() for _ in range(work.samples - count)]
            for trajectory in group.trajectories:
                trajectory.finish_reason = trajectory.finish_reason or "truncated"
        return group
