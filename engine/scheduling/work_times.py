"""How long an order has taken, in time in which its process could work on it.

A recorded timer, the *limit check*, fires while an order with a time limit is open (`time_limits.py`). Each check adds
the time since the one before to the clock of the run, but at most twice the interval: a scheduler that was suspended
blames nobody. The work time of a process is the clock without the time in which it could not work. An order keeps the
work time of its process at which it was given, or last progressed, as its `mark`; the time it has taken is the
difference. So no order is overdue early, and at most one interval late.

Functions over the state, called when an order is given or answered, and at each check. They never give an order.
"""

from collections.abc import Iterable
from math import inf
from typing import Any, Protocol

from engine.commands import InspectStep, PauseReplica, ScoreBatch, StageWeights, StartProcess
from engine.events import Event, ProcessWaits
from engine.ids import NO_VERSION
from engine.states.orders import FAILURES, KINDS_OF_SUBJECTS, RELATIONS, Order, works_in_order
from engine.states.state import State
from engine.states.timeouts import BITS, CUT, MOST_S

MOST_DOUBLED = 6
"""A limit doubles at most so many times."""
PREPARES = frozenset((ScoreBatch, InspectStep, StageWeights, PauseReplica))
"""Orders that prepare a train step or an install. An answer to them leaves the doubled limit as it is."""
TEACH_NOTHING = FAILURES | {ProcessWaits}
"""Events that say nothing about how long work takes."""


class CountsExceeded(Protocol):
    """A record that counts how often orders about it exceeded their limit."""

    exceeded: int


def is_limited(state: State, order: Order) -> bool:
    """Whether an order has a time limit."""
    return order.subject in state.limit_check.least


def mark(state: State, order: Order, delay_s: float = 0.0) -> None:
    """An order begins now, or progresses: it has its full time."""
    order.mark, order.overdue = _work_time(state, order) + delay_s, False


def mark_new(state: State) -> None:
    """The orders that were given in this tick begin now."""
    orders = state.orders
    first = orders.next_number - sum(type(command) in RELATIONS for command in orders.commands)
    for order in reversed(orders.by_number.values()):
        if order.number < first:
            return
        mark(state, order, order.command.delay_s if isinstance(order.command, StartProcess) else 0.0)


def mark_all(state: State) -> None:
    """Every open order gets its full time from now on. What one that exceeded its limit has caused goes on."""
    for order in state.orders.all():
        overdue, is_delayed = order.overdue, order.mark > _work_time(state, order)
        mark(state, order, order.command.delay_s if is_delayed and isinstance(order.command, StartProcess) else 0.0)
        order.overdue = overdue


def time_taken(state: State, order: Order) -> float:
    """Seconds in which the process of an order could work on it since it was given, or last progressed."""
    return max(0.0, _work_time(state, order) - order.mark)


def could_work(state: State, order: Order) -> bool:
    """Whether the process of an order can work on it now."""
    command, owner = order.command, order.owner
    if not order.stands_still:
        if type(command) is PauseReplica and command.mode == "wait":
            return not state.orders.of(command.replica, "group")
        if type(command) is StartProcess:
            return not state.process(command.kind, command.index).no_room
        return True
    process = state.process_of(owner)
    if process is not None and process.still_since >= 0:
        return False
    return type(owner) is int or not works_in_order(owner) or state.orders.first(owner) is order


def limit_of(state: State, order: Order) -> float:
    """The time limit of an order that has one."""
    kind, check, timeouts = KINDS_OF_SUBJECTS[order.subject], state.limit_check, state.limits.timeouts
    process = state.process_of(order.owner)
    fresh = kind != "start" and process is not None and not process.answered & BITS[kind]
    limit = timeouts.limit(kind, check.longest.get(kind), fresh=fresh)
    if limit is None:
        return inf  # only `timeouts.max_s` bounds it
    if type(order.command) is StartProcess and order.command.redo:
        train = timeouts.limit("train", check.longest.get("train"), fresh=True)
        limit += len(order.command.redo) * (MOST_S if train is None else train)
    record = _record_of(state, order)
    return limit if record is None else limit * 2.0 ** min(record.exceeded, MOST_DOUBLED)


def note_exceeded(state: State, order: Order) -> None:
    """An order exceeded its limit: the next one about its subject gets twice as much time."""
    order.overdue = True
    record = _record_of(state, order)
    if record is not None and KINDS_OF_SUBJECTS[order.subject] != CUT:
        record.exceeded += 1


def note_matched(state: State, event: Event, matched: Iterable[Order]) -> None:
    """An event has answered orders, or reports that they progress. Call it before the event changes anything else."""
    check = state.limit_check
    for order in matched:
        progress = order.number in state.orders.by_number
        if not progress and works_in_order(order.owner):
            following = state.orders.first(order.owner)
            if following is not None and following.number > order.number:
                mark(state, following)  # its process works on it from now on
        subject = order.subject
        if subject not in check.least:
            continue
        process = state.process_of(order.owner)
        if process is not None and subject in ("stage", "inspect"):
            process.last_answer = _work_time(state, order)
        if type(event) in TEACH_NOTHING or (subject == "start" and not could_work(state, order)):
            continue  # when it had room to start is not known
        kind, took = KINDS_OF_SUBJECTS[subject], time_taken(state, order)
        whole = not progress or subject != "start"  # a part of a start teaches nothing about those of others
        if whole and took > check.longest.get(kind, -1.0):
            check.learn(state.limits.timeouts, kind, took)
        if progress:
            mark(state, order)
            truncated = state.orders.find("truncate", order.id) if order.subject == "group" else None
            if truncated is not None:
                mark(state, truncated)  # the same work
            continue
        if process is not None:
            process.answered |= BITS[kind]
        record = _record_of(state, order)
        if record is not None and record.exceeded and type(order.command) not in PREPARES:
            record.exceeded = 0


def is_silent(state: State, order: Order) -> bool:
    """Whether the process of an order has answered no order of its kind since this one was given."""
    process = state.process_of(order.owner)
    return process is None or process.last_answer <= order.mark


def _work_time(state: State, order: Order) -> float:
    """The work time of the process of an order; the clock for an order that never stands still."""
    clock = state.limit_check.read(state.now)
    process = state.process_of(order.owner) if order.stands_still else None
    return clock if process is None else process.work_time(clock)


def _record_of(state: State, order: Order) -> CountsExceeded | None:
    """The record of what an order is about, if it counts exceeded limits."""
    command: Any = order.command
    found: CountsExceeded | None = None
    match order.subject:
        case "group" | "truncate" | "stage":
            found = state.groups.live.get(command.group)
        case "rows":
            found = state.validations.runs[command.validation].chunks[command.chunk]
        case "sync" | "resume":
            found = state.replicas.by_id[command.replica]
        case "start":
            found = state.find_process(command.kind, command.index)
        case "train" | "score":
            found = state.training.steps.get(command.step)
        case "inspect" if command.version == NO_VERSION:
            found = state.training.steps.get(command.step)
        case "publish" | "inspect":
            found = state.limit_check
        case "checkpoint":
            found = state.checkpoints
    return found
