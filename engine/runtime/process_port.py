"""The interface between the runtime and the processes of a run.

Called by `supervisor.py` and `executor.py`; implemented over Ray by `actors.ray_processes`, in one process by
`runtime.local.local_processes`, on a virtual clock by `simulation.virtual_processes`. An implementation starts,
messages, probes and stops processes, and reports what happened. It must never decide anything.
"""

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.commands import Command
from engine.ids import GroupId, LifeNumber, StepId, Version
from engine.states.process import ADDED_STATES, GATEWAY, REPLICA, SCORER, TRAINER, TRAJECTORY_STORE, WEIGHTS_STORE
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.plan import Restore

Key = tuple[str, int]
"""(kind, index) of a process."""
SERVICES = (TRAJECTORY_STORE, WEIGHTS_STORE, GATEWAY)
"""Kinds that start and end with the run."""
SOURCES = {
    REPLICA: "rollout",
    SCORER: "scorer",
    TRAINER: "trainer",
    ADDED_STATES: "states",
    TRAJECTORY_STORE: "trajectories",
    WEIGHTS_STORE: "weights",
    GATEWAY: "gateway",
}
"""The names of processes in their reports and logs, by kind. Those of replicas and scorers also have a number."""


def source_of(kind: str, index: int) -> str:
    """The name of a process in its reports and logs."""
    return f"{SOURCES[kind]}-{index}" if kind in (REPLICA, SCORER) else SOURCES[kind]


def key_of(source: str) -> Key:
    """The inverse of `source_of`."""
    name, _, number = source.partition("-")
    return next(kind for kind, known in SOURCES.items() if known == name), int(number or 0)


class SentOrder(NamedTuple):
    """A command for a process, with the prompt that a generator needs."""

    command: Command
    prompt: Prompt | None = None


class Sign(NamedTuple):
    """A sign of life. `waits_for`: the process whose answer it has awaited longest, by name; empty: none."""

    pid: int
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a life of a process ended."""

    reason: str
    self_reported: bool = False
    """The process itself reported the reason."""
    silent: bool = False
    """The process does not respond, but may still run."""


class Life:
    """One life of a process. An implementation of the port derives its own class; what that leaves out does nothing."""

    def __init__(self, kind: str, index: int, number: LifeNumber) -> None:
        self.kind = kind
        self.index = index
        self.key: Key = (kind, index)
        self.number = number
        self.opening: asyncio.Future[None] | None = None
        """The result of `bring_up`, if the launch has called it."""
        self.up = False
        self.failure: BaseException | None = None
        """What `bring_up` raised."""

    def begin(self, restore: Restore | None = None) -> "asyncio.Future[None]":
        """Bring it up; sets `up` once it is."""
        opening: asyncio.Future[None] = asyncio.ensure_future(self.bring_up(restore))
        opening.add_done_callback(self._opened)
        return opening

    def _opened(self, opening: "asyncio.Future[None]") -> None:
        """Also retrieves the exception; otherwise asyncio warns."""
        self.failure = None if opening.cancelled() else opening.exception()
        self.up = not opening.cancelled() and self.failure is None

    async def bring_up(self, restore: Restore | None) -> None:
        """Load the worker. A trainer begins from `restore`. Raises: the user's exception, or an `EngineError`
        that describes it."""

    def join(self) -> None:
        """Make a replica report that it is up, once, before its other events."""

    def send(self, orders: Sequence[SentOrder]) -> None:
        """Send orders, to be executed after those sent before."""

    async def probe(self) -> Sign | None:
        """Wait for the process to respond. Returns None if it is dead."""
        return Sign(os.getpid())

    async def lost(self) -> ProcessEnd:
        """Wait until the process is lost, and return how it ended."""
        raise NotImplementedError

    async def stacks(self) -> str:
        """Make a hung process write its stacks. Returns a text that says where they are; empty if it wrote none."""
        return ""

    async def hand_over(self, steps: StepId) -> None:
        """Make the trainer give scorers the weights after `steps` train steps. Raises the reason if it cannot."""

    async def close(self) -> None:
        """End its work and close the worker."""

    def kill(self, *, hung: bool = False) -> Awaitable[object] | None:
        """End the process at once. Returns an awaitable to wait for before the next life starts, if needed.
        `hung`: a call into the user's code does not return, so do not wait for that call."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The processes that a restarted scheduler finds."""

    processes: Mapping[tuple[str, LifeNumber], Life]
    """By source and life."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why a process could not be taken over, by its source."""


class Processes(Protocol):
    """The processes of one run."""

    goodbye_s: float
    """Seconds that processes get to close at the end of the run."""
    look_again_s: float | None
    """Seconds after which `lacking` may have another answer."""

    def make(self, kind: str, index: int, life: LifeNumber) -> Life:
        """Make a life; returns at once. Raises the reason if it cannot be made."""

    def last(self, kind: str, index: int) -> bool:
        """Whether a process cannot be replaced after its loss."""

    def check(self, prompt: Prompt) -> None:
        """Raises: `DataFailure` for a prompt that cannot be sent."""

    def services(self) -> Mapping[str, Life]:
        """The processes that start and end with the run, by kind."""

    async def room(self) -> int:
        """Number of replicas that fit."""

    async def lacking(self, kind: str, replicas: int) -> str | None:
        """What the trainer, or this many replicas, lack; empty if nothing. None: they need no resources."""

    async def published(self) -> Version:
        """The newest version in the weights store; -1 if it does not answer."""


class Stores(Protocol):
    """The executor's calls to the stores and the gateway. Await the result for the answer; None: already done."""

    def read(self, groups: Sequence[GroupId]) -> Awaitable[list[TrajectoryGroup]]:
        """The trajectories of groups, as they are before every later call."""

    def discard(self, groups: Sequence[GroupId]) -> Awaitable[object] | None:
        """Delete the trajectories of groups."""

    def retire(self, version: Version) -> Awaitable[object] | None:
        """Delete a published version."""

    def cut_agents(self, groups: Sequence[GroupId]) -> bool:
        """Stop the agents of groups; False: there are none."""
