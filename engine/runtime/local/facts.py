"""Which facts a session accepts, and `answer`, which makes the fact that answers an order.

Called by `session.py` before a fact reaches the scheduler. A fact that no order can have caused is refused, and the
error says what is allowed. A fact that comes too late, about work that has ended, is accepted: the scheduler ignores
it. This module must never change the state.
"""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from engine.commands import Command
from engine.control.requests import changes, check_replicas
from engine.errors import EngineError, suggestion
from engine.events import (
    EVENTS,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderDone,
    PrefixStored,
    ProcessLost,
    ProcessUp,
    PromptsDrawn,
    ReplicasWanted,
    RowsMeasured,
    RunInterrupted,
    RunResumed,
    RunStarted,
    SchedulerRecovered,
    SettingChanged,
    StateFailed,
    StateLeft,
    TimerFired,
    WeightsInstalled,
    WeightsStaged,
)
from engine.ids import NO_VERSION
from engine.record.codec import plain_event
from engine.record.msgpack_values import CodecError
from engine.scheduling.scheduler import Scheduler
from engine.states.orders import RELATIONS, Order, Relation
from engine.states.process import KINDS, REPLICA
from engine.states.state import State


class IllegalFact(EngineError):
    """A fact that cannot be true, or that no order can have caused. Nothing has changed: report the right one."""

    @property
    def orders(self) -> tuple[Command, ...]:
        """The orders of the facts before it in the same report."""
        return tuple(self.details.get("orders", ()))


# -- making facts ------------------------------------------------------------------------------------------------------


Fact = TypeVar("Fact", bound=Event)


def answer(order: Command, kind: type[Fact], **data: Any) -> Fact:
    """The fact of class `kind` that answers or reports on `order`. It repeats the ids and numbers of the order. Pass
    the other fields as `data`.

    Raises: `IllegalFact` if such a fact does not answer this order, or a field is missing or unknown.
    """
    relation = RELATIONS.get(type(order))
    known = () if relation is None else (*relation.answers, *relation.reports)
    if relation is None or kind not in known:
        allowed = _named(known) if known else "nothing, because it needs no answer"
        raise IllegalFact(f"{_name(kind)} does not answer {type(order).__name__}; use {allowed}")
    if kind is OrderDone:
        data = {"orders": (getattr(order, "number", -1),), **data}
    own = {field.name: field for field in fields(kind) if field.name not in ("id", "at")}
    unknown = next((name for name in data if name not in own), None)
    if unknown is not None:
        fix = suggestion(unknown, own, f"it has {', '.join(own)}")
        raise IllegalFact(f"{kind.__name__} has no field {unknown}; {fix}")
    repeated = {*relation.id, *relation.echo, *(name for name, field in own.items() if field.default is MISSING)}
    echo = {name: getattr(order, name) for name in own if name in repeated and hasattr(order, name)}
    missing = [name for name in own if name in repeated and name not in echo and name not in data]
    if missing:
        raise IllegalFact(f"{kind.__name__} lacks {', '.join(missing)}; give each as a keyword")
    return kind(**{**echo, **data})


# -- checking facts ----------------------------------------------------------------------------------------------------


OWN = (RunStarted, RunResumed, RunInterrupted, SchedulerRecovered)
"""Facts that only the session reports."""
MAY_BE_NONE = ("oldest_version", "newest_version", "published")
"""Versions that are `NO_VERSION` if there is none."""
CAUSES = ("infrastructure", "data")


def check_fact(fact: Any, scheduler: Scheduler, now: float) -> None:
    """Raises: `IllegalFact`, or the `ConfigError` of a setting or number of replicas that is not allowed."""
    if not isinstance(fact, Event) or EVENTS.get(type(fact).tag) is not type(fact):
        raise IllegalFact(f"{fact!r:.200} is not a fact; report an object of a class in engine.events")
    if isinstance(fact, OWN):
        raise IllegalFact(f"{_name(type(fact))} is reported by the session itself, in begin(); leave it out")
    try:
        plain_event(fact)
    except CodecError as error:
        raise IllegalFact(f"{fact}: {error}") from None
    problem = next(_problems(fact, scheduler, now), None)
    if problem is not None:
        raise IllegalFact(f"{fact}: {problem}")


def _problems(fact: Any, scheduler: Scheduler, now: float) -> Iterator[str]:
    """What is wrong with a fact of a valid class, worst first."""
    state = scheduler.state
    yield from _number_problems(fact)
    yield from _subject_problems(fact, state)
    orders = [order for relation in _relations(type(fact)) for order in _about(fact, relation, state)]
    for order in orders:
        yield from _echo_problems(fact, order)
    if isinstance(fact, OrderDone):
        yield from _acknowledgment_problems(fact, state)
    elif isinstance(fact, SettingChanged):
        changes([(fact.setting, fact.value)], state.limits, scheduler.policies)
    elif isinstance(fact, ReplicasWanted):
        check_replicas(fact.replicas, state.limits, 4096)
    elif isinstance(fact, TimerFired):
        yield from _timer_problems(fact, state, now)
    elif orders and not _is_late(fact, orders[0].command):
        yield from _content_problems(fact, orders[0].command, state)


def _number_problems(fact: Any) -> Iterator[str]:
    for field in fields(fact):
        value = getattr(fact, field.name)
        least = NO_VERSION if field.name in MAY_BE_NONE else 0
        for number in value if isinstance(value, tuple) else [value]:
            if type(number) is int and number < least and field.name != "id":
                yield f"{field.name} is {number}, but must be at least {least}"
    if isinstance(fact, GroupFailed | StateFailed) and fact.cause not in CAUSES:
        yield f"cause is {fact.cause!r}; use {' or '.join(CAUSES)}"


def _subject_problems(fact: Any, state: State) -> Iterator[str]:
    """Whether the subject of the fact exists."""
    if (group := getattr(fact, "group", None)) is not None:
        yield from _lacks("group", group, state.ledger.drawn, "were drawn")
        known = state.groups.get(group)
        if known is not None and fact.attempt > known.attempt:
            yield f"attempt {fact.attempt} of group {group} was not ordered; the newest is {known.attempt}"
    if (step := getattr(fact, "step", None)) is not None:
        yield from _lacks("step", step, state.steps_batched, "have a batch")
    if (steps := getattr(fact, "steps", None)) is not None and steps > state.steps_trained:
        yield f"steps is {steps}, but only {state.steps_trained} are trained"
    kind, index = getattr(fact, "kind", REPLICA), getattr(fact, "index", getattr(fact, "replica", None))
    if index is None:
        return
    process = state.find_process(kind, index) if kind in KINDS else None
    if process is None:
        yield f"there is no {kind} {index}" if kind in KINDS else f"kind is {kind!r}; use one of {', '.join(KINDS)}"
    elif fact.incarnation > process.incarnation:
        yield f"incarnation {fact.incarnation} was not ordered; the newest is {process.incarnation}"


def _lacks(what: str, number: int, count: int, how: str) -> Iterator[str]:
    if number >= count:
        there = f"only {what}s 0 to {count - 1} {how}" if count else f"no {what}s {how} yet"
        yield f"there is no {what} {number}: {there}"


def _relations(kind: type[Event]) -> list[Relation]:
    found = (relation for relation in RELATIONS.values() if kind in (*relation.answers, *relation.reports))
    return list({relation.subject: relation for relation in found}.values())


def _about(fact: Any, relation: Relation, state: State) -> Iterator[Order]:
    """The open orders about the same subject as a fact."""
    names = [name for name in relation.id if hasattr(fact, name)]
    if isinstance(fact, OrderDone):
        return
    for order in state.orders.open(relation.subject).values():
        if all(getattr(order.command, name) == getattr(fact, name) for name in names):
            yield order


def _echo_problems(fact: Any, order: Order) -> Iterator[str]:
    """A number above that of the open order was never given; a lower one is late."""
    for name in ("attempt", "number"):
        theirs, ours = getattr(fact, name, None), getattr(order.command, name, None)
        if theirs is not None and ours is not None and theirs > ours:
            yield f"{name} is {theirs}, but {type(order.command).__name__} has {ours}"


def _is_late(fact: Any, command: Any) -> bool:
    """Whether a fact answers an order that ended before this one was given, and so has no effect."""
    names = ["attempt", "number"]
    if isinstance(fact, WeightsStaged | WeightsInstalled) and fact.version > 0:  # the first version is never ordered
        names.append("version")
    both = [name for name in names if hasattr(fact, name) and hasattr(command, name)]
    return any(getattr(fact, name) < getattr(command, name) for name in both)


def _acknowledgment_problems(fact: OrderDone, state: State) -> Iterator[str]:
    if not fact.orders:
        yield "orders is empty; give the `number` of each order that is done"
    for number in fact.orders:
        yield from _lacks("order", number, state.orders.next_number, "were given")
        if state.orders.is_open(number):
            command = type(state.orders.numbered(number).command)
            if OrderDone not in RELATIONS[command].answers:
                yield f"order {number} is {command.__name__}; answer it by {_named(RELATIONS[command].answers)}"


def _timer_problems(fact: TimerFired, state: State, now: float) -> Iterator[str]:
    yield from _lacks("timer", fact.timer, state.next_timer, "were set")
    order = state.orders.find("timer", fact.timer)
    if order is not None and (left := due_at(order) - now) > 0:
        yield f"it is due in {left:.3f} s; ask next_due() when to report a timer"


def _content_problems(fact: Any, order: Any, state: State) -> Iterator[str]:
    """What is impossible in a fact that answers an open order."""
    if isinstance(fact, PromptsDrawn):
        if fact.first != order.first or fact.count > order.count:
            yield f"prompts {order.first} to {order.first + order.count - 1} were ordered"
        if not fact.count and not fact.exhausted:
            yield "count is 0, but the source is not exhausted; draw at least one prompt"
    elif isinstance(fact, GroupGenerated | GroupAborted | PrefixStored):
        yield from _version_problems(fact, state)
    elif isinstance(fact, WeightsStaged | WeightsInstalled) and fact.version != order.version:
        yield f"version {order.version} was ordered"
    elif isinstance(fact, RowsMeasured):
        if not fact.right <= fact.measured <= order.count:
            yield f"must have right <= measured <= {order.count}, the number of rows"
        if fact.rows and len(fact.right_rows) != fact.right:
            yield f"has {len(fact.right_rows)} right_rows, but right is {fact.right}; name these rows"
        if fact.version != order.version:
            yield f"version {order.version} was ordered"
    if isinstance(fact, GroupGenerated | StateLeft) and fact.reward_spread < 0:
        yield "reward_spread is negative, but is the largest minus the smallest reward"
    if isinstance(fact, ProcessUp) and fact.kind == REPLICA:
        if not fact.slots or not fact.samples:
            yield "slots and samples must be at least 1"
        if fact.version > state.latest_version:
            yield f"version is {fact.version}, but the newest is {state.latest_version}"
    if isinstance(fact, ProcessLost) and fact.published > state.latest_version + 1:
        yield f"published is {fact.published}, but the newest version is {state.latest_version}"


def _version_problems(fact: Any, state: State) -> Iterator[str]:
    oldest, newest = fact.oldest_version, fact.newest_version
    known, replica = state.groups.get(fact.group), state.fleet.replicas.get(fact.replica)
    if (oldest == NO_VERSION or newest == NO_VERSION) and (fact.tokens or oldest != newest):
        yield "a group with tokens has an oldest and a newest version; use -1 for both if it has no token"
    elif isinstance(fact, GroupGenerated) and not fact.tokens:
        yield "tokens is 0; a group without tokens is GroupFailed"
    elif oldest != NO_VERSION and known is not None and replica is not None:
        first, last = known.admitted_version, replica.version
        if not first <= oldest <= newest <= last:
            law = f"must have {first} <= oldest_version <= newest_version <= {last}"
            yield f"{law}: it was admitted on version {first}, and replica {replica.id} has version {last}"


def due_at(order: Order) -> float:
    """When the timer of an order is due, in seconds since the run began."""
    delay_s: float = getattr(order.command, "delay_s", 0.0)
    return order.at + max(0.0, delay_s)


def _named(kinds: Any) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))
