"""Every name the engine exports to Prometheus: the one place to look one up, and the only one to add one.

Read by the exporter, by the generator of `docs/METRICS.md`, by the boards and alerts of `dashboards/` and by the tests
that compare them. Base units, `engine_` in front, `_total` behind counters. Where label values are a closed
set they are in `labels.py`, and exported from the start with 0, so that a rate has a beginning. No label ever holds the
id of a group, a step or a version: those go up for as long as a run lasts, and the number of series must not.
"""

from dataclasses import dataclass, field

from engine.metrics.labels import (
    ADMISSION_LIMITS,
    FIGURES_KEPT,
    LIVE_GROUP_STATES,
    LIVE_VALIDATION_STATES,
    MACHINES,
    PARKED_REASONS,
    RECOVERY_KINDS,
    REPLICA_GROUP_ENDS,
    REPLICA_STATES,
    REQUESTS,
    RETRY_CAUSES,
    ROLLOUT_IDLE_CAUSES,
    STEP_PHASES,
    TRAINER_IDLE_CAUSES,
    TRAINER_TASKS,
)
from engine.states.group import GROUP
from engine.states.limits import SYNC_MODES
from engine.states.process import KINDS, PROCESS
from engine.states.validation import VALIDATION

Labels = dict[str, tuple[str, ...]]
"""Each label with the values it can take; an empty tuple is an open set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported name."""

    name: str
    kind: str
    """`counter`, `gauge` or `histogram`."""
    unit: str
    help: str
    labels: Labels = field(default_factory=dict)
    where: str = ""
    """What exports it, where not every run does: `run directory` or `Ray`."""

    @property
    def family(self) -> str:
        """The name as `prometheus_client` wants it: it adds `_total` by itself."""
        return self.name.removesuffix("_total")


def _gauge(name: str, unit: str, help: str, labels: Labels | None = None, where: str = "") -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, help=help, labels=labels or {}, where=where)


def _counter(name: str, unit: str, help: str, labels: Labels | None = None, where: str = "") -> Metric:
    return Metric(name=name, kind="counter", unit=unit, help=help, labels=labels or {}, where=where)


def _histogram(name: str, unit: str, help: str, labels: Labels | None = None, where: str = "") -> Metric:
    return Metric(name=name, kind="histogram", unit=unit, help=help, labels=labels or {}, where=where)


GROUPS = _gauge("engine_groups", "groups", "Prompt groups that have not ended, by state.", {"state": LIVE_GROUP_STATES})
GROUPS_ENDED = _counter(
    "engine_groups_ended_total",
    "groups",
    "Prompt groups that ended, by the state they ended in.",
    {"state": GROUP.terminal},
)
GROUPS_RUNNING = _gauge("engine_groups_running", "groups", "Prompt groups being generated (at most K).")
CAPACITY = _gauge(
    "engine_capacity_groups",
    "groups",
    "Groups that may still start: under the bound K, and under staleness at the newest installed version.",
    {"bound": ("workers", "staleness")},
)
ADMISSION_LIMIT = _gauge(
    "engine_admission_limit",
    "0 or 1",
    "1 for the limit that keeps the next group from starting now, 0 for the others.",
    {"limit": ADMISSION_LIMITS},
)
MAX_STALENESS = _gauge("engine_max_staleness_steps", "train steps", "S: the staleness no group may exceed.")
MAX_GROUPS = _gauge("engine_max_concurrent_groups", "groups", "K: groups that may be generated at once.")
BATCH_SIZE = _gauge("engine_train_batch_size_groups", "groups", "B: groups that a train step takes.")
SLOTS = _gauge(
    "engine_slots",
    "slots",
    "Slots of living replicas: generating, frozen with a group while weights are swapped, or free.",
    {"state": ("busy", "frozen", "free")},
)
STALENESS = _histogram(
    "engine_staleness_steps",
    "train steps",
    "Staleness of every group taken by a train step: steps its oldest token lags behind. Exemplar: the newest group.",
)
STEP_STALENESS = _gauge(
    "engine_step_staleness_steps",
    "train steps",
    "Staleness of the groups of the newest trained step.",
    {"stat": ("min", "mean", "max")},
)
DEADLINE_ROOM = _gauge(
    "engine_deadline_room_steps",
    "train steps",
    "Train steps left until the oldest deadline among started groups falls due; 0: the step that forms now needs it.",
)
OLDEST_GROUP_AGE = _gauge(
    "engine_oldest_group_age_seconds", "seconds", "Time since the oldest group that no step has taken was started."
)
STEPS = _counter("engine_train_steps_total", "steps", "Outer train steps trained.")
STEP_AGE = _gauge(
    "engine_step_age_seconds",
    "seconds",
    "Time since a train step was last finished, or the run began or was resumed.",
)
STEP_SECONDS = _histogram(
    "engine_step_phase_seconds", "seconds", "Time a finished train step spent in a phase.", {"phase": STEP_PHASES}
)
TOKENS_GENERATED = _counter("engine_tokens_generated_total", "tokens", "Response tokens of generated groups.")
TOKENS_TRAINED = _counter("engine_tokens_trained_total", "tokens", "Response tokens of groups trained on.")
RESPONSE_TOKENS = _histogram(
    "engine_response_tokens",
    "tokens",
    "Mean response length of each generated group. Exemplar: the newest group.",
)
GROUP_SECONDS = _histogram(
    "engine_group_seconds",
    "seconds",
    "Time from a group's first start to its last trajectory, waits and retries included. Exemplar: the newest group.",
)
TRANSITIONS = _counter(
    "engine_transitions_total",
    "transitions",
    "Changes of state, by machine and by the states left and entered.",
    {"machine": MACHINES, "from": (), "to": ()},
)
REPLICAS = _gauge(
    "engine_replicas",
    "replicas",
    "Rollout replicas, by state; one that is down has the state of its process. gone: it cannot restart. Replicas that "
    "were let go do not count.",
    {"state": REPLICA_STATES},
)
WEIGHTS_VERSION = _gauge("engine_weights_version", "version", "Newest weights version published by the trainer.")
REPLICA_WEIGHTS_VERSION = _gauge(
    "engine_replica_weights_version", "version", "Weights version a replica samples from.", {"replica": ()}
)
REPLICA_STATE = _gauge(
    "engine_replica_state",
    "0 or 1",
    "1 for the state a replica is in, 0 for the others.",
    {"replica": (), "state": REPLICA_STATES},
)
REPLICA_SLOTS = _gauge(
    "engine_replica_slots", "slots", "Slots of a replica that is up.", {"replica": (), "state": ("held", "free")}
)
REPLICA_TOKENS = _counter(
    "engine_replica_tokens_total", "tokens", "Response tokens of the groups a replica generated.", {"replica": ()}
)
REPLICA_GROUPS = _counter(
    "engine_replica_groups_total",
    "groups",
    "Attempts that ended on a replica: the group generated, aborted (its prefix kept) or failed.",
    {"replica": (), "end": REPLICA_GROUP_ENDS},
)
REPLICA_RESUMED = _counter(
    "engine_replica_groups_resumed_total",
    "groups",
    "Groups that a replica resumed from the prefix of an earlier attempt.",
    {"replica": ()},
)
REPLICA_PAUSE = _counter(
    "engine_replica_pause_seconds_total",
    "seconds",
    "Time a replica spent between the order to pause and sampling again, by sync mode.",
    {"replica": (), "mode": SYNC_MODES},
)
SYNC_SECONDS = _histogram(
    "engine_weight_sync_seconds",
    "seconds",
    "Time from the order to pause a replica until it samples from the new version.",
    {"mode": SYNC_MODES},
)
ROLLOUT_BUSY = _counter(
    "engine_rollout_busy_slot_seconds_total",
    "slot seconds",
    "Slots of living replicas that were generating, times seconds.",
)
ROLLOUT_IDLE = _counter(
    "engine_rollout_idle_slot_seconds_total",
    "slot seconds",
    "Slots of living replicas that were not generating, times seconds, by cause.",
    {"cause": ROLLOUT_IDLE_CAUSES},
)
TRAINER_BUSY = _counter(
    "engine_trainer_busy_seconds_total",
    "seconds",
    "Time in which a batch was being scored or trained on.",
    {"task": TRAINER_TASKS},
)
TRAINER_IDLE = _counter(
    "engine_trainer_idle_seconds_total",
    "seconds",
    "Time in which no batch was being scored or trained on, by cause.",
    {"cause": TRAINER_IDLE_CAUSES},
)
TRAINER_FIGURE = _gauge(
    "engine_trainer_figure",
    "as reported",
    f"Figures that the trainer reported for its newest step, by name; the first {FIGURES_KEPT} names.",
    {"figure": ()},
)
PROCESSES = _gauge(
    "engine_processes",
    "processes",
    "Processes of the run, by kind and state. gone: none runs, and none is being started. Replicas that were let go do "
    "not count.",
    {"kind": KINDS, "state": PROCESS.states},
)
PROCESS_DEATHS = _counter(
    "engine_process_deaths_total",
    "processes",
    "Processes that ended although they were wanted, or failed to start, by kind.",
    {"kind": KINDS},
)
RETRIES = _counter(
    "engine_retries_total",
    "attempts",
    "Attempts that failed, by what failed. A group on a lost replica counts under replica_lost; process_lost: any "
    "other process. Exemplar: the group.",
    {"cause": RETRY_CAUSES},
)
BUDGET = _gauge(
    "engine_retry_budget_attempts",
    "attempts",
    "Attempts that each group, install, step and publication has against a cause.",
    {"budget": ("infrastructure", "data")},
)
STALE_ECHOES = _counter(
    "engine_stale_echoes_total", "events", "Events about an order that has ended: recorded, without effect."
)
EVENTS = _counter("engine_events_total", "events", "Events handled by the scheduler, by kind.", {"event": ()})
EVENTS_WAITING = _gauge("engine_events_waiting", "events", "Events taken in and not handled yet.", where="Ray")
DECISION_SECONDS = _histogram(
    "engine_decision_seconds",
    "seconds",
    "Time from the arrival of events until they were recorded and the commands that answer them had left. Over Ray.",
)
STORE_GROUPS = _gauge("engine_trajectory_store_groups", "groups", "Groups in the trajectory store.", where="Ray")
STORE_BYTES = _gauge(
    "engine_trajectory_store_bytes", "bytes", "Bytes of the groups in the trajectory store.", where="Ray"
)
STORE_DISK_BYTES = _gauge(
    "engine_trajectory_store_disk_bytes",
    "bytes",
    "Bytes of the trajectory store on disk, groups that are discarded and not yet cleared away included.",
    where="Ray",
)
RECORD_BYTES = _counter(
    "engine_record_bytes_total", "bytes", "Bytes of the schedule record that were written.", where="run directory"
)
RECORD_LAG = _gauge(
    "engine_record_waiting_bytes",
    "bytes",
    "Bytes of the schedule record that the operating system does not have yet.",
    where="run directory",
)
DISK_FREE = _gauge("engine_disk_free_bytes", "bytes", "Free on the disk of the run's directory.", where="run directory")
DISK_SIZE = _gauge("engine_disk_size_bytes", "bytes", "Size of the disk of the run's directory.", where="run directory")
REWARD = _gauge("engine_reward_mean", "reward", "Mean reward of the groups of the newest trained step.")
ACCURACY = _gauge("engine_validation_accuracy", "ratio", "Newest accuracy on held-out prompts, 0 to 1.")
ACCURACY_STEPS = _gauge(
    "engine_validation_steps", "train steps", "Train steps in the weights that were last measured on held-out prompts."
)
VALIDATION_VERSION = _gauge(
    "engine_validation_version",
    "version",
    "Weights version that the newest accuracy on held-out prompts was measured under.",
)
VALIDATIONS = _gauge(
    "engine_validations",
    "validations",
    "Validations that have not ended, by state.",
    {"state": LIVE_VALIDATION_STATES},
)
VALIDATIONS_ENDED = _counter(
    "engine_validations_ended_total",
    "validations",
    "Validations that ended, by the state they ended in.",
    {"state": VALIDATION.terminal},
)
VALIDATION_ROWS = _counter("engine_validation_rows_total", "rows", "Held-out rows measured.")
VALIDATION_SECONDS = _histogram(
    "engine_validation_seconds", "seconds", "Time from a version that is to be validated to its report."
)
SILENCE = _gauge(
    "engine_silence_seconds",
    "seconds",
    "Time since anything was last reported to the scheduler: how long it has waited for what it waits for.",
)
RECOVERIES = _counter(
    "engine_recoveries_total",
    "times",
    "Times the run went on, in whichever process: resumed with all it had, branched at a checkpoint, or with a new "
    "process of the scheduler.",
    {"kind": RECOVERY_KINDS},
)
REQUESTS_TAKEN = _counter(
    "engine_requests_total",
    "requests",
    "What users asked of the running run: to stop, to drain, other replicas, another setting.",
    {"request": tuple(REQUESTS.values())},
)
DRAINING = _gauge(
    "engine_draining_seconds", "seconds", "How long the run has been coming to rest; 0 where nobody asked it to."
)
PARKED = _counter(
    "engine_groups_parked_total",
    "groups",
    "Running groups that were ordered to be parked: their attempt took too long, or a faster replica takes them over.",
    {"reason": PARKED_REASONS},
)
POLICY_ERRORS = _counter(
    "engine_policy_errors_total",
    "decisions",
    "Decisions of built-in policies in place of one that raised or broke a law.",
)
REPLICAS_WANTED = _gauge(
    "engine_replicas_wanted",
    "replicas",
    "Replicas that there should be, those that only validate not included.",
)
REPLICA_SLOW = _gauge(
    "engine_replica_slow",
    "0 or 1",
    "1 for a replica that is slower than the others by more than may be.",
    {"replica": ()},
)
BATCHES_KEPT = _gauge(
    "engine_batches_kept_steps",
    "train steps",
    "Steps whose batches are kept, since no checkpoint contains them: those that a resume would train again.",
)
CHECKPOINT_AGE = _gauge(
    "engine_checkpoint_age_seconds",
    "seconds",
    "Time since a checkpoint was last complete, or since the run was resumed.",
)
CHECKPOINT_STEPS = _gauge(
    "engine_checkpoint_steps", "train steps", "Train steps in the newest complete checkpoint; 0 before the first."
)
CHECKPOINT_EVERY = _gauge(
    "engine_checkpoint_every_steps", "train steps", "Train steps from one checkpoint to the next; 0: none is written."
)
UPTIME = _gauge("engine_uptime_seconds", "seconds", "Time since the run began.")

METRICS: tuple[Metric, ...] = (
    GROUPS, GROUPS_ENDED, GROUPS_RUNNING, CAPACITY, ADMISSION_LIMIT, MAX_STALENESS, MAX_GROUPS, BATCH_SIZE, SLOTS,
    STALENESS, STEP_STALENESS, DEADLINE_ROOM, OLDEST_GROUP_AGE, STEPS, STEP_AGE, STEP_SECONDS, TOKENS_GENERATED,
    TOKENS_TRAINED, RESPONSE_TOKENS, GROUP_SECONDS, TRANSITIONS, REPLICAS, WEIGHTS_VERSION, REPLICA_WEIGHTS_VERSION,
    REPLICA_STATE, REPLICA_SLOTS, REPLICA_TOKENS, REPLICA_GROUPS, REPLICA_RESUMED, REPLICA_PAUSE, SYNC_SECONDS,
    ROLLOUT_BUSY, ROLLOUT_IDLE, TRAINER_BUSY, TRAINER_IDLE, TRAINER_FIGURE, PROCESSES, PROCESS_DEATHS, RETRIES, BUDGET,
    STALE_ECHOES, EVENTS, EVENTS_WAITING, DECISION_SECONDS, STORE_GROUPS, STORE_BYTES,
    STORE_DISK_BYTES, RECORD_BYTES, RECORD_LAG, DISK_FREE, DISK_SIZE, REWARD,
    ACCURACY, ACCURACY_STEPS, VALIDATION_VERSION, VALIDATIONS, VALIDATIONS_ENDED, VALIDATION_ROWS, VALIDATION_SECONDS,
    SILENCE, RECOVERIES, REQUESTS_TAKEN, DRAINING, PARKED, POLICY_ERRORS, REPLICAS_WANTED, REPLICA_SLOW, BATCHES_KEPT,
    CHECKPOINT_AGE, CHECKPOINT_STEPS, CHECKPOINT_EVERY, UPTIME,
)  # fmt: skip
