"""Time limits: the check of all open orders, and what follows when one exceeds its limit.

If any order has a limit (`Limits.timeouts`), a timer is set while one is open that its process can work on; with
`max_s`, while any is open. When it fires, each order whose process worked on it for longer than its limit, or that was
given more than `max_s` ago, is cut short, or the process to blame is stopped.
`work_times.py` measures. This module must never act on work that is within its limit.

The owner of an overdue order may itself wait for another process that hangs. So the owner is probed, then what it waits
for, and so on. The open `ProbeProcess` names the overdue order and the processes that were probed before.
"""

from bisect import bisect_right
from typing import Any

from engine.commands import ParkGroup, ProbeProcess
from engine.events import ProcessProbed, SchedulerRecovered
from engine.scheduling.core import Core
from engine.scheduling.groups import lose_replica
from engine.scheduling.lifetimes import REASON_LENGTH, stop_process
from engine.scheduling.steps import fail_stage_work
from engine.scheduling.timers import cancel_timer, set_timer
from engine.scheduling.validation import cut_rows
from engine.scheduling.work_times import (
    could_work,
    is_limited,
    is_silent,
    limit_of,
    mark,
    mark_all,
    mark_new,
    note_exceeded,
    time_taken,
)
from engine.states.limit_check import interval_of
from engine.states.orders import KINDS_OF_SUBJECTS, LIMIT, RELATIONS, Order, owner_text, works_in_order
from engine.states.process import REPLICA, Process
from engine.states.state import State
from engine.states.timeouts import AUTO

CHECKS_IN_LIMIT = 20
"""The interval of the check is the smallest limit of any open order, divided by this."""
SHORTEST_S, LONGEST_S = 0.05, 30.0
"""The shortest and the longest interval."""
MOST_LOOKS = 4096
"""Maximum number of orders that one check looks at."""
LOOKS_IN_LIMIT = 4
"""How often each order is looked at within its limit, at least."""
SLACK_S = 0.001
"""An order this close to its limit has reached it: sums of floats are no more exact than that."""
COMMA = ", "


# the check


def set_limit_check(core: Core) -> None:
    """Set the timer of the next check, if an order with a limit is open that its process can work on; or a sooner one,
    after an order with a shorter limit was given."""
    state, least = core.state, core.state.limit_check.least
    if not least:  # the last limit was lifted
        cancel_timer(core, LIMIT)
        return
    mark_new(state)
    limits = [limit for subject, limit in least.items() if state.orders.open[subject]]
    if not limits:
        return
    rounds = -(-len(state.orders) // MOST_LOOKS)
    interval = min(limits) / max(CHECKS_IN_LIMIT, LOOKS_IN_LIMIT * rounds)
    interval = min(LONGEST_S, max(SHORTEST_S, interval))
    timer = state.orders.find("timer", LIMIT)
    if timer is None:
        is_due = _is_anything_timed(state)
    else:
        is_due = interval < interval_of(timer) - SLACK_S
    if is_due:
        set_timer(core, LIMIT, interval)


def _is_anything_timed(state: State) -> bool:
    """Whether an order with a limit is open that its process can work on; with `max_s`, any order with a limit."""
    always = state.limits.timeouts.max_s is not None
    found = (order for subject in state.limit_check.least for order in state.orders.open[subject].values())
    return any(always or could_work(state, order) for order in found)


def check_limits(core: Core) -> None:
    """Look at the open orders, and act on each that exceeds its limit. Many orders are looked at in rounds; a round has
    the orders that were open when it began."""
    state, check = core.state, core.state.limit_check
    numbers = list(state.orders.by_number)
    first, end = bisect_right(numbers, check.cursor), bisect_right(numbers, check.newest)
    if first >= end:  # all orders of the last round were looked at
        first, end, check.newest = 0, len(numbers), numbers[-1] if numbers else -1
    looked_at = numbers[first : min(end, first + MOST_LOOKS)]
    check.cursor = looked_at[-1] if looked_at else -1
    for number in looked_at:
        if state.ending.outcome is not None:
            return
        if number in state.orders.by_number:  # it may have ended with one before it
            _check_order(core, state.orders.by_number[number])


def _check_order(core: Core, order: Order) -> None:
    state, check, total_s = core.state, core.state.limit_check, core.state.limits.timeouts.max_s
    least_s = check.least.get(order.subject)
    if order.overdue or least_s is None:
        return
    of_replica = type(order.owner) is int and order.stands_still
    if of_replica and total_s is None and check.clock - order.mark < least_s - SLACK_S:
        return  # it is within the smallest limit, even if its replica never stood still
    if total_s is not None and state.now - order.at >= total_s - SLACK_S:
        _handle_exceeded_limit(core, order)
    elif could_work(state, order):
        if time_taken(state, order) >= limit_of(state, order) - SLACK_S:
            _handle_exceeded_limit(core, order)
    elif not order.stands_still or works_in_order(order.owner):
        mark(state, order)  # its process waits for room or for groups, or works on the order ahead


def on_recovered(core: Core, event: SchedulerRecovered) -> None:
    """Every order gets its full time: answers may have arrived while no scheduler ran."""
    mark_all(core.state)
    core.state.recoveries["scheduler"] += 1


# acting


def _handle_exceeded_limit(core: Core, order: Order) -> None:
    if order.subject in ("group", "truncate") and _is_parked_as_overdue(core.state, order):
        order.overdue = True  # one attempt exceeds its limit once
        return
    (limit, _), reason = _exceeded_limit(core, order), _reason_of(core, order)
    note_exceeded(core.state, order)
    if order.subject == "probe":
        _on_silence(core, order)
    elif order.subject in ("group", "truncate"):
        _park_overdue(core, order, f"an attempt exceeded its time limit of {limit}")
    elif order.subject == "rows":
        cut_rows(core, order, reason)
    elif order.subject in ("stage", "inspect") and not is_silent(core.state, order):
        command: Any = order.command
        core.state.orders.withdraw(order.subject, order.id)  # its process keeps running; a late answer is a stale echo
        fail_stage_work(core, command, reason[:REASON_LENGTH])
    elif order.subject == "stop":
        core.state.end_run("stopped", reason, again=True)
    else:
        _probe_owner(core, order, reason)


def _park_overdue(core: Core, order: Order, reason: str) -> None:
    state = core.state
    group, replica = state.groups.live[order.id], state.replicas.by_id[int(order.owner)]
    core.state.orders.add(ParkGroup(**replica.address_of(group), reason=reason))


def _is_parked_as_overdue(state: State, order: Order) -> bool:
    """Whether the group of an order is being parked because it exceeded its limit."""
    park: Any = state.orders.find("park", order.id)
    return park is not None and bool(park.command.reason)


# whom to blame


def _probe_owner(core: Core, order: Order, reason: str) -> None:
    """Probe the owner of an overdue order, unless that is in progress for another of its orders."""
    owner = core.state.process_of(order.owner)
    probes: list[Any] = [one.command for one in core.state.orders.open["probe"].values()]
    if owner is None:  # the data source
        core.state.end_run("stopped", reason)
    elif any(probe.chain.split(COMMA)[0] == owner.id for probe in probes):
        mark(core.state, order)
    else:
        _probe_process(core, owner, order, reason[:REASON_LENGTH], owner.id)


def _probe_process(core: Core, process: Process, order: Order, reason: str, *chain: str) -> None:
    core.state.orders.add(ProbeProcess(**process.address(), order=order.number, reason=reason, chain=COMMA.join(chain)))


def on_probed(core: Core, event: ProcessProbed) -> None:
    """Follow the chain of processes that wait for one another. If the last one works, its own limits apply. If it
    is idle, the process that waits for it hangs. In a cycle, the owner of the overdue order hangs."""
    state = core.state
    probe: Any = state.orders.matched[event.id][0].command
    order = _overdue(core, probe)
    if order is None:
        return
    chain, reason = probe.chain.split(COMMA), probe.reason
    awaited = state.processes.get(event.waits_for)
    if awaited is not None and awaited.id not in chain:
        if awaited.state == "up":
            _probe_process(core, awaited, order, reason, *chain, awaited.id)
        else:
            mark(core.state, order)
    elif awaited is not None or len(chain) == 1:
        _stop_hung_process(core, chain[0], reason, order)
    elif _has_limited_work(core, state.processes[chain[-1]]):
        mark(core.state, order)
    else:
        _stop_hung_process(core, chain[-2], f"{chain[-2]} waits for the idle {chain[-1]}; {reason}", order)


def _on_silence(core: Core, order: Order) -> None:
    """Stop a process that did not answer a probe in time: it hangs."""
    probe: Any = order.command
    core.state.orders.withdraw("probe", order.id)
    process, overdue = core.state.find_process(probe.kind, probe.index), _overdue(core, probe)
    chain = probe.chain.split(COMMA)
    if overdue is None or process is None:
        return
    if process.incarnation != probe.incarnation:
        mark(core.state, overdue)
    elif len(chain) == 1:
        _stop_hung_process(core, process.id, f"{probe.reason}; it does not answer", overdue)
    else:
        reason = f"the {process.id} does not answer, and {chain[-2]} waits for it; {probe.reason}"
        _stop_hung_process(core, process.id, reason, overdue)


def restart_probed_orders(core: Core, answered: tuple[Order, ...]) -> None:
    """A process was lost before it answered its probes: the overdue orders get their full time."""
    for order in answered:
        if order.subject == "probe" and (overdue := _overdue(core, order.command)) is not None:
            mark(core.state, overdue)


def _overdue(core: Core, probe: Any) -> Order | None:
    """The overdue order of a probe, if it is still open, has a limit and has not progressed since."""
    order = core.state.orders.by_number.get(probe.order)
    return order if order is not None and order.overdue and is_limited(core.state, order) else None


def _has_limited_work(core: Core, process: Process) -> bool:
    """Whether it has an order with a limit."""
    owned = (order for owner in core.state.owners_of(process) for order in core.state.orders.owned(owner))
    return any(is_limited(core.state, order) and order.subject != "probe" for order in owned)


def _stop_hung_process(core: Core, name: str, reason: str, order: Order) -> None:
    """Stop the process to blame for an overdue order. `processes.py` handles its loss. No other code stops a
    process for a time limit."""
    owner = core.state.process_of(order.owner)
    process = core.state.processes.get(name, owner)
    assert process is not None
    if process.kind == REPLICA:
        lose_replica(core, core.state.replicas.by_id[process.index], reason, hung=True)
    stop_process(core, process, reason, hung=True)
    if process is not owner:
        mark(core.state, order)


def _exceeded_limit(core: Core, order: Order) -> tuple[str, float]:
    """The limit that an order exceeded, with its setting; and the seconds that it took."""
    timeouts, kind = core.state.limits.timeouts, KINDS_OF_SUBJECTS[order.subject]
    limit_s, taken_s = limit_of(core.state, order), time_taken(core.state, order)
    if timeouts.max_s is not None and taken_s < limit_s:
        return f"{timeouts.max_s:g} s (timeouts.max_s)", core.state.now - order.at
    return f"{limit_s:g} s (timeouts.{kind}_s{': auto' if timeouts.given(kind) == AUTO else ''})", taken_s


def _reason_of(core: Core, order: Order) -> str:
    """One sentence: the process, the limit, the time taken and the work."""
    limit, taken_s = _exceeded_limit(core, order)
    keys = ", ".join(f"{name} {getattr(order.command, name)}" for name in RELATIONS[type(order.command)].id)
    work = type(order.command).__name__ + (f" ({keys})" if keys else "")
    (timer,) = core.state.orders.matched[core.state.orders.event.id]
    checked = f"limits are checked every {interval_of(timer):.3g} s"
    return f"{owner_text(order.owner)} exceeded its time limit of {limit} after {taken_s:.0f} s in {work}; {checked}"
