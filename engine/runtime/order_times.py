"""How long each open order has taken, in time in which its process could work on it.

The watchdog calls it after each tick and before it looks for overdue orders; a `Session` does both itself. What stands
still, what the limits are and how often they were exceeded is in the state of the run; only times are here.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from engine.commands import PauseReplica, StartProcess
from engine.events import Event, OrderOverdue, ProcessWaits, RunResumed, SchedulerRecovered, SettingChanged
from engine.scheduling.scheduler import GROUP_EVENTS
from engine.states.order_times import can_work, could_work, limit_of
from engine.states.orders import FAILURES, KINDS_OF_SUBJECTS, SLACK_S, TOTAL, Order, works_in_order
from engine.states.state import State
from engine.states.timeouts import AUTO

TEACH_NOTHING = FAILURES | {ProcessWaits, OrderOverdue}
"""Events that say nothing about how long work takes."""
LOOKS_IN_LIMIT = 20
"""An order may be found late by its limit, divided by this."""
SHORTEST_S, LONGEST_S = 0.05, 30.0
"""The shortest and the longest time that a look may be late."""
MOST_LOOKED_AT = 10_000
"""Maximum number of orders that are looked at in a second, unless orders would be found too late."""
NEVER = float("inf")


class OverdueOrder(NamedTuple):
    """An order that has exceeded its limit."""

    order: Order
    took_s: float
    limit_s: float
    setting: str

    def event(self, chain: tuple[str, ...] = (), answered: bool = True) -> OrderOverdue:
        """The report about it."""
        return OrderOverdue(
            order=self.order.number, took_s=self.took_s, limit_s=self.limit_s, setting=self.setting, chain=chain,
            answered=answered,
        )  # fmt: skip


class OrderTimes:
    """The times of the open orders of one run. A new instance gives every open order its full time.

    The clock is the time of the run, without time in which its process stood still. The work time of a process is the
    clock without the time in which that process could not work. Of an order, the work time of its process is kept at
    which it was given, or last got its full time: the time it has taken is the difference.
    """

    def __init__(self, state: State) -> None:
        now = state.facts.now
        self.longest: dict[str, float] = {}
        """The longest time to an answer or to progress that was seen, by kind."""
        self.look_at = NEVER
        """When to look for overdue orders."""
        self._state = state
        self._awake_at = now
        """When this was called last."""
        self._stood_still_s = 0.0
        """Seconds in which the process of the run seems to have stood still."""
        self._was_late = False
        """Whether the last look came too late to blame anybody."""
        self._least: dict[str, float] = {}
        """The smallest limit that an order of each subject can have; subjects without a limit are left out."""
        self._marks: dict[int, float] = {}
        """The work time at which each order was given, or last got its full time, by its number."""
        self._first_unseen = 0
        """Orders with this number or a higher one were not seen yet."""
        self._still_s: dict[tuple[str, int], float] = {}
        """Seconds in which each process could not work, without the present standstill."""
        self._still_since: dict[tuple[str, int], float] = {}
        """Since when each process that cannot work stands still."""
        self._waiting_pauses: set[int] = set()
        """Pauses that wait for groups to end, and so have not begun."""
        self._use_limits()
        self._note_standstills(now)
        self._begin(self._new_orders(), now)

    # after each tick

    def note(self, events: Sequence[Event], now: float) -> None:
        """The scheduler has handled events."""
        self._wake(now)
        matched = self._state.orders.matched
        for event in events:
            for order in matched.get(event.id, ()):
                self._note_matched(event, order, now)
        new = self._new_orders()
        if any(type(event) not in GROUP_EVENTS for event in events) or any(not one.stands_still for one in new):
            self._note_standstills(now)
        self._begin(new, now)
        for number in [*self._waiting_pauses]:
            pause = self._state.orders.by_number.get(number)
            if pause is None or could_work(self._state, pause):
                self._waiting_pauses.discard(number)
                if pause is not None:
                    self.mark(pause, now)
        if _gives_full_time(events[-1]):  # such an event is a tick of its own
            self._use_limits()
            self.give_full_time(now)

    def _note_matched(self, event: Event, order: Order, now: float) -> None:
        """An event answers an order, or reports that it progresses."""
        progresses = order.number in self._state.orders.by_number
        part_of_start = progresses and order.subject == "start"  # teaches nothing about whole starts
        if type(event) not in TEACH_NOTHING and not part_of_start and order.number in self._marks:
            self._learn(KINDS_OF_SUBJECTS[order.subject], self.took_s(order, now), now)
        if type(event) is ProcessWaits and event.reason:
            self._marks.pop(order.number, None)  # it begins when there is room
        elif progresses:
            self.mark(order, now)
            truncated = self._state.orders.find("truncate", order.id) if order.subject == "group" else None
            if truncated is not None:
                self.mark(truncated, now)  # the same work
        else:
            self._marks.pop(order.number, None)
            following = self._state.orders.first(order.owner) if works_in_order(order.owner) else None
            if following is not None and following.number > order.number:
                self.mark(following, now)  # its process works on it from now on

    def _learn(self, kind: str, took_s: float, now: float) -> None:
        if took_s > self.longest.get(kind, -1.0):
            limit_s = self.limit_s(kind)
            self.longest[kind] = took_s
            self._use_limits()
            if self.limit_s(kind) != limit_s:  # the first answer shortens the limit of orders that are open
                self._look_within(self.every_s, now)

    def _new_orders(self) -> list[Order]:
        orders = self._state.orders
        found = [*takewhile(lambda order: order.number >= self._first_unseen, reversed(orders.by_number.values()))]
        self._first_unseen = orders.facts.next_number
        return found

    def _begin(self, new: Sequence[Order], now: float) -> None:
        """Orders were given."""
        for order in new:
            command = order.command
            self.mark(order, now + (command.delay_s if isinstance(command, StartProcess) else 0.0))
            if isinstance(command, PauseReplica) and command.mode == "wait":
                self._waiting_pauses.add(order.number)

    def _note_standstills(self, now: float) -> None:
        """Processes can work from now on, or cannot."""
        state = self._state
        for process in (*state.processes.values(), *(replica.process for replica in state.replicas.by_id.values())):
            key = (process.kind, process.index)
            since, works = self._still_since.get(key), can_work(state, process)
            if works and since is not None:
                del self._still_since[key]
                self._still_s[key] = self._still_s.get(key, 0.0) + self._clock(now) - since
                for order in (order for owner in state.owners_of(process) for order in state.orders.owned(owner)):
                    if order.number in self._marks:
                        self._look_within(self._least[order.subject] - self.took_s(order, now), now)
            elif not works and since is None:
                self._still_since[key] = self._clock(now)

    def _use_limits(self) -> None:
        """Find the smallest limits anew, because a setting or a longest time has changed."""
        timeouts = self._state.limits.timeouts
        by_kind = {kind: timeouts.limit(kind, self.longest.get(kind)) for kind in {*KINDS_OF_SUBJECTS.values()}}
        self._least = {
            subject: min(limits)
            for subject, kind in KINDS_OF_SUBJECTS.items()
            if (limits := [limit for limit in (by_kind[kind], timeouts.max_s) if limit is not None])
        }

    # times

    def mark(self, order: Order, now: float) -> None:
        """An order has its full time from `now` on."""
        least_s = self._least.get(order.subject)
        if least_s is not None:
            self._marks[order.number] = self._work_time(order, now)
            self._look_within(least_s, now)

    def give_full_time(self, now: float) -> None:
        """Every open order has its full time from now on."""
        self.look_at = NEVER
        for order in self._state.orders.all():
            delay_s = order.command.delay_s if isinstance(order.command, StartProcess) else 0.0
            begins_later = self._marks.get(order.number, 0.0) > self._clock(now)
            self.mark(order, now + (delay_s if begins_later else 0.0))

    def took_s(self, order: Order, now: float) -> float:
        """Seconds in which the process of an order could work on it since it was given, or last got its full time."""
        work_s = self._work_time(order, now)
        return max(0.0, work_s - self._marks.get(order.number, work_s))

    def limit_s(self, kind: str) -> float | None:
        """The limit of an order of a kind that exceeded none before."""
        return self._state.limits.timeouts.limit(kind, self.longest.get(kind))

    def _clock(self, now: float) -> float:
        return now - self._stood_still_s

    def _work_time(self, order: Order, now: float) -> float:
        process = self._state.process_of(order.owner) if order.stands_still else None
        if process is None:
            return self._clock(now)
        key = (process.kind, process.index)
        return self._still_since.get(key, self._clock(now)) - self._still_s.get(key, 0.0)

    # overdue orders

    def overdue(self, now: float) -> list[OverdueOrder]:
        """The orders that have exceeded their limits and were not reported; each has its full time again. Sets the time
        of the next look. If this one is late by more than an interval, the process of the run stood still. That time
        does not count, and nobody is blamed before the answers that came meanwhile are known."""
        self._was_late = self._wake(now) and not self._was_late
        if self._was_late:
            self.look_at = now + self.every_s
            return []
        found, left_s = list[OverdueOrder](), NEVER
        for one in self._timed(now):
            left = one.limit_s - one.took_s
            if left <= SLACK_S:
                found.append(one)
                left = one.limit_s
            left_s = min(left_s, left)
        pause_s = min(self.every_s, len(self._state.orders) / MOST_LOOKED_AT)
        self.look_at = now + max(pause_s, SHORTEST_S, left_s)
        self._marks = {number: mark for number, mark in self._marks.items() if number in self._state.orders.by_number}
        for one in found:
            self.mark(one.order, now)
        return found

    def _timed(self, now: float) -> Iterator[OverdueOrder]:
        """The orders that run towards a limit, each with the one that it reaches first."""
        state, timeouts = self._state, self._state.limits.timeouts
        for order in state.orders.all():
            if order.overdue or order.subject not in self._least:
                continue
            kind, age_s = KINDS_OF_SUBJECTS[order.subject], now - order.at
            limit_s = limit_of(state, order, self.longest) if could_work(state, order) else None
            took_s = self.took_s(order, now)
            if timeouts.max_s is not None and (limit_s is None or timeouts.max_s - age_s < limit_s - took_s):
                yield OverdueOrder(order, age_s, timeouts.max_s, TOTAL)
            elif limit_s is not None:
                setting = f"timeouts.{kind}_s{': auto' if timeouts.given(kind) == AUTO else ''}"
                yield OverdueOrder(order, took_s, limit_s, setting)

    @property
    def every_s(self) -> float:
        """Seconds that a look may be late: longer, and the process of the run stood still."""
        limits = (
            self._least[subject] for subject, open in self._state.orders.open.items() if open and subject in self._least
        )
        return min(LONGEST_S, max(SHORTEST_S, min(limits, default=NEVER) / LOOKS_IN_LIMIT))

    def _wake(self, now: float) -> bool:
        """Leave out the time in which the process of the run stood still. Returns whether it did: a look is late."""
        late = now > self.look_at and now > self.look_at + self.every_s
        if late:
            self._stood_still_s += max(0.0, now - self._awake_at - self.every_s)
        self._awake_at = now
        return late

    def _look_within(self, seconds: float, now: float) -> None:
        self.look_at = min(self.look_at, now + seconds)


def _gives_full_time(event: Event) -> bool:
    """Whether every order has its full time after an event."""
    if isinstance(event, SettingChanged):
        return event.setting.startswith("timeouts.")
    return isinstance(event, SchedulerRecovered | RunResumed)
