"""The pool: hardware whose tasks take turns. Driven by `scheduling/pools.py`.

Only pools that a task of the trainer needs have a record; replicas with a pool of their own need no turn.
"""

from engine.ids import ReplicaId, StepId
from engine.states.facts import Facts
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


class PoolLease(Facts):
    """Who has a pool now."""

    id: int
    """Its index in `Limits.pools`."""
    state: str = POOL.initial
    task: str = ""
    """Who has it: a task of the trainer, or `rollout`; empty while it is free."""
    step: StepId = -1
    """Of which step; -1: of none."""
    wanted: bool = False
    """Its replicas are to sleep as soon as they can: a task of the trainer waits for it."""


class Pools:
    """The pools of a run that tasks of the trainer need, and which task stands in which."""

    def __init__(self, leases: dict[int, PoolLease], limits: Limits) -> None:
        tasks = ("train", *limits.scoring_tasks)
        pools = limits.pools or (Pool(tasks=tasks),)
        self.settings = {id: pool for id, pool in enumerate(pools) if set(tasks) & set(pool.tasks)}
        """The pool of each lease, by the lease's id."""
        self.leases = [leases.setdefault(id, PoolLease(id)) for id in self.settings]
        of_task = [(task, lease) for lease in self.leases for task in self.settings[lease.id].tasks]
        self._of_task = {task: lease for task, lease in of_task if task != ROLLOUT}
        self.shared = [lease for lease in self.leases if self.settings[lease.id].shared]
        """Those where replicas stand as well: they sleep while a task of the trainer has the pool."""
        self._of_replica = {id: lease for lease in self.shared for id in self.settings[lease.id].replicas}

    def of(self, task: str) -> PoolLease:
        """Where a task of the trainer is done: with the training itself where no pool lists it."""
        return self._of_task.get(task) or self._of_task["train"]

    def sleepers(self, lease: PoolLease) -> tuple[ReplicaId, ...]:
        """The replicas that stand in a pool and sleep while a task of the trainer has it."""
        pool = self.settings[lease.id]
        return pool.replicas if pool.shared else ()

    def of_replica(self, replica: ReplicaId) -> PoolLease | None:
        """The pool that a replica shares with the trainer; None for one that has its hardware to itself."""
        return self._of_replica.get(replica) if self._of_replica else None
