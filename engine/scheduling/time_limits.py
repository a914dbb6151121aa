"""Time limits: what follows when an order exceeds its limit.

The watchdog measures, and reports an overdue order with the chain of processes that wait for one another
(`runtime/watchdog.py`). Here the order is cut short, or the process to blame is stopped, and the limit of the next one
about the same subject doubles.
"""

from collections.abc import Iterable
from typing import Any

from engine.commands import EnterState, InspectStep, ParkGroup, PauseReplica, ScoreBatch, StageWeights
from engine.events import Event, OrderOverdue, SchedulerRecovered
from engine.scheduling.core import Core
from engine.scheduling.groups import lose_replica
from engine.scheduling.lifetimes import REASON_LENGTH, stop_process
from engine.scheduling.steps import fail_state_work
from engine.scheduling.validation import cut_rows
from engine.states.order_times import record_of
from engine.states.orders import FAILURES, KINDS_OF_SUBJECTS, RELATIONS, Order, owner_text
from engine.states.process import REPLICA, Process
from engine.states.state import State
from engine.states.timeouts import CUT

PREPARES = frozenset((ScoreBatch, InspectStep, StageWeights, PauseReplica))
"""Orders that prepare a train step or an install. An answer to them leaves the doubled limit as it is."""


# full time


def give_full_time(state: State, order: Order) -> None:
    """An order progresses, or nobody is to blame: it has its full time from now on."""
    order.since, order.overdue = state.facts.now, False


def give_all_full_time(state: State) -> None:
    """Every open order gets its full time. What one that exceeded its limit has caused goes on."""
    for order in state.orders.all():
        order.since = state.facts.now


def note_matched(state: State, event: Event, matched: Iterable[Order]) -> None:
    """An event has answered orders, or reports that they progress. Call it before the event changes anything else."""
    for order in matched:
        if order.number in state.orders.by_number:
            if type(event) is not OrderOverdue:
                give_full_time(state, order)
                truncated = state.orders.find("truncate", order.id) if order.subject == "group" else None
                if truncated is not None:
                    give_full_time(state, truncated)  # the same work
            continue
        if type(order.command) in (EnterState, InspectStep) and (process := state.process_of(order.owner)) is not None:
            process.answered_at = state.facts.now
        if type(event) in FAILURES or type(order.command) in PREPARES:
            continue
        record = record_of(state, order)
        if record is not None and record.exceeded:
            record.exceeded = 0


def on_recovered(core: Core, event: SchedulerRecovered) -> None:
    """Every order gets its full time: answers may have arrived while no scheduler ran."""
    give_all_full_time(core.state)
    core.state.recoveries["scheduler"] += 1


# an overdue order


def on_overdue(core: Core, event: OrderOverdue) -> None:
    (order,) = core.state.orders.matched[event.id]
    order.overdue = True
    limit, reason = f"{event.limit_s:g} s ({event.setting})", _reason_of(event, order)
    if order.subject in ("group", "truncate") and _is_parked_as_overdue(core.state, order):
        return  # one attempt exceeds its limit once
    record = record_of(core.state, order)
    if record is not None and KINDS_OF_SUBJECTS[order.subject] != CUT:
        record.exceeded += 1
    if order.subject in ("group", "truncate"):
        _park_overdue(core, order, f"an attempt exceeded its time limit of {limit}")
    elif order.subject == "rows":
        cut_rows(core, order, reason)
    elif order.subject in ("state", "inspect") and not _is_silent(core.state, order):
        command: Any = order.command
        core.state.orders.withdraw(order.subject, order.id)  # its process keeps running; a late answer is a stale echo
        fail_state_work(core, command, reason[:REASON_LENGTH])
    elif order.subject == "stop":
        core.state.end_run("stopped", reason, again=True)
    elif core.state.process_of(order.owner) is None:  # the data source
        core.state.end_run("stopped", reason)
    else:
        _blame(core, order, event, reason)


def _park_overdue(core: Core, order: Order, reason: str) -> None:
    state = core.state
    group, replica = state.groups.live[order.id], state.replicas.by_id[int(order.owner)]
    core.state.orders.add(ParkGroup(**replica.address_of(group), reason=reason))


def _is_parked_as_overdue(state: State, order: Order) -> bool:
    """Whether the group of an order is being parked because it exceeded its limit."""
    park: Any = state.orders.find("park", order.id)
    return park is not None and bool(park.command.reason)


def _is_silent(state: State, order: Order) -> bool:
    """Whether the process of an order has answered no order of its kind since this one was given."""
    process = state.process_of(order.owner)
    return process is None or process.answered_at <= order.since


# whom to blame


def _blame(core: Core, order: Order, event: OrderOverdue, reason: str) -> None:
    """Stop the process that the chain of waiting processes points to, if any. Docs: TIMEOUTS, "Which process hangs"."""
    owner = core.state.process_of(order.owner)
    assert owner is not None
    chain = event.chain or (owner.id,)
    *waiting, last = chain
    process = core.state.processes.get(last, owner)
    if not event.answered and not waiting:
        _stop_hung_process(core, owner, f"{reason}; it does not answer", order)
    elif not event.answered:
        said = f"the {last} does not answer, and {waiting[-1]} waits for it; {reason}"
        _stop_hung_process(core, process, said, order)
    elif not waiting or last in waiting:
        _stop_hung_process(core, owner, reason, order)
    elif process.state != "up" or _has_limited_work(core, process):
        give_full_time(core.state, order)
    else:
        waits = core.state.processes.get(waiting[-1], owner)
        _stop_hung_process(core, waits, f"{waits.id} waits for the idle {last}; {reason}", order)


def _has_limited_work(core: Core, process: Process) -> bool:
    """Whether it has an order with a limit: that of its own applies."""
    given = core.state.limits.timeouts.given
    owned = (order for owner in core.state.owners_of(process) for order in core.state.orders.owned(owner))
    limited = (KINDS_OF_SUBJECTS.get(order.subject) for order in owned)
    bounded = core.state.limits.timeouts.max_s is not None
    return any(kind is not None and (bounded or given(kind) is not None) for kind in limited)


def _stop_hung_process(core: Core, process: Process, reason: str, order: Order) -> None:
    """Stop the process to blame for an overdue order. `processes.py` handles its loss. No other code stops a
    process for a time limit."""
    reason = reason[:REASON_LENGTH]
    if process.kind == REPLICA:
        lose_replica(core, core.state.replicas.by_id[process.index], reason, hung=True)
    stop_process(core, process, reason, hung=True)
    if process is not core.state.process_of(order.owner):
        give_full_time(core.state, order)


def _reason_of(event: OrderOverdue, order: Order) -> str:
    """One sentence: the process, the limit, the time taken and the work."""
    keys = ", ".join(f"{name} {getattr(order.command, name)}" for name in RELATIONS[type(order.command)].id)
    work = type(order.command).__name__ + (f" ({keys})" if keys else "")
    limit = f"{event.limit_s:g} s ({event.setting})"
    return f"{owner_text(order.owner)} exceeded its time limit of {limit} after {event.took_s:.0f} s in {work}"
