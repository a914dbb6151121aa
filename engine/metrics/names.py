"""All metrics that the engine exports to Prometheus. Add new ones here.

The exporter, the generator of docs/reference/METRICS.md, the boards and alerts of `dashboards/`, and the tests that
compare them read this module. Names begin with `engine_`, counters end with `_total`, and units are base units.
`names.py` has the label values that form a closed set; these series start at 0, so `rate()` sees the first increase. No
label may hold the id of a group, a step or a version, because the number of series must not grow with the length of a
run.
"""

from dataclasses import dataclass, field
from functools import partial

from engine.events import DrainRequested, Event, ReplicaLeaves, ReplicasWanted, SettingChanged, StopRequested
from engine.metrics.health import ALL_CHECKS
from engine.states.causes import SLOT_CAUSES, TASKS, TRAINER_CAUSES
from engine.states.group import GROUP
from engine.states.limits import SYNC_MODES
from engine.states.process import KINDS, PROCESS
from engine.states.replica import REPLICA
from engine.states.state import RECOVERY_KINDS
from engine.states.validation import VALIDATION

# -- label values and buckets ------------------------------------------------------------------------------------------


ROLLOUT_IDLE_CAUSES = tuple(cause.name for cause in SLOT_CAUSES)
ADMISSION_LIMITS = ("slots_full", "no_replica", *ROLLOUT_IDLE_CAUSES)
"""Why no further group starts: every slot is busy; no replica is up; otherwise why slots are idle."""
TRAINER_IDLE_CAUSES = tuple(cause.name for cause in TRAINER_CAUSES)
TRAINER_TASKS = tuple(task.name for task in TASKS)
STEP_PHASES = ("collecting", "scoring", "training", "publishing")

RETRY_CAUSES = (
    "group_infrastructure",
    "group_data",
    "replica_lost",
    "process_lost",
    "weight_sync",
    "train_step",
    "publish",
    "checkpoint",
    "validation",
    "draw",
)

REQUESTS: dict[type[Event], str] = {
    StopRequested: "stop",
    DrainRequested: "drain",
    ReplicaLeaves: "replica_leaves",
    ReplicasWanted: "replicas_wanted",
    SettingChanged: "setting",
}
"""Label value of each event that is a user's request."""

PARKED_REASONS = ("timeout", "moved")
"""Why a running group is parked: its attempt exceeded its time limit; a faster replica continues it."""

LIVE_VALIDATION_STATES = tuple(state for state in VALIDATION.states if state not in VALIDATION.terminal)
LIVE_GROUP_STATES = tuple(state for state in GROUP.states if state not in GROUP.terminal)
REPLICA_GROUP_ENDS = ("generated", "aborted", "failed")
REPLICA_STATES = ("starting", "stopping", "gone", *(state for state in REPLICA.states if state != "down"))
"""A replica that is down has the state of its process."""
MACHINES = ("group", "step", "replica", "process", "version", "validation", "pool")

STALENESS_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
VALIDATION_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
SYNC_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PHASE_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0)
REWARD_FUNCTIONS_KEPT = 16
"""Maximum number of reward functions with a histogram; the first names count."""
GROUP_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0)
TOKEN_BUCKETS = tuple(float(1 << power) for power in range(3, 18))
DECISION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
FIGURES_KEPT = 128
"""Maximum number of the trainer's metrics that are exported; the first names count."""


# -- the metrics -------------------------------------------------------------------------------------------------------


Labels = dict[str, tuple[str, ...]]
"""Each label with its possible values. An empty tuple means that the set is open."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric."""

    kind: str
    """`counter`, `gauge` or `histogram`."""
    name: str
    unit: str
    help: str
    labels: Labels = field(default_factory=dict)
    where: str = ""
    """What a run needs to export it: `run directory` or `Ray`. Empty: every run exports it."""

    @property
    def family(self) -> str:
        """The name for `prometheus_client`, which adds `_total` itself."""
        return self.name.removesuffix("_total")


_gauge = partial(Metric, "gauge")
_counter = partial(Metric, "counter")
_histogram = partial(Metric, "histogram")


GROUPS = _gauge("engine_groups", "groups", "Prompt groups that have not ended, by state.", {"state": LIVE_GROUP_STATES})
GROUPS_ENDED = _counter(
    "engine_groups_ended_total",
    "groups",
    "Prompt groups that ended, by final state.",
    {"state": GROUP.terminal},
)
GROUPS_RUNNING = _gauge("engine_groups_running", "groups", "Prompt groups being generated (at most K).")
CAPACITY = _gauge(
    "engine_capacity_groups",
    "groups",
    "Groups that may still start: workers: under K; staleness: under S, at the newest installed version.",
    {"bound": ("workers", "staleness")},
)
ADMISSION_LIMIT = _gauge(
    "engine_admission_limit",
    "0 or 1",
    "1 for the limit that currently prevents the next group from starting, 0 for the others.",
    {"limit": ADMISSION_LIMITS},
)
MAX_STALENESS = _gauge("engine_max_staleness_steps", "train steps", "S: the maximum staleness of a group.")
MAX_GROUPS = _gauge("engine_max_concurrent_groups", "groups", "K: the maximum number of groups that run at once.")
BATCH_SIZE = _gauge("engine_train_batch_size_groups", "groups", "B: groups in the batch of a train step.")
SLOTS = _gauge(
    "engine_slots",
    "slots",
    "Slots of replicas that are up. busy: generating; frozen: holding a group during a weight swap; free: not in use.",
    {"state": ("busy", "frozen", "free")},
)
STALENESS = _histogram(
    "engine_staleness_steps",
    "train steps",
    "Staleness of every group in a trained batch: train steps that its oldest token lags behind. Exemplar: a group "
    "with the largest value of a step.",
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
    "Train steps until the earliest deadline of a started group. 0: the step that forms now must take the group.",
)
OLDEST_GROUP_AGE = _gauge(
    "engine_oldest_group_age_seconds", "seconds", "Age of the oldest started group that is not in a batch yet."
)
STEPS = _counter("engine_train_steps_total", "steps", "Train steps done (outer steps).")
STEP_AGE = _gauge(
    "engine_step_age_seconds",
    "seconds",
    "Time since the last train step finished, or since the run started or resumed.",
)
STEP_SECONDS = _histogram(
    "engine_step_phase_seconds",
    "seconds",
    "Time that each finished train step spent in a phase.",
    {"phase": STEP_PHASES},
)
TOKENS_GENERATED = _counter("engine_tokens_generated_total", "tokens", "Response tokens of generated groups.")
TOKENS_TRAINED = _counter("engine_tokens_trained_total", "tokens", "Response tokens of groups trained on.")
RESPONSE_TOKENS = _histogram(
    "engine_response_tokens",
    "tokens",
    "Mean response length of each generated group. Exemplar: the longest of groups that arrived together.",
)
GROUP_SECONDS = _histogram(
    "engine_group_seconds",
    "seconds",
    "Time from the first start of a group until it is generated, with waits and retries. Exemplar: the slowest of "
    "groups that arrived together.",
)
TRANSITIONS = _counter(
    "engine_transitions_total",
    "transitions",
    "State transitions, by machine, old state and new state.",
    {"machine": MACHINES, "from": (), "to": ()},
)
REPLICAS = _gauge(
    "engine_replicas",
    "replicas",
    "Rollout replicas, by state. A replica that is down has the state of its process; gone: it cannot restart. "
    "Replicas that were removed on request do not count.",
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
    "engine_replica_slots",
    "slots",
    "Slots of a replica that is up. held: in use; free: not in use.",
    {"replica": (), "state": ("held", "free")},
)
REPLICA_LIMIT = _gauge(
    "engine_replica_limit_groups",
    "groups",
    "Groups that the concurrency policy allows on a replica that is up; 0 if the replica only measures validations.",
    {"replica": ()},
)
REPLICA_CACHE = _gauge(
    "engine_replica_cache_used_ratio",
    "ratio",
    "Share of a replica's KV cache in use, from 0 to 1, by its newest report.",
    {"replica": ()},
    where="scheduler.policies.concurrency: kv-cache",
)
REPLICA_TOKENS = _counter(
    "engine_replica_tokens_total", "tokens", "Response tokens of the groups that a replica generated.", {"replica": ()}
)
REPLICA_GROUPS = _counter(
    "engine_replica_groups_total",
    "groups",
    "Attempts that ended on a replica. generated: finished; aborted: stopped, with its prefix stored; failed: failed.",
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
    "Time from the order to pause a replica until it samples again, by sync mode.",
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
    "Busy slot time of replicas that are up.",
)
ROLLOUT_IDLE = _counter(
    "engine_rollout_idle_slot_seconds_total",
    "slot seconds",
    "Idle slot time of replicas that are up, by cause.",
    {"cause": ROLLOUT_IDLE_CAUSES},
)
TRAINER_BUSY = _counter(
    "engine_trainer_busy_seconds_total",
    "seconds",
    "Time spent scoring or training a batch.",
    {"task": TRAINER_TASKS},
)
TRAINER_IDLE = _counter(
    "engine_trainer_idle_seconds_total",
    "seconds",
    "Time in which no batch was scored or trained, by cause.",
    {"cause": TRAINER_IDLE_CAUSES},
)
TRAINER_FIGURE = _gauge(
    "engine_trainer_figure",
    "as reported",
    "Metrics that the trainer reported for its newest step, and those of its responses, by name. At most "
    f"{FIGURES_KEPT} names are exported.",
    {"figure": ()},
)
REWARD_HISTOGRAM = _histogram(
    "engine_response_rewards",
    "reward",
    "Rewards of the responses of trained steps: `reward`, and `reward_NAME` of at most "
    f"{REWARD_FUNCTIONS_KEPT} reward functions. Without sum and count, because rewards may be negative.",
    {"figure": ()},
)
HEALTH_FINDING = _gauge(
    "engine_health_finding",
    "0 or 1",
    "Whether a health check finds something that ruins the run, by check. The live view says what to do.",
    {"check": ALL_CHECKS},
)
SOURCE_REWARD = _gauge(
    "engine_source_reward_mean",
    "reward",
    "Mean reward of the responses of the newest trained step, by data source.",
    {"source": ()},
    where="data.sources",
)
SOURCE_SHARE = _gauge(
    "engine_source_share",
    "ratio",
    "Share of the groups of the newest trained step, by data source.",
    {"source": ()},
    where="data.sources",
)
SOURCE_DRAWN = _counter(
    "engine_source_drawn_total",
    "groups",
    "Groups whose prompt was chosen, by data source.",
    {"source": ()},
    where="data.sources",
)
SOURCE_DROPPED = _gauge(
    "engine_source_dropped_rows",
    "rows",
    "Rows that `pass_rate` or `data.overlong` left out before the run, by data source.",
    {"source": ()},
    where="data.sources",
)
SOURCE_RESTED = _counter(
    "engine_source_rested_rows_total",
    "rows",
    "Rows skipped because their newest reward is outside `pass_rate`, by data source.",
    {"source": ()},
    where="data.sources",
)
FUNCTION_CALLS = _counter(
    "engine_function_calls_total",
    "calls",
    "Calls of the user's functions that have ended, such as `reward NAME` and `agent NAME`, by function.",
    {"function": ()},
    where="reward.function, agent or environment",
)
FUNCTION_SECONDS = _counter(
    "engine_function_call_seconds_total",
    "seconds",
    "Sum of the durations of these calls, by function.",
    {"function": ()},
    where="reward.function, agent or environment",
)
FUNCTION_GROUPS = _gauge(
    "engine_function_waiting_groups",
    "groups",
    "Groups and validation rows that wait for calls of a function; reported every 10 s.",
    {"function": ()},
    where="reward.function, agent or environment",
)
UNREWARDED = _gauge(
    "engine_groups_unrewarded",
    "groups",
    "Groups whose trajectories have all ended and whose rewards, or whose work in an added state, have not.",
)
PROCESSES = _gauge(
    "engine_processes",
    "processes",
    "Processes of the run, by kind and state. gone: not running and not starting. Replicas that were removed on "
    "request do not count.",
    {"kind": KINDS, "state": PROCESS.states},
)
PROCESS_DEATHS = _counter(
    "engine_process_deaths_total",
    "processes",
    "Processes that died or failed to start, by kind.",
    {"kind": KINDS},
)
RETRIES = _counter(
    "engine_retries_total",
    "attempts",
    "Failed attempts, by cause. replica_lost: a group on a replica that died; process_lost: an order of any other "
    "process that died. Exemplar: the group.",
    {"cause": RETRY_CAUSES},
)
BUDGET = _gauge(
    "engine_retry_budget_attempts",
    "attempts",
    "Attempts that each group, install, train step and publication has, by cause of failure.",
    {"budget": ("infrastructure", "data")},
)
STALE_ECHOES = _counter(
    "engine_stale_echoes_total", "events", "Events about orders that have ended; they are recorded and ignored."
)
EVENTS = _counter("engine_events_total", "events", "Events that the scheduler handled, by kind.", {"event": ()})
EVENTS_WAITING = _gauge(
    "engine_events_waiting", "events", "Events that were received but not handled yet.", where="Ray"
)
DECISION_SECONDS = _histogram(
    "engine_decision_seconds",
    "seconds",
    "Time from the arrival of events until they are recorded and their commands are sent; only on Ray.",
)
STORE_GROUPS = _gauge("engine_trajectory_store_groups", "groups", "Groups in the trajectory store.", where="Ray")
STORE_BYTES = _gauge(
    "engine_trajectory_store_bytes", "bytes", "Bytes of the groups in the trajectory store.", where="Ray"
)
STORE_DISK_BYTES = _gauge(
    "engine_trajectory_store_disk_bytes",
    "bytes",
    "Bytes of the trajectory store on disk, including discarded groups that are not deleted yet.",
    where="Ray",
)
RECORD_BYTES = _counter(
    "engine_record_bytes_total", "bytes", "Bytes written to the schedule record.", where="run directory"
)
RECORD_LAG = _gauge(
    "engine_record_waiting_bytes",
    "bytes",
    "Bytes of the schedule record that wait in memory to be written.",
    where="run directory",
)
DISK_FREE = _gauge(
    "engine_disk_free_bytes", "bytes", "Free space on the disk of the run's directory.", where="run directory"
)
DISK_SIZE = _gauge("engine_disk_size_bytes", "bytes", "Size of the disk of the run's directory.", where="run directory")
REWARD = _gauge("engine_reward_mean", "reward", "Mean reward of the groups of the newest trained step.")
ACCURACY = _gauge("engine_validation_accuracy", "ratio", "Accuracy of the newest validation over all its sets, 0 to 1.")
FAILED_SHARE = _gauge(
    "engine_validation_failed_ratio", "ratio", "Share of the newest validation's responses that failed, 0 to 1."
)
VALIDATION_FIGURE = _gauge(
    "engine_validation_figure",
    "ratio or reward",
    "Figure of a set in the newest validation, such as pass@4, with the ends of its 95 % confidence interval.",
    {"set": (), "figure": (), "estimate": ("value", "low", "high")},
)
ACCURACY_STEPS = _gauge(
    "engine_validation_steps", "train steps", "Train steps in the weights of the newest validation."
)
VALIDATION_VERSION = _gauge(
    "engine_validation_version",
    "version",
    "Weights version of the newest validation.",
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
    "Validations that ended, by final state.",
    {"state": VALIDATION.terminal},
)
VALIDATION_ROWS = _counter("engine_validation_rows_total", "rows", "Validation rows measured.")
VALIDATION_SECONDS = _histogram(
    "engine_validation_seconds", "seconds", "Time from the request for a validation to its report."
)
SILENCE = _gauge(
    "engine_silence_seconds",
    "seconds",
    "Time since the last event of the scheduler.",
)
RECOVERIES = _counter(
    "engine_recoveries_total",
    "recoveries",
    "Recoveries of the run. resumed: new processes lost no train step; branched: new processes continued from a "
    "checkpoint; scheduler: a new scheduler process took over the running actors.",
    {"kind": RECOVERY_KINDS},
)
REQUESTS_TAKEN = _counter(
    "engine_requests_total",
    "requests",
    "Requests from users and signals to the running run, by kind.",
    {"request": tuple(REQUESTS.values())},
)
DRAINING = _gauge(
    "engine_draining_seconds", "seconds", "Time since the current drain began; 0 if the run is not draining."
)
PARKED = _counter(
    "engine_groups_parked_total",
    "groups",
    "Running groups that were parked. timeout: the attempt exceeded its limit; moved: a faster replica continues it.",
    {"reason": PARKED_REASONS},
)
REPLICAS_WANTED = _gauge(
    "engine_replicas_wanted",
    "replicas",
    "Number of generating replicas that the run should have.",
)
REPLICA_SLOW = _gauge(
    "engine_replica_slow",
    "0 or 1",
    "1 for a replica that is slower than the others by more than `rollout.straggler_factor`, 0 for the others.",
    {"replica": ()},
)
BATCHES_KEPT = _gauge(
    "engine_batches_kept_steps",
    "train steps",
    "Train steps that no checkpoint contains yet. A resume retrains them from their stored batches.",
)
CHECKPOINT_AGE = _gauge(
    "engine_checkpoint_age_seconds",
    "seconds",
    "Time since the last checkpoint was saved, or since the run started or resumed.",
)
CHECKPOINT_STEPS = _gauge(
    "engine_checkpoint_steps", "train steps", "Train steps in the newest complete checkpoint; 0 before the first."
)
CHECKPOINT_EVERY = _gauge(
    "engine_checkpoint_every_steps", "train steps", "Train steps from one checkpoint to the next; 0: no checkpoints."
)
UPTIME = _gauge("engine_uptime_seconds", "seconds", "Time since the run began, as the scheduler counts it.")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""
