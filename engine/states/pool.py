"""The pool: hardware whose tasks take turns. Driven by `scheduling/pools.py`.

Only pools that a task of the trainer needs have a record; replicas that share theirs with nobody need no turn.
"""

from engine.ids import ReplicaId, StepId
from engine.states.limits import TRAINER_TASKS, Limits, Pool
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

    __slots__ = ("id", "place_of", "pool", "replicas", "shared", "state", "step", "task", "wanted")

    def __init__(self, id: int, pool: Pool) -> None:
        self.id = id
        self.pool = pool
        self.replicas: tuple[ReplicaId, ...] = pool.replicas
        self.place_of = {replica: place for place, replica in enumerate(pool.replicas)}
        self.shared = pool.shared
        """Replicas stand here as well: they sleep while a task of the trainer has the pool."""
        self.state: str = POOL.initial
        self.task = ""
        """Who has it: a task of the trainer, or `rollout`; empty while it is free."""
        self.step: StepId = -1
        """Of which step; -1: of none."""
        self.wanted = False
        """Its replicas are to sleep as soon as they can: a task of the trainer waits for it."""

    def identity(self) -> tuple[int, ...]:
        """What the state hash is made of."""
        return (self.id, STATE_NUMBER[self.state], TASK_NUMBER.get(self.task, len(TASK_NUMBER)), self.step)


STATE_NUMBER: dict[str, int] = {state: number for number, state in enumerate(POOL.states)}
TASK_NUMBER: dict[str, int] = {task: number for number, task in enumerate(("", ROLLOUT, *TRAINER_TASKS))}


class Pools:
    """The pools of a run that tasks of the trainer need, and which task stands in which."""

    __slots__ = ("_of_replica", "_of_task", "leases", "listed")

    def __init__(self, limits: Limits) -> None:
        self.listed = bool(limits.pools)
        pools = limits.pools or (Pool(tasks=("train", *limits.scoring_tasks)),)
        self.leases = [
            PoolLease(id, pool) for id, pool in enumerate(pools) if set(pool.tasks) & {"train", *limits.scoring_tasks}
        ]
        self._of_task = {task: lease for lease in self.leases for task in lease.pool.tasks if task != ROLLOUT}
        self._of_replica = {replica: lease for lease in self.leases if lease.shared for replica in lease.replicas}

    def of(self, task: str) -> PoolLease:
        """Where a task of the trainer is done: with the training itself where no pool lists it."""
        return self._of_task.get(task) or self._of_task["train"]

    def of_replica(self, replica: ReplicaId) -> PoolLease | None:
        """The pool that a replica shares with the trainer; None for one that has its hardware to itself."""
        return self._of_replica.get(replica) if self._of_replica else None
