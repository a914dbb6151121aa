"""The pool: hardware whose tasks take turns. Driven by `scheduling/pools.py`.

Only pools that a task of the trainer needs have a record; replicas with a pool of their own need no turn.
"""

from engine.ids import ReplicaId, StepId
from engine.states.limits import Limits, Pool
from engine.states.machine import Table, transitions

POOL = Table(
    name="pool",
    states=("free", "leased"),
    transitions=transitions(
        ("lease", "free", "leased", "the inputs of a task exist, and its step is the earliest; else to rollout"),
        ("give-back", "leased", "free", "the task is done or failed, its version published, or its replicas sleep"),
    ),
    terminal=(),
)

ROLLOUT = "rollout"


class PoolLease:
    """Who has a pool now."""

    id: int
    state: str
    task: str = ""
    """Who has it: a task of the trainer, or `rollout`; empty while it is free."""
    step: StepId = -1
    """Of which step; -1: of none."""
    wanted: bool = False
    """Its replicas are to sleep as soon as they can: a task of the trainer waits for it."""

    def __init__(self, id: int, pool: Pool) -> None:
        self.id, self.state = id, POOL.initial
        self.pool = pool
        self.replicas: tuple[ReplicaId, ...] = pool.replicas
        self.shared = pool.shared
        """Replicas stand here as well: they sleep while a task of the trainer has the pool."""


class Pools:
    """The pools of a run that tasks of the trainer need, and which task stands in which."""

    leases: list[PoolLease]

    def __init__(self, limits: Limits) -> None:
        pools = limits.pools or (Pool(tasks=("train", *limits.scoring_tasks)),)
        self.leases = [
            PoolLease(id, pool) for id, pool in enumerate(pools) if set(pool.tasks) & {"train", *limits.scoring_tasks}
        ]
        self._of_task = {task: lease for lease in self.leases for task in lease.pool.tasks if task != ROLLOUT}
        self.shared = [lease for lease in self.leases if lease.shared]
        self._of_replica = {replica: lease for lease in self.shared for replica in lease.replicas}

    def of(self, task: str) -> PoolLease:
        """Where a task of the trainer is done: with the training itself where no pool lists it."""
        return self._of_task.get(task) or self._of_task["train"]

    def of_replica(self, replica: ReplicaId) -> PoolLease | None:
        """The pool that a replica shares with the trainer; None for one that has its hardware to itself."""
        return self._of_replica.get(replica) if self._of_replica else None
