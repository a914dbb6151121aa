"""Where the time of slots and trainer goes: busy, or idle and by which cause.

Kept by `collector.RunMetrics`. Between two events nothing changes, so the split found after one event holds until the
next; adding it up is exact and costs O(1) an event, O(replicas not ready) while weights are being swapped.
"""

from engine.metrics.names import ROLLOUT_IDLE_CAUSES, TRAINER_IDLE_CAUSES, TRAINER_TASKS
from engine.states.pool import ROLLOUT
from engine.states.replica import Replica
from engine.states.state import State

FROZEN_STATES = ("paused", "installing")
"""A replica in these samples nothing, whatever it holds."""


class IdleTime:
    """Seconds by cause, summed up to the newest event; `measure` says what holds from it on."""

    def __init__(self, state: State) -> None:
        self.rollout_busy_s = 0.0
        self.rollout_idle_s = dict.fromkeys(ROLLOUT_IDLE_CAUSES, 0.0)
        self.trainer_busy_s = dict.fromkeys(TRAINER_TASKS, 0.0)
        self.trainer_idle_s = dict.fromkeys(TRAINER_IDLE_CAUSES, 0.0)
        self.busy = 0
        """Slots generating now."""
        self.frozen = 0
        """Slots whose group stands still while weights are swapped."""
        self.slots = 0
        """Slots of living replicas."""
        self.rollout_cause = "starting"
        """Why the free slots of ready replicas are free, where there are any."""
        self.trainer_task: str | None = None
        self.trainer_cause = "starting"
        self._at: float | None = None
        self._state = state
        self._not_ready: list[Replica] = []
        self._ready_slots = 0
        self._swapping = 0
        self._asleep = 0
        self._newest = 0
        self.replicas_changed()

    def replicas_changed(self) -> None:
        """To be called after any replica changed its state, slots or version."""
        living = [r for r in self._state.fleet.rollouts() if r.state not in ("lost", "joining")]
        ready = [r for r in living if r.state == "ready"]
        self._not_ready = [r for r in living if r.state != "ready"]
        self._ready_slots = sum(r.slots for r in ready)
        self.slots = sum(r.slots for r in living)
        self._newest = max((r.version for r in ready), default=max((r.version for r in living), default=0))

    def advance(self, at: float) -> None:
        """Add the time since the last event to what held since then."""
        seconds = 0.0 if self._at is None else at - self._at
        self._at = at
        if seconds <= 0:
            return
        self.rollout_busy_s += self.busy * seconds
        if self._swapping:
            self.rollout_idle_s["weight_sync"] += self._swapping * seconds
        if self._asleep:
            self.rollout_idle_s["pool"] += self._asleep * seconds
        free = self.slots - self.busy - self._swapping - self._asleep
        if free > 0:
            self.rollout_idle_s[self.rollout_cause] += free * seconds
        if self.trainer_task is not None:
            self.trainer_busy_s[self.trainer_task] += seconds
        else:
            self.trainer_idle_s[self.trainer_cause] += seconds

    def measure(self) -> None:
        """Find the split that holds from now on."""
        busy, self.frozen, self._swapping, self._asleep = self._state.ledger.running, 0, 0, 0
        if self._state.validations.out and not self._state.limits.validators():
            busy += self._state.validations.out
        for replica in self._not_ready:
            held = len(replica.groups)
            if replica.state in FROZEN_STATES:
                busy -= held
                self.frozen += held
                self._swapping += replica.slots
            elif replica.state in ("yielding", "asleep"):
                self._asleep += replica.slots - held
            else:
                self._swapping += replica.slots - held
        self.busy = busy
        if busy + self._swapping + self._asleep < self.slots:
            self.rollout_cause = self._why_slots_are_free()
        self._measure_trainer()

    @property
    def capacity(self) -> tuple[int, int]:
        """Groups that may still start: under the worker bound, and under the staleness bound at the newest installed
        version."""
        state = self._state
        workers = state.limits.max_concurrent_groups - state.ledger.running
        return max(0, workers), max(0, state.places(self._newest) - state.held)

    @property
    def split(self) -> dict[str, int]:
        """Slots of living replicas, by what they do."""
        free = max(0, self.slots - self.busy - self.frozen)
        return {"busy": self.busy, "frozen": self.frozen, "free": free}

    @property
    def admission_limit(self) -> str:
        """What keeps the next group from starting: one of `names.ADMISSION_LIMITS`."""
        if self._state.started and not self.slots:
            return "no_replica"
        free = self.slots - self.busy - self._swapping - self._asleep
        if free > 0:
            return self.rollout_cause
        if self._asleep:
            return "pool"
        return "weight_sync" if self._swapping else "slots_full" if self.slots else self.rollout_cause

    def _why_slots_are_free(self) -> str:
        state, ledger, limits = self._state, self._state.ledger, self._state.limits
        if not state.started:
            return "starting"
        if limits.max_steps is not None and state.held >= limits.max_steps * limits.train_batch_size:
            return "run_ending"
        workers, staleness = self.capacity
        if not workers:
            return "worker_bound"
        if not staleness:
            return "staleness_bound"
        if ledger.waiting:
            return "other"
        if ledger.parked:
            return "waiting_for_weights"
        return "no_prompts" if state.no_more_prompts else "waiting_for_prompts"

    def _measure_trainer(self) -> None:
        state, ledger = self._state, self._state.ledger
        step = state.training_step
        waits = step is not None and step.state == "scoring" and not step.under_way
        self.trainer_task = step.state if step is not None and step.state in TRAINER_TASKS and not waits else None
        if waits:
            lease = state.pools.of("train")
            self.trainer_cause = "pool" if lease.shared and lease.task == ROLLOUT else "waiting_for_weight_sync"
        elif state.publishing or (step is not None and step.state == "trained"):
            self.trainer_cause = "publishing"
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
        """Slot time not spent generating, as a share of all slot time; 0 while there was none."""
        idle = sum(self.rollout_idle_s.values())
        return idle / (idle + self.rollout_busy_s) if idle else 0.0

    @property
    def trainer_idle_share(self) -> float:
        idle, busy = sum(self.trainer_idle_s.values()), sum(self.trainer_busy_s.values())
        return idle / (idle + busy) if idle else 0.0
