"""Process lifetimes: starts, stops, and whether a process that ended is started again.

Called by the other modules of `scheduling/`. It decides nothing about the work of a process: `processes.py` does.
"""

from typing import Any

from engine.commands import StartProcess, StopProcess
from engine.scheduling.core import Core
from engine.states.process import ADDED_STATES, POOL_TAKEN, REPLICA, SCORER, TRAINER, Process

REASON_LENGTH = 1000
"""Maximum length of a reason in an order, in characters."""
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delay after a failed start. It doubles with each further one."""
REFILLED_BY_STEPS = (REPLICA, TRAINER)
"""Kinds of processes for which a train step is progress. For the others, an answered order is."""


def launch_replicas(core: Core, replicas: int) -> None:
    """Start those of the first `replicas` replicas that are wanted and gone."""
    for index in range(replicas):
        process = core.state.process(REPLICA, index)
        if process.state == "gone" and process.wanted and not process.deaths:
            start_process(core, process)


def start_process(core: Core, process: Process, **beginning: Any) -> None:
    """Start the next life of a process. One that takes turns waits until its pool has room. `beginning`: a
    trainer's starting point, as fields of `StartProcess`."""
    process.delay_s = 0.0
    if process.state == "starting" and process.deaths:  # give the cause of the failed start time to pass
        process.delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(process.deaths - 1, 10))
    core.state.fire_process(process, "start" if process.state == "gone" else "restart")
    process.life += 1
    process.excused, process.no_room = False, POOL_TAKEN if _takes_turns(core, process) else ""
    if not process.no_room:
        order_start(core, process, **beginning)


def order_start(core: Core, process: Process, **beginning: Any) -> None:
    """Order the start of a process that has room."""
    process.no_room = ""
    core.state.orders.add(StartProcess(**process.address(), delay_s=process.delay_s, **beginning))


def _takes_turns(core: Core, process: Process) -> bool:
    """Whether a process starts where rollout and a task of the trainer take turns. The launch starts all at once."""
    if process.kind == REPLICA and core.state.pools.of_replica(process.index) is not None:
        return core.state.process(TRAINER, 0).state != "gone"
    return process.kind == TRAINER and core.state.pools.of("train") in core.state.pools.shared


def stop_process(core: Core, process: Process, reason: str, *, hung: bool = False) -> None:
    """Stop a process. Its `ProcessLost` may start the next life."""
    if process.state not in ("starting", "up"):
        return
    core.state.fire_process(process, "stop")
    process.no_room = ""
    core.state.orders.withdraw("start", (process.kind, process.index))
    core.state.orders.add(StopProcess(**process.address(), reason=reason[:REASON_LENGTH], hung=hung))


def reset_process(core: Core, process: Process) -> None:
    """The run continues with new processes: the old life has ended, and the restart budget is reset."""
    if process.state != "gone":
        core.state.fire_process(process, "end")
    process.deaths = process.trained = 0
    process.excused, process.reason, process.no_room = False, "", ""


def may_restart(core: Core, process: Process) -> bool:
    """Charge the death of a process to its restart budget. Returns whether it may be started again. Progress resets
    the budget."""
    trained = core.state.training.steps_trained
    if process.kind in REFILLED_BY_STEPS and process.trained != trained:
        process.deaths = 0
    process.trained = trained
    process.deaths += 1
    return process.deaths <= _restarts_of(core, process)


def _restarts_of(core: Core, process: Process) -> int:
    limits = core.state.limits
    if process.kind == REPLICA:
        return limits.replica_restarts
    if process.kind == TRAINER:
        return limits.trainer_restarts
    return limits.worker_restarts if process.kind in (SCORER, ADDED_STATES) else 0
