"""What the limit check keeps: the clock of time limits, how far it has looked, and the longest orders.

`scheduling/work_times.py` reads the clock, and `scheduling/time_limits.py` makes the checks. The order book has the
timer of the next check.
"""

from typing import Any

from engine.states.orders import KINDS_OF_SUBJECTS, LIMIT, Order, OrderBook
from engine.states.timeouts import Timeouts

MOST_INTERVALS = 2
"""A check adds at most so many of its intervals to the clock."""


class LimitCheck:
    """The clock runs while the timer of a check is set."""

    clock: float = 0.0
    """Seconds in which orders with a limit were open, when the present timer was set; without one, when the last one
    ended."""
    cursor: int = -1
    """The order that was looked at last."""
    newest: int = -1
    """The last order of the present round of checks. Orders that were given later wait for the next round."""
    exceeded: int = 0
    """How often publications exceeded their limit since one was answered; other orders have a record that counts."""
    longest: dict[str, float]
    """The longest time to an answer or to progress, by kind."""

    def __init__(self, timeouts: Timeouts, orders: OrderBook) -> None:
        self.longest, self._timers = {}, orders.open["timer"]
        self.use(timeouts)

    def read(self, now: float) -> float:
        """The clock now."""
        timer = self._timers.get(LIMIT)
        return self.clock if timer is None else self.clock + _elapsed(timer, now)

    def advance(self, timer: Order, now: float) -> None:
        """A timer has fired, or is canceled. If it is that of a check, add the time since it was set."""
        if timer.id == LIMIT:
            self.clock += _elapsed(timer, now)

    def use(self, timeouts: Timeouts) -> None:
        """Find the smallest limit that an order of each subject can have. Call it after a change of the settings."""
        self.least: dict[str, float] = {}
        """By subject; subjects without a limit are left out."""
        for subject, kind in KINDS_OF_SUBJECTS.items():
            either = (timeouts.limit(kind, self.longest.get(kind), fresh=False), timeouts.max_s)
            if limits := [limit for limit in either if limit is not None]:
                self.least[subject] = min(limits)

    def learn(self, timeouts: Timeouts, kind: str, took: float) -> None:
        """No order of a kind has taken so long before."""
        self.longest[kind] = took
        self.use(timeouts)


def interval_of(timer: Order) -> float:
    """Seconds from when the timer of a check is set until the check."""
    command: Any = timer.command
    return float(command.delay_s)


def _elapsed(timer: Order, now: float) -> float:
    """Seconds since a timer was set, as far as the clock counts them: a suspended scheduler blames nobody."""
    return min(now - timer.at, MOST_INTERVALS * interval_of(timer))
