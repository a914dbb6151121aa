"""How long each open order has taken, in time in which its process could work on it.

The watchdog calls it after each tick and before it looks for overdue orders; a `Session` does both itself. What stands
still, what the limits are and how often they were exceeded is in the state of the run; only times are here.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.commands import Command, PauseReplica, StartProcess
from engine.events import Event, OrderOverdue, ProcessWaits, RunResumed, SchedulerRecovered, SettingChanged
from engine.scheduling.scheduler import CHANGE_NO_PROCESS
from engine.states.order_times import can_work, could_work, limit_of
from engine.states.orders import FAILURES, RELATIONS, SLACK_S, TOTAL, Order, works_in_order
from engine.states.state import State
from engine.states.timeouts import AUTO

TEACH_NOTHING = FAILURES | {ProcessWaits, OrderOverdue}
"""Events that say nothing about how long work takes."""
CHANGE_PROCESSES = frozenset(command for command, relation in RELATIONS.items() if not relation.stands_still)
"""Orders with which that may change."""
LOOKS_IN_LIMIT = 20
"""An order may be found late by its limit, divided by this."""
SHORTEST_S, LONGEST_S = 0.05, 30.0
"""The shortest and the longest time that a look may be late."""
MOST_LOOKED_AT = 10_000
"""Maximum number of orders that are looked at in a second, unless orders would be found too late."""
NEVER = float("inf")
OWN = ("run", 0)
"""Instead of the kind and index of a process: the one that this runs in."""


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

    An order has taken the time since it was given, or last got its full time, without the time in which its process
    could not work or the process of the run stood still.
    """

    def __init__(self, state: State) -> None:
        self.longest: dict[str, float] = {}
        """The longest time to an answer or to progress that was seen, by kind."""
        self.look_at = NEVER
        """When to look for overdue orders."""
        self._state = state
        self._awake_at = state.facts.now
        """When this was called last."""
        self._was_late = False
        """Whether the last look came too late to blame anybody."""
        self._least: dict[type[Command], float] = {}
        """The smallest limit that an order of each class can have; classes without a limit are left out."""
        self._full_at: dict[int, float] = {}
        """When an order last got its full time, by its number, if not when it was given. `NEVER`: it has not begun."""
        self._standstills: dict[tuple[str, int], list[tuple[float, float]]] = {}
        """From when to when each process could not work, as long as an open order may need it. They do not overlap
        those of the run's own process, `OWN`."""
        self._still_since: dict[tuple[str, int], float] = {}
        """Since when each process that cannot work stands still."""
        self._waiting_pauses: set[int] = set()
        """Pauses that wait for groups to end, and so have not begun."""
        self._use_limits()
        self._note_standstills(state.facts.now)
        for order in state.orders.all():
            self._begin(order, state.facts.now)

    # after each tick

    def note(self, events: Sequence[Event], commands: Sequence[Command], now: float) -> None:
        """The scheduler has handled events as a tick, and answered with commands."""
        self._wake(now)
        orders = self._state.orders
        for event in events:
            for order in orders.matched.get(event.id, ()):
                self._note_matched(event, order, now)
        given = {*map(type, commands)}
        for kind in given & self._least.keys():
            self._look_within(self._least[kind], now)
        if not CHANGE_NO_PROCESS.issuperset(map(type, events)) or not CHANGE_PROCESSES.isdisjoint(given):
            self._note_standstills(now)
            for order in orders.all()[-len(commands) :] if commands else ():
                if order.at == now:
                    self._begin(order, now)
            if _gives_full_time(events[-1]):  # such an event is a tick of its own
                self._use_limits()
                self.give_full_time(now)
        for number in [*self._waiting_pauses]:
            pause = orders.by_number.get(number)
            if pause is None or could_work(self._state, pause):
                self._waiting_pauses.discard(number)
                if pause is not None:
                    self.mark(pause, now)

    def _note_matched(self, event: Event, order: Order, now: float) -> None:
        """An event answers an order, or reports that it progresses."""
        number, command = order.number, type(order.command)
        progresses = number in self._state.orders.by_number
        if command in self._least:
            began, kind = self._full_at.get(number, order.at), RELATIONS[command].limit
            part_of_start = progresses and command is StartProcess  # teaches nothing about whole starts
            if now - began > self.longest.get(kind, -1.0) and type(event) not in TEACH_NOTHING and not part_of_start:
                self._learn(kind, self._work_s(order, began, now), now)
        if type(event) is ProcessWaits and event.reason:
            self._full_at[number] = NEVER  # it begins when there is room
            return
        if progresses:
            self.mark(order, now)
            return
        self._full_at.pop(number, None)
        if type(order.owner) is str and works_in_order(order.owner):
            following = self._state.orders.first(order.owner)
            if following is not None and following.number > number:
                self.mark(following, now)  # its process works on it from now on

    def _learn(self, kind: str, took_s: float, now: float) -> None:
        if took_s > self.longest.get(kind, -1.0):
            limit_s = self.limit_s(kind)
            self.longest[kind] = took_s
            self._use_limits()
            if self.limit_s(kind) != limit_s:  # the first answer shortens the limit of orders that are open
                self._look_within(self.every_s, now)

    def _begin(self, order: Order, now: float) -> None:
        """An order was given."""
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
                self._keep_standstill(key, since, now)
                due = [  # at the earliest, because the time in which it stood still does not count
                    self._full_at.get(order.number, order.at) + self._least[type(order.command)]
                    for owner in state.owners_of(process)
                    for order in state.orders.owned(owner)
                    if type(order.command) in self._least
                ]
                self.look_at = min(self.look_at, max(now, min(due, default=NEVER)))
            elif not works and since is None:
                self._still_since[key] = now

    def _keep_standstill(self, key: tuple[str, int], since: float, until: float) -> None:
        oldest = next(iter(self._state.orders.by_number.values()), None)
        kept = [] if oldest is None else [one for one in self._standstills.get(key, ()) if one[1] > oldest.at]
        self._standstills[key] = [*kept, (since, until)]

    def _use_limits(self) -> None:
        """Find the smallest limits anew, because a setting or a longest time has changed."""
        timeouts = self._state.limits.timeouts
        by_kind = {kind: self.limit_s(kind) for kind in {relation.limit for relation in RELATIONS.values()} if kind}
        self._least = {
            command: min(limits)
            for command, relation in RELATIONS.items()
            if relation.limit
            and (limits := [limit for limit in (by_kind[relation.limit], timeouts.max_s) if limit is not None])
        }

    # times

    def mark(self, order: Order, now: float) -> None:
        """An order has its full time from `now` on."""
        least_s = self._least.get(type(order.command))
        if least_s is not None:
            self._full_at[order.number] = now
            self._look_within(least_s, now)

    def give_full_time(self, now: float) -> None:
        """Every open order has its full time from now on."""
        self.look_at = NEVER
        for order in self._state.orders.all():
            delay_s = order.command.delay_s if isinstance(order.command, StartProcess) else 0.0
            begins_later = self._full_at.get(order.number, order.at) > now
            self.mark(order, now + (delay_s if begins_later else 0.0))

    def took_s(self, order: Order, now: float) -> float:
        """Seconds in which the process of an order could work on it since it was given, or last got its full time."""
        began = max(self._full_at.get(order.number, order.at), order.since)
        return max(0.0, self._work_s(order, began, now))

    def limit_s(self, kind: str) -> float | None:
        """The limit of an order of a kind that exceeded none before."""
        return self._state.limits.timeouts.limit(kind, self.longest.get(kind))

    def _work_s(self, order: Order, since: float, now: float) -> float:
        """Seconds since then in which the process of an order could work."""
        still = self._standstills.get(OWN, [])
        process = self._state.process_of(order.owner) if order.stands_still else None
        if process is not None:
            key = process.kind, process.index
            still = [*still, *self._standstills.get(key, ()), (self._still_since.get(key, now), now)]
        return now - since - sum([max(0.0, end - max(begin, since)) for begin, end in still])

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
        self._full_at = {number: at for number, at in self._full_at.items() if number in self._state.orders.by_number}
        for one in found:
            self.mark(one.order, now)
        return found

    def _timed(self, now: float) -> Iterator[OverdueOrder]:
        """The orders that run towards a limit, each with the one that it reaches first."""
        state, timeouts = self._state, self._state.limits.timeouts
        for order in state.orders.all():
            if order.overdue or type(order.command) not in self._least:
                continue
            kind, age_s = RELATIONS[type(order.command)].limit, now - order.at
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
        open = self._state.orders.open
        limits = [limit_s for kind, limit_s in self._least.items() if open[RELATIONS[kind].subject]]
        return min(LONGEST_S, max(SHORTEST_S, min(limits, default=NEVER) / LOOKS_IN_LIMIT))

    def _wake(self, now: float) -> bool:
        """Leave out the time in which the process of the run stood still. Returns whether it did: a look is late."""
        late = now > self.look_at and now > self.look_at + self.every_s
        if late and now > (until := self._awake_at + self.every_s):
            for key, since in self._still_since.items():
                self._keep_standstill(key, since, until)
                self._still_since[key] = now
            self._keep_standstill(OWN, until, now)
        self._awake_at = now
        return late

    def _look_within(self, seconds: float, now: float) -> None:
        self.look_at = min(self.look_at, now + seconds)


def _gives_full_time(event: Event) -> bool:
    """Whether every order has its full time after an event."""
    if isinstance(event, SettingChanged):
        return event.setting.startswith("timeouts.")
    return isinstance(event, SchedulerRecovered | RunResumed)
