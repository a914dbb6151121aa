"""The values that labels can take, and the bounds of histograms: closed sets, so that series stay as many as they are.

Beside `names.py`, which uses them; read by what keeps the figures.
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
"""Why a slot of a living replica generates nothing: its replica takes weights; its pool is not rollout's now; its
replica is let go, or the run comes to rest; K is reached; the staleness bound is reached; the prompts are used up;
prompts are being drawn; the groups that could run need newer weights than the replica has; the run needs no more
groups; the run is starting; anything else."""

ADMISSION_LIMITS = ("slots_full", "no_replica", *ROLLOUT_IDLE_CAUSES)
"""What keeps the next group from starting: every slot is busy; no replica is up; else why slots are free."""

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
"""Why no train step is being scored or trained: fewer groups are ready than a batch takes; enough are, but a deadline
binds and its groups are still being generated; weights are being published; replicas in its pool are not asleep yet; a
replica has not got the newest weights, for which `train_after_sync` waits; no replica is alive; the prompts are used
up; the run comes to rest; another life of the trainer begins; the run is starting."""

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
"""How a run went on: in new processes with everything it had; in new processes from a checkpoint, what came after it
done again; with a new process of the scheduler beside the living actors."""

REQUESTS: dict[type[Event], str] = {
    StopRequested: "stop",
    DrainRequested: "drain",
    ReplicaLeaves: "replica_leaves",
    ReplicasWanted: "replicas_wanted",
    SettingChanged: "setting",
}
"""What users ask of a running run, by the event it becomes."""

PARKED_REASONS = ("timeout", "moved")
"""Why a running group is ordered to be parked: its attempt took too long; a faster replica takes it over."""

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
"""Different figures of the trainer that become series, at most: the first ones named."""
