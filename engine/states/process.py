"""The process: whatever executes orders and can die. Driven by `scheduling/lifetimes.py`.

All kinds share one table. A replica's sync machine (`states/replica.py`) runs while its process is up.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.ids import Incarnation, StepId
from engine.states.machine import Table, transitions
from engine.states.tree import Record

REPLICA, TRAINER, SCORER, ADDED_STATES = "replica", "trainer", "scorer", "added states"
TRAJECTORY_STORE, WEIGHTS_STORE, GATEWAY = "trajectory store", "weights store", "gateway"
KINDS = (REPLICA, TRAINER, SCORER, ADDED_STATES, TRAJECTORY_STORE, WEIGHTS_STORE, GATEWAY)
"""Replicas and scorers are numbered by `index`; there is at most one process of any other kind, with index 0."""

PROCESS = Table(
    name="process",
    states=("gone", "starting", "up", "stopping"),
    transitions=transitions(
        ("start", "gone", "starting", "it is wanted: its next life is ordered"),
        ("up", "gone starting", "up", "it can execute orders"),
        ("restart", "starting up stopping", "starting", "its life ended, and another is ordered"),
        ("stop", "starting up", "stopping", "it is not wanted, to be renewed, or of no use: its end is ordered"),
        ("end", "starting up stopping", "gone", "its life ended, and no other follows"),
    ),
    terminal=(),
)


@dataclass(eq=False)
class Process(Record):
    """What the scheduler knows of one process."""

    UNHASHED: ClassVar[tuple[str, ...]] = ("reason",)

    kind: str
    index: int = 0
    state: str = PROCESS.initial
    incarnation: Incarnation = 0
    """Its newest life, which may not be up yet."""
    deaths: int = 0
    """Lives that ended by themselves, in a row, with no progress in between."""
    trained: StepId = 0
    """Train steps done at the last of these deaths; more of them are progress."""
    wanted: bool = True
    """Another life follows one that has ended."""
    excused: bool = False
    """It ends for no fault of its own, so it costs no restart: it gets no new work, and ends once it has none."""
    reason: str = ""
    """Why it is to leave."""
    room: str = ""
    """What it waits for before it can start."""

    @property
    def id(self) -> str:
        """For messages."""
        return name_of(self.kind, self.index)

    @property
    def leaves(self) -> bool:
        """It gets no new work, and ends once it has none."""
        return self.excused or not self.wanted

    @property
    def dismissed(self) -> bool:
        """It is not wanted, and its last life has ended."""
        return not self.wanted and self.state == "gone"

    @property
    def coming(self) -> bool:
        """It is not up, and a life of it is on its way."""
        return self.wanted and self.state in ("starting", "stopping")


def name_of(kind: str, index: int) -> str:
    """How a process is called in messages."""
    return f"{kind} {index}" if kind in (REPLICA, SCORER) else kind
