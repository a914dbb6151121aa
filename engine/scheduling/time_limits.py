"""Time limits: when an order exceeds its limit, its work is cut short or the process to blame is stopped.

Called by `scheduler.py`, if any order has a limit (`Limits.timeouts`). `Clocks` says which orders are overdue. This
module keeps one timer, for the order that may be due first. It must never act on work that is within its limit.

The owner of an overdue order may itself wait for another process that hangs. So the owner is probed, then what it waits
for, and so on. The open `ProbeProcess` names the overdue order and the processes that were probed before.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from engine.commands import CancelTimer, ParkGroup, ProbeProcess, SetTimer
from engine.events import ProcessProbed, SchedulerRecovered, StateFailed, TimerFired, stamp
from engine.scheduling.groups import RolloutScheduling
from engine.scheduling.issued_commands import Orders
from engine.scheduling.lifetimes import REASON_LENGTH, Lifetimes
from engine.scheduling.validation import ValidationScheduling
from engine.states.clocks import SLACK_S, Clocks
from engine.states.orders import KINDS_OF_SUBJECTS, Order
from engine.states.process import REPLICA, Process
from engine.states.state import State
from engine.states.timeouts import AUTO, CUT
from engine.states.waits import described

LATE_S = 60.0
"""If the timer fires this much too late, the scheduler's own process was suspended, and answers may still arrive."""
COMMA = ", "


@dataclass(eq=False)
class TimeLimits:
    """Sets the timer, and acts on overdue orders when it fires."""

    state: State
    orders: Orders
    lifetimes: Lifetimes
    rollout: RolloutScheduling
    validation: ValidationScheduling

    @property
    def clocks(self) -> Clocks:
        return self.state.clocks

    # the timer

    def watch(self) -> None:
        """Set the timer for the order that may be due first."""
        state, clocks = self.state, self.clocks
        if not clocks.sooner:
            return
        clocks.sooner = False
        at = clocks.next_look()
        if clocks.enabled and at + SLACK_S >= clocks.timer_at:
            return
        if state.limit_timer is not None:
            self.orders.add(CancelTimer(timer=state.limit_timer, cause=self.orders.cause))
            state.limit_timer = None
        clocks.timer_at = inf
        if at < inf:
            timer, delay_s = state.new_timer(), max(0.0, at - state.now)
            state.limit_timer, clocks.timer_at = timer, state.now + delay_s
            self.orders.add(SetTimer(timer=timer, delay_s=delay_s, cause=self.orders.cause))

    def on_timer(self, event: TimerFired) -> None:
        """Act on every order that exceeds its limit."""
        state, clocks = self.state, self.clocks
        late_s = state.now - clocks.timer_at
        state.limit_timer, clocks.timer_at, clocks.sooner = None, inf, True
        if late_s > LATE_S:
            clocks.restart_all()
            return
        for order in clocks.take_overdue():
            if state.orders.is_open(order.number) and state.outcome is None:  # it may have ended with one before it
                self._act_on(order)

    def on_recovered(self, event: SchedulerRecovered) -> None:
        """Restart all clocks: answers may have arrived while no scheduler ran."""
        if self.clocks.enabled:
            self.clocks.restart_all()

    # acting

    def _act_on(self, order: Order) -> None:
        reason, limit_s = self._reason(order), self.clocks.limit(order)
        if KINDS_OF_SUBJECTS[order.subject] != CUT:
            self.clocks.double(order)
        if order.subject == "probe":
            self._on_silence(order)
        elif order.subject in ("group", "truncate"):
            self._park(order, f"an attempt exceeded its time limit of {limit_s:g} s (timeouts.group_s)")
        elif order.subject == "rows":
            self.validation.cut(order, reason)
        elif order.subject == "stage" and not self.clocks.is_silent(order):
            self._fail_stage(order, reason)
        elif order.subject == "stop":
            self.orders.end_run("stopped", reason, again=True)
        else:
            self._blame(order, reason)

    def _park(self, order: Order, reason: str) -> None:
        state = self.state
        group = state.groups[order.id]
        replica = state.fleet.replicas[group.replica]
        park = state.orders.find("park", group.id)
        if park is None or not getattr(park.command, "reason", ""):
            self.orders.add(
                ParkGroup(group=group.id, attempt=group.attempt, replica=replica.id, incarnation=replica.incarnation,
                          reason=reason, cause=self.orders.cause)
            )  # fmt: skip

    def _fail_stage(self, order: Order, reason: str) -> None:
        """Fail the attempt as a `StateFailed` would; its process keeps running. A late answer is a stale echo."""
        command: Any = order.command
        self.state.orders.withdraw("stage", order.id)
        failed = StateFailed(
            group=command.group, attempt=command.attempt, state=command.state, cause="infrastructure",
            reason=reason[:REASON_LENGTH],
        )  # fmt: skip
        stamp(failed, self.orders.cause, self.state.now)
        self.rollout.on_state_failed(failed)

    # whom to blame

    def _blame(self, order: Order, reason: str) -> None:
        """Probe the owner of an overdue order, unless that is in progress for another of its orders."""
        owner = self.state.process_of(order.owner)
        probes: list[Any] = [one.command for one in self.state.orders.open("probe").values()]
        if owner is None:  # the data source
            self.orders.end_run("stopped", reason)
        elif any(probe.chain.split(COMMA)[0] == owner.id for probe in probes):
            self.clocks.restart(order)
        else:
            self._probe(owner, order, reason[:REASON_LENGTH], owner.id)

    def _probe(self, process: Process, order: Order, reason: str, *chain: str) -> None:
        self.orders.add(
            ProbeProcess(kind=process.kind, index=process.index, incarnation=process.incarnation, order=order.number,
                         reason=reason, chain=COMMA.join(chain), cause=self.orders.cause)
        )  # fmt: skip

    def on_probed(self, event: ProcessProbed) -> None:
        """Follow the chain of processes that wait for one another. If the last one works, its own limits apply. If it
        is idle, the process that waits for it is to blame. In a cycle, the owner of the overdue order is to blame."""
        state = self.state
        probe: Any = state.orders.matched[0].command
        order = self._overdue(probe)
        if order is None:
            return
        chain, reason = probe.chain.split(COMMA), probe.reason
        awaited = state.processes.get(event.waits_for)
        if awaited is not None and awaited.id not in chain:
            if awaited.state == "up":
                self._probe(awaited, order, reason, *chain, awaited.id)
            else:
                self.clocks.restart(order)
        elif awaited is not None or len(chain) == 1:
            self._stop(chain[0], reason, order)
        elif self._works(state.processes[chain[-1]]):
            self.clocks.restart(order)
        else:
            self._stop(chain[-2], f"{chain[-2]} waits for the idle {chain[-1]}; {reason}", order)

    def _on_silence(self, order: Order) -> None:
        """Stop a process that did not answer a probe in time: it hangs."""
        probe: Any = order.command
        self.state.orders.withdraw("probe", order.id)
        process, overdue = self.state.find_process(probe.kind, probe.index), self._overdue(probe)
        chain = probe.chain.split(COMMA)
        if overdue is None or process is None:
            return
        if process.incarnation != probe.incarnation:
            self.clocks.restart(overdue)
        elif len(chain) == 1:
            self._stop(process.id, f"{probe.reason}; it does not answer", overdue)
        else:
            reason = f"the {process.id} does not answer, and {chain[-2]} waits for it; {probe.reason}"
            self._stop(process.id, reason, overdue)

    def on_lost(self, answered: tuple[Order, ...]) -> None:
        """A process was lost before it answered its probes: restart the clocks of the overdue orders."""
        for order in answered:
            if order.subject == "probe" and (overdue := self._overdue(order.command)) is not None:
                self.clocks.restart(overdue)

    def _overdue(self, probe: Any) -> Order | None:
        """The overdue order of a probe, if it is still open and has a limit."""
        orders = self.state.orders
        order = orders.numbered(probe.order) if orders.is_open(probe.order) else None
        return order if order is not None and order.subject in self.clocks.least else None

    def _works(self, process: Process) -> bool:
        """Whether it has an order with a limit."""
        owned = (order for owner in self.state.owners_of(process) for order in self.state.orders.owned(owner))
        return any(order.subject in self.clocks.least and order.subject != "probe" for order in owned)

    def _stop(self, name: str, reason: str, order: Order) -> None:
        """Stop the process to blame for an overdue order. `processes.py` handles its loss. No other code stops a
        process for a time limit."""
        owner = self.state.process_of(order.owner)
        process = self.state.processes.get(name, owner)
        assert process is not None
        if process.kind == REPLICA:
            replica = self.state.fleet.replicas[process.index]
            if replica.state != "down":
                self.rollout.lose_replica(replica, reason, hung=True)
        self.lifetimes.stop(process, reason, hung=True)
        if process is not owner:
            self.clocks.restart(order)

    def _reason(self, order: Order) -> str:
        """One sentence: the process, the limit, the time taken and the work."""
        timeouts, kind = self.state.limits.timeouts, KINDS_OF_SUBJECTS[order.subject]
        wait = described(order, self.state)
        setting = timeouts.setting(kind) + (": auto" if timeouts.given(kind) == AUTO else "")
        limit_s, taken_s = self.clocks.limit(order), self.clocks.elapsed(order)
        if timeouts.max_s is not None and taken_s < limit_s:
            setting, limit_s, taken_s = "timeouts.max_s", timeouts.max_s, self.state.now - order.at
        return f"{wait.by} exceeded its time limit of {limit_s:g} s ({setting}) after {taken_s:.0f} s: it {wait.what}"
