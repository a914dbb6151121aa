"""The replica: one rollout engine, its weights and its slots. Driven by `scheduling/weights.py` and
`scheduling/groups.py`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from engine.ids import EventId, GroupId, Incarnation, ReplicaId, ValidationId, Version
from engine.states.machine import Table, transitions
from engine.states.process import REPLICA as REPLICA_KIND
from engine.states.process import Process
from engine.states.tree import Record, digest, hashed_values

REPLICA = Table(
    name="replica",
    states=("down", "ready", "pausing", "installing", "yielding", "asleep", "draining", "drained"),
    transitions=transitions(
        ("join", "down", "ready", "its process is up, with the weights it says"),
        ("pause", "ready", "pausing", "a newer version is staged"),
        ("yield", "ready", "yielding", "a task of the trainer wants the pool it stands in"),
        ("sleep", "yielding", "asleep", "its groups are parked, its memory is given back"),
        ("wake", "asleep", "ready", "rollout has the pool again, and there are no newer weights"),
        ("install", "pausing asleep", "installing", "it samples no token: the swap is ordered"),
        ("installed", "installing", "ready", "it samples from the new version"),
        ("drain", "ready", "draining", "it leaves, or the run comes to rest: what runs there is parked"),
        ("drained", "draining", "drained", "nothing runs there"),
        ("keep", "drained", "ready", "it is wanted after all"),
        (
            "revert",
            "pausing installing yielding draining",
            "ready",
            "it failed: the replica keeps its old weights",
        ),
        (
            "lose",
            "ready pausing installing yielding asleep draining drained",
            "down",
            "its process ended, or is to end",
        ),
    ),
    terminal=(),
)


@dataclass(eq=False)
class Replica(Record):
    """What the scheduler knows of one replica."""

    UNHASHED: ClassVar[tuple[str, ...]] = ("process", "groups", "chunks")  # process: hashed beside it

    id: ReplicaId
    validator: bool = False
    """It does nothing but validate: no group ever runs on it."""
    process: Process = field(default_factory=lambda: Process(REPLICA_KIND))
    """Its lifetimes."""
    state: str = REPLICA.initial
    incarnation: Incarnation = 0
    """The life that joined last."""
    slots: int = 0
    samples: int = 1
    """Trajectories that a slot holds: those of one group."""
    finished: int = 0
    """Trajectories that have ended, of the groups that run here. Each `samples` of them free a slot."""
    taken: int = 0
    """Slots that groups cannot have: all of a validator, and those that a validation has."""
    version: Version = 0
    staging: Version | None = None
    """Being brought to host memory."""
    staged: Version | None = None
    """In host memory, not yet installed."""
    sync_attempt: int = 0
    """Syncs begun on this incarnation; its sync orders and their answers carry it."""
    sync_failures: int = 0
    failed_groups: int = 0
    """Different groups in a row whose attempt failed here for infrastructure, none finished in between."""
    failed_group: GroupId = -1
    """The last of them."""
    pace: float = 0.0
    """Seconds that a token of the groups it generates takes, a moving mean; where paces are compared."""
    paced: int = 0
    """Groups in it, of this life."""
    slow: bool = False
    """It is slower than the others by more than may be."""
    groups: dict[GroupId, None] = field(default_factory=dict)
    """Running here, in the order they started; a dict for its order."""
    held: ValidationId = -1
    """The validation that keeps it at its version; -1: none."""
    chunks: dict[int, None] = field(default_factory=dict)
    """Of that validation, being measured here, each in a slot; a dict for its order."""

    def __post_init__(self) -> None:
        self.place = 0
        """How many replicas were seen before it: its place in every order of replicas."""
        self.freed = 0
        """Slots that `Fleet.freed` counts for it."""

    def watch(self, note: Callable[[], None]) -> None:
        super().watch(note)
        self.process.watch(note)

    @property
    def condition(self) -> str:
        """Its state; while it is down, the state of its process."""
        return self.process.state if self.state == "down" else self.state

    @property
    def lost(self) -> bool:
        """It is wanted, and down since a life of it ended by itself."""
        process = self.process
        return self.state == "down" and process.wanted and (process.state == "gone" or process.deaths > 0)

    @property
    def occupied(self) -> int:
        """Slots that its groups need, by the number of their trajectories that have not ended."""
        return len(self.groups) - self.finished // self.samples

    @property
    def free_slots(self) -> int:
        """For groups."""
        return self.slots - self.taken - self.occupied

    @property
    def free_for_chunks(self) -> int:
        """Slots that neither a group nor a chunk of a validation needs."""
        return self.slots - self.occupied - len(self.chunks)

    @property
    def heading(self) -> Version:
        """The newest version it has or is about to have."""
        return max(self.version, self.staging or 0, self.staged or 0)

    def address(self, cause: EventId) -> dict[str, int]:
        """What every order of a sync carries."""
        return {"replica": self.id, "incarnation": self.incarnation, "attempt": self.sync_attempt, "cause": cause}

    def count_taken(self) -> None:
        """To be called after a change of its slots or chunks."""
        self.taken = self.slots if self.validator else len(self.chunks)

    def digest(self) -> int:
        """What it adds to the state hash."""
        return digest((hashed_values(self), hashed_values(self.process)))
