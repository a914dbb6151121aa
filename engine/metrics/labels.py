"""Closed sets of label values, and the bucket bounds of histograms.

Used by `names.py` and by the modules that count. Closed sets keep the number of series constant.
"""

from engine.events import DrainRequested, Event, ReplicaLeaves, ReplicasWanted, SettingChanged, StopRequested
from engine.states.group import GROUP
from engine.states.replica import REPLICA
from engine.states.validation import VALIDATION

ROLLOUT_IDLE_CAUSES = (
    "weight_sync",
    "pool",
    "draining",
    "worker_bound",
    "staleness_bound",
    "no_prompts",
    "waiting_for_prompts",
    "waiting_for_weights",
    "run_ending",
    "starting",
    "other",
)
"""Why a slot of a running replica is idle, in the order of the values: the replica syncs weights; another task has
its pool; the replica or the run drains; K is reached; the staleness bound is reached; there are no more prompts;
prompts are being drawn; the parked groups need newer weights than the replica has; the run needs no more groups; the
run is starting; anything else."""

ADMISSION_LIMITS = ("slots_full", "no_replica", *ROLLOUT_IDLE_CAUSES)
"""Why no further group starts: every slot is busy; no replica is up; otherwise why slots are idle."""

TRAINER_IDLE_CAUSES = (
    "waiting_for_groups",
    "waiting_for_stragglers",
    "publishing",
    "pool",
    "waiting_for_weight_sync",
    "waiting_for_replicas",
    "no_prompts",
    "draining",
    "restarting",
    "starting",
)
"""Why no batch is scored or trained, in the order of the values: fewer groups are ready than a batch needs; enough are
ready, but the step must take groups that still run; weights are being published; replicas in its pool do not sleep yet;
a replica does not have the newest weights, for which `train_after_sync` waits; no replica is up; there are no more
prompts; the run drains; the trainer restarts; the run is starting."""

TRAINER_TASKS = ("scoring", "training")
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

RECOVERY_KINDS = ("resumed", "branched", "scheduler")
"""How a run recovered: new processes continued and lost no train step; new processes continued from a checkpoint and
repeated the later steps; a new scheduler process took over the running actors."""

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
GROUP_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0)
TOKEN_BUCKETS = tuple(float(1 << power) for power in range(3, 18))
DECISION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
FIGURES_KEPT = 128
"""Maximum number of the trainer's metrics that are exported; the first names count."""
