"""What the runtime needs of the processes of a run, wherever they are: the port between `supervisor.py`,
`executor.py` and the world.

Implemented over Ray by `actors.processes`, in one process by `local.processes`. An implementation decides nothing: it
starts, sends, asks and stops, and reports what happened.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.commands import Command
from engine.ids import GroupId, Incarnation, StepId, Version
from engine.runtime.plan import Restore
from engine.states.process import (
    ADDED_STATES,
    GATEWAY,
    REPLICA,
    SCORER,
    TRAINER,
    TRAJECTORY_STORE,
    WEIGHTS_STORE,
)
from engine.trajectory import Prompt

Key = tuple[str, int]
"""(kind, index) of a process."""
KEPT = (TRAJECTORY_STORE, WEIGHTS_STORE, GATEWAY)
"""Kinds that live as long as the run, started and ended with it."""
SINGLE = {
    TRAINER: "trainer",
    ADDED_STATES: "states",
    TRAJECTORY_STORE: "trajectories",
    WEIGHTS_STORE: "weights",
    GATEWAY: "gateway",
}
NUMBERED = {REPLICA: "rollout", SCORER: "scorer"}


def source_of(kind: str, index: int) -> str:
    """The name of a process in its reports and logs."""
    return f"{NUMBERED[kind]}-{index}" if kind in NUMBERED else SINGLE[kind]


def key_of(source: str) -> Key:
    """The inverse of `source_of`."""
    name, _, number = source.rpartition("-")
    if name in NUMBERED.values():
        return next(kind for kind, known in NUMBERED.items() if known == name), int(number)
    return next(kind for kind, known in SINGLE.items() if known == source), 0


class Order(NamedTuple):
    """A command for a process, with the prompt that a generator needs."""

    command: Command
    prompt: Prompt | None = None


class Sign(NamedTuple):
    """A sign of life. `waits_for`: the name of the process that has not answered for longest; empty: none."""

    pid: int
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a life ended."""

    reason: str
    told: bool = False
    """The process says so itself."""
    silent: bool = False
    """It gives no sign of life, but may still run."""


class Process(Protocol):
    """One life of a process."""

    def bring_up(self, restore: Restore | None) -> Awaitable[None]:
        """Load what it hosts. A trainer begins where `restore` says. Raises: the user's exception, or an `EngineError`
        that tells of it."""

    def join(self) -> None:
        """A replica reports that it is up, once, before anything else that it reports."""

    def send(self, orders: Sequence[Order]) -> None:
        """Have orders carried out, after those sent before."""

    async def probe(self) -> Sign | None:
        """Returns when it gives a sign of life; None: it is dead."""

    async def lost(self) -> Ended:
        """Returns when it is lost."""

    async def stacks(self) -> str:
        """Have it write its stacks, because it hangs. Returns where they are; empty if nowhere."""

    async def hand_over(self, steps: StepId) -> None:
        """Have the trainer give scorers the weights after so many steps. Raises: why it cannot."""

    async def close(self) -> None:
        """Let it end what it does, and close what it hosts."""

    def kill(self, *, hung: bool = False) -> Awaitable[object] | None:
        """End it at once. Returns what to wait for before the next life may begin, if anything. `hung`: a call into
        the user's code does not return, so nothing waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The processes of a run that a restarted scheduler finds."""

    processes: Mapping[tuple[str, Incarnation], Process]
    """By source and incarnation."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why a process could not be taken over, by its source."""


class Processes(Protocol):
    """The processes of one run."""

    goodbye_s: float
    """Seconds that processes get to close at the end of the run."""
    look_again_s: float | None
    """Seconds after which `lacking` may have another answer."""

    def make(self, kind: str, index: int, incarnation: Incarnation) -> Process:
        """Make a life; returns at once. Raises: why it cannot be made."""

    def last(self, kind: str, index: int) -> bool:
        """Whether no further life of a process can be made."""

    def kept(self) -> Mapping[str, Process]:
        """The processes that live as long as the run, by kind."""

    async def room(self) -> int:
        """Number of replicas that there is room for."""

    async def lacking(self, replicas: int) -> str | None:
        """What so many replicas lack for room; empty: nothing. None: they need no room."""

    async def published(self) -> Version:
        """The newest version in the weights store; -1 if it does not answer."""


class Stores(Protocol):
    """What the executor asks of the stores and the gateway. Each returns what answers the order; None: it is done."""

    def discard(self, groups: Sequence[GroupId]) -> Awaitable[object] | None:
        """Delete the trajectories of groups."""

    def retire(self, version: Version) -> Awaitable[object] | None:
        """Delete a published version."""

    def cut_agents(self, groups: Sequence[GroupId]) -> bool:
        """Stop the agents of groups; False: there are none."""
