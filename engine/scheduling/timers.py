"""Timers, by which the scheduler acts later: the order book has those that are set.

Called by the other modules of `scheduling/`. What follows from a timer that fired is in `TIMERS` of `scheduler.py`.
"""

from engine.commands import CancelTimer, SetTimer
from engine.events import TimerFired
from engine.scheduling.core import Core


def set_timer(core: Core, name: str, delay_s: float) -> None:
    """Set a timer, and cancel the one with this name that is already set."""
    cancel_timer(core, name)
    orders = core.state.orders
    orders.add(SetTimer(name=name, timer=orders.facts.next_number, delay_s=delay_s))


def limit_timer(core: Core, name: str, since: float, limit_s: float | None) -> None:
    """Set a timer for `limit_s` after `since`, instead of one that is set; without a limit, none. Call it again after a
    change of the limit."""
    cancel_timer(core, name)
    if limit_s is not None:
        set_timer(core, name, max(0.0, limit_s - (core.state.facts.now - since)))


def cancel_timer(core: Core, name: str) -> None:
    """Cancel a timer, if it is set."""
    state = core.state
    order = state.orders.find("timer", name)
    if order is not None:
        state.orders.add(CancelTimer(name=name, timer=order.number))


def on_timer_fired(core: Core, event: TimerFired) -> None:
    """Note that a timer has fired. It is acted on once all events of the tick are known."""
    (order,) = core.state.orders.matched[event.id]
    core.fired[order.id] = event
