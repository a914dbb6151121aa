"""Which facts a session accepts, and `answer`, which makes the fact that answers an order.

Called by `session.py` before a fact reaches the scheduler. A fact that no order can have caused is refused, and the
error says what is allowed. A fact that comes too late, about work that has ended, is accepted: the scheduler ignores
it. This module must never change the state.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec import structs

from engine.commands import Command, MeasureRows, PauseReplica
from engine.control.requests import MOST_REPLICAS, changes, check_replicas
from engine.errors import EngineError, choice
from engine.events import (
    EVENTS,
    BatchScored,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointSaved,
    DrawFailed,
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    InspectionFailed,
    OrderDone,
    OrderProgressed,
    PrefixStored,
    ProcessLost,
    ProcessProbed,
    ProcessUp,
    PromptsDrawn,
    PublishFailed,
    ReplicaPaused,
    ReplicasWanted,
    RowsFailed,
    RowsMeasured,
    RunInterrupted,
    RunResumed,
    RunStarted,
    SchedulerRecovered,
    SettingChanged,
    StateFailed,
    StateLeft,
    StepFailed,
    StepInspected,
    StepTrained,
    SyncFailed,
    TimerFired,
    WeightsInstalled,
    WeightsPublished,
    WeightsStaged,
)
from engine.ids import NO_VERSION
from engine.record.codec import CodecError, pack_events, unpack_events
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import PUBLISHING, SCORING
from engine.states.orders import NUMBERED, RELATIONS, Order, Relation
from engine.states.process import KINDS, REPLICA, TRAINER
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
    number = getattr(order, "number", -1)
    if kind is OrderDone:
        data = {"orders": (number,), **data}
    elif kind is OrderProgressed:
        data = {"order": number, **data}
    own = {field.name: field for field in structs.fields(kind) if field.name not in ("id", "at")}
    unknown = next((name for name in data if name not in own), None)
    if unknown is not None:
        fix = choice(unknown, [*own], f"it has {', '.join(own)}")
        raise IllegalFact(f"{kind.__name__} has no field {unknown}; {fix}")
    repeated = {*relation.id, *relation.echo, *(name for name, field in own.items() if field.required)}
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
COUNTED = ("attempt", "incarnation")
"""Fields whose numbers begin with 1."""
SYNC = (WeightsStaged, ReplicaPaused, WeightsInstalled)
"""The facts of a sync, in this order."""
INSPECTION = (StepInspected, InspectionFailed)
"""The answers to an `InspectStep`. Of a batch they have no version, of the initial weights no step."""
ABORTING = ("abort", "sleep")
"""Modes of a pause that first stops the groups of its replica."""
CAUSES = ("infrastructure", "data")


def checked_fact(fact: Any, scheduler: Scheduler, now: float) -> Event:
    """The fact as a record has it: numbers of a subclass, such as numpy's floats, become plain ones. Raises:
    `IllegalFact`, or the `ConfigError` of a setting or number of replicas that is not allowed."""
    if not isinstance(fact, Event) or type(fact) not in EVENTS:
        raise IllegalFact(f"{fact!r:.200} is not a fact; report an object of a class in engine.events")
    if isinstance(fact, OWN):
        raise IllegalFact(f"{_name(type(fact))} is reported by the session itself, in begin(); leave it out")
    try:
        (recorded,) = unpack_events(pack_events([fact]))
    except CodecError as error:
        raise IllegalFact(f"{fact}: {error}") from None
    problem = next(_problems(recorded, scheduler, now), None)
    if problem is not None:
        raise IllegalFact(f"{fact}: {problem}")
    return recorded


def _problems(fact: Any, scheduler: Scheduler, now: float) -> Iterator[str]:
    """What is wrong with a fact of a valid class, worst first."""
    state = scheduler.state
    yield from _number_problems(fact)
    yield from _subject_problems(fact, state)
    if state.ending.outcome is None:
        yield from _unordered_problems(fact, state)
    orders = [order for relation in _relations(type(fact)) for order in _about(fact, relation, state)]
    for order in orders:
        yield from _echo_problems(fact, order)
    if isinstance(fact, OrderDone):
        yield from _acknowledgment_problems(fact, state)
    elif isinstance(fact, OrderProgressed):
        yield from _progress_problems(fact, state)
    elif isinstance(fact, SettingChanged):
        changes([(fact.setting, fact.value)], state.limits, scheduler.policies)
    elif isinstance(fact, ReplicasWanted):
        check_replicas(fact.replicas, state.limits, MOST_REPLICAS)
    elif isinstance(fact, TimerFired):
        yield from _timer_problems(fact, state, now)
    elif orders and not _is_late(fact, orders[0].command):
        yield from _content_problems(fact, orders[0].command, state)


def _number_problems(fact: Any) -> Iterator[str]:
    for name in fact.__struct_fields__:
        value = getattr(fact, name)
        none = name in MAY_BE_NONE or (isinstance(fact, INSPECTION) and name in ("version", "step"))
        least = NO_VERSION if none else int(name in COUNTED)
        for number in value if isinstance(value, tuple) else [value]:
            if type(number) is int and number < least and name != "id":
                yield f"{name} is {number}, but must be at least {least}"
    if isinstance(fact, GroupFailed | StateFailed) and fact.cause not in CAUSES:
        yield f"cause is {fact.cause!r}; use {' or '.join(CAUSES)}"


def _subject_problems(fact: Any, state: State) -> Iterator[str]:
    """Whether the subject of the fact exists."""
    training = state.training
    if (group := getattr(fact, "group", None)) is not None:
        yield from _lacks("group", group, state.groups.ledger.drawn, "were drawn")
        known = state.groups.live.get(group)
        if known is not None and fact.attempt > known.attempt:
            yield f"attempt {fact.attempt} of group {group} was not ordered; the newest is {known.attempt}"
    if (step := getattr(fact, "step", None)) is not None:
        yield from _lacks("step", step, training.steps_batched, "have a batch")
    if (steps := getattr(fact, "steps", None)) is not None and steps > training.steps_trained:
        yield f"steps is {steps}, but only {training.steps_trained} are trained"
    kind, index = getattr(fact, "kind", REPLICA), getattr(fact, "index", getattr(fact, "replica", None))
    if index is None:
        return
    process = state.find_process(kind, index) if kind in KINDS else None
    if process is None or process.index != index:
        yield f"there is no {kind} {index}" if kind in KINDS else f"kind is {kind!r}; use one of {', '.join(KINDS)}"
    elif fact.incarnation > process.incarnation:
        yield f"incarnation {fact.incarnation} was not ordered; the newest is {process.incarnation}"


def _unordered_problems(fact: Any, state: State) -> Iterator[str]:
    """Whether no order so far can have caused the fact, although its subject exists."""
    training = state.training
    if isinstance(fact, WeightsPublished | PublishFailed):
        to_come = fact.version > training.latest_version
        if not fact.version or (to_come and state.orders.find("publish", fact.version) is None):
            newest = training.latest_version
            yield f"no publication of version {fact.version} was ordered; the newest version is {newest}"
        yield from _exceeds("attempt", fact.attempt, training.publishing_attempt)
    elif isinstance(fact, StepTrained | StepFailed | BatchScored):
        if (step := training.steps.get(fact.step)) is not None:
            yield from _exceeds("attempt", fact.attempt, step.attempt)
            if isinstance(fact, StepTrained) and step.state == "scoring" and fact.attempt == step.attempt:
                yield f"attempt {fact.attempt} to train step {step.id} was not ordered yet"
        if isinstance(fact, BatchScored):
            yield from _unknown("scoring task", fact.task, state.limits.scoring_tasks)
    elif isinstance(fact, CheckpointSaved | CheckpointFailed):
        if not fact.steps or not state.limits.checkpoint_every:
            yield f"no checkpoint after {fact.steps} train steps was ordered"
    elif isinstance(fact, CheckpointDamaged):
        if fact.steps not in state.checkpoints.steps:
            yield f"no checkpoint after {fact.steps} train steps was reported as saved"
    elif isinstance(fact, RowsMeasured | RowsFailed):
        yield from _lacks("validation", fact.validation, state.validations.created, "were begun")
        if (run := state.validations.runs.get(fact.validation)) is not None:
            yield from _lacks("chunk", fact.chunk, len(run.chunks), f"are in validation {run.id}")
            yield from _exceeds("attempt", fact.attempt, run.chunks[fact.chunk].attempt)
    elif isinstance(fact, StateLeft | StateFailed):
        yield from _unknown("added state", fact.state, [*state.groups.stages.by_name])
    elif isinstance(fact, INSPECTION):
        yield from _unknown(
            "added state", fact.state, [*state.limits.states_at(SCORING), *state.limits.states_at(PUBLISHING)]
        )
    elif isinstance(fact, (*SYNC, SyncFailed)):
        replica = state.replicas.by_id[fact.replica]
        if fact.incarnation == replica.incarnation:
            yield from _exceeds("attempt", fact.attempt, replica.sync_attempt)
        yield from _exceeds("version", getattr(fact, "version", 0), training.latest_version)
    elif isinstance(fact, PromptsDrawn | DrawFailed | ProcessProbed):
        number = fact.order if isinstance(fact, ProcessProbed) else fact.number
        yield from _lacks("order", number, state.orders.next_number, "were given")
    elif isinstance(fact, ProcessLost):
        yield from _loss_problems(fact, state)


def _loss_problems(fact: ProcessLost, state: State) -> Iterator[str]:
    """The problem of a `ProcessLost` with versions or checkpoints that its process cannot have left."""
    if fact.kind != TRAINER:
        if fact.published != NO_VERSION or fact.saved:
            yield f"a {fact.kind} publishes no weights and saves no checkpoints; leave published and saved out"
        return
    newest = state.training.latest_version + state.publishing
    if fact.published > newest:
        yield f"published is {fact.published}, but the newest version that was ordered is {newest}"
    for steps in fact.saved:
        if not 0 < steps <= state.training.steps_trained or not state.limits.checkpoint_every:
            yield f"saved has {steps}, but no checkpoint after {steps} train steps was ordered"


def _exceeds(name: str, number: int, newest: int) -> Iterator[str]:
    if number > newest:
        yield f"{name} {number} was not ordered; the newest is {newest}"


def _unknown(what: str, name: str, known: Sequence[str]) -> Iterator[str]:
    if name not in known:
        yield f"there is no {what} {name!r}; {f'use {_any(known)}' if known else f'the run has no {what}'}"


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
    if isinstance(fact, NUMBERED):
        return
    for order in state.orders.open(relation.subject).values():
        if all(getattr(order.command, name) == getattr(fact, name) for name in names):
            yield order


def _echo_problems(fact: Any, order: Order) -> Iterator[str]:
    """A number above that of the open order was never issued; a lower one, or one of an earlier life, is late. The same
    attempt of a group or of rows was ordered on one life of one replica."""
    command: Any = order.command
    if "replica" in RELATIONS[type(command)].echo and fact.attempt == command.attempt:
        for name in ("replica", "incarnation"):
            if getattr(fact, name) != getattr(command, name):
                yield f"{name} is {getattr(fact, name)}, but this attempt was ordered on {getattr(command, name)}"
    late = getattr(fact, "incarnation", 0) < getattr(command, "incarnation", 0)
    for name in () if late else ("attempt", "number"):
        theirs, ours = getattr(fact, name, None), getattr(command, name, None)
        if theirs is not None and ours is not None and theirs > ours:
            yield f"{name} is {theirs}, but {type(command).__name__} has {ours}"


def _is_late(fact: Any, command: Any) -> bool:
    """Whether a fact answers an order that ended before this one was given, and so has no effect."""
    both = [name for name in ("incarnation", "attempt", "number") if hasattr(fact, name) and hasattr(command, name)]
    return any(getattr(fact, name) < getattr(command, name) for name in both)


def _acknowledgment_problems(fact: OrderDone, state: State) -> Iterator[str]:
    if not fact.orders:
        yield "orders is empty; give the `number` of each order that is done"
    for number in fact.orders:
        yield from _lacks("order", number, state.orders.next_number, "were given")
        if number in state.orders.by_number:
            command = type(state.orders.by_number[number].command)
            if OrderDone not in RELATIONS[command].answers:
                yield f"order {number} is {command.__name__}; answer it by {_named(RELATIONS[command].answers)}"


def _progress_problems(fact: OrderProgressed, state: State) -> Iterator[str]:
    yield from _lacks("order", fact.order, state.orders.next_number, "were given")
    order: Any = state.orders.by_number.get(fact.order)
    if order is None:
        return
    if OrderProgressed not in RELATIONS[type(order.command)].reports:
        yield f"order {fact.order} is {_name(type(order.command))}, which does not report progress"
    elif order.subject == "group" and fact.finished > (samples := state.replicas.by_id[order.owner].samples):
        yield f"finished is {fact.finished}, but the group has {samples} trajectories"
    elif order.subject != "group" and fact.finished:
        yield f"finished is {fact.finished}, but order {fact.order} generates no group"


def _timer_problems(fact: TimerFired, state: State, now: float) -> Iterator[str]:
    yield from _lacks("timer", fact.timer, state.orders.next_number, "were set")
    order = next((order for order in state.orders.open("timer").values() if order.number == fact.timer), None)
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
    elif isinstance(fact, (*SYNC, SyncFailed)):
        answers = RELATIONS[type(order)].answers
        if type(fact) in SYNC and SYNC.index(type(fact)) > SYNC.index(answers[0]):
            yield f"{type(order).__name__} comes first; answer it by {_named(answers)}"
        aborts = isinstance(order, PauseReplica) and order.mode in ABORTING
        if aborts and isinstance(fact, ReplicaPaused) and (groups := state.orders.of(order.replica, "group")):
            yield f"groups {[*groups]} still run there; first report how each was aborted or ended"
        if getattr(fact, "version", order.version) != order.version:
            yield f"version {order.version} was ordered"
    elif isinstance(fact, RowsMeasured):
        yield from _row_problems(fact, order, state)
    if isinstance(fact, GroupGenerated | StateLeft) and fact.reward_spread < 0:
        yield "reward_spread is negative, but is the largest minus the smallest reward"
    if isinstance(fact, ProcessUp) and fact.kind == REPLICA:
        if not fact.slots or not fact.samples:
            yield "slots and samples must be at least 1"
        if fact.version > state.training.latest_version:
            yield f"version is {fact.version}, but the newest is {state.training.latest_version}"


def _row_problems(fact: RowsMeasured, order: MeasureRows, state: State) -> Iterator[str]:
    """What is impossible in the measurement of an ordered chunk."""
    if not fact.right <= fact.measured <= order.count:
        yield f"must have right <= measured <= {order.count}, the number of rows"
    if fact.version != order.version:
        yield f"version {order.version} was ordered"
    ordered = range(order.first, order.first + order.count)
    for name in ("rows", "right_rows", "part_rows"):
        rows = getattr(fact, name)
        if (strange := next((row for row in rows if row not in ordered), None)) is not None:
            yield f"{name} has row {strange}, but rows {ordered.start} to {ordered.stop - 1} were ordered"
        if not {*fact.rows}.issuperset(rows):
            yield f"{name} has rows that are not in rows"
        values = rows if name != "part_rows" else tuple(zip(rows, fact.part_places, strict=False))
        if len({*values}) < len(values):
            yield f"{name} names a row twice{' with the same part' if name == 'part_rows' else ''}; name each once"
    for names in (("rows", "rewards", "answers"), ("part_rows", "part_places", "part_values")):
        if len({len(getattr(fact, name)) for name in names}) > 1:
            yield f"{', '.join(names)} must have the same number of entries"
    for name, number in (("rows", fact.measured), ("right_rows", fact.right)):
        if fact.rows and len(getattr(fact, name)) != number:
            field = "measured" if name == "rows" else "right"
            yield f"has {len(getattr(fact, name))} {name}, but {field} is {number}; name these rows"
    assert state.limits.validation is not None  # otherwise no rows are ordered
    for row, place in zip(fact.part_rows, fact.part_places, strict=True):
        parts = state.limits.validation.place(row).set.parts
        if place >= len(parts):
            yield f"part_places has {place}, but the set of row {row} has {len(parts)} reward parts"


def _version_problems(fact: Any, state: State) -> Iterator[str]:
    oldest, newest = fact.oldest_version, fact.newest_version
    known, replica = state.groups.live.get(fact.group), state.replicas.by_id.get(fact.replica)
    if (oldest == NO_VERSION or newest == NO_VERSION) and (fact.tokens or oldest != newest):
        yield "a group with tokens has an oldest and a newest version; use -1 for both if it has no token"
    elif isinstance(fact, GroupGenerated) and not fact.tokens:
        yield "tokens is 0; a group without tokens is GroupFailed"
    elif oldest != NO_VERSION and known is not None and replica is not None:
        first, last = known.admission.version, replica.version
        if not first <= oldest <= newest <= last:
            law = f"must have {first} <= oldest_version <= newest_version <= {last}"
            yield f"{law}: it was admitted on version {first}, and replica {replica.id} has version {last}"


def due_at(order: Order) -> float:
    """When the timer of an order is due, in seconds since the run began."""
    delay_s: float = getattr(order.command, "delay_s", 0.0)
    return order.at + max(0.0, delay_s)


def _named(kinds: Any) -> str:
    return _any([kind.__name__ for kind in kinds])


def _any(names: Iterable[str]) -> str:
    return " or ".join(names)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))
