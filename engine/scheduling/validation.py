"""Validation runs: when one is due, which replicas it holds at its version, which rows each measures, how it ends.

Called by `scheduler.py`. A run takes nothing but slots of the replicas it holds, and delays nothing but their
installs. Whatever becomes of it, the training run continues.
"""

from dataclasses import dataclass
from typing import Any

from engine.commands import MeasureRows, StopMeasuring
from engine.events import OrderDone, RowsFailed, RowsMeasured
from engine.ids import StepId, Version
from engine.scheduling.decisions import Decisions
from engine.scheduling.issued_commands import Orders
from engine.states.limits import ValidationLimits
from engine.states.orders import Order
from engine.states.replica import Replica
from engine.states.state import State
from engine.states.validation import Chunk, Validation, Validations

REASON_LENGTH = 1000
"""Maximum length of a stored reason, in characters."""


@dataclass(eq=False)
class ValidationScheduling:
    """Serves one validation run at a time, the oldest. Of those that wait, the newest supersedes the others."""

    state: State
    decisions: Decisions
    orders: Orders

    @property
    def books(self) -> Validations:
        return self.state.validations

    @property
    def limits(self) -> ValidationLimits | None:
        return self.state.limits.validation

    # facts

    def on_rows_measured(self, event: RowsMeasured) -> None:
        run, chunk, replica = self._subject(event)
        fits = 0 <= event.right <= event.measured <= chunk.count and self._fits(event, chunk)
        if event.version != run.version or not fits:
            reason = (
                f"its replica reported version {event.version} instead of {run.version}, or {event.measured} rows and "
                f"{event.right} right ones of {chunk.count}"
            )
            self._lose_attempt(run, chunk, replica, reason)
            return
        self.books.count(run, chunk, replica, event)
        if run.left:
            return
        if run.measured:
            self._end(run, "report", "")
        else:
            self._end(run, "fail", "no row could be measured")

    @staticmethod
    def _fits(event: RowsMeasured, chunk: Chunk) -> bool:
        """Whether an answer names each measured row of its chunk once, or none, and only these in its other parts."""
        named = {*event.rows}
        known = not named or (len(named) == event.measured and len({*event.right_rows}) == event.right)
        inside = all(chunk.first <= row < chunk.first + chunk.count for row in event.rows)
        inside = inside and named.issuperset(event.right_rows) and named.issuperset(event.part_rows)
        parts = len(event.part_rows) == len(event.part_places) == len(event.part_values)
        return known and inside and parts and len(named) == len(event.rows) == len(event.rewards) == len(event.answers)

    def on_rows_failed(self, event: RowsFailed) -> None:
        self._lose_attempt(*self._subject(event), event.reason)

    def on_order_done(self, event: OrderDone) -> None:
        """A replica that stopped measuring has free slots for rows."""
        for order in self.state.orders.matched:
            if order.subject == "stop rows":
                self.books.look_again([order.id])

    def cut(self, order: Order, reason: str) -> None:
        """A chunk exceeded its time limit: its replica stops measuring, and all chunks there wait again. Only the
        overdue one is charged an attempt."""
        late: Any = order.command
        run, replica = self.books.runs[late.validation], self.state.fleet.replicas[late.replica]
        self.orders.add(
            StopMeasuring(validation=run.id, replica=replica.id, incarnation=replica.incarnation,
                          number=self.orders.number, cause=self.orders.cause)
        )  # fmt: skip
        for index in list(replica.chunks):
            self.books.put_back(run, run.chunks[index], replica, failed=index == late.chunk)
        run.reason = reason[:REASON_LENGTH]

    def _is_stopping(self, run: Validation, replica: Replica) -> bool:
        """Whether a replica has not yet stopped measuring for a run. It would drop new chunks too."""
        stop: Any = self.state.orders.find("stop rows", replica.id)
        return stop is not None and stop.command.validation == run.id

    def _subject(self, event: RowsMeasured | RowsFailed) -> tuple[Validation, Chunk, Replica]:
        """The run, chunk and replica of an answer."""
        run = self.books.runs[event.validation]
        return run, run.chunks[event.chunk], self.state.fleet.replicas[event.replica]

    def _lose_attempt(self, run: Validation, chunk: Chunk, replica: Replica, reason: str) -> None:
        self.books.put_back(run, chunk, replica)
        run.reason = reason[:REASON_LENGTH]

    # orders

    def advance(self) -> None:
        """Queue what is due, give the oldest run its replicas, end what cannot continue."""
        if self.limits is None or not self.state.started or self.state.outcome is not None:
            return
        self._queue_due(self.limits)
        if self.state.draining:
            return  # a queued validation is measured after the resume
        for run in list(self.books.runs.values()):
            self._take_replicas(run, self.limits)
            spent = self._why_it_cannot(run, self.limits)
            if spent:
                self._end(run, "fail", spent)
            elif self._in_conflict(run, self.limits):
                self._end(run, "cancel", f"it kept every replica from version {self.state.latest_version}")
            else:
                return

    def send(self) -> None:
        """Fill free slots of the replicas that the served run holds. Called before groups get the slots."""
        run = self.books.served
        if run is None or not self.books.sendable:
            return
        for replica in self.books.with_room(run):
            if not run.waiting:
                return
            pool = self.state.pools.of_replica(replica.id)
            wanted = (pool is not None and pool.wanted) or self._is_stopping(run, replica)
            if replica.state == "ready" and replica.version == run.version and not wanted:
                while run.waiting and replica.free_for_chunks > 0:
                    if run.state == "queued":
                        run.started_at = self.state.now
                        self.books.fire(run, "start")
                    self._order(run, self.books.send(run, replica), replica)
                if replica.free_for_chunks > 0:
                    return
            self.books.no_room(replica)

    def close(self) -> None:
        """No newer version will be published: measure the last one, if it was not measured, on all replicas."""
        if self.limits is None:
            return
        self.books.closing = True
        if self.limits.at_end and self.books.newest != self.state.latest_version:
            self._queue(self.state.latest_version, self.limits)

    def reopen(self) -> None:
        """Newer versions will be published after all."""
        self.books.closing = False

    def begin_again(self, steps: StepId) -> None:
        """The run is resumed after `steps` train steps, and older versions and their validations are lost. The next
        version is measured instead: it contains their steps, and usually the same weights. A validation of steps that
        are trained again is queued again with them."""
        for run in list(self.books.runs.values()):
            for id in list(run.replicas):
                self.books.release(run, self.state.fleet.replicas[id])  # its process is gone, so no order to stop
            again = "its steps are trained again" if run.steps > steps else "the next version is measured instead"
            self._cut_off(run, f"the run ended before the validation: {again}")
        self.books.owed |= 0 <= self.books.interrupted <= steps
        self.books.interrupted = -1
        self.books.closing = False
        if self.limits is not None:
            self.books.considered = self.state.latest_version

    def cancel_all(self, reason: str) -> None:
        """Cancel all validations, because the run ends."""
        for run in list(self.books.runs.values()):
            self._cut_off(run, reason)

    def _cut_off(self, run: Validation, reason: str) -> None:
        known = self.books.interrupted
        self.books.interrupted = run.steps if known < 0 else min(known, run.steps)
        self._end(run, "cancel", reason)

    # deciding

    def _queue_due(self, limits: ValidationLimits) -> None:
        books, steps_in = self.books, self.state.steps_in
        while books.considered < self.state.latest_version:
            version = books.considered = books.considered + 1
            before = steps_in[max(version - 1, 0)]
            due = self.decisions.ask("validation", (version, before, steps_in[version]), (bool,))
            if due or self.books.owed:
                self.books.owed = False
                self._queue(version, limits)

    def _queue(self, version: Version, limits: ValidationLimits) -> None:
        for run in [run for run in self.books.runs.values() if run.state == "queued"]:
            self._end(run, "cancel", f"superseded by version {version} before it started")
        steps = self.state.steps_in[version]
        self.books.queue(version, steps, limits.rows, limits.rows_per_slot, self.state.now)

    def _take_replicas(self, run: Validation, limits: ValidationLimits) -> None:
        """Hold as many replicas as allowed: first those that have its version, then those that can install it."""
        if not run.waiting:
            return
        census = self.state.census
        kind = census.kind(validators=limits.own)
        most = kind.present.total if limits.own or self.books.closing else limits.replicas
        if len(run.replicas) >= most or min(kind.unheld.by, default=run.version + 1) > run.version:
            return
        there = (r for r in self.state.fleet.replicas.values() if r.validator == limits.own and r.held < 0)
        fit = [r for r in there if census.is_present(r) and r.heading <= run.version]
        fit.sort(key=lambda r: (r.version != run.version, r.heading != run.version, r.id))
        for replica in fit[: most - len(run.replicas)]:
            self.books.hold(run, replica)

    def _why_it_cannot(self, run: Validation, limits: ValidationLimits) -> str:
        """Why a validation must fail; empty if it need not."""
        attempts = self.state.limits.infrastructure_attempts
        if run.refused >= attempts:
            return f"{run.refused} replicas could not install version {run.version}"
        if run.worst >= attempts:
            return f"{run.worst} attempts at the same rows failed; last error: {run.reason or self.state.last_failure}"
        if run.replicas or not run.waiting:
            return ""
        kind = self.state.census.kind(validators=limits.own)
        coming = kind.coming.total or min(kind.alive.by, default=run.version + 1) <= run.version
        if coming or kind.seen.total < (limits.replicas if limits.own else 1):
            return ""
        return f"no replica is left that has or can install version {run.version}"

    def _in_conflict(self, run: Validation, limits: ValidationLimits) -> bool:
        """Whether the validation keeps every replica from a newer version although `conflict` is `cancel`."""
        if limits.own or limits.conflict != "cancel" or run.version == self.state.latest_version:
            return False
        left = self.state.census.rollouts_left
        return 0 < left == len(run.replicas)

    # telling

    def _rate(self, run: Validation) -> None:
        """Compute the figures of a validation, and note the one by which the best checkpoint is kept."""
        assert self.limits is not None
        run.estimate(self.limits.measured_sets)
        metric = self.state.limits.keep_best
        value = run.value(metric) if metric else None
        if value is not None:
            self.state.checkpoints.rate(run.steps, value)

    def _order(self, run: Validation, chunk: Chunk, replica: Replica) -> None:
        self.orders.add(
            MeasureRows(validation=run.id, chunk=chunk.index, attempt=chunk.attempt, replica=replica.id,
                        incarnation=replica.incarnation, version=run.version, first=chunk.first, count=chunk.count,
                        cause=self.orders.cause)
        )  # fmt: skip

    def _end(self, run: Validation, trigger: str, reason: str) -> None:
        run.reason = reason
        run.ended_at = self.state.now
        if trigger == "report":
            self._rate(run)
        if self.state.clocks.doubled:
            self.state.clocks.forget_keys(*(("rows", (run.id, chunk.index)) for chunk in run.chunks))
        for id in run.replicas:
            replica = self.state.fleet.replicas[id]
            if replica.chunks:
                self.orders.add(
                    StopMeasuring(validation=run.id, replica=id, incarnation=replica.incarnation,
                                  number=self.orders.number, cause=self.orders.cause)
                )  # fmt: skip
        self.books.fire(run, trigger)
