"""What the time limit of an open order depends on: whether its process can work on it, and how often it was exceeded.

Functions over the state, which read no clock. The watchdog of a run measures with them (`runtime/watchdog.py`), and
`scheduling/time_limits.py` decides what follows.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from engine.commands import PauseReplica, StartProcess
from engine.ids import NO_VERSION
from engine.states.orders import KINDS_OF_SUBJECTS, Order, works_in_order
from engine.states.process import REPLICA, Process
from engine.states.state import State
from engine.states.timeouts import MOST_S

MOST_DOUBLED = 6
"""A limit doubles at most so many times."""


class CountsExceeded(Protocol):
    """A record that counts how often orders about it exceeded their limit."""

    exceeded: int


def can_work(state: State, process: Process) -> bool:
    """Whether a process can work on orders that stand still while it cannot."""
    if process.kind != REPLICA:
        return process.state == "up"
    replica = state.replicas.by_id[process.index]
    return replica.state == "ready" or (replica.state == "pausing" and state.limits.sync_mode == "wait")


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
    if process is not None and not can_work(state, process):
        return False
    return type(owner) is int or not works_in_order(owner) or state.orders.first(owner) is order


def limit_of(state: State, order: Order, longest: Mapping[str, float]) -> float | None:
    """The time limit of an order in seconds; None: it has none. `longest`: the longest time to an answer or to
    progress, by kind, as far as it is known."""
    kind, timeouts = KINDS_OF_SUBJECTS.get(order.subject), state.limits.timeouts
    limit = None if kind is None else timeouts.limit(kind, longest.get(kind))
    if limit is None:
        return None
    if type(order.command) is StartProcess and order.command.redo:
        train = timeouts.limit("train", None)
        limit += len(order.command.redo) * (MOST_S if train is None else train)
    record = record_of(state, order)
    return limit if record is None else limit * 2.0 ** min(record.exceeded, MOST_DOUBLED)


def record_of(state: State, order: Order) -> CountsExceeded | None:
    """The record of what an order is about, if it counts exceeded limits."""
    command: Any = order.command
    found: CountsExceeded | None = None
    match order.subject:
        case "group" | "truncate" | "state":
            found = state.groups.live.get(command.group)
        case "rows":
            found = state.validations.live[command.validation].chunks[command.chunk]
        case "sync" | "resume":
            found = state.replicas.by_id[command.replica]
        case "start":
            found = state.find_process(command.kind, command.index)
        case "train" | "score":
            found = state.training.steps.get(command.step)
        case "inspect" if command.version == NO_VERSION:
            found = state.training.steps.get(command.step)
        case "publish" | "inspect":
            found = state.training
        case "checkpoint":
            found = state.checkpoints
    return found
