"""The process: whatever executes orders and can die. Driven by `scheduling/lifetimes.py`.

All kinds share one table. A replica's sync machine (`states/replica.py`) runs while its process is up.
"""

from typing import Any

from engine.ids import Incarnation, StepId
from engine.states.digest import digest
from engine.states.machine import Table, transitions

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


class Process:
    """What the scheduler knows of one process."""

    __slots__ = (
        "deaths",
        "excused",
        "id",
        "incarnation",
        "index",
        "kind",
        "reason",
        "room",
        "state",
        "touched",
        "trained",
        "wanted",
    )  # fmt: skip

    touched: dict[int, None] | None
    """Where every change of a field is noted; None: nowhere."""

    def __init__(self, kind: str, index: int = 0, touched: dict[int, None] | None = None) -> None:
        self.watch(None)
        self.kind = kind
        self.index = index
        self.id = name_of(kind, index)
        """For messages."""
        self.state: str = PROCESS.initial
        self.incarnation: Incarnation = 0
        """Its newest life, which may not be up yet."""
        self.deaths = 0
        """Lives that ended by themselves, in a row, with no progress in between."""
        self.trained: StepId = 0
        """Train steps done at the last of these deaths; more of them are progress."""
        self.wanted = True
        """Another life follows one that has ended."""
        self.excused = False
        """It ends for no fault of its own, so it costs no restart: it gets no new work, and ends once it has none."""
        self.reason = ""
        """Why it is to leave."""
        self.room = ""
        """What it waits for before it can start."""
        self.watch(touched)

    def watch(self, touched: dict[int, None] | None) -> None:
        """Note every change of a field in `touched` from now on, under `index`."""
        object.__setattr__(self, "touched", touched)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if self.touched is not None:
            self.touched[self.index] = None

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

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        return (
            STATE_NUMBER[self.state], self.incarnation, self.deaths, self.trained, self.wanted, self.excused,
            digest(tuple(self.room.encode())) >> 1 if self.room else 0,
        )  # fmt: skip


def name_of(kind: str, index: int) -> str:
    """How a process is called in messages."""
    return f"{kind} {index}" if kind in (REPLICA, SCORER) else kind


STATE_NUMBER: dict[str, int] = {state: number for number, state in enumerate(PROCESS.states)}
