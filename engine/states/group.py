"""The prompt group: one prompt and its trajectories, from drawn to consumed or released.

The table is the law of what may happen to a group; the record is what the scheduler knows of one. Driven by
`scheduling/`.
"""

from functools import lru_cache
from hashlib import blake2b

from engine.ids import NO_VERSION, GroupId, ReplicaId, Version
from engine.states.machine import Phase, Table, Transition, transitions

GROUP = Table(
    name="group",
    states=(
        "queued",
        "generating",
        "aborted",
        "resumed",
        "generated",
        "batched",
        "consumed",
        "filtered",
        "dropped",
        "failed",
    ),
    transitions=transitions(
        ("start", "queued", "generating", "admitted on a replica (law 3)"),
        ("abort", "generating resumed", "aborted", "weight sync, lost replica or failed attempt; it keeps its place"),
        ("lose", "generated", "aborted", "what the trajectory store held of it is gone: it begins again"),
        ("resume", "aborted", "resumed", "a free slot on a replica new enough"),
        ("generate", "generating resumed", "generated", "all its trajectories are finished"),
        ("batch", "generated", "batched", "taken by a train step"),
        ("consume", "batched", "consumed", "its step was trained"),
        ("filter", "generated", "filtered", "the filter policy says so"),
        ("drop", "queued generating resumed aborted generated", "dropped", "the deadline policy, or the run is over"),
        ("fail", "aborted", "failed", "a retry budget is spent"),
    ),
    terminal=("consumed", "filtered", "dropped", "failed"),
    phases={
        "queued": Phase.WAITING,
        "generating": Phase.RUNNING,
        "aborted": Phase.PARKED,
        "resumed": Phase.RUNNING,
        "generated": Phase.READY,
        "batched": Phase.BATCHED,
        "consumed": Phase.CONSUMED,
        "filtered": Phase.RELEASED,
        "dropped": Phase.RELEASED,
        "failed": Phase.RELEASED,
    },
)


class Group:
    """What the scheduler knows of one live group. Versions are `NO_VERSION` until known."""

    __slots__ = (
        "admitted_version",
        "attempt",
        "data_failures",
        "deadline",
        "digest",
        "entered",
        "failed_on",
        "id",
        "infrastructure_failures",
        "kept",
        "moved",
        "moving",
        "newest_version",
        "oldest_version",
        "overdue_s",
        "ready_at",
        "ready_number",
        "replica",
        "resume_key",
        "reward_mean",
        "seated_at",
        "seated_tokens",
        "started_at",
        "state",
        "tokens",
        "truncate",
        "unfinished",
    )  # fmt: skip

    def __init__(self, id: GroupId) -> None:
        self.id = id
        self.state: str = GROUP.initial
        self.attempt = 0
        self.replica: ReplicaId = -1
        self.admitted_version: Version = NO_VERSION
        self.deadline = -1
        """The last train step that may consume it: steps in the version it was admitted on, plus S. Never moved."""
        self.oldest_version: Version = NO_VERSION
        self.newest_version: Version = NO_VERSION
        """Newest version any kept token can have; it resumes only on a replica at least as new."""
        self.tokens = 0
        self.unfinished = 0
        """Trajectories of what is stored that have not ended; 0 while nothing is stored."""
        self.kept = False
        """An earlier attempt left finished trajectories or prefixes in the trajectory store."""
        self.truncate = False
        """The deadline policy wants it finished with the prefixes it has."""
        self.infrastructure_failures = 0
        self.data_failures = 0
        self.started_at = 0.0
        self.seated_at = 0.0
        """When its present attempt began, where attempts are timed; 0 where they are not."""
        self.seated_tokens = 0
        """Tokens it had then."""
        self.moving = False
        """Its replica was told to park it, so that a faster one goes on with it."""
        self.moved = False
        """That has happened once; it stays then."""
        self.overdue_s = 0.0
        """Its attempt exceeded a time limit of so many seconds, and its replica was told to park it; 0: it has not."""
        self.failed_on: ReplicaId = -1
        """The replica its last attempt failed on; another one is preferred for the next."""
        self.ready_number = 0
        """Its place in the order in which groups became ready."""
        self.resume_key: tuple[float, ...] = ()
        """Where it is parked: what the resume policy orders it by; empty for its deadline alone."""
        self.entered = 0
        """Where it is in an added state: the number of its entry, by which its turn comes."""
        self.ready_at = 0.0
        self.reward_mean = 0.0
        self.digest = 0
        """What this record adds to the state hash."""

    def identity(self) -> tuple[int, ...]:
        """Every field that decides what happens next, as integers: what the state hash is made of."""
        numbers = (
            self.id, state_number(self.state), self.attempt, self.replica, self.admitted_version, self.deadline,
            self.oldest_version, self.newest_version, self.tokens, self.kept, self.truncate,
            self.infrastructure_failures, self.data_failures, self.failed_on, self.ready_number,
        )  # fmt: skip
        return (*numbers, self.unfinished, self.entered) if self.unfinished or self.entered else numbers

    def figures(self) -> tuple[float, ...]:
        """The fields that are no integers; hashed as well, since policies see them."""
        figures = (self.started_at, self.ready_at, self.reward_mean, *self.resume_key)
        if not (self.seated_at or self.moved or self.overdue_s):
            return figures
        return (*figures, self.seated_at, self.seated_tokens, self.overdue_s, 2 * self.moving + 4 * self.moved)

    def forget_tokens(self) -> None:
        """What earlier attempts left is gone: the next one begins with the prompt."""
        self.kept = False
        self.tokens = self.unfinished = 0
        self.oldest_version = self.newest_version = NO_VERSION

    @property
    def begun(self) -> bool:
        """Whether it was ever started; until then there is nothing of it to know but its id."""
        return self.attempt > 0 or self.state != "queued"

    @property
    def resumes_from(self) -> Version:
        """The oldest weights version it may go on under (law 3)."""
        return self.admitted_version if self.admitted_version > self.newest_version else self.newest_version


STATE_NUMBER: dict[str, int] = {state: number for number, state in enumerate(GROUP.states)}
PHASES: dict[str, Phase] = GROUP.phases or {}


def phase_of(state: str) -> Phase:
    """The phase of a state of groups. Those that were added are parked: they keep the place and have no slot."""
    return PHASES.get(state, Phase.PARKED)


@lru_cache
def state_number(state: str) -> int:
    """What the state hash knows a state by. That of an added one follows from its name: it is the same everywhere."""
    if state in STATE_NUMBER:
        return STATE_NUMBER[state]
    return ADDED_FROM + int.from_bytes(blake2b(state.encode(), digest_size=4).digest(), "little")


BETWEEN = ("generated", "batched")
"""Where added states lie. To the machine they come before `generated`, since a step may take a group in `generated`."""
ADDED_FROM = 1 << 16
"""Numbers of added states begin here."""


@lru_cache
def group_table(added: tuple[str, ...] = ()) -> Table:
    """The table of groups that pass through added states, in their order; the same object for the same states."""
    if not added:
        return GROUP
    rows = []
    for row in GROUP.transitions:
        also = added if row.trigger in ("generate", "drop", "fail", "lose") else ()
        rows.append(Transition(trigger=row.trigger, sources=(*row.sources, *also), target=row.target, why=row.why))
        if row.trigger == "resume":
            rows += [
                Transition(
                    trigger=name, sources=("generating", "resumed", *added[:number]), target=name,
                    why="an added state: its policy lets the group in",
                )
                for number, name in enumerate(added)
            ]  # fmt: skip
    return Table(
        name=GROUP.name, states=(*GROUP.states, *added), transitions=tuple(rows), terminal=GROUP.terminal,
        phases={state: phase_of(state) for state in (*GROUP.states, *added)},
    )  # fmt: skip
