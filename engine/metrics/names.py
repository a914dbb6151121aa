"""Every name the engine exports to Prometheus: the one place to look one up, and the only one to add one.

Read by the exporter, by the generator of `docs/METRICS.md` and by the tests that compare both with it. Base units,
`engine_` in front, `_total` behind counters. Label values are listed here where they are a closed set, and exported
from the start with 0, so that a rate has a beginning.
"""

from dataclasses import dataclass, field

from engine.states.group import GROUP
from engine.states.limits import SYNC_MODES
from engine.states.replica import REPLICA
from engine.states.validation import VALIDATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported name. `labels` maps each label to the values it can take; an empty tuple is an open set."""

    name: str
    kind: str
    """`counter`, `gauge` or `histogram`."""
    unit: str
    help: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The name as `prometheus_client` wants it: it adds `_total` by itself."""
        return self.name.removesuffix("_total")


ROLLOUT_IDLE_CAUSES = (
    "weight_sync",
    "worker_bound",
    "staleness_bound",
    "no_prompts",
    "waiting_for_prompts",
    "waiting_for_weights",
    "run_ending",
    "starting",
    "other",
)
"""Why a slot of a living replica generates nothing: its replica takes weights; K is reached; the staleness bound is
reached; the prompts are used up; prompts are being drawn; the groups that could run need newer weights than the replica
has; the run needs no more groups; the run is starting; anything else."""

TRAINER_IDLE_CAUSES = (
    "waiting_for_groups",
    "waiting_for_stragglers",
    "publishing",
    "waiting_for_replicas",
    "no_prompts",
    "starting",
)
"""Why no train step is being scored or trained: fewer groups are ready than a batch takes; enough are, but a deadline
binds and its groups are still being generated; weights are being published; no replica is alive; the prompts are used
up; the run is starting."""

TRAINER_TASKS = ("scoring", "training")

RETRY_CAUSES = (
    "group_infrastructure",
    "group_data",
    "replica_lost",
    "weight_sync",
    "train_step",
    "publish",
    "checkpoint",
    "validation",
)

LIVE_VALIDATION_STATES = tuple(state for state in VALIDATION.states if state not in VALIDATION.terminal)
LIVE_GROUP_STATES = tuple(state for state in GROUP.states if state not in GROUP.terminal)

STALENESS_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
VALIDATION_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
SYNC_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

GROUPS = Metric(
    name="engine_groups",
    kind="gauge",
    unit="groups",
    help="Prompt groups that have not ended, by state.",
    labels={"state": LIVE_GROUP_STATES},
)
GROUPS_ENDED = Metric(
    name="engine_groups_ended_total",
    kind="counter",
    unit="groups",
    help="Prompt groups that ended, by the state they ended in.",
    labels={"state": GROUP.terminal},
)
GROUPS_RUNNING = Metric(
    name="engine_groups_running", kind="gauge", unit="groups", help="Prompt groups being generated (at most K)."
)
CAPACITY = Metric(
    name="engine_capacity_groups",
    kind="gauge",
    unit="groups",
    help="Groups that may still start: under the bound K, and under staleness at the newest installed version.",
    labels={"bound": ("workers", "staleness")},
)
SLOTS = Metric(
    name="engine_slots",
    kind="gauge",
    unit="slots",
    help="Slots of living replicas: generating, frozen with a group while weights are swapped, or free.",
    labels={"state": ("busy", "frozen", "free")},
)
STALENESS = Metric(
    name="engine_staleness_steps",
    kind="histogram",
    unit="train steps",
    help="Staleness of every group taken by a train step: steps its oldest token lags behind.",
)
STEPS = Metric(name="engine_train_steps_total", kind="counter", unit="steps", help="Outer train steps trained.")
TOKENS_GENERATED = Metric(
    name="engine_tokens_generated_total", kind="counter", unit="tokens", help="Response tokens of generated groups."
)
TOKENS_TRAINED = Metric(
    name="engine_tokens_trained_total", kind="counter", unit="tokens", help="Response tokens of groups trained on."
)
TRANSITIONS = Metric(
    name="engine_transitions_total",
    kind="counter",
    unit="transitions",
    help="Changes of state, by machine and by the states left and entered.",
    labels={"machine": ("group", "step", "replica", "version", "validation"), "from": (), "to": ()},
)
REPLICAS = Metric(
    name="engine_replicas",
    kind="gauge",
    unit="replicas",
    help="Rollout replicas, by state.",
    labels={"state": REPLICA.states},
)
WEIGHTS_VERSION = Metric(
    name="engine_weights_version", kind="gauge", unit="version", help="Newest weights version published by the trainer."
)
REPLICA_WEIGHTS_VERSION = Metric(
    name="engine_replica_weights_version",
    kind="gauge",
    unit="version",
    help="Weights version a replica samples from.",
    labels={"replica": ()},
)
SYNC_SECONDS = Metric(
    name="engine_weight_sync_seconds",
    kind="histogram",
    unit="seconds",
    help="Time from the order to pause a replica until it samples from the new version.",
    labels={"mode": SYNC_MODES},
)
ROLLOUT_BUSY = Metric(
    name="engine_rollout_busy_slot_seconds_total",
    kind="counter",
    unit="slot seconds",
    help="Slots of living replicas that were generating, times seconds.",
)
ROLLOUT_IDLE = Metric(
    name="engine_rollout_idle_slot_seconds_total",
    kind="counter",
    unit="slot seconds",
    help="Slots of living replicas that were not generating, times seconds, by cause.",
    labels={"cause": ROLLOUT_IDLE_CAUSES},
)
TRAINER_BUSY = Metric(
    name="engine_trainer_busy_seconds_total",
    kind="counter",
    unit="seconds",
    help="Time in which a batch was being scored or trained on.",
    labels={"task": TRAINER_TASKS},
)
TRAINER_IDLE = Metric(
    name="engine_trainer_idle_seconds_total",
    kind="counter",
    unit="seconds",
    help="Time in which no batch was being scored or trained on, by cause.",
    labels={"cause": TRAINER_IDLE_CAUSES},
)
RETRIES = Metric(
    name="engine_retries_total",
    kind="counter",
    unit="attempts",
    help="Attempts that failed, by what failed. A group on a lost replica counts under replica_lost.",
    labels={"cause": RETRY_CAUSES},
)
STALE_ECHOES = Metric(
    name="engine_stale_echoes_total",
    kind="counter",
    unit="events",
    help="Events about something already over: recorded, and without effect.",
)
EVENTS = Metric(
    name="engine_events_total",
    kind="counter",
    unit="events",
    help="Events handled by the scheduler, by kind.",
    labels={"event": ()},
)
REWARD = Metric(
    name="engine_reward_mean", kind="gauge", unit="reward", help="Mean reward of the groups of the newest trained step."
)
ACCURACY = Metric(
    name="engine_validation_accuracy", kind="gauge", unit="ratio", help="Newest accuracy on held-out prompts, 0 to 1."
)
VALIDATION_VERSION = Metric(
    name="engine_validation_version",
    kind="gauge",
    unit="version",
    help="Weights version that the newest accuracy on held-out prompts was measured under.",
)
VALIDATIONS = Metric(
    name="engine_validations",
    kind="gauge",
    unit="validations",
    help="Validations that have not ended, by state.",
    labels={"state": LIVE_VALIDATION_STATES},
)
VALIDATIONS_ENDED = Metric(
    name="engine_validations_ended_total",
    kind="counter",
    unit="validations",
    help="Validations that ended, by the state they ended in.",
    labels={"state": VALIDATION.terminal},
)
VALIDATION_ROWS = Metric(
    name="engine_validation_rows_total", kind="counter", unit="rows", help="Held-out rows measured."
)
VALIDATION_SECONDS = Metric(
    name="engine_validation_seconds",
    kind="histogram",
    unit="seconds",
    help="Time from a version that is to be validated to its report.",
)
UPTIME = Metric(name="engine_uptime_seconds", kind="gauge", unit="seconds", help="Time since the run began.")

METRICS: tuple[Metric, ...] = (
    GROUPS, GROUPS_ENDED, GROUPS_RUNNING, CAPACITY, SLOTS, STALENESS, STEPS, TOKENS_GENERATED, TOKENS_TRAINED,
    TRANSITIONS, REPLICAS, WEIGHTS_VERSION, REPLICA_WEIGHTS_VERSION, SYNC_SECONDS, ROLLOUT_BUSY, ROLLOUT_IDLE,
    TRAINER_BUSY, TRAINER_IDLE, RETRIES, STALE_ECHOES, EVENTS, REWARD, ACCURACY, VALIDATION_VERSION,
    VALIDATIONS, VALIDATIONS_ENDED, VALIDATION_ROWS, VALIDATION_SECONDS, UPTIME,
)  # fmt: skip
