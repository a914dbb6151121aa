"""The replica: one rollout engine, its weights and its slots. Driven by `scheduling/sync.py` and
`scheduling/rollout.py`."""

from typing import Any

from engine.ids import EventId, GroupId, Incarnation, ReplicaId, ValidationId, Version
from engine.states.machine import Table, transitions
from engine.states.process import REPLICA as REPLICA_KIND
from engine.states.process import Process

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
            "it failed: it goes on with its old weights",
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


class Replica:
    """What the scheduler knows of one replica."""

    __slots__ = (
        "chunks", "failed_group", "failed_groups", "groups", "held", "id", "incarnation", "pace", "paced", "place",
        "process", "slots", "slow", "staged", "staging", "state", "sync_attempt", "sync_failures", "taken", "touched",
        "validator", "version",
    )  # fmt: skip

    touched: dict[ReplicaId, None]
    """Where every change of a field is noted."""

    def __init__(
        self,
        id: ReplicaId,
        *,
        validator: bool = False,
        place: int = 0,
        touched: dict[ReplicaId, None] | None = None,
    ) -> None:
        self.watch({} if touched is None else touched, id)
        self.id = id
        self.place = place
        """How many replicas were seen before it: its place in every order of replicas."""
        self.validator = validator
        """It does nothing but validate: no group ever runs on it."""
        self.state: str = REPLICA.initial
        self.process = Process(REPLICA_KIND, id, self.touched)
        """Its lifetimes."""
        self.incarnation: Incarnation = 0
        """The life that joined last."""
        self.slots = 0
        self.taken = 0
        """Slots that groups cannot have: all of a validator, and those that a validation has."""
        self.version: Version = 0
        self.staging: Version | None = None
        """Being brought to host memory."""
        self.staged: Version | None = None
        """In host memory, not yet installed."""
        self.sync_attempt = 0
        """Syncs begun on this incarnation; its sync orders and their answers carry it."""
        self.sync_failures = 0
        self.failed_groups = 0
        """Different groups in a row whose attempt failed here for infrastructure, none finished in between."""
        self.failed_group: GroupId = -1
        """The last of them."""
        self.pace = 0.0
        """Seconds that a token of the groups it generates takes, a moving mean; where paces are compared."""
        self.paced = 0
        """Groups in it, of this life."""
        self.slow = False
        """It is slower than the others by more than may be."""
        self.groups: dict[GroupId, None] = {}
        """Running here, in the order they started; a dict for its order."""
        self.held: ValidationId = -1
        """The validation that keeps it at its version; -1: none."""
        self.chunks: dict[int, None] = {}
        """Of that validation, being measured here, each in a slot; a dict for its order."""

    def watch(self, touched: dict[ReplicaId, None], id: ReplicaId) -> None:
        """Note every change of a field in `touched` from now on. The fleet's books and the state hash are brought up to
        date from there, so that no caller has to tell them and an event costs the same however many replicas it leaves
        alone."""
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "touched", touched)
        if hasattr(self, "process"):
            self.process.watch(touched)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self.touched[self.id] = None

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
    def free_slots(self) -> int:
        """For groups."""
        return self.slots - self.taken - len(self.groups)

    @property
    def free_for_chunks(self) -> int:
        """Slots that neither a group nor a chunk of a validation has."""
        return self.slots - len(self.groups) - len(self.chunks)

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

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        return (
            self.id, STATE_NUMBER[self.state], self.incarnation, self.slots, self.version,
            -1 if self.staging is None else self.staging, -1 if self.staged is None else self.staged,
            self.sync_attempt, self.sync_failures, self.failed_groups, self.failed_group, *self.process.identity(),
            *((1,) if self.validator else ()), *((round(self.pace * 1e9), self.paced, self.slow) if self.paced else ()),
        )  # fmt: skip


STATE_NUMBER: dict[str, int] = {state: number for number, state in enumerate(REPLICA.states)}
