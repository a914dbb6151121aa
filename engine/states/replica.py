"""The replica: one rollout engine, its weights and its slots. Driven by `scheduling/weights.py` and
`scheduling/groups.py`."""

from typing import Any

from msgspec import field

from engine.ids import GroupId, LifeNumber, ReplicaId, Version
from engine.states.facts import Facts
from engine.states.group import Group
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


IN_SYNC = ("pausing", "installing")
GONE = ("down", "draining", "drained")
"""A replica in one of these states gets no weights and serves no validation, and training does not wait for it."""
AT_REST = ("drained", "asleep", "down")
"""Nothing runs on a replica in one of these states."""


class Replica(Facts):
    """What the scheduler knows of one replica."""

    id: ReplicaId
    validator: bool = False
    """It does nothing but validate: no group ever runs on it."""
    process: Process = field(default_factory=lambda: Process(REPLICA_KIND))
    """Its lifetimes."""
    state: str = REPLICA.initial
    slots: int = 0
    samples: int = 1
    """Trajectories that a slot holds: those of one group."""
    limit: int = 0
    """Groups that may run on it at once: the newest answer of the concurrency policy."""
    cache_used: float = 0.0
    """Share of its KV cache in use, by its newest report."""
    version: Version = 0
    next_version: Version | None = None
    """The version that it is to install: in host memory, or being brought there while a `StageWeights` is open."""
    sync_attempt: int = 0
    """Syncs begun on this life; its sync orders and their answers carry it."""
    sync_failures: int = 0
    exceeded: int = 0
    """How often orders about it exceeded their time limit since one was answered."""
    generated: int = 0
    """Groups that it has generated, over all its lives."""
    tokens: int = 0
    """Response tokens of these groups."""
    aborted: int = 0
    """Attempts that ended before their groups were generated, over all its lives; their prefixes are stored."""
    failed: int = 0
    """Attempts that failed there, over all its lives."""
    failed_groups: int = 0
    """Different groups in a row whose attempt failed here for infrastructure, none finished in between."""
    failed_group: GroupId = -1
    """The last of them."""
    pace: float = 0.0
    """Seconds that a token of the groups it generates takes, a moving mean; where paces are compared."""
    paced: int = 0
    """Groups in it, of this life."""

    @property
    def life(self) -> LifeNumber:
        """Its newest life, which may not be up yet."""
        return self.process.life

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
    def heading(self) -> Version:
        """The newest version it has or is about to have."""
        return max(self.version, self.next_version or 0)

    def address(self) -> dict[str, int]:
        """What every order of a sync carries."""
        return {"replica": self.id, "life": self.life, "attempt": self.sync_attempt}

    def address_of(self, group: Group) -> dict[str, Any]:
        """What every order about a group on this replica carries."""
        return {"group": group.id, "attempt": group.attempt, "replica": self.id, "life": self.life}

    @property
    def present(self) -> bool:
        """It may serve a validation."""
        return self.state not in GONE and not self.process.leaves

    @property
    def coming(self) -> bool:
        """It is down, and its next life is on its way."""
        return self.state == "down" and self.process.coming
