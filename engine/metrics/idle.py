"""Splits the time of slots and of the trainer into busy and idle, by cause.

Used by `collector.RunMetrics`. Nothing changes between two ticks, so the split after one tick holds until the next.
Sums are updated only when the split changes.
"""

from engine.ids import ReplicaId, Version
from engine.metrics.names import ROLLOUT_IDLE_CAUSES, TRAINER_IDLE_CAUSES, TRAINER_TASKS
from engine.metrics.waits import agent_groups, unrewarded_groups
from engine.states.limits import Limits
from engine.states.machine import Phase
from engine.states.pool import ROLLOUT
from engine.states.process import TRAINER
from engine.states.replica import Replica
from engine.states.state import State

FROZEN_STATES = ("installing",)
"""States in which a replica samples nothing."""
DOWN_STATES = ("down",)
RUNNING, PARKED, READY = int(Phase.RUNNING), int(Phase.PARKED), int(Phase.READY)
NEVER = 1 << 62
"""More groups than any run has."""
NONE = (0, 0, 0, 0)


Split = tuple[int, tuple[tuple[str, int], ...], str, str | None, str]
"""A split: busy slots, or slots idle for the cause named third; (cause, slots) of the others; the trainer's task; its
idle cause if it has no task."""
NOTHING: Split = (0, (), "starting", None, "starting")


class Period:
    """A period in which only the number of busy slots changes, with the sums at its beginning. Immutable."""

    __slots__ = ("at", "busy_s", "idle_s", "split", "trainer_busy_s", "trainer_idle_s")

    def __init__(self, at: float, split: Split, before: "Period | None" = None, busy_s: float = 0.0) -> None:
        """`before`: the period that ends at `at`, and its busy slot seconds until then."""
        self.at = at
        self.split = split
        self.busy_s = busy_s
        if before is None:
            self.idle_s = dict.fromkeys(ROLLOUT_IDLE_CAUSES, 0.0)
            self.trainer_busy_s = dict.fromkeys(TRAINER_TASKS, 0.0)
            self.trainer_idle_s = dict.fromkeys(TRAINER_IDLE_CAUSES, 0.0)
            return
        self.idle_s, self.trainer_busy_s = before.idle_s, before.trainer_busy_s
        self.trainer_idle_s = before.trainer_idle_s
        seconds = at - before.at
        if seconds <= 0:
            return
        most, away, cause, task, trainer_cause = before.split
        free_s = most * seconds - (busy_s - before.busy_s)
        if away or free_s > 0:
            self.idle_s = self.idle_s.copy()
            for name, slots in away:
                self.idle_s[name] += slots * seconds
            self.idle_s[cause] += max(0.0, free_s)
        if task is not None:
            self.trainer_busy_s = self.trainer_busy_s.copy()
            self.trainer_busy_s[task] += seconds
        else:
            self.trainer_idle_s = self.trainer_idle_s.copy()
            self.trainer_idle_s[trainer_cause] += seconds


class IdleTime:
    """Seconds by cause until the newest event. `measure` determines the split from that event on.

    Safe to read from any thread: `at`, `_now` and `_period` are written and read in this order, so no sum ever
    decreases.
    """

    def __init__(self, state: State) -> None:
        self.at = 0.0
        """Time of the newest event, seconds since the run began."""
        self.frozen = 0
        """Slots whose group is frozen while weights are swapped."""
        self.slots = 0
        """Slots of replicas that are up."""
        self.rollout_cause = "starting"
        """Why free slots of ready replicas are idle, if there are any."""
        self.trainer_task: str | None = None
        self.trainer_cause = "starting"
        self._now = (0.0, 0, 0.0)
        """(time, number of busy slots since then, busy slot seconds before)."""
        self._period: Period | None = None
        """None before the first event: time before it is not counted."""
        self._state = state
        self._slots_of: dict[ReplicaId, int] = {}
        """Number of slots of each replica that is up."""
        self._not_ready: dict[ReplicaId, Replica] = {}
        """Replicas that are up, in a state in which no group starts."""
        self._ready: dict[ReplicaId, Version] = {}
        """Weights versions of the other replicas."""
        self._counted: dict[ReplicaId, tuple[int, int, int, int]] = {}
        """For each replica that is not ready: slots that are frozen, syncing, asleep and draining."""
        self._swapping = self._asleep = self._leaving = 0
        self._unrewarded = 0
        """Free slots of ready replicas whose groups wait for rewards."""
        self.in_agents = 0
        """Slots whose groups wait for agents or environments: they are busy, and the model has nothing to do."""
        self._agents_of: dict[ReplicaId, int] = {}
        """Groups of each replica that wait for them, by its newest report."""
        self._most = 0
        self._measuring = 0
        """Slots that validation rows hold instead of groups."""
        self._known: tuple[Limits, int, Version] | None = None
        """The inputs of the next four figures."""
        self._batch = self._workers = self._last = self._places = self._batched = 0
        for replica in state.replicas.by_id.values():
            self.replica_changed(replica)

    def replica_changed(self, replica: Replica) -> None:
        """Call it after a replica changed its state, slots or version."""
        if replica.validator:
            return
        id, is_up, is_ready = replica.id, replica.state not in DOWN_STATES, replica.state == "ready"
        away = is_up and not is_ready
        self.slots += (replica.slots if is_up else 0) - self._slots_of.pop(id, 0)
        if is_up:
            self._slots_of[id] = replica.slots
        if is_ready:  # it enters before it leaves: another thread may look meanwhile
            self._ready[id] = replica.version
        elif away:
            self._not_ready[id] = replica
        if not is_ready:
            self._ready.pop(id, None)
        if not away:
            self._not_ready.pop(id, None)
        self._count_away(replica, self._state.replicas.occupied(replica))
        self.calls_measured(replica)

    def calls_measured(self, replica: Replica) -> None:
        """Call it after a replica reported its calls of the user's functions."""
        self._agents_of.pop(replica.id, None)
        if replica.id in self._slots_of and (groups := agent_groups(replica.process)):
            self._agents_of[replica.id] = groups

    def _count_away(self, replica: Replica, held: int) -> None:
        """Count the slots of a replica that is not ready by what they do. Does not count a replica that is ready or
        down."""
        before = self._counted.pop(replica.id, NONE)
        now = NONE
        if replica.id in self._not_ready:
            free = replica.slots - held
            if replica.state in FROZEN_STATES:
                now = (held, replica.slots, 0, 0)
            elif replica.state in ("yielding", "asleep"):
                now = (0, 0, free, 0)
            elif replica.state in ("draining", "drained"):
                now = (0, 0, 0, free)
            else:
                now = (0, free, 0, 0)
            self._counted[replica.id] = now
        if now != before:
            self.frozen += now[0] - before[0]
            self._swapping += now[1] - before[1]
            self._asleep += now[2] - before[2]
            self._leaving += now[3] - before[3]

    @property
    def busy(self) -> int:
        """Slots taken by groups that are generated now."""
        return self._now[1] + self.in_agents

    def _bound(self, count: list[int]) -> str:
        """The bound that prevents the next group from starting on a ready replica; empty if none does."""
        running = count[RUNNING]
        held = running + count[PARKED] + count[READY] + self._batched
        if held >= self._last:
            return "run_ending"
        if running >= self._workers:
            return "worker_bound"
        return "staleness_bound" if held >= self._places else ""

    def measure(self) -> None:
        """Determine the split from the newest tick on."""
        state = self._state
        self._remember(state)
        beside = bool(state.validations.out) and not state.limits.validators()
        self._measuring = state.validations.out if beside else 0
        for replica in self._not_ready.values():
            self._count_away(replica, self._state.replicas.occupied(replica))
        busy = state.groups.ledger.running - state.replicas.freed + self._measuring - self.frozen
        self.in_agents = min(busy, sum(self._agents_of.values())) if self._agents_of else 0
        busy -= self.in_agents
        self._most = self.slots - self._swapping - self._asleep - self._leaving - self.in_agents
        self._measure_trainer()
        if busy < self._most:
            self.rollout_cause = self._why_slots_are_free()
            self._unrewarded = min(self._most - busy, self._held_by_rewards())
            self._most -= self._unrewarded
        else:
            self._unrewarded = 0
        self._note(busy)

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
        return groups + ready if groups + ready >= self._batch else groups

    def _remember(self, state: State) -> None:
        """Cache figures that changes of groups alone do not change."""
        limits, steps = state.limits, state.training.steps_batched
        known = (limits, steps, self._newest_installed())
        if known == self._known:
            return
        self._known = known
        self._batch, self._workers = limits.train_batch_size, limits.max_concurrent_groups
        self._batched = self._batch * steps
        self._last = NEVER if limits.max_steps is None else limits.max_steps * self._batch
        self._places = state.places(known[2])

    def _note(self, busy: int) -> None:
        """Store the present split if it differs from the last one."""
        since, before, seconds = self._now
        at = self.at
        seconds += before * (at - since)
        self._now = (at, busy, seconds)
        period = self._period
        away: tuple[tuple[str, int], ...] = ()
        if self._not_ready or self._unrewarded or self.in_agents:
            found = (
                ("weight_sync", self._swapping), ("pool", self._asleep), ("draining", self._leaving),
                ("reward", self._unrewarded), ("agent", self.in_agents),
            )  # fmt: skip
            away = tuple([part for part in found if part[1] > 0])
        split = (self._most, away, self.rollout_cause, self.trainer_task, self.trainer_cause)
        if period is None or period.split != split:
            self._period = Period(at, split, period, seconds if period is not None else 0.0)

    @property
    def period(self) -> Period | None:
        """The period that the newest event is in; None before the first event."""
        return self._period

    @property
    def sums(self) -> Period:
        """Seconds by cause until the newest event."""
        at = self.at  # first: see the class
        since, busy, seconds = self._now
        period = self._period
        if period is None:
            return Period(at, NOTHING)
        at = max(at, since)
        return period if period.at >= at else Period(at, period.split, period, seconds + busy * (at - since))

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
        return max(0, workers), max(0, state.places(self._newest_installed()) - state.held)

    def _newest_installed(self) -> Version:
        """The newest version on a replica that can start groups; if there is none, on any replica that is up."""
        ready = list(self._ready.values())  # a copy: the run may change the dict while another thread reads it
        return max(ready or [replica.version for replica in list(self._not_ready.values())], default=0)

    @property
    def split(self) -> dict[str, int]:
        """Number of slots of replicas that are up, by what they do."""
        free = max(0, self.slots - self.busy - self.frozen)
        return {"busy": self.busy, "frozen": self.frozen, "free": free}

    @property
    def admission_limit(self) -> str:
        """What prevents the next group from starting: one of `names.ADMISSION_LIMITS`."""
        if self._state.started and not self.slots:
            return "no_replica"
        if self._state.ending.draining:
            return "draining"
        if self._unrewarded:
            return "reward"
        if self._now[1] < self._most:
            return self.rollout_cause
        if self._leaving:
            return "draining"
        if self._asleep:
            return "pool"
        return "weight_sync" if self._swapping else "slots_full" if self.slots else self.rollout_cause

    def _why_slots_are_free(self) -> str:
        state, ledger, replicas = self._state, self._state.groups.ledger, self._state.replicas
        if not state.started:
            return "starting"
        if state.ending.draining:
            return "draining"
        bound = self._bound(ledger.count)
        if bound:
            return bound
        limited = any(map(replicas.is_limited, replicas.rollouts)) if ledger.waiting or ledger.parked else False
        if limited and not replicas.idle(replicas.slow(state.limits.straggler_factor)):
            return "concurrency"
        if ledger.waiting:
            return "other"
        if ledger.parked:
            return "waiting_for_weights"
        return "no_prompts" if state.no_more_prompts else "waiting_for_prompts"

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
            self.trainer_cause = "pool" if lease.shared and lease.task == ROLLOUT else "waiting_for_weight_sync"
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
