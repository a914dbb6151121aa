"""Reacts when a process comes up or is lost: whether and from where it starts again, and what happens to its orders.

Called by `scheduler.py`. A lost process costs each of its orders one attempt, or if it hung,
those that exceeded their limits. A store or the gateway cannot be replaced
while the run continues: the run stops, and begins again from its record.
"""

from dataclasses import dataclass

from engine.commands import EnterState, PublishWeights, SaveCheckpoint, ScoreBatch, StopProcess, TrainStep
from engine.events import (
    BatchScored,
    Event,
    ProcessLost,
    ProcessUp,
    ProcessWaits,
    ReplicaLeaves,
    StateFailed,
    StateLeft,
)
from engine.ids import StepId
from engine.scheduling.groups import RolloutScheduling
from engine.scheduling.issued_commands import Orders
from engine.scheduling.lifetimes import Lifetimes
from engine.scheduling.steps import TrainingScheduling
from engine.scheduling.weights import SyncScheduling
from engine.states.orders import Order
from engine.states.process import ADDED_STATES, REPLICA, SCORER, TRAINER, TRAJECTORY_STORE, WEIGHTS_STORE, Process
from engine.states.state import State


@dataclass(eq=False)
class ProcessScheduling:
    """Handles the events of processes."""

    state: State
    orders: Orders
    lifetimes: Lifetimes
    rollout: RolloutScheduling
    sync: SyncScheduling
    training: TrainingScheduling

    def begin(self, replicas: int) -> None:
        """Start the processes of a run, or of a resumed run: `replicas` replicas, and those that the limits name."""
        state = self.state
        for replica in state.fleet.replicas.values():
            self.lifetimes.begin_again(replica.process)
            replica.process.wanted = replica.id < replicas
        for process in state.processes.values():
            self.lifetimes.begin_again(process)
        self.lifetimes.launch(replicas)
        scorers = [state.process(SCORER, index) for index in range(len(state.limits.scorers()))]
        added = [state.process(ADDED_STATES, 0)] if state.limits.added_states else []
        stores = [state.process(kind, 0) for kind in (TRAJECTORY_STORE, WEIGHTS_STORE)]
        for process in (state.process(TRAINER, 0), *scorers, *added, *stores):
            process.incarnation += 1  # the launch has brought them up
            state.fire_process(process, "up")

    # events

    def is_repeated(self, event: Event) -> bool:
        """Whether an event is about an incarnation that has ended, or repeats what is known."""
        if isinstance(event, ReplicaLeaves):
            replica = self.state.fleet.replicas.get(event.replica)
            return replica is None or replica.state == "down" or replica.incarnation != event.incarnation
        if not isinstance(event, ProcessUp | ProcessLost):
            return False
        process = self.state.find_process(event.kind, event.index)
        if process is None:
            return False
        if event.incarnation != process.incarnation:
            return event.incarnation < process.incarnation
        return process.state == "gone" or (isinstance(event, ProcessUp) and process.state != "starting")

    def on_batch_scored(self, event: BatchScored) -> None:
        for index, tasks in enumerate(self.state.limits.scorers()):
            if event.task in tasks:
                self.lifetimes.note_progress(self.state.process(SCORER, index))
        self.training.on_batch_scored(event)

    def on_state_left(self, event: StateLeft) -> None:
        self.lifetimes.note_progress(self.state.process(ADDED_STATES, 0))
        self.rollout.on_state_left(event)

    def on_up(self, event: ProcessUp) -> None:
        process = self._life(event)
        if process.state in ("up", "stopping"):  # an older incarnation
            self._end(process, "a newer incarnation joined")
        self.state.fire_process(process, "up")
        if event.kind == REPLICA:
            self.sync.join(self.state.fleet.replicas[event.index], event)

    def on_waits(self, event: ProcessWaits) -> None:
        self.state.wait_for_room(self.state.process(event.kind, event.index), event.reason)

    def on_lost(self, event: ProcessLost) -> None:
        process = self._life(event)
        if event.kind == REPLICA:
            self._lose_replica(process, event)
        elif event.kind == TRAINER:
            self._lose_trainer(process, event)
        elif event.kind in (SCORER, ADDED_STATES):
            self._lose_worker(process, event)
        else:
            self._end(process, event.reason)
            reason = f"the {process.id} is lost: {event.reason}"
            self.orders.end_run("stopped", reason, again=not event.final)

    def _life(self, event: ProcessUp | ProcessLost) -> Process:
        """The process of an event. A newer incarnation than the known one withdraws the known one's start and stop."""
        process = self.state.process(event.kind, event.index)
        if event.incarnation != process.incarnation:
            for subject in ("start", "stop"):
                self.state.orders.withdraw(subject, (event.kind, event.index))
        process.incarnation, process.room = event.incarnation, ""
        return process

    # kinds

    def _lose_replica(self, process: Process, event: ProcessLost) -> None:
        replica = self.state.fleet.replicas[event.index]
        self.state.orders.fail(replica.id)
        if replica.state != "down":
            self.rollout.lose_replica(replica, event.reason)
        self._follow(process, event)
        self.sync.note_none_left(replica, event.reason)

    def _follow(self, process: Process, event: ProcessLost) -> None:
        """Start a lost process again if it is wanted and its budget allows; else end it."""
        if process.wanted and not event.final and (process.excused or self.lifetimes.may_restart(process)):
            self.lifetimes.start(process)
        else:
            self._end(process, event.reason)

    def _end(self, process: Process, reason: str) -> None:
        if process.state != "gone":
            self.state.fire_process(process, "end")
        process.excused = False
        if process.kind == REPLICA:
            replica = self.state.fleet.replicas[process.index]
            if replica.state != "down":
                self.rollout.lose_replica(replica, reason)

    def _lose_worker(self, process: Process, event: ProcessLost) -> None:
        """A scorer, or the process of the added states: it has no data that would be lost with it."""
        tasks = self.state.limits.scorers()[process.index] if process.kind == SCORER else ()
        who = f"scorer of {' and '.join(tasks)}" if tasks else f"process of the {process.id}"
        reason = f"the {who} is lost: {event.reason}"
        if event.final or not self.lifetimes.may_restart(process):
            self._end(process, reason)
            self.orders.end_run("failed", self._spent(process, reason, event))  # a resume orders its work again
            return
        failed, charged = self._take_orders(process)
        self.lifetimes.start(process)
        self._fail(failed, charged, reason)

    def _lose_trainer(self, process: Process, event: ProcessLost) -> None:
        """Start the trainer again from a point that loses no step. If there is none, or the restart budget is spent,
        the run ends."""
        state = self.state
        failed, charged = self._take_orders(process)
        done = []  # done, but their reports are lost
        for order in failed:
            if isinstance(order.command, PublishWeights) and order.command.version <= event.published:
                self.training.take_published(order.id)
                done.append(order)
            elif isinstance(order.command, SaveCheckpoint) and order.command.steps in event.saved:
                self.training.take_saved(order.id)
                done.append(order)
        reason = f"the trainer is lost: {event.reason}"
        beginning = self.training.beginning()
        may_restart = self.lifetimes.may_restart(process)
        if beginning is None:
            self._end(process, reason)
            self.orders.end_run("failed", f"{reason}; {self.training.why_no_beginning()}")
            return
        if event.final or not may_restart:
            self._end(process, reason)
            self.orders.end_run("failed", self._spent(process, reason, event))
            return
        self.lifetimes.start(process, **beginning)
        self._fail([order for order in failed if order not in done], charged, reason)
        if "version" in beginning and state.limits.checkpoint_every and not state.checkpoint_pending:
            self.training.checkpoint()  # a resume could not begin from the checkpoints on disk

    def _take_orders(self, process: Process) -> tuple[list[Order], list[Order]]:
        """End the orders of a lost process. Returns them, and those that are charged an attempt: all, or if the process
        hung, those that exceeded their limits."""
        state, owners = self.state, self.state.owners_of(process)
        exceeded = [order for owner in owners for order in state.clocks.find_exceeded(owner)]
        hung = exceeded or any(
            isinstance(one.command, StopProcess) and one.command.hung for one in state.orders.matched
        )
        failed = [order for owner in owners for order in state.orders.fail(owner)]
        return failed, exceeded if hung else failed

    def _spent(self, process: Process, reason: str, event: ProcessLost) -> str:
        if event.final or process.deaths <= 1:
            return reason
        return f"{reason}; it ended {process.deaths} times without progress"

    def _fail(self, failed: list[Order], costly: list[Order], reason: str) -> None:
        """Repeat the orders that were lost with a process. Those in `costly` are charged an attempt. A lost checkpoint
        is ordered again only at the end of the run, which needs it."""
        steps: dict[StepId, bool] = {}
        for order in failed:
            command, charged = order.command, order in costly
            if isinstance(command, ScoreBatch | TrainStep):
                steps[command.step] = steps.get(command.step, False) or charged
            elif isinstance(command, PublishWeights) and not charged:
                self.training.publish()
            elif isinstance(command, PublishWeights):
                self.training.fail_publication(command.version, reason)
            elif isinstance(command, SaveCheckpoint):
                self.state.checkpoint_ordered = min(self.state.checkpoint_ordered, self.state.checkpoints.newest)
            elif isinstance(command, EnterState) and not charged:
                self.rollout.stages.put_back(command.state, self.state.groups[command.group])
            elif isinstance(command, EnterState):
                self.rollout.on_state_failed(
                    StateFailed(group=command.group, attempt=command.attempt, state=command.state,
                                cause="infrastructure", reason=reason)
                )  # fmt: skip
        for step, charged in steps.items():
            self.training.fail_step(step, reason, charged=charged)
        self.training.delete_checkpoints()  # those that the trainer was to delete
