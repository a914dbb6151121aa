"""Reacts when a process comes up or is lost: whether and from where it starts again, and what happens to its orders.

Called by `scheduler.py`. A lost process costs each of its orders one attempt, or if it hung,
those that exceeded their limits. A store or the gateway cannot be replaced
while the run continues: the run stops, and begins again from its record.
"""

from msgspec.structs import replace

from engine.commands import EnterState, InspectStep, PublishWeights, SaveCheckpoint, ScoreBatch, StopProcess, TrainStep
from engine.events import (
    CacheMeasured,
    CallsMeasured,
    Event,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    ReplicaLeaves,
)
from engine.scheduling.core import Core
from engine.scheduling.groups import lose_replica
from engine.scheduling.lifetimes import launch_replicas, may_restart, order_start, reset_process, start_process
from engine.scheduling.pools import is_empty
from engine.scheduling.steps import (
    beginning_of_trainer,
    delete_checkpoints,
    fail_publication,
    fail_state_work,
    fail_step,
    on_weights_stored,
    order_checkpoint,
    order_publication,
    take_saved,
    why_trainer_cannot_begin,
)
from engine.scheduling.weights import join_replica, note_none_left
from engine.states.limits import SCORING
from engine.states.orders import Order
from engine.states.process import (
    ADDED_STATES,
    POOL_TAKEN,
    REPLICA,
    SCORER,
    TRAINER,
    TRAJECTORY_STORE,
    WEIGHTS_STORE,
    FunctionCalls,
    Process,
)


def begin_processes(core: Core, replicas: int) -> None:
    """Start the processes of a run, or of a resumed run: `replicas` replicas, among them all that only validate,
    and those that the limits name."""
    state, own = core.state, core.state.limits.validators()
    for replica in state.replicas.by_id.values():
        reset_process(core, replica.process)
        replica.process.wanted = replica.validator or replica.id < replicas - len(own)
    for process in state.processes.values():
        reset_process(core, process)
    launch_replicas(core, own.stop or replicas)
    scorers = [state.process(SCORER, index) for index in range(len(state.limits.scorers()))]
    added = [state.process(ADDED_STATES, 0)] if state.limits.added_states else []
    stores = [state.process(kind, 0) for kind in (TRAJECTORY_STORE, WEIGHTS_STORE)]
    for process in (state.process(TRAINER, 0), *scorers, *added, *stores):
        process.life += 1  # the launch has brought them up
        state.fire_process(process, "up")


# events


ABOUT_LIVES = (ProcessUp, ProcessLost, ReplicaLeaves, CallsMeasured, CacheMeasured)
"""Events that may come from a life that has ended, and need no order."""


def is_repeated(core: Core, event: Event) -> bool:
    """Whether an event of `ABOUT_LIVES` is about a life that has ended, or repeats what is known."""
    if isinstance(event, ReplicaLeaves):
        replica = core.state.replicas.by_id.get(event.replica)
        return replica is None or replica.state == "down" or replica.life != event.life
    if isinstance(event, (CallsMeasured, CacheMeasured)):
        process = core.state.find_process(event.kind, event.index)
        return process is None or process.state != "up" or process.life != event.life
    if not isinstance(event, (ProcessUp, ProcessLost)):
        return False
    process = core.state.find_process(event.kind, event.index)
    if process is None:
        return False
    if event.life != process.life:
        return event.life < process.life
    return process.state == "gone" or (isinstance(event, ProcessUp) and process.state != "starting")


def on_up(core: Core, event: ProcessUp) -> None:
    process = _process_of(core, event)
    if process.state in ("up", "stopping"):  # an older life
        _end_process(core, process, "a newer life joined")
    core.state.fire_process(process, "up")
    if event.kind == REPLICA:
        join_replica(core, core.state.replicas.by_id[event.index], event)


def on_waits(core: Core, event: ProcessWaits) -> None:
    """A process cannot start before it has room; with an empty reason, it has room now. Its start is timed from then
    on."""
    core.state.process(event.kind, event.index).no_room = event.reason


def on_calls_measured(core: Core, event: CallsMeasured) -> None:
    process = core.state.process(event.kind, event.index)
    before = process.calls.get(event.function, FunctionCalls())
    call_s = event.seconds / event.calls if event.calls else max(before.call_s, event.running_s)
    ended = before.ended or event.calls > 0
    found = FunctionCalls(event.groups, event.queued, event.at_once, event.setting, call_s, ended)
    process.calls = {**process.calls, event.function: found}


def on_lost(core: Core, event: ProcessLost) -> None:
    process = _process_of(core, event)
    if event.kind == REPLICA:
        _lose_replica(core, process, event)
    elif event.kind == TRAINER:
        _lose_trainer(core, process, event)
    elif event.kind in (SCORER, ADDED_STATES):
        _lose_worker(core, process, event)
    else:
        _end_process(core, process, event.reason)
        reason = f"the {process.id} is lost: {event.reason}"
        core.state.end_run("stopped", reason, again=not event.final)


def _process_of(core: Core, event: ProcessUp | ProcessLost) -> Process:
    """The process of an event. A newer life than the known one withdraws the known one's start and stop."""
    process = core.state.process(event.kind, event.index)
    if event.life != process.life:
        for subject in ("start", "stop"):
            core.state.orders.withdraw(subject, (event.kind, event.index))
    process.life, process.no_room, process.calls = event.life, "", {}
    return process


def start_trainer_in_turn(core: Core) -> None:
    """Start a trainer that waits for its pool, and repeat what was ordered of it meanwhile, because nobody has it."""
    process = core.state.process(TRAINER, 0)
    if process.no_room == POOL_TAKEN and is_empty(core, core.state.pools.of("train")):
        waiting = core.state.orders.owned(TRAINER)
        beginning = beginning_of_trainer(core)
        assert beginning is not None  # what it begins with is kept while it waits
        order_start(core, process, **beginning)
        for order in waiting:
            core.state.orders.add(replace(order.command, cause=-1))


# kinds


def _lose_replica(core: Core, process: Process, event: ProcessLost) -> None:
    replica = core.state.replicas.by_id[event.index]
    lose_replica(core, replica, event.reason)
    core.state.orders.fail(replica.id)
    _restart_or_end(core, process, event)
    note_none_left(core, replica, event.reason)


def _restart_or_end(core: Core, process: Process, event: ProcessLost) -> None:
    """Start a lost process again if it is wanted and its budget allows; else end it."""
    ends = event.final or not process.wanted
    if not ends and (process.excused or may_restart(core, process)):
        start_process(core, process)
    else:
        _end_process(core, process, event.reason)


def _end_process(core: Core, process: Process, reason: str) -> None:
    if process.state != "gone":
        core.state.fire_process(process, "end")
    process.excused = False
    if process.kind == REPLICA:
        lose_replica(core, core.state.replicas.by_id[process.index], reason)


def _lose_worker(core: Core, process: Process, event: ProcessLost) -> None:
    """A scorer, or the process of the added states: it has no data that would be lost with it."""
    tasks = core.state.limits.scorers()[process.index] if process.kind == SCORER else ()
    who = f"scorer of {' and '.join(tasks)}" if tasks else f"process of the {process.id}"
    reason = f"the {who} is lost: {event.reason}"
    if event.final or not may_restart(core, process):
        _end_process(core, process, reason)
        core.state.end_run("failed", _why_spent(process, reason, event))  # a resume orders its work again
        return
    failed, charged = _take_orders(core, process, event)
    start_process(core, process)
    _repeat_lost_orders(core, failed, charged, reason)


def _lose_trainer(core: Core, process: Process, event: ProcessLost) -> None:
    """Start the trainer again from a point that loses no step. If there is none, or the restart budget is spent,
    the run ends."""
    state = core.state
    failed, charged = _take_orders(core, process, event)
    done = []  # done, but their reports are lost
    for order in failed:
        if isinstance(order.command, PublishWeights) and order.command.version <= event.published:
            on_weights_stored(core, order.id)
            done.append(order)
        elif isinstance(order.command, SaveCheckpoint) and order.command.steps in event.saved:
            take_saved(core, order.id)
            done.append(order)
    reason = f"the trainer is lost: {event.reason}"
    beginning = beginning_of_trainer(core)
    restarts = may_restart(core, process)
    if beginning is None:
        _end_process(core, process, reason)
        core.state.end_run("failed", f"{reason}; {why_trainer_cannot_begin(core)}")
        return
    if event.final or not restarts:
        _end_process(core, process, reason)
        core.state.end_run("failed", _why_spent(process, reason, event))
        return
    start_process(core, process, **beginning)
    for step in state.training.formed_steps:  # what the trainer computed of a batch that is inspected is lost
        if step.state in state.limits.states_at(SCORING):
            fail_step(core, step.id, reason, charged=False)
    _repeat_lost_orders(core, [order for order in failed if order not in done], charged, reason)
    if "version" in beginning and state.limits.checkpoint_every and not state.checkpoint_pending:
        order_checkpoint(core)  # a resume could not begin from the checkpoints on disk


def _take_orders(core: Core, process: Process, event: ProcessLost) -> tuple[list[Order], list[Order]]:
    """End the orders of a lost process. Returns them, and those that are charged an attempt: all, or if the process
    hung, those that exceeded their limits. Such a process is stopped only if it hung."""
    state, owners = core.state, core.state.owners_of(process)
    exceeded = [order for owner in owners for order in state.orders.owned(owner) if order.overdue]
    hung = exceeded or any(isinstance(one.command, StopProcess) for one in state.orders.matched[event.id])
    failed = [order for owner in owners for order in state.orders.fail(owner)]
    return failed, exceeded if hung else failed


def _why_spent(process: Process, reason: str, event: ProcessLost) -> str:
    if event.final or process.deaths <= 1:
        return reason
    return f"{reason}; it ended {process.deaths} times without progress"


def _repeat_lost_orders(core: Core, failed: list[Order], costly: list[Order], reason: str) -> None:
    """Repeat the orders that were lost with a process. Those in `costly` are charged an attempt. At most one of them
    scores or trains a step, because a pool has one task at a time. A lost checkpoint is ordered again only at the end
    of the run, which needs it."""
    for order in failed:
        command, charged = order.command, order in costly
        if isinstance(command, ScoreBatch | TrainStep):
            fail_step(core, command.step, reason, charged=charged)
        elif isinstance(command, PublishWeights) and not charged:
            order_publication(core)
        elif isinstance(command, PublishWeights):
            fail_publication(core, command.version, reason)
        elif isinstance(command, SaveCheckpoint):
            core.state.checkpoints.ordered = min(core.state.checkpoints.ordered, core.state.checkpoints.newest)
        elif isinstance(command, EnterState | InspectStep):
            fail_state_work(core, command, reason, charged=charged)
    delete_checkpoints(core)  # those that the trainer was to delete
