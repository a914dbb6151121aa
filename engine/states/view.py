"""What policies, metrics and readers may see of the state: figures and copies, nothing that can be changed through it.

Policies get one `View` for a whole run; it is always current. Group facts are handed out as `GroupView`, a snapshot.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.ids import GroupId, ReplicaId, StepId, ValidationId, Version
from engine.states.group import Group
from engine.states.limits import Limits
from engine.states.machine import Phase
from engine.states.replica import Replica
from engine.states.state import State

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""Read-only: every `GroupView` without values has it."""


class GroupView(NamedTuple):
    """One open group. Versions are `events.NO_VERSION` until known; times are seconds since the run began."""

    id: GroupId
    state: str
    attempt: int
    deadline: StepId
    admitted_version: Version
    oldest_version: Version
    newest_version: Version
    tokens: int
    infrastructure_failures: int
    data_failures: int
    started_at: float
    ready_at: float
    reward_mean: float
    unfinished: int
    """Trajectories that have not ended, of what is stored; 0 while nothing is."""
    source: str = ""
    """The name of its data source."""
    fields: Mapping[str, Any] = NOTHING
    """Columns of its row that `scheduler.policy_fields` names."""
    lengths: tuple[int, ...] = ()
    """Response tokens of each rollout, once generated."""
    rewards: Mapping[str, float] = NOTHING
    """Mean of each named reward over the rollouts that have it, once generated."""


class StepView(NamedTuple):
    """What an added state of train steps is asked about: a formed batch, or stored weights that no replica has."""

    step: StepId
    """The step that the batch is for; the last step in the weights, -1 for none."""
    version: Version
    """Version of the weights; -1 for a batch."""
    attempt: int
    groups: tuple[GroupId, ...] = ()
    """The groups of the batch: `View.group` has each. Empty for weights."""
    staleness: tuple[int, ...] = ()


class ReplicaView(NamedTuple):
    """One replica. `running` of its `slots` are busy, with groups or a validation; `staged` is the version in its host
    memory, if any. At most `limit` groups may run on it; 0 while it joins, and for a validator. `cache_used`: see
    `CacheMeasured`; 0 before the first report."""

    id: ReplicaId
    state: str
    life: int
    version: Version
    staged: Version | None
    slots: int
    running: int
    limit: int
    cache_used: float


class ValidationView(NamedTuple):
    """One validation that has not ended. `replicas` are held at its version; `out` of its chunks are being measured."""

    id: ValidationId
    state: str
    version: Version
    rows: int
    measured: int
    out: int
    replicas: tuple[ReplicaId, ...]


class PoolView(NamedTuple):
    """Hardware that tasks take turns on. `task` has it now, of train step `step` (-1: of none); empty: none has."""

    tasks: tuple[str, ...]
    replicas: tuple[ReplicaId, ...]
    task: str
    step: StepId


def view_group(group: Group) -> GroupView:
    return GroupView(
        group.id, group.state, group.attempt, group.deadline, group.admitted_version, group.oldest_version,
        group.newest_version, group.tokens, group.infrastructure_failures, group.data_failures, group.started_at,
        group.ready_at, group.reward_mean, group.unfinished,
        *(_described(group.described) if group.described else ()),
    )  # fmt: skip


def _described(described: str) -> tuple[Any, ...]:
    """The last fields of a `GroupView`."""
    known = json.loads(described)
    return known["source"], known["fields"], tuple(known.get("lengths", ())), known.get("rewards", NOTHING)


def view_replica(state: State, replica: Replica) -> ReplicaView:
    return ReplicaView(
        replica.id,
        replica.state,
        replica.life,
        replica.version,
        None if state.is_staging(replica) else replica.next_version,
        replica.slots,
        replica.slots - state.replicas.for_chunks(replica),
        replica.limit,
        replica.cache_used,
    )


class View:
    """Read-only face of the state."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def limits(self) -> Limits:
        return self._state.limits

    @property
    def now(self) -> float:
        """Time of the event being handled, seconds since the run began."""
        return self._state.facts.now

    @property
    def step(self) -> StepId:
        """The train step whose batch is formed next."""
        return self._state.training.steps_batched

    @property
    def steps_trained(self) -> int:
        return self._state.training.steps_trained

    @property
    def latest_version(self) -> Version:
        return self._state.training.latest_version

    @property
    def running(self) -> int:
        return self._state.groups.ledger.running

    @property
    def parked(self) -> int:
        return self._state.groups.ledger.parked

    @property
    def ready(self) -> int:
        return self._state.groups.ledger.ready

    @property
    def waiting(self) -> int:
        return self._state.groups.ledger.waiting

    @property
    def held(self) -> int:
        """Places taken, in the sense of law 3."""
        return self._state.held

    @property
    def exhausted(self) -> bool:
        """The source has no more prompts, and none is on its way: those that wait are the last."""
        return self._state.groups.facts.exhausted and not self._state.asked

    @property
    def step_reward(self) -> float | None:
        """Mean over the groups of the last step trained of their mean rewards; None before the first."""
        return self._state.training.step_reward

    @property
    def no_more_prompts(self) -> bool:
        return self._state.no_more_prompts

    def phase_counts(self) -> dict[str, int]:
        """Prompts drawn so far by phase."""
        return {phase.name.lower(): self._state.groups.ledger.count[phase] for phase in Phase}

    def places(self, version: Version) -> int:
        """Places there are for groups admitted on a version."""
        return self._state.places(version)

    def capacity(self) -> int:
        """Groups that could be admitted now by K and by the staleness bound at the newest version; slots not
        counted."""
        return self._state.capacity

    def group(self, id: GroupId) -> GroupView | None:
        """An open group; None when it ended or was never drawn."""
        group = self._state.groups.live.get(id)
        return None if group is None else view_group(group)

    def groups(self) -> Iterator[GroupView]:
        """Every open group in the order drawn."""
        return (view_group(group) for group in self._state.groups.live.values())

    def ready_deadlines(self) -> Iterator[tuple[GroupId, StepId]]:
        """(group, deadline) of the groups a step may take, first ready first."""
        groups = self._state.groups.live
        return ((id, groups[id].deadline) for id in self._state.groups.ready)

    def ready_ids(self) -> Iterator[GroupId]:
        """Groups a step may take, first ready first."""
        return iter(self._state.groups.ready)

    def requirements(self) -> list[tuple[StepId, int, int]]:
        """(d, how many groups with deadline ≤ d the next step must take, how many of those are ready), where above
        0."""
        return self._state.groups.deadlines.requirements(
            self._state.training.steps_batched, self._state.limits.train_batch_size
        )

    def failed_on(self, id: GroupId) -> ReplicaId:
        """The replica on which the last attempt of an open group failed; -1 if none did."""
        return self._state.groups.live[id].failed_on

    def least_loaded(self, oldest: Version, avoid: ReplicaId = -1) -> ReplicaId | None:
        """The replica with the smallest share of busy slots among those that can take a group at version `oldest` or
        newer; `avoid` only if no other will do."""
        return self._state.replicas.free_slots.least_loaded(oldest, avoid)

    def newest_weights(self, oldest: Version, avoid: ReplicaId = -1) -> ReplicaId | None:
        """The replica with the newest weights, then the smallest share of busy slots, among those that can take a group
        at version `oldest` or newer; `avoid` only if no other will do."""
        return self._state.replicas.free_slots.newest(oldest, avoid)

    def replicas(self) -> list[ReplicaView]:
        """Every replica ever seen that groups run on, in the order they joined."""
        return [view_replica(self._state, replica) for replica in self._state.replicas.rollouts]

    def validations(self) -> list[ValidationView]:
        """Validations that have not ended, in the order they were queued: the first is served."""
        books = self._state.validations
        return [
            ValidationView(
                validation.id,
                validation.state,
                validation.version,
                validation.rows,
                validation.measured,
                books.out_of(validation),
                tuple(validation.replicas),
            )
            for validation in books.live.values()
        ]

    def pools(self) -> list[PoolView]:
        """Pools in which something of the trainer is done; the replicas of the others have theirs to themselves."""
        pools = [(self._state.pools.settings[lease.id], lease) for lease in self._state.pools.leases]
        return [PoolView(pool.tasks, pool.replicas, lease.task, lease.step) for pool, lease in pools]
