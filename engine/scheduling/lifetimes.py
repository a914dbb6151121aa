"""Process lifetimes: starts, stops, and whether a process that ended is started again.

Called by the other modules of `scheduling/`. It decides nothing about the work of a process: `processes.py` does.
"""

from dataclasses import dataclass
from typing import Any

from engine.commands import StartProcess, StopProcess
from engine.scheduling.issued_commands import MOST_STARTS, Orders
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER, Process
from engine.states.state import State

REASON_LENGTH = 1000
"""Maximum length of a reason in an order, in characters."""
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delay after a failed start. It doubles with each further one."""
REFILLED_BY_STEPS = (REPLICA, TRAINER)
"""Kinds of processes for which a train step is progress. For the others, an answered order is."""


@dataclass(eq=False)
class Lifetimes:
    """Orders starts and stops of processes, within their restart budgets."""

    state: State
    orders: Orders

    def launch(self, replicas: int) -> None:
        """Start those of the first `replicas` replicas that are wanted and gone."""
        self.state.launched, self.state.launching = 0, replicas
        self.continue_launch()

    def continue_launch(self) -> None:
        """Start the next replicas of a launch, at most `MOST_STARTS` in one event."""
        state, left = self.state, MOST_STARTS
        while state.launched < state.launching:
            process = state.process(REPLICA, state.launched)
            if process.state == "gone" and process.wanted and not process.deaths:
                if not left:
                    self.orders.continue_at_once()
                    return
                left -= 1
                self.start(process)
            state.launched += 1

    def start(self, process: Process, **beginning: Any) -> None:
        """Start the next incarnation of a process. `beginning`: a trainer's starting point, as fields of
        `StartProcess`."""
        delay_s = 0.0
        if process.state == "starting" and process.deaths:  # give the cause of the failed start time to pass
            delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(process.deaths - 1, 10))
        self.state.fire_process(process, "start" if process.state == "gone" else "restart")
        process.incarnation += 1
        process.excused, process.room = False, ""
        self.orders.add(
            StartProcess(kind=process.kind, index=process.index, incarnation=process.incarnation, delay_s=delay_s,
                         cause=self.orders.cause, **beginning)
        )  # fmt: skip

    def stop(self, process: Process, reason: str, *, hung: bool = False) -> None:
        """Stop a process. Its `ProcessLost` may start the next incarnation."""
        if process.state not in ("starting", "up"):
            return
        self.state.fire_process(process, "stop")
        self.state.orders.withdraw("start", (process.kind, process.index))
        self.orders.add(
            StopProcess(kind=process.kind, index=process.index, incarnation=process.incarnation,
                        reason=reason[:REASON_LENGTH], hung=hung, cause=self.orders.cause)
        )  # fmt: skip

    def begin_again(self, process: Process) -> None:
        """The run continues with new processes: the old incarnation has ended, and the restart budget is reset."""
        if process.state != "gone":
            self.state.fire_process(process, "end")
        process.deaths = process.trained = 0
        process.excused, process.reason, process.room = False, "", ""

    def may_restart(self, process: Process) -> bool:
        """Charge the death of a process to its restart budget. Returns whether it may be started again. Progress resets
        the budget."""
        trained = self.state.steps_trained
        if process.kind in REFILLED_BY_STEPS and process.trained != trained:
            process.deaths = 0
        process.trained = trained
        process.deaths += 1
        return process.deaths <= self._restarts(process)

    def note_progress(self, process: Process) -> None:
        """A process other than a replica or the trainer has answered an order."""
        if process.deaths:
            process.deaths = 0

    def _restarts(self, process: Process) -> int:
        limits = self.state.limits
        if process.kind == REPLICA:
            return limits.replica_restarts
        if process.kind == TRAINER:
            return limits.trainer_restarts
        return limits.worker_restarts if process.kind in (SCORER, ADDED_STATES) else 0
