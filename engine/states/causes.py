"""Why slots, the trainer or a step wait: one table of causes, and which of them holds.

Read by the metrics of idle time, the status, `waits`, `explain`, and the error of a stuck run. Pure; changes nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

from engine.errors import counted
from engine.ids import Version
from engine.states.pool import ROLLOUT
from engine.states.process import TRAINER
from engine.states.replica import Replica
from engine.states.state import State

REPLICAS_NAMED = 4


class Cause(NamedTuple):
    """One reason to wait, or one task."""

    name: str
    """The value of labels and figures."""
    sentence: str
    """For a time that is over."""
    now: Callable[[State], str] = lambda state: ""
    """For the present; empty where the order that is open says more."""


# -- sentences with the figures that the scheduler decides by ----------------------------------------------------------


def missing_groups(state: State) -> str:
    """What the next batch lacks: `2 groups`, `1 group due by step 3`, or a decision of the batching policy."""
    step, size, ready = state.training.steps_batched, state.limits.train_batch_size, state.groups.ledger.ready
    if ready < size:
        return counted(size - ready, "group")
    if needs := state.groups.deadlines.needs(step, size):
        return f"{counted(sum(count for _, count in needs), 'group')} due by step {needs[-1][0]}"
    return f"the batching policy to take {size} of {ready} groups"


def limited_replicas(state: State) -> str:
    """`replica 1 is limited to 9 groups by scheduler.policies.concurrency: its KV cache is 84 % full`: why replicas
    with free slots take no group. Empty if there are none."""
    limited = [replica for replica in state.replicas.rollouts if state.replicas.is_limited(replica)]
    return "; ".join(map(limit_text, limited[:REPLICAS_NAMED]))


def limit_text(replica: Replica) -> str:
    cache = f": its KV cache is {100 * replica.cache_used:.0f} % full" if replica.cache_used else ""
    limit = counted(replica.limit, "group")
    return f"replica {replica.id} is limited to {limit} by scheduler.policies.concurrency{cache}"


def waits_for_groups(state: State) -> str:
    size, ledger = state.limits.train_batch_size, state.groups.ledger
    ready = f"{ledger.ready} of {size} ready" if ledger.ready < size else f"{ledger.ready} ready"
    return f"step {state.training.steps_batched} waits for {missing_groups(state)}; {ready}, {ledger.running} running"


def _works(task: str) -> Callable[[State], str]:
    def now(state: State) -> str:
        step = state.training.training_step
        return "" if step is None else f"{task} step {step.id} on {counted(len(step.groups), 'group')}"

    return now


def _waits_to_be_scored(state: State) -> str:
    step = state.training.training_step
    return "" if step is None else f"step {step.id} waits for {missing_for_scoring(state)}"


def missing_for_scoring(state: State) -> str:
    """What the tasks of a step that is scored wait for, while none has begun."""
    pooled = why_nothing_is_scored(state) is POOL
    return "its pool: replicas go to sleep or start" if pooled else "replicas to take the newest weights"


def _says(words: str) -> Callable[[State], str]:
    return lambda state: words


# -- the table ---------------------------------------------------------------------------------------------------------


POOL = Cause("pool", "another task used its pool", _waits_to_be_scored)
DRAINING = Cause("draining", "the replica or the run drained", _says("the run is draining: no further step"))
NO_PROMPTS = Cause("no_prompts", "the prompts were used up", _says("the prompts are used up"))
STARTING = Cause("starting", "the run was starting", _says("the run is starting"))

WEIGHT_SYNC = Cause("weight_sync", "its replica took new weights")
REWARD = Cause(
    "reward", "its groups waited for rewards, for the trajectory store, or for the work of an added state",
    _says("their groups wait for rewards"),
)  # fmt: skip
AGENT = Cause("agent", "its group waited for an agent or an environment")
WORKER_BOUND = Cause(
    "worker_bound", "K groups were running (scheduler.max_concurrent_groups)",
    lambda state: f"K = {state.limits.max_concurrent_groups} groups run",
)  # fmt: skip
STALENESS_BOUND = Cause(
    "staleness_bound", "the staleness bound was reached (scheduler.max_staleness_steps)",
    lambda state: (
        f"S = {state.limits.max_staleness_steps}: no place before version {state.training.latest_version + 1}"
    ),
)  # fmt: skip
WAITING_FOR_PROMPTS = Cause("waiting_for_prompts", "prompts were being drawn", _says("prompts are being drawn"))
WAITING_FOR_WEIGHTS = Cause(
    "waiting_for_weights", "the parked groups needed newer weights",
    _says("groups that could resume need newer weights"),
)  # fmt: skip
RUN_ENDING = Cause("run_ending", "the run needed no more groups", _says("the run needs no more groups"))
CONCURRENCY = Cause(
    "concurrency", "scheduler.policies.concurrency allowed its replica no more groups", limited_replicas
)
OTHER = Cause("other", "the policies started no group", _says("the policies start no group"))
SLOT_CAUSES = (
    WEIGHT_SYNC, POOL, DRAINING, REWARD, AGENT, WORKER_BOUND, STALENESS_BOUND, NO_PROMPTS, WAITING_FOR_PROMPTS,
    WAITING_FOR_WEIGHTS, RUN_ENDING, STARTING, CONCURRENCY, OTHER,
)  # fmt: skip
"""Why a slot of a running replica is idle."""

SCORING = Cause("scoring", "it scored a batch", _works("scoring"))
TRAINING = Cause("training", "it trained", _works("training"))
TASKS = (SCORING, TRAINING)
WAITING_FOR_GROUPS = Cause("waiting_for_groups", "fewer groups were ready than a batch needs", waits_for_groups)
WAITING_FOR_STRAGGLERS = Cause(
    "waiting_for_stragglers", "enough groups were ready, but the step had to take one that still ran", waits_for_groups
)
PUBLISHING = Cause(
    "publishing", "weights were published",
    lambda state: (
        f"publishing version {state.training.latest_version + 1}, after step {state.training.steps_trained - 1}"
    ),
)  # fmt: skip
INSPECTING = Cause("inspecting", "an added state inspected a batch or weights")
WAITING_FOR_WEIGHT_SYNC = Cause(
    "waiting_for_weight_sync", "a replica did not have the newest weights", _waits_to_be_scored
)
WAITING_FOR_REPLICAS = Cause(
    "waiting_for_replicas", "no replica was up",
    lambda state: f"step {state.training.steps_batched} waits for a replica: none is alive",
)  # fmt: skip
RESTARTING = Cause("restarting", "the trainer restarted")
TRAINER_CAUSES = (
    WAITING_FOR_GROUPS, WAITING_FOR_STRAGGLERS, PUBLISHING, INSPECTING, POOL, WAITING_FOR_WEIGHT_SYNC,
    WAITING_FOR_REPLICAS, NO_PROMPTS, DRAINING, RESTARTING, STARTING,
)  # fmt: skip
"""Why no batch is scored or trained."""

BY_NAME = {cause.name: cause for cause in (*TASKS, *SLOT_CAUSES, *TRAINER_CAUSES)}


# -- which cause holds -------------------------------------------------------------------------------------------------


def why_slots_are_free(state: State, newest: Version) -> Cause:
    """Why no further group starts on a ready replica. `newest`: the newest version on such replicas."""
    limits, ledger, replicas = state.limits, state.groups.ledger, state.replicas
    if not state.facts.started:
        return STARTING
    if state.ending.draining:
        return DRAINING
    if limits.max_steps is not None and state.held >= limits.max_steps * limits.train_batch_size:
        return RUN_ENDING
    if ledger.running >= limits.max_concurrent_groups:
        return WORKER_BOUND
    if state.held >= state.places(newest):
        return STALENESS_BOUND
    if ledger.waiting or ledger.parked:
        _, free = replicas.room_beside(replicas.slow(limits.straggler_factor))
        if free <= 0 and any(map(replicas.is_limited, replicas.rollouts)):
            return CONCURRENCY
    if ledger.waiting:
        return OTHER
    if ledger.parked:
        return WAITING_FOR_WEIGHTS
    return NO_PROMPTS if state.no_more_prompts else WAITING_FOR_PROMPTS


def what_the_trainer_does(state: State) -> Cause:
    """Its task, or why it has none."""
    ledger, step = state.groups.ledger, state.training.training_step
    trainer = state.processes.get(TRAINER)
    if trainer is not None and trainer.coming:
        return RESTARTING
    if step is not None and step.state == SCORING.name:
        return SCORING if state.scoring(step) else why_nothing_is_scored(state)
    if step is not None and step.state == TRAINING.name:
        return TRAINING
    if state.orders.open["inspect"]:
        return INSPECTING
    if state.publishing:
        return PUBLISHING
    if state.ending.draining:
        return DRAINING
    if not state.facts.started:
        return STARTING
    if all([one.state == "down" or one.validator for one in list(state.replicas.by_id.values())]):
        return WAITING_FOR_REPLICAS
    if not ledger.unconsumed and state.no_more_prompts:
        return NO_PROMPTS
    return WAITING_FOR_STRAGGLERS if ledger.ready >= state.limits.train_batch_size else WAITING_FOR_GROUPS


def why_nothing_is_scored(state: State) -> Cause:
    """Why the tasks of a step that is scored have not begun."""
    lease, by_id = state.pools.of("train"), state.replicas.by_id
    loads = any(by_id[id].process.loads for id in state.pools.sleepers(lease) if id in by_id)
    taken = loads or lease.task == ROLLOUT
    return POOL if taken else WAITING_FOR_WEIGHT_SYNC
