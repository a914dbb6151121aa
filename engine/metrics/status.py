"""`Status`: a snapshot of what a run is doing, as small plain data that can be pickled or sent as JSON.

`read_status` creates it next to the scheduler, and the live view draws it in another process. Two of its fields
are sentences that say what the trainer and the rollout do or wait for, from the figures that the scheduler decides by.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from engine.errors import EngineError, counted
from engine.ids import ReplicaId, Version
from engine.metrics.collector import RunMetrics
from engine.metrics.health import HealthFinding, run_findings
from engine.metrics.journal import plain
from engine.metrics.waits import agent_wait, inspected, reward_wait, start_text, waits
from engine.states.causes import INSPECTING, RESTARTING, REWARD
from engine.states.process import POOL_TAKEN, TRAINER
from engine.states.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One snapshot. Times are in seconds and shares from 0 to 1. None: the figure does not exist yet."""

    outcome: str | None
    """`finished`, `stopped` or `failed`; None while the run is running."""
    reason: str
    step: int
    """Train steps trained."""
    max_steps: int | None
    batch_size: int
    elapsed_s: float
    eta_s: float | None
    reward: float | None
    """Mean reward of the newest step."""
    rewards: tuple[float | None, ...]
    """Mean rewards of the newest steps, oldest first."""
    reward_first: float | None
    accuracies: tuple[tuple[int, float, float], ...]
    """(train steps, accuracy, share of failed responses) of every reported validation, oldest first."""
    staleness_min: float | None
    """Smallest staleness of all groups trained so far, in train steps. The mean and the largest follow."""
    staleness_mean: float | None
    staleness_max: float | None
    max_staleness_steps: int
    slots_busy: int
    slots: int
    running: int
    max_concurrent_groups: int
    ready: int
    parked: int
    version: Version
    """Newest version that the trainer published."""
    replica_versions: dict[ReplicaId, Version]
    """Weights versions of the replicas that are up."""
    replica_states: dict[ReplicaId, str]
    """State of each replica (`names.REPLICA_STATES`)."""
    replica_slots: dict[ReplicaId, tuple[int, int]]
    """Slots held and slots, of replicas that are up."""
    replica_caches: dict[ReplicaId, float]
    """Share of the KV cache in use, of each replica whose newest report is above 0."""
    replicas_lost: int
    """Number of replicas that are down because their process died."""
    groups_live: dict[str, int]
    """Prompt groups that have not ended, by state."""
    step_phase: str
    """State of the current train step, or of the next one to form."""
    versions_kept: int
    """Weights versions that are not retired."""
    admission_limit: str
    """Why no further group starts now: one of `names.ADMISSION_LIMITS`."""
    groups_ended: dict[str, int]
    """Prompt groups that ended, by final state."""
    failures: dict[str, int]
    """Failed attempts by cause, without zeros."""
    last_failure: str
    """The newest failure and its reason; empty if nothing failed."""
    tokens_generated: int
    tokens_trained: int
    tokens_per_s: float
    rollout_idle_share: float
    trainer_idle_share: float
    rollout_idle_s: dict[str, float]
    """Idle slot seconds by cause, without zeros."""
    trainer_idle_s: dict[str, float]
    trainer_now: str
    """What the trainer does, or what it waits for and why."""
    rollout_now: str
    validation_now: str
    """What the current validation measures or waits for; empty if there is none."""
    validations: tuple[dict[str, Any], ...]
    """Rows of the newest validations that ended in this process, oldest first."""
    draining_s: float
    """Seconds since the current drain began; 0 if the run is not draining."""
    draining: str
    """Why the run drains; empty if it does not."""
    replicas_wanted: int
    replicas_slow: tuple[ReplicaId, ...]
    """Ids of replicas that are slower than the others by more than `rollout.straggler_factor`."""
    silent_s: float
    """Time since the last event of the scheduler."""
    checkpoint_steps: int
    """Train steps in the newest complete checkpoint."""
    checkpoint_age_s: float
    checkpoint_every: int
    """Train steps from one checkpoint to the next; 0: no checkpoints."""
    recoveries: dict[str, int]
    """Number of recoveries by kind, without zeros."""
    settings: dict[str, str]
    """Live settings that were changed, by name."""
    events: int
    recent: tuple[dict[str, Any], ...]
    """The newest lines of `metrics.jsonl` that this process wrote, oldest first."""
    first: tuple[dict[str, Any], ...]
    """The lines of the first train steps of the run."""
    silence: str = ""
    """The newest report that nothing changed: for how long, and what the run waits for. Empty if something did."""
    slowest: dict[str, str] = field(default_factory=dict)
    """For the idle causes `reward` and `agent`: the function with the most time in calls, and the time of one."""
    calls_now: str = ""
    """The reward, judge, agent or environment that groups wait for, if slots are idle for it or the run drains."""
    drained: bool = False
    """It was asked to drain, and stopped when nothing was running any more."""

    @property
    def ending(self) -> str:
        """How the run ended, for people; empty while the run is running."""
        return "drained" if self.drained else self.outcome or ""

    @property
    def health(self) -> list[HealthFinding]:
        """Common training failures, from the newest train steps and the replicas."""
        return run_findings(
            self.recent, self.replica_versions, self.version, self.max_staleness_steps, self.first, self.validations
        )

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the newest validation."""
        return self.accuracies[-1][1] if self.accuracies else None

    @property
    def accuracy_first(self) -> float | None:
        """Accuracy of the initial weights."""
        return self.accuracies[0][1] if self.accuracies and self.accuracies[0][0] == 0 else None

    def failed_share(self, steps: int) -> float:
        """Share of failed responses in the newest validation of the weights after `steps` train steps."""
        return next((share for at, _, share in reversed(self.accuracies) if at == steps), 0.0)

    @property
    def accuracy_last(self) -> float | None:
        """Accuracy of the weights after the newest train step."""
        return self.accuracy if self.step and self.accuracies and self.accuracies[-1][0] == self.step else None


SPARK_STEPS = 60
TRIES = 8
T = TypeVar("T")


def read_status(metrics: RunMetrics, now: float | None = None) -> Status:
    """The snapshot of a run. `now`: seconds since it began; by default the time of the newest event."""
    now = metrics.at if now is None else max(now, metrics.at)
    state, idle, staleness = metrics.state, metrics.idle, metrics.trained.range
    rewards, limits, outcome, sums = metrics.rewards, state.limits, state.ending.outcome, idle.sums
    return Status(
        outcome=None if outcome is None else outcome.outcome,
        reason="" if outcome is None else outcome.reason,
        step=state.training.steps_trained,
        max_steps=limits.max_steps,
        batch_size=limits.train_batch_size,
        elapsed_s=now,
        eta_s=metrics.eta_s(now),
        reward=rewards[-1] if rewards else None,
        rewards=tuple(rewards[-SPARK_STEPS:]),
        reward_first=rewards[0] if rewards else None,
        accuracies=tuple(metrics.accuracies),
        staleness_min=staleness[0] if staleness else None,
        staleness_mean=metrics.trained.mean,
        staleness_max=staleness[1] if staleness else None,
        max_staleness_steps=limits.max_staleness_steps,
        slots_busy=idle.busy,
        slots=idle.slots,
        running=state.groups.ledger.running,
        max_concurrent_groups=limits.max_concurrent_groups,
        ready=state.groups.ledger.ready,
        parked=state.groups.ledger.parked,
        version=state.training.latest_version,
        **_replica_fields(state),
        groups_live=metrics.groups.by_state(),
        step_phase=next((s.state for s in list(state.training.steps.values()) if s.state != "finished"), "finished"),
        versions_kept=len(state.training.versions),
        admission_limit=idle.admission_limit,
        groups_ended=metrics.groups.by_final_state(),
        failures={cause: n for cause, n in metrics.retries.items() if n},
        last_failure=metrics.last_failure,
        tokens_generated=metrics.generated.tokens,
        tokens_trained=metrics.trained.tokens,
        tokens_per_s=metrics.generated.tokens_per_s(now),
        rollout_idle_share=idle.rollout_idle_share,
        trainer_idle_share=idle.trainer_idle_share,
        rollout_idle_s={cause: s for cause, s in sums.idle_s.items() if s > 0},
        trainer_idle_s={cause: s for cause, s in sums.trainer_idle_s.items() if s > 0},
        trainer_now=_trainer_now(metrics),
        rollout_now=_rollout_now(metrics),
        validation_now=_validation_now(state),
        validations=tuple(metrics.validations[metrics.validations_before :][-SPARK_STEPS:]),
        draining_s=draining_s(state, now),
        draining=state.ending.draining,
        replicas_wanted=replicas_wanted(state),
        replicas_slow=tuple(sorted(r.id for r in state.replicas.slow(limits.straggler_factor))),
        silent_s=max(0.0, now - metrics.at),
        checkpoint_steps=state.checkpoints.newest,
        checkpoint_age_s=max(0.0, now - metrics.checkpoint_at),
        checkpoint_every=limits.checkpoint_every,
        recoveries={kind: times for kind, times in state.recoveries.items() if times},
        settings=dict(state.facts.settings),
        events=sum(metrics.events.values()),
        recent=tuple(metrics.steps.recent),
        first=tuple(metrics.steps.first),
        silence=metrics.silence[1] if metrics.silence[0] == metrics.changes and outcome is None else "",
        slowest=_slowest_calls(metrics),
        calls_now=_calls_now(metrics),
        drained=outcome is not None and outcome.drained,
    )


def draining_s(state: State, now: float) -> float:
    """Seconds since the current drain began; 0 if the run is not draining."""
    return max(0.0, now - state.ending.draining_since) if state.ending.draining else 0.0


def replicas_wanted(state: State) -> int:
    """Number of generating replicas that the run should have, including those that are down."""
    return sum(replica.process.wanted for replica in state.replicas.rollouts)


def _replica_fields(state: State) -> dict[str, Any]:
    fleet = sorted((r for r in state.replicas.by_id.values() if not r.process.dismissed), key=lambda r: r.id)
    replicas = [replica for replica in fleet if replica.state != "down"]
    return {
        "replica_versions": {r.id: r.version for r in replicas},
        "replica_states": {r.id: r.condition for r in fleet},
        "replica_slots": {r.id: (state.replicas.occupied(r), r.slots) for r in replicas},
        "replica_caches": {r.id: r.cache_used for r in replicas if r.cache_used},
        "replicas_lost": sum(r.lost for r in fleet),
    }


def plain_status(metrics: RunMetrics, now: float) -> dict[str, Any]:
    """The snapshot as plain JSON data. Safe on any thread. Raises: `EngineError` if all `TRIES` attempts failed."""
    status = undisturbed(lambda: dict(plain(asdict(read_status(metrics, now)))))
    if status is None:
        raise EngineError("the run changed during every attempt to read its status")
    return status


def undisturbed(read: Callable[[], T]) -> T | None:
    """The result of `read`; None if every attempt failed. An attempt fails if another thread changes the data during
    it."""
    for _ in range(TRIES):
        with suppress(RuntimeError, KeyError, IndexError):
            return read()
    return None


def status_of(answer: Mapping[str, Any]) -> Status:
    """Parse a snapshot that `plain_status` wrote. Raises: ValueError, TypeError for anything else."""
    values: dict[str, Any] = {field.name: answer[field.name] for field in fields(Status) if field.name in answer}
    for name in ("replica_versions", "replica_states", "replica_slots", "replica_caches"):
        values[name] = {int(id): value for id, value in values.get(name, {}).items()}
    for name in ("rewards", "accuracies", "recent", "first", "replicas_slow"):
        values[name] = tuple(values.get(name, ()))
    return Status(**values)


def _slowest_calls(metrics: RunMetrics) -> dict[str, str]:
    ended = sorted((one.seconds, name, one) for name, one in list(metrics.calls.items()) if one.calls)
    return {one.cause: f"{name}, {seconds / one.calls:.2g} s a call" for seconds, name, one in ended}


def _calls_now(metrics: RunMetrics) -> str:
    state, idle = metrics.state, metrics.idle
    if state.ending.outcome is not None:
        return ""
    if idle.admission_limit in ("reward", "draining") and (rewards := reward_wait(state)):
        return rewards
    return agent_wait(state) if idle.in_agents else ""


def _trainer_now(metrics: RunMetrics) -> str:
    state, idle = metrics.state, metrics.idle
    if state.ending.outcome is not None:
        return f"run {state.ending.outcome.word}"
    if state.validations.facts.closing and state.validations.live:
        return "every step is trained; the run ends with its last validation"
    if idle.trainer is RESTARTING:
        order = state.orders.find("start", (TRAINER, 0))
        waits = f"waiting for room: {POOL_TAKEN}" if state.process(TRAINER, 0).no_room else "being stopped"
        return "the trainer is " + (waits if order is None else start_text(order, state))
    if idle.trainer is INSPECTING and (order := next(iter(state.orders.open["inspect"].values()), None)):
        inspection: Any = order.command
        return f"state {inspection.state} inspects {inspected(inspection)}"
    return idle.trainer.now(state)


def _rollout_now(metrics: RunMetrics) -> str:
    state, idle = metrics.state, metrics.idle
    replicas = state.replicas
    if state.ending.outcome is not None:
        return "stopped"
    syncing = [r.id for r in replicas.by_id.values() if r.state in ("pausing", "installing")]
    if syncing:
        names = ", ".join(map(str, syncing[:8])) + (", ..." if len(syncing) > 8 else "")
        return f"replica{'s' * (len(syncing) > 1)} {names} taking new weights"
    if state.ending.draining:
        first = next(iter(waits(state)), None)
        return f"the run is draining: {first.sentence(metrics.at)}" if first is not None else "the run is draining"
    free = idle.slots - idle.busy
    if not idle.slots:
        return "no replica is up"
    sleeping = [r.id for r in replicas.by_id.values() if r.state in ("yielding", "asleep")]
    if sleeping and len(sleeping) == sum(r.state != "down" for r in replicas.rollouts):
        return "every replica sleeps: the trainer has their pool"
    if free <= 0:
        agents = f", {idle.in_agents} in agents" if idle.in_agents else ""
        return f"every slot is busy: {counted(idle.busy, 'group')} generating{agents}"
    why = REWARD if idle.admission_limit == REWARD.name else idle.rollout_cause
    return f"{free} of {idle.slots} slots free: {why.now(state)}"


def _validation_now(state: State) -> str:
    validation = state.validations.served
    if validation is None or state.ending.outcome is not None:
        return ""
    done = sum(chunk.count for chunk in validation.chunks if chunk.done)
    said = f"version {validation.version}: {done} of {validation.rows} rows"
    replicas = [state.replicas.by_id[id] for id in validation.replicas]
    if not replicas:
        said += ", waits for a replica that can install it"
    elif out := state.validations.out_of(validation):
        said += f", {out} slots measuring"
    elif all(replica.version != validation.version for replica in replicas):
        said += f", waits until replica {replicas[0].id} has it"
    else:
        said += ", waits for a free slot"
    waiting = len(state.validations.live) - 1
    return said + (f"; {waiting} more due" if waiting else "")
