"""A run that goes on after its processes have ended: back to the weights there are, and on from there.

Called by `scheduler.py`. The weights come from a checkpoint, or are the initial ones; trajectories, replicas and the
weights of every version are gone with the processes that held them. The state says what was true before; this makes it
say what is true now, and asks for the one thing that everything else waits for: those weights as a new version.
"""

from engine.events import RunResumed
from engine.scheduling.sync import SyncScheduling
from engine.scheduling.training import TrainingScheduling
from engine.scheduling.validation import ValidationScheduling
from engine.states.invariants import require
from engine.states.state import State


def resume(
    event: RunResumed,
    state: State,
    training: TrainingScheduling,
    sync: SyncScheduling,
    validation: ValidationScheduling,
) -> None:
    """Take the run back to `event.steps` train steps and let it begin again. Raises: `InvariantViolated`."""
    again = (*event.consumed, *event.released)
    require(
        0 <= event.steps <= state.steps_trained, "law 5: a run resumes after steps that it did not train",
        steps=event.steps, trained=state.steps_trained,
    )  # fmt: skip
    require(
        len(set(again)) == len(again) and all(0 <= id < state.ledger.drawn and id not in state.groups for id in again),
        "law 5: a group is said to have ended that has not", groups=again[:8],
    )  # fmt: skip
    validation.begin_again()
    for replica in state.fleet.replicas.values():
        for id in list(replica.groups):
            state.unseat(state.groups[id])
        replica.staged = replica.staging = None
        replica.failed_groups = 0
        replica.returns = replica.id < event.replicas
        if replica.state != "lost":
            state.fire_replica(replica, "lose")
    state.branch(event.steps, event.consumed, event.released)
    state.started = True
    state.outcome = None
    state.asked = 0
    state.publish_failures = state.failed_in_a_row = 0
    state.checkpoint_pending = False
    state.checkpoint_ordered = event.steps
    state.last_failure = ""
    training.failure = sync.failure = None
    sync.none_left = ""
    training.publish()
