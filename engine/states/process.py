"""The process: whatever executes orders and can die. Driven by `scheduling/lifetimes.py`.

All kinds share one table. A replica's sync machine (`states/replica.py`) runs while its process is up.
"""

from typing import Any

from engine.ids import LifeNumber, StepId
from engine.states.facts import Facts
from engine.states.machine import Table, transitions

REPLICA, TRAINER, SCORER, ADDED_STATES = "replica", "trainer", "scorer", "added states"
TRAJECTORY_STORE, WEIGHTS_STORE, GATEWAY = "trajectory store", "weights store", "gateway"
POOL_TAKEN = "its pool is not free"
"""Why a process that is to start in a shared pool has no room; its start is not ordered yet."""
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


class FunctionCalls(Facts):
    """The newest figures of a process's calls of one of the user's functions: see `events.CallsMeasured`."""

    groups: int = 0
    queued: int = 0
    at_once: int = 0
    setting: str = ""
    call_s: float = 0.0
    """Mean duration of the newest calls; until one has ended, the time that the oldest has run."""
    ended: bool = False


class Process(Facts):
    """What the scheduler knows of one process."""

    kind: str
    index: int = 0
    state: str = PROCESS.initial
    life: LifeNumber = 0
    """Its newest life, which may not be up yet."""
    deaths: int = 0
    """Lives that ended by themselves, in a row, with no progress in between."""
    trained: StepId = 0
    """Train steps done at the last of these deaths; more of them are progress."""
    wanted: bool = True
    """Another life follows one that has ended."""
    excused: bool = False
    """It ends for no fault of its own, so it costs no restart: it gets no new work, and ends once it has none."""
    delay_s: float = 0.0
    """Seconds that its newest life waits before it starts, because the one before could not start."""
    reason: str = ""
    """Why it is to leave."""
    no_room: str = ""
    """Why the cluster or its pool has no room to start it; empty if there is room."""
    exceeded: int = 0
    """How often orders about it exceeded their time limit since one was answered."""
    answered_at: float = -1.0
    """Time of its last answer, if it does the work of added states; -1: none since it came up."""
    calls: dict[str, FunctionCalls] = {}
    """Its calls of the user's functions, by the function's name in messages; those of its newest life."""

    def address(self) -> dict[str, Any]:
        """What every order about its present life carries."""
        return {"kind": self.kind, "index": self.index, "life": self.life}

    @property
    def id(self) -> str:
        """For messages."""
        return name_of(self.kind, self.index)

    @property
    def loads(self) -> bool:
        """It starts, and does not wait for room: vLLM takes its GPU meanwhile."""
        return self.state == "starting" and not self.no_room

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
