"""The prompt group: one prompt and its trajectories, from drawn to consumed or released.

The table is the law of what may happen to a group; the record is what the scheduler knows of one. Driven by
`scheduling/`.
"""

from functools import lru_cache

from engine.ids import NO_VERSION, GroupId, ReplicaId, Version
from engine.states.facts import Facts
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


class Group(Facts):
    """What the scheduler knows of one live group. Versions are `NO_VERSION` until known."""

    id: GroupId
    state: str = GROUP.initial
    attempt: int = 0
    started_at: float = 0.0
    admitted_version: Version = NO_VERSION
    """The version of the weights that it started on. Its tokens may come from no older one."""
    deadline: int = -1
    """The last train step that may consume it: steps in the version it was admitted on, plus S."""
    finished: int = 0
    """Trajectories of its running attempt that have ended, by the newest report."""

    # what its attempts left in the trajectory store
    tokens: int = 0
    """0: the next attempt begins with the prompt."""
    unfinished: int = 0
    """Trajectories that have not ended."""
    oldest_version: Version = NO_VERSION
    newest_version: Version = NO_VERSION
    """Newest version any token can have; the group resumes only on a replica at least as new."""

    # what policies see of a generated group
    described: str = ""
    """Columns, lengths and rewards, as JSON; empty if its events say nothing."""
    reward_mean: float = 0.0
    ready_at: float = 0.0

    infrastructure_failures: int = 0
    data_failures: int = 0
    exceeded: int = 0
    """How often orders about it exceeded their time limit since one was answered."""
    truncate: bool = False
    """The deadline policy wants it finished with the prefixes it has."""
    moved: bool = False
    """A faster replica took it over once; it stays there."""
    failed_on: ReplicaId = -1
    """The replica its last attempt failed on; another one is preferred for the next."""
    resumed_tokens: int = 0
    """Tokens it had when it was last resumed; 0 if the paces of replicas were not compared then."""
    resume_key: tuple[int | float, ...] = ()
    """The key by which the resume policy ordered it when it was last parked: the smallest resumes first."""
    prepared: bool = False
    """An added state before generation has stored its prompt."""

    def forget_tokens(self) -> None:
        """What the trajectory store has of it is gone or unusable: its next attempt begins with the prompt."""
        self.tokens = self.unfinished = 0
        self.oldest_version = self.newest_version = NO_VERSION

    @property
    def resumes_from(self) -> Version:
        """The oldest weights version it may continue under (law 3)."""
        return max(self.admitted_version, self.newest_version)


BETWEEN = {"queued": ("queued", "generating"), "generated": ("generated", "batched")}
"""Where added states lie, by place. To the machine, those of `queued` lead back to it, since only a group in `queued`
may start; those of `generated` come before it, since a step may take a group in it."""
PHASE_AT = {"queued": Phase.WAITING, "generated": Phase.PARKED}
"""Before generation, a group holds no place. After it, a group keeps its place and has no slot."""
LET_IN = "an added state: its policy lets the group in"


@lru_cache
def group_table(after: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> Table:
    """The table of groups that pass through added states after generation, and `before` it, in their order; the same
    object for the same states."""
    if not after and not before:
        return GROUP
    rows = []
    for row in GROUP.transitions:
        also = after if row.trigger in ("generate", "drop", "fail", "lose") else ()
        also = (*also, *before) if row.trigger in ("drop", "fail") else also
        rows.append(Transition(trigger=row.trigger, sources=(*row.sources, *also), target=row.target, why=row.why))
        if row.trigger == "resume":
            rows += [
                Transition(trigger=name, sources=("generating", "resumed", *after[:number]), target=name, why=LET_IN)
                for number, name in enumerate(after)
            ]
    rows += [
        Transition(trigger=name, sources=("queued", *before[:number]), target=name, why=LET_IN)
        for number, name in enumerate(before)
    ]
    if before:
        why = "the work of its added states is done: it may start"
        rows.append(Transition(trigger="prepare", sources=before, target="queued", why=why))
    phases = {**(GROUP.phases or {}), **dict.fromkeys(after, PHASE_AT["generated"])}
    return Table(
        name=GROUP.name, states=(*GROUP.states, *after, *before), transitions=tuple(rows), terminal=GROUP.terminal,
        phases={**phases, **dict.fromkeys(before, PHASE_AT["queued"])},
    )  # fmt: skip
