"""Splits the time of slots and of the trainer into busy and idle, by cause.

Used by `collector.RunMetrics`. Nothing changes between two ticks, so the split after one tick holds until the next.
Sums grow from tick to tick.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.ids import ReplicaId, Version
from engine.metrics.names import ROLLOUT_IDLE_CAUSES, TRAINER_IDLE_CAUSES, TRAINER_TASKS
from engine.metrics.waits import agent_groups, unrewarded_groups
from engine.states.pool import ROLLOUT
from engine.states.process import TRAINER
from engine.states.replica import Replica
from engine.states.state import State

LEAST_WAIT = 0.05
"""A smaller share of the time is no cause of anything: it may be chance."""
IDLE_CAUSES = {"yielding": "pool", "asleep": "pool", "draining": "draining", "drained": "draining"}
"""Why the free slots of a replica are idle, by its state. In other states but ready, it syncs weights."""


class Split(NamedTuple):
    """What slots and trainer do, but for the number of busy slots."""

    most: int = 0
    """Slots that are busy, or idle for `cause`."""
    away: tuple[tuple[str, int], ...] = ()
    """(cause, slots) of those that are idle for other causes."""
    cause: str = "starting"
    task: str | None = None
    """The trainer's task."""
    trainer_cause: str = "starting"
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


class IdleTime:
    """Seconds by cause until the newest event. `measure` determines the split from that event on.

    Safe to read from any thread: `at` is written before `period` and read before it, so no sum ever decreases.
    """

    def __init__(self, state: State) -> None:
        self.at = 0.0
        """Time of the newest event, seconds since the run began."""
        self.period: Period | None = None
        """None before the first event: time before it is not counted."""
        self.slots = 0
        """Slots of replicas that are up."""
        self.rollout_cause = "starting"
        """Why free slots of ready replicas are idle, if there are any."""
        self.trainer_task: str | None = None
        self.trainer_cause = "starting"
        self._state = state
        self._slots_of: dict[ReplicaId, int] = {}
        """Number of slots of each replica that does not only validate; 0 while it is down."""
        self._ready: dict[ReplicaId, Version] = {}
        """Weights versions of those in which groups start."""
        self._away: dict[ReplicaId, Replica] = {}
        """The others."""
        self._agents_of: dict[ReplicaId, int] = {}
        """Groups of each replica that wait for agents or environments, by its newest report."""
        self._newest: Version = 0
        """The newest version on a replica in which groups start; if there is none, on any replica that is up."""
        self.replicas_changed(state.replicas.by_id.values())
        for replica in state.replicas.by_id.values():
            self.calls_measured(replica)

    def replicas_changed(self, replicas: Iterable[Replica]) -> None:
        """Call it after replicas changed their states, slots or versions."""
        for replica in replicas:
            if replica.validator:
                continue
            id, state = replica.id, replica.state
            slots = 0 if state == "down" else replica.slots
            self.slots += slots - self._slots_of.get(id, 0)
            self._slots_of[id] = slots
            self._ready.pop(id, None)
            self._away.pop(id, None)
            if state == "ready":
                self._ready[id] = replica.version
            elif state != "down":
                self._away[id] = replica
            else:
                self._agents_of.pop(id, None)
        self._newest = max(self._ready.values() or [replica.version for replica in self._away.values()], default=0)

    def calls_measured(self, replica: Replica) -> None:
        """Call it after a replica reported its calls of the user's functions."""
        if replica.id in self._slots_of and replica.state != "down":
            self._agents_of[replica.id] = agent_groups(replica.process)

    @property
    def in_agents(self) -> int:
        """Slots whose groups wait for agents or environments: they are busy, and the model has nothing to do."""
        return 0 if self.period is None else dict(self.period.split.away).get("agent", 0)

    @property
    def busy(self) -> int:
        """Slots taken by groups that are generated now."""
        return self.split["busy"]

    def measure(self) -> None:
        """Determine the split from the newest tick on."""
        state = self._state
        beside = 0 if state.limits.validators() else state.validations.out
        away, frozen = self._slots_away()
        busy = state.groups.ledger.running - state.replicas.freed + beside - frozen
        in_agents = min(busy, sum(self._agents_of.values())) if self._agents_of else 0
        busy -= in_agents
        self._measure_trainer()
        most = self.slots - sum(away.values()) - in_agents
        if busy < most:
            self.rollout_cause = self._why_slots_are_free()
            away["reward"] = min(most - busy, self._held_by_rewards())
            most -= away["reward"]
        away["agent"] = in_agents
        found = tuple([part for part in away.items() if part[1] > 0])
        split = Split(most, found, self.rollout_cause, self.trainer_task, self.trainer_cause)
        before = self.period
        if before is None or (before.split, before.busy, before.frozen) != (split, busy, frozen):
            self.period = Period(self.at, split, busy, frozen, before)

    def _slots_away(self) -> tuple[dict[str, int], int]:
        """Slots of replicas that are not ready: by why they are idle, and how many of them are frozen."""
        away, frozen = dict.fromkeys(("weight_sync", "pool", "draining"), 0), 0
        for replica in self._away.values():
            held = self._state.replicas.occupied(replica)
            if replica.state == "installing":
                frozen += held
                away["weight_sync"] += replica.slots
            else:
                away[IDLE_CAUSES.get(replica.state, "weight_sync")] += replica.slots - held
        return away, frozen

    def _held_by_rewards(self) -> int:
        """Number of slots that are free only because rewards are not computed: a group that waits for one holds a place
        of K, or keeps the trainer from a step that would open places under S."""
        state, ready = self._state, self._state.groups.ledger.ready
        groups = unrewarded_groups(state)
        if not groups or self.rollout_cause == "worker_bound":
            return len(state.replicas.unrewarded)
        if self.rollout_cause not in ("staleness_bound", "run_ending") or self.trainer_task is not None:
            return 0
        if self.trainer_cause not in ("waiting_for_groups", "waiting_for_stragglers"):
            return 0
        return groups + ready if groups + ready >= state.limits.train_batch_size else groups

    @property
    def sums(self) -> Period:
        """Seconds by cause until the newest event."""
        at = self.at  # first: see the class
        period = self.period
        if period is None:
            return Period(at, Split(), 0, 0)
        return period if period.at >= at else Period(at, period.split, period.busy, period.frozen, period)

    @property
    def rollout_busy_s(self) -> float:
        return self.sums.busy_s

    @property
    def rollout_idle_s(self) -> dict[str, float]:
        return self.sums.idle_s

    @property
    def trainer_busy_s(self) -> dict[str, float]:
        return self.sums.trainer_busy_s

    @property
    def trainer_idle_s(self) -> dict[str, float]:
        return self.sums.trainer_idle_s

    @property
    def capacity(self) -> tuple[int, int]:
        """Groups that may still start: under K, and under the staleness bound at the newest installed version."""
        state = self._state
        workers = state.limits.max_concurrent_groups - state.groups.ledger.running
        return max(0, workers), max(0, state.places(self._newest) - state.held)

    @property
    def split(self) -> dict[str, int]:
        """Number of slots of replicas that are up, by what they do."""
        period = self.period or Period(self.at, Split(), 0, 0)
        busy = period.busy + dict(period.split.away).get("agent", 0)
        return {"busy": busy, "frozen": period.frozen, "free": max(0, self.slots - busy - period.frozen)}

    @property
    def admission_limit(self) -> str:
        """What prevents the next group from starting: one of `names.ADMISSION_LIMITS`."""
        state, period = self._state, self.period
        if state.started and not self.slots:
            return "no_replica"
        if state.ending.draining:
            return "draining"
        if period is None:
            return self.rollout_cause
        away = dict(period.split.away)
        if "reward" in away:
            return "reward"
        if period.busy < period.split.most:
            return period.split.cause
        named = next((cause for cause in ("draining", "pool", "weight_sync") if cause in away), "")
        return named or ("slots_full" if self.slots else self.rollout_cause)

    def _why_slots_are_free(self) -> str:
        state, ledger, replicas = self._state, self._state.groups.ledger, self._state.replicas
        if not state.started:
            return "starting"
        if state.ending.draining:
            return "draining"
        bound = self._bound()
        if bound:
            return bound
        if ledger.waiting or ledger.parked:
            _, free = replicas.room_beside(replicas.slow(state.limits.straggler_factor))
            if free <= 0 and any(map(replicas.is_limited, replicas.rollouts)):
                return "concurrency"
        if ledger.waiting:
            return "other"
        if ledger.parked:
            return "waiting_for_weights"
        return "no_prompts" if state.no_more_prompts else "waiting_for_prompts"

    def _bound(self) -> str:
        """The bound that prevents the next group from starting on a ready replica; empty if none does."""
        state, limits = self._state, self._state.limits
        if limits.max_steps is not None and state.held >= limits.max_steps * limits.train_batch_size:
            return "run_ending"
        if state.groups.ledger.running >= limits.max_concurrent_groups:
            return "worker_bound"
        return "staleness_bound" if state.held >= state.places(self._newest) else ""

    def _measure_trainer(self) -> None:
        state, ledger = self._state, self._state.groups.ledger
        step = state.training.training_step
        waits = step is not None and step.state == "scoring" and not state.scoring(step)
        trainer = state.processes.get(TRAINER)
        away = trainer is not None and trainer.coming
        trains = step is not None and step.state in TRAINER_TASKS and not (waits or away)
        self.trainer_task = step.state if step is not None and trains else None
        if away:
            self.trainer_cause = "restarting"
        elif waits:
            lease = state.pools.of("train")
            replicas = [state.replicas.by_id[id] for id in lease.replicas if id in state.replicas.by_id]
            taken = lease.shared and (lease.task == ROLLOUT or any(replica.process.loads for replica in replicas))
            self.trainer_cause = "pool" if taken else "waiting_for_weight_sync"
        elif state.orders.open("inspect"):
            self.trainer_cause = "inspecting"
        elif state.publishing:
            self.trainer_cause = "publishing"
        elif state.ending.draining and step is None:
            self.trainer_cause = "draining"
        elif not state.started:
            self.trainer_cause = "starting"
        elif not self.slots:
            self.trainer_cause = "waiting_for_replicas"
        elif state.no_more_prompts and not ledger.unconsumed:
            self.trainer_cause = "no_prompts"
        elif ledger.ready >= state.limits.train_batch_size:
            self.trainer_cause = "waiting_for_stragglers"
        else:
            self.trainer_cause = "waiting_for_groups"

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
