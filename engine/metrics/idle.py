"""Splits the time of slots and of the trainer into busy and idle, by cause.

Used by `collector.RunMetrics`. Nothing changes between two ticks, so the split after one tick holds until the next.
Sums grow from tick to tick.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.ids import Version
from engine.metrics.names import ROLLOUT_IDLE_CAUSES, TRAINER_IDLE_CAUSES, TRAINER_TASKS
from engine.metrics.waits import agent_groups, unrewarded_groups
from engine.states.causes import (
    AGENT,
    DRAINING,
    POOL,
    REWARD,
    RUN_ENDING,
    STALENESS_BOUND,
    STARTING,
    TASKS,
    WAITING_FOR_GROUPS,
    WAITING_FOR_STRAGGLERS,
    WEIGHT_SYNC,
    WORKER_BOUND,
    Cause,
    what_the_trainer_does,
    why_slots_are_free,
)
from engine.states.replica import Replica
from engine.states.state import State

LEAST_WAIT = 0.05
"""A smaller share of the time is no cause of anything: it may be chance."""
REPLICA_CAUSES = {"yielding": POOL, "asleep": POOL, "draining": DRAINING, "drained": DRAINING}
"""Why the free slots of a replica are idle, by its state. In other states but ready, it syncs weights."""


class Split(NamedTuple):
    """What slots and trainer do, but for the number of busy slots."""

    most: int = 0
    """Slots that are busy, or idle for `cause`."""
    away: tuple[tuple[str, int], ...] = ()
    """(cause, slots) of those that are idle for other causes."""
    cause: str = STARTING.name
    task: str | None = None
    """The trainer's task."""
    trainer_cause: str = STARTING.name
    """Why the trainer is idle, if it has no task."""


class Period:
    """The time since an event, in which slots and trainer do the same, with the sums until then. Immutable."""

    __slots__ = ("at", "busy", "busy_s", "frozen", "idle_s", "split", "trainer_busy_s", "trainer_idle_s")

    def __init__(self, at: float, split: Split, busy: int, frozen: int, before: "Period | None" = None) -> None:
        """`busy`, `frozen`: slots whose groups are generated, and whose groups are frozen while weights are swapped.
        `before`: the period that ends at `at`."""
        self.at, self.split, self.busy, self.frozen = at, split, busy, frozen
        if before is None:
            self.busy_s = 0.0
            self.idle_s = dict.fromkeys(ROLLOUT_IDLE_CAUSES, 0.0)
            self.trainer_busy_s = dict.fromkeys(TRAINER_TASKS, 0.0)
            self.trainer_idle_s = dict.fromkeys(TRAINER_IDLE_CAUSES, 0.0)
            return
        seconds, (most, away, cause, task, trainer_cause) = at - before.at, before.split
        self.busy_s = before.busy_s + before.busy * seconds
        idle = [(cause, most - before.busy), *away]
        self.idle_s = _added(before.idle_s, [(name, slots * seconds) for name, slots in idle if slots > 0])
        self.trainer_busy_s = _added(before.trainer_busy_s, [(task, seconds)] if task else [])
        self.trainer_idle_s = _added(before.trainer_idle_s, [] if task else [(trainer_cause, seconds)])


def _added(sums: dict[str, float], more: Sequence[tuple[str, float]]) -> dict[str, float]:
    if not more:
        return sums
    sums = sums.copy()
    for name, seconds in more:
        sums[name] += seconds
    return sums


class Fleet(NamedTuple):
    """The replicas that are up and do not only validate."""

    slots: int
    newest: Version
    """The newest version on a replica in which groups start; if there is none, on any that is up."""
    away: tuple[Replica, ...]
    """Those in which no group starts."""
    in_agents: int
    """Their groups that wait for agents or environments, by their newest reports."""


def _fleet(state: State) -> Fleet:
    up = [replica for replica in state.replicas.rollouts if replica.state != "down"]
    away = tuple(replica for replica in up if replica.state != "ready")
    ready = [replica for replica in up if replica.state == "ready"]
    newest = max((replica.version for replica in ready or away), default=0)
    return Fleet(sum(one.slots for one in up), newest, away, sum(agent_groups(one.process) for one in up))


class IdleTime:
    """Seconds by cause until the newest event. `measure` determines the split from that event on.

    Safe to read from any thread: `at` is written before `period` and read before it, so no sum ever decreases.
    """

    def __init__(self, state: State) -> None:
        self.at = 0.0
        """Time of the newest event, seconds since the run began."""
        self.period: Period | None = None
        """None before the first event: time before it is not counted."""
        self.rollout_cause = STARTING
        """Why free slots of ready replicas are idle, if there are any."""
        self.trainer = STARTING
        """The trainer's task, or why it is idle."""
        self._state = state
        self._fleet = _fleet(state)

    def replicas_changed(self) -> None:
        """Call it after replicas changed their states, slots or versions, or reported calls of the user's functions."""
        self._fleet = _fleet(self._state)

    @property
    def slots(self) -> int:
        """Slots of replicas that are up."""
        return self._fleet.slots

    @property
    def in_agents(self) -> int:
        """Slots whose groups wait for agents or environments: they are busy, and the model has nothing to do."""
        return 0 if self.period is None else dict(self.period.split.away).get(AGENT.name, 0)

    @property
    def busy(self) -> int:
        """Slots taken by groups that are generated now."""
        return self.split["busy"]

    def measure(self) -> None:
        """Determine the split from the newest tick on."""
        state, fleet = self._state, self._fleet
        beside = state.validations.out if state.validations.live and not state.limits.validators() else 0
        freed = state.replicas.freed if state.groups.finishing else 0
        away, frozen = self._slots_away()
        busy = state.groups.ledger.running - freed + beside - frozen
        in_agents = min(busy, fleet.in_agents)
        busy -= in_agents
        self.trainer = what_the_trainer_does(state)
        most = fleet.slots - sum(away.values()) - in_agents
        if busy < most:
            self.rollout_cause = why_slots_are_free(state, fleet.newest)
            away[REWARD] = min(most - busy, self._held_by_rewards())
            most -= away[REWARD]
        away[AGENT] = in_agents
        found = tuple([(cause.name, slots) for cause, slots in away.items() if slots > 0])
        task = self.trainer.name if self.trainer in TASKS else None
        split = Split(most, found, self.rollout_cause.name, task, self.trainer.name)
        before = self.period
        if before is None or (before.split, before.busy, before.frozen) != (split, busy, frozen):
            self.period = Period(self.at, split, busy, frozen, before)

    def _slots_away(self) -> tuple[dict[Cause, int], int]:
        """Slots of replicas that are not ready: by why they are idle, and how many of them are frozen."""
        away, frozen = dict.fromkeys((WEIGHT_SYNC, POOL, DRAINING), 0), 0
        for replica in self._fleet.away:
            held = self._state.replicas.occupied(replica)
            if replica.state == "installing":
                frozen += held
                away[WEIGHT_SYNC] += replica.slots
            else:
                away[REPLICA_CAUSES.get(replica.state, WEIGHT_SYNC)] += replica.slots - held
        return away, frozen

    def _held_by_rewards(self) -> int:
        """Number of slots that are free only because rewards are not computed."""
        state = self._state
        if self.rollout_cause is WORKER_BOUND:  # of the groups without rewards, those that run hold a place of K
            return state.groups.unrewarded
        groups = unrewarded_groups(state)
        trainer_waits = self.trainer in (WAITING_FOR_GROUPS, WAITING_FOR_STRAGGLERS)
        if not groups or not trainer_waits or self.rollout_cause not in (STALENESS_BOUND, RUN_ENDING):
            return 0
        batch = groups + state.groups.ledger.ready  # with their rewards, a step could take these and open their places
        return batch if batch >= state.limits.train_batch_size else groups

    @property
    def sums(self) -> Period:
        """Seconds by cause until the newest event."""
        at = self.at  # first: see the class
        period = self.period
        if period is None:
            return Period(at, Split(), 0, 0)
        return period if period.at >= at else Period(at, period.split, period.busy, period.frozen, period)

    @property
    def capacity(self) -> tuple[int, int]:
        """Groups that may still start: under K, and under the staleness bound at the newest installed version."""
        state = self._state
        workers = state.limits.max_concurrent_groups - state.groups.ledger.running
        return max(0, workers), max(0, state.places(self._fleet.newest) - state.held)

    @property
    def split(self) -> dict[str, int]:
        """Number of slots of replicas that are up, by what they do."""
        period = self.period or Period(self.at, Split(), 0, 0)
        busy = period.busy + dict(period.split.away).get(AGENT.name, 0)
        return {"busy": busy, "frozen": period.frozen, "free": max(0, self.slots - busy - period.frozen)}

    @property
    def admission_limit(self) -> str:
        """What prevents the next group from starting: one of `names.ADMISSION_LIMITS`."""
        state, period = self._state, self.period
        if state.facts.started and not self.slots:
            return "no_replica"
        if state.ending.draining:
            return DRAINING.name
        if period is None:
            return self.rollout_cause.name
        away = dict(period.split.away)
        if REWARD.name in away:
            return REWARD.name
        if period.busy < period.split.most:
            return period.split.cause
        named = next((cause.name for cause in (DRAINING, POOL, WEIGHT_SYNC) if cause.name in away), "")
        return named or ("slots_full" if self.slots else self.rollout_cause.name)

    @property
    def rollout_idle_share(self) -> float:
        """Idle slot time as a share of all slot time; 0 before there was any."""
        sums = self.sums
        idle = sum(sums.idle_s.values())
        return idle / (idle + sums.busy_s) if idle else 0.0

    @property
    def trainer_idle_share(self) -> float:
        sums = self.sums
        idle, busy = sum(sums.trainer_idle_s.values()), sum(sums.trainer_busy_s.values())
        return idle / (idle + busy) if idle else 0.0
