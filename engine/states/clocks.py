"""How long every open order has taken, and which order may exceed its time limit first.

`OrderBook` tells it of each order that opens, progresses, is answered and closes; `State` of each process that starts
or stops working. `scheduling/time_limits.py` asks it for overdue orders. It must never give an order itself.

The clock of an order runs only while its process can work on it:

* orders for generating and measuring stand still while their replica is pausing, installing, asleep or draining;
* orders of a process that is not up, or is being stopped, stand still;
* the clock of a start begins after its delay, and stands still while the process waits for room;
* the trainer and each scorer work on one order at a time: the clock of an order starts when the one ahead closes;
* a pause in sync mode `wait` starts when the last group of the replica ends;
* progress (a stored prefix) restarts the clock.

Orders of one subject are given in order of time, so they wait in a queue, and only the first is looked at. An order
that was looked at before its time is looked at again later: `looks` says when. Both cost O(1) for each order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from engine.commands import PauseReplica, StartProcess
from engine.events import Event
from engine.states.orders import FAILURES, KINDS_OF_SUBJECTS, Order, Owner, works_in_order
from engine.states.process import REPLICA, Process
from engine.states.replica import Replica
from engine.states.timeouts import CUT, KINDS, MOST_S, Timeouts
from engine.states.tree import Record, digest, hashed_values

if TYPE_CHECKING:
    from engine.states.state import State

SLACK_S = 0.001
"""An order this close to its limit has reached it: clocks and sums of floats are no more exact than that."""
STALLED, PAST = -1.0, -2.0
"""In `looks`: the order stands still, so nothing is due; the order exceeded its limit, and that was acted on."""
WHATEVER_STATE = frozenset(("start", "stop", "sync", "resume", "probe"))
"""Subjects whose clock does not stand still with their process: most of these orders change its state."""
BITS = {kind: 1 << index for index, kind in enumerate((*KINDS, CUT))}
MOST_DOUBLED = 1 << 20
KeyId = int | tuple[int | str, ...] | None
"""The id of an order; with its subject, its key."""


@dataclass(eq=False, slots=True)
class OwnerClock:
    """The clock of one process: its work time is the time it has not stood still."""

    answered: int = 0
    """Kinds of which it has answered an order since it started: a sum of `BITS`."""
    still: float = 0.0
    """Seconds it has stood still, a present standstill not counted."""
    stopped_at: float = -1.0
    """Since when it stands still; -1: it works."""
    closed: float = 0.0
    """Its work time when the last order closed, if it works on one at a time; or was answered, if it is a state."""

    def work_time(self, now: float) -> float:
        return (self.stopped_at if self.stopped_at >= 0 else now) - self.still


class Clocks(Record):
    """The clocks of all open orders that have a time limit."""

    UNHASHED: ClassVar[tuple[str, ...]] = ("owners", "doubled", "looks", "stalled")
    """`trace` stands for the first two; the others follow from the orders and from when the timer fired."""

    longest: dict[str, float]
    """The longest time to an answer or to progress, by kind."""
    doubled: dict[tuple[str, KeyId], int]
    """By how much the limit of a key is multiplied, for keys whose orders exceeded it since their last answer."""
    owners: dict[Owner, OwnerClock]
    looks: dict[int, float]
    """When to look at an order again, by number, for orders that have left their queue."""
    stalled: dict[int, None]
    """Orders that were found to stand still, by number."""
    trace: int = 0
    """A hash of everything that happened to the clocks of processes and to `doubled`."""

    def __init__(self, state: "State") -> None:
        self._state = state
        self.longest, self.doubled, self.owners, self.looks, self.stalled = {}, {}, {}, {}, {}
        self.least: dict[str, float] = {}
        """The smallest limit of any order, by subject. Subjects without a limit are left out."""
        self.timer_at = inf
        """When the timer fires."""
        self.sooner = False
        """Something may be due before the timer fires."""
        self._queues: dict[str, dict[int, Order]] = {}
        """Orders not looked at yet, oldest first, by subject."""
        self._heap: list[tuple[float, int]] = []
        """`looks` as (time, order number); outdated entries are skipped."""
        self._stalled: dict[Owner, dict[int, None]] = {}
        """`stalled` by owner."""
        self._find_least(state.limits.timeouts)

    @property
    def enabled(self) -> bool:
        """Whether any order has a limit."""
        return bool(self.least)

    @property
    def _timeouts(self) -> Timeouts:
        return self._state.limits.timeouts

    # told by the order book

    def on_opened(self, order: Order) -> None:
        """An order was given."""
        subject = order.subject
        least = self.least.get(subject)
        if least is None:
            return
        clock = self.owners.get(order.owner)
        if clock is not None and (clock.still or clock.stopped_at >= 0) and subject not in WHATEVER_STATE:
            order.mark = clock.work_time(order.at)
        if type(order.command) is StartProcess:
            order.mark += order.command.delay_s
        if self.doubled and (subject, order.id) in self.doubled:
            self._look_at(order, self._due(order))
            return
        self._queues[subject][order.number] = order
        if order.at + least < self.timer_at:
            self.sooner = True

    def on_answered(self, order: Order, event: Event) -> None:
        """An event answers an order, which is still open. A failure teaches nothing about how long work takes."""
        subject = order.subject
        if subject not in self.least:
            return
        if subject == "stage":
            self._note_closed(order.owner)
        if type(event) in FAILURES:
            return
        if subject == "start" and not self.runs(order):
            return  # it is not known when it had room
        kind, took = KINDS_OF_SUBJECTS[subject], self.elapsed(order)
        if took > self.longest.get(kind, -1.0):
            self._learn(order, took)
        if self.doubled:
            self.forget_keys((subject, order.id))
        clock = self.owners.get(order.owner)
        if clock is None:
            clock = self.owners[order.owner] = OwnerClock()
        if not clock.answered & BITS[kind]:
            clock.answered |= BITS[kind]
            self._note_owner(order.owner, clock)

    def on_progress(self, order: Order) -> None:
        """An event reports progress of an open order: its clock restarts."""
        if order.subject in self.least and order.subject != "start":  # `room_changed` times a start
            took = self.elapsed(order)
            if took > self.longest.get(KINDS_OF_SUBJECTS[order.subject], -1.0):
                self._learn(order, took)
            self._restart(order)

    def on_closed(self, order: Order, *, was_first: bool) -> None:
        """An order has ended. `was_first`: its owner has no older order."""
        queue = self._queues.get(order.subject)
        if queue is not None and queue.pop(order.number, None) is None:
            self.looks.pop(order.number, None)
            if self.stalled and self.stalled.pop(order.number, 0) is None:
                self._stalled[order.owner].pop(order.number, None)
        if was_first and type(order.owner) is str and works_in_order(order.owner):
            self._note_closed(order.owner)
            self._wake(order.owner)

    def on_cleared(self) -> None:
        """All orders have ended, the timer among them."""
        self._forget_orders()
        self.timer_at = inf

    def _forget_orders(self) -> None:
        for queue in self._queues.values():
            queue.clear()
        self.looks.clear()
        self._heap.clear()
        self.stalled.clear()
        self._stalled.clear()

    # told of processes

    def on_replica_changed(self, replica: Replica) -> None:
        """A replica changed its state, and may have started or stopped working."""
        if replica.state == "down":
            self.forget(replica.id)
        elif self._works(replica):
            self.run_clock(replica.id)
        else:
            self.stop_clock(replica.id)

    def on_process_changed(self, process: Process) -> None:
        """A process changed its state. Of a replica, its own machine says more."""
        if process.kind == REPLICA:
            return
        for owner in self._state.owners_of(process):
            if process.state == "up":
                self.run_clock(owner)
            else:
                if process.state != "stopping":
                    self.forget(owner)
                self.stop_clock(owner)

    def on_room_changed(self, process: Process) -> None:
        """A process waits for room before it can start, or has room now: the clock of its start begins anew."""
        start = self._state.orders.find("start", (process.kind, process.index))
        if start is not None and start.subject in self.least:
            self._restart(start)
            self._wake(start.owner)

    def stop_clock(self, owner: Owner) -> None:
        """A process stands still: the clocks of its orders do, too."""
        clock = self.owners.get(owner)
        if clock is None:
            clock = self.owners[owner] = OwnerClock()
        if clock.stopped_at < 0:
            clock.stopped_at = self._state.now
            self._note_owner(owner, clock)

    def run_clock(self, owner: Owner) -> None:
        """A process works, perhaps after a standstill."""
        clock = self.owners.get(owner)
        if clock is None:
            clock = self.owners[owner] = OwnerClock()
            self._note_owner(owner, clock)
        elif clock.stopped_at >= 0:
            clock.still += self._state.now - clock.stopped_at
            clock.stopped_at = -1.0
            self._note_owner(owner, clock)
            self._wake(owner)

    def forget(self, owner: Owner) -> None:
        """A process is gone. The next one has the limits of a fresh one."""
        clock = self.owners.pop(owner, None)
        if clock is not None:
            self._note_owner(owner, clock)

    def on_emptied(self, replica: Replica) -> None:
        """The last group of a pausing replica has ended: a pause that waited for it begins."""
        pause = self._state.orders.find("sync", replica.id)
        if pause is not None:
            self._restart(pause)
            self._wake(replica.id)

    def begin_again(self) -> None:
        """New processes carry the run. What was learned about limits stays."""
        self.owners.clear()
        self.timer_at, self.sooner = inf, True

    # settings

    def use(self) -> None:
        """The time limits of the run have changed. All clocks begin anew."""
        before = bool(self.least)
        self._find_least(self._timeouts)
        if self.enabled and not before:
            self.owners.clear()
            for replica in self._state.fleet.replicas.values():
                self.on_replica_changed(replica)
            for process in self._state.processes.values():
                self.on_process_changed(process)
        self.restart_all()
        self.sooner = True

    def restart(self, order: Order) -> None:
        """An overdue order is not to blame: it gets its full time from now on."""
        self._restart(order)
        self._look_at(order, self._state.now + self.limit(order))

    def restart_all(self) -> None:
        """Every open order gets its full time from now on."""
        past = {number: None for number, look in self.looks.items() if look == PAST}
        self._forget_orders()
        for order in self._state.orders.all():
            if order.subject in self.least:
                self._restart(order)
                if order.number in past:
                    self.looks[order.number] = PAST
                else:
                    self._look_at(order, self._due(order))

    def _find_least(self, timeouts: Timeouts) -> None:
        least: dict[str, float] = {}
        for subject, kind in KINDS_OF_SUBJECTS.items():
            limit = self._least(timeouts, kind)
            if limit is not None:
                least[subject] = limit
        self.least = least
        self._queues = {subject: self._queues.get(subject, {}) for subject in least}
        self._state.orders.clocks = self if least else None

    def _least(self, timeouts: Timeouts, kind: str) -> float | None:
        limit = timeouts.limit(kind, self.longest.get(kind), fresh=False)
        return limit if limit is None or timeouts.max_s is None else min(limit, timeouts.max_s)

    # figures

    def limit(self, order: Order) -> float:
        """The time limit of an order that has one."""
        kind = KINDS_OF_SUBJECTS[order.subject]
        clock = self.owners.get(order.owner)
        fresh = kind != "start" and (clock is None or not clock.answered & BITS[kind])
        limit = self._timeouts.limit(kind, self.longest.get(kind), fresh=fresh)
        assert limit is not None  # it has one
        if type(order.command) is StartProcess and order.command.redo:
            train = self._timeouts.limit("train", self.longest.get("train"), fresh=True)
            limit += len(order.command.redo) * (MOST_S if train is None else train)
        return limit * self.doubled.get((order.subject, order.id), 1)

    def elapsed(self, order: Order) -> float:
        """How long the clock of an order has run since it was given, or since its last progress."""
        mark = order.mark
        clock = None if order.subject in WHATEVER_STATE else self.owners.get(order.owner)
        if clock is None:
            return self._state.now - mark
        if clock.closed > mark and type(order.owner) is str and works_in_order(order.owner):
            mark = clock.closed
        return clock.work_time(self._state.now) - mark

    def runs(self, order: Order) -> bool:
        """Whether the process of an order can work on it now."""
        if order.subject in WHATEVER_STATE:
            command = order.command
            if type(command) is PauseReplica and command.mode == "wait":
                return not self._state.fleet.replicas[command.replica].groups
            if type(command) is StartProcess:
                return not self._state.process(command.kind, command.index).room
            return True
        clock = self.owners.get(order.owner)
        if clock is not None and clock.stopped_at >= 0:
            return False
        if type(order.owner) is str and works_in_order(order.owner):
            return self._state.orders.first(order.owner) is order
        return True

    def find_exceeded(self, owner: Owner) -> list[Order]:
        """The open orders of an owner that exceeded their limits."""
        if PAST not in self.looks.values():
            return []
        return [order for order in self._state.orders.owned(owner) if self.looks.get(order.number) == PAST]

    def is_silent(self, order: Order) -> bool:
        """Whether the owner of an order to a state has answered nothing since it was given."""
        clock = self.owners.get(order.owner)
        return clock is None or clock.closed <= order.mark

    def take_overdue(self) -> list[Order]:
        """Look at every order whose time may have come. Returns those that exceed their limit, in the order given."""
        found: list[Order] = []
        now, orders = self._state.now + SLACK_S, self._state.orders
        for subject, queue in self._queues.items():
            due = takewhile(partial(_given_by, now - self.least[subject]), queue.values())
            for order in list(due):
                del queue[order.number]
                self._look(order, found)
        while self._heap and self._heap[0][0] <= now:
            look, number = heappop(self._heap)
            if self.looks.get(number) == look:
                self._look(orders.numbered(number), found)
        found.sort(key=lambda order: order.number)
        return found

    def next_look(self) -> float:
        """When to look next; infinity if nothing has a limit that runs."""
        heads = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        times = [order.at + self.least[order.subject] for order in heads]
        while self._heap and self.looks.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return min([*times, *(look for look, _ in self._heap[:1])], default=inf)

    def double(self, order: Order) -> None:
        """An order exceeded its limit: the next one with its key gets twice as much time."""
        key = order.subject, order.id
        times = self.doubled[key] = min(MOST_DOUBLED, 2 * self.doubled.get(key, 1))
        self._note_doubled(key, times)

    def forget_keys(self, *keys: tuple[str, KeyId]) -> None:
        """No order with these keys will follow."""
        for key in keys:
            if self.doubled.pop(key, None) is not None:
                self._note_doubled(key, 1)

    # inside

    def _work_time(self, owner: Owner) -> float:
        clock = self.owners.get(owner)
        return self._state.now if clock is None else clock.work_time(self._state.now)

    def _note_closed(self, owner: Owner) -> None:
        clock = self.owners.get(owner)
        if clock is None:
            clock = self.owners[owner] = OwnerClock()
        clock.closed = clock.work_time(self._state.now)
        self._note_owner(owner, clock)

    def _works(self, replica: Replica) -> bool:
        waits = replica.state == "pausing" and self._state.limits.sync_mode == "wait"
        return replica.state == "ready" or waits

    def _restart(self, order: Order) -> None:
        order.mark = self._state.now if order.subject in WHATEVER_STATE else self._work_time(order.owner)

    def _learn(self, order: Order, took: float) -> None:
        """No order of the kind has taken so long before."""
        kind = KINDS_OF_SUBJECTS[order.subject]
        self.longest = {**self.longest, kind: took}
        least = self._least(self._timeouts, kind)
        if least is not None and least != self.least[order.subject]:
            self.sooner |= least < self.least[order.subject]
            self.least.update((subject, least) for subject, of in KINDS_OF_SUBJECTS.items() if of == kind)

    def _due(self, order: Order) -> float:
        """When to look at an order, or `STALLED`."""
        total = self._timeouts.max_s
        if not self.runs(order):
            self.stalled[order.number] = None
            self._stalled.setdefault(order.owner, {})[order.number] = None
            return STALLED if total is None else max(self._state.now, order.at + total)
        now = self._state.now
        due = now + max(0.0, self.limit(order) - self.elapsed(order))
        return due if total is None else max(now, min(due, order.at + total))

    def _look(self, order: Order, found: list[Order]) -> None:
        total = self._timeouts.max_s
        over = total is not None and self._state.now - order.at >= total - SLACK_S
        if over or (self.runs(order) and self.elapsed(order) >= self.limit(order) - SLACK_S):
            self.looks[order.number] = PAST
            found.append(order)
        else:
            self._look_at(order, self._due(order))

    def _look_at(self, order: Order, look: float) -> None:
        self.looks[order.number] = look
        if look == STALLED:
            return
        heappush(self._heap, (look, order.number))
        if look < self.timer_at:
            self.sooner = True
        if len(self._heap) > 64 + 4 * len(self.looks):
            self._make_heap()

    def _make_heap(self) -> None:
        self._heap = [(look, number) for number, look in self.looks.items() if look >= 0]
        heapify(self._heap)

    def _wake(self, owner: Owner) -> None:
        """Orders of a process that stood still may run again."""
        for number in self._stalled.pop(owner, ()):
            del self.stalled[number]
            order = self._state.orders.numbered(number)
            self._look_at(order, self._due(order))

    def rebuild(self) -> None:
        """Make what follows from the open orders and `looks`."""
        state = self._state
        self._find_least(self._timeouts)
        for queue in self._queues.values():
            queue.clear()
        self._stalled.clear()
        for order in state.orders.all():
            if order.subject not in self.least:
                continue
            if order.number not in self.looks:
                self._queues[order.subject][order.number] = order
            elif order.number in self.stalled:
                self._stalled.setdefault(order.owner, {})[order.number] = None
        self._make_heap()
        timer = None if state.limit_timer is None else state.orders.find("timer", state.limit_timer)
        command: Any = None if timer is None else timer.command
        self.timer_at = inf if timer is None else timer.at + command.delay_s
        self.sooner = False

    # the state hash

    def _note_owner(self, owner: Owner, clock: OwnerClock) -> None:
        self.trace = digest((self.trace, owner, hashed_values(clock))) >> 1

    def _note_doubled(self, key: tuple[str, KeyId], times: int) -> None:
        self.trace = digest((self.trace, key, times)) >> 1

    def problems(self) -> Iterator[str]:
        """What is wrong with the books, if anything."""
        limited = {order.number for order in self._state.orders.all() if order.subject in self.least}
        queued = [number for queue in self._queues.values() for number in queue]
        if sorted([*queued, *self.looks]) != sorted(limited):
            yield f"orders {limited} have a limit, {queued} and {list(self.looks)} are timed"
        at = self.next_look()
        if at < inf and max(at, self._state.now) < self.timer_at - SLACK_S:
            yield f"an order may be due at {at}, and the timer fires at {self.timer_at}"
        if {number for number, look in self.looks.items() if look == STALLED} - set(self.stalled):
            yield "the clock of an order stands still forever"


def _given_by(at: float, order: Order) -> bool:
    return order.at <= at
