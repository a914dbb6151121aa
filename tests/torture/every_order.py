"""Every order of events of small runs, with at most one failure: every law holds in every state, and an end can be
reached from each. `order_grid` has the runs that `make torture` searches.

The order book says what may come next (`engine.simulation.order_answers`). Each event is a tick of its own, and no time
passes. A *state* is what a snapshot of the scheduler holds. To keep their number small, a search passes over states,
and over differences between states, that decide nothing:

*Acknowledgments come at once.* No decision reads an open order to discard, retire, abort or resume (`INERT`), and its
acknowledgment has no handler. So a state without it can do all that the state with it can, by the same commands, and
more: a replica samples only once its resume is acknowledged. Whatever goes wrong goes wrong without it, too, and an end
can be reached from both states or from neither. Each acknowledgment is a tick in which nothing may be ordered.

*Counts* and sentences (`COUNTS`) only name orders or are for people, or the handler of a failure reads them. Those are
0 until the one failure, and none follows it.

*Groups are named by their rank* among those that live: ties are broken by the order of ids, which ranks keep. Replicas
are not renamed, because to exchange two would change that order.

*A state after the failure that equals one before it* is that state: all that can follow can follow there.

`test_every_order.py` compares the states with those of a search that passes over nothing. Never search with more than
one failure, with time limits, or with policies that have a memory or read counts, times or ids of groups.
"""

import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import fields, force_setattr

from engine.commands import Command, FinishRun, RetireWeights, TrainStep
from engine.errors import InvariantViolated, counted
from engine.events import Event, OrderDone, RunStarted, stamp
from engine.policies import PolicySet
from engine.scheduling.core import Core
from engine.scheduling.scheduler import Scheduler
from engine.simulation.order_answers import GivenPrompts, answers
from engine.states.facts import Facts
from engine.states.laws import check_all, require
from engine.states.limits import Limits
from engine.states.orders import RELATIONS
from engine.states.state import RunFacts, State
from engine.states.timeouts import Timeouts
from engine.states.view import View

INERT = frozenset(("discard", "retire", "abort", "resume"))
"""Subjects of orders that no decision reads and whose acknowledgment has no handler."""
COUNTS: Mapping[str, tuple[str, ...]] = {
    "Group": ("attempt", "infrastructure_failures", "data_failures", "resumed_tokens"),
    "Replica": (
        "sync_attempt", "sync_failures", "generated", "tokens", "aborted", "failed", "failed_groups", "failed_group",
    ),
    "Process": ("life", "deaths", "trained", "delay_s", "answered_at", "reason"),
    "Training": ("publishing_attempt", "publish_failures", "setbacks"),
    "Step": ("attempt", "failures", "seconds", "setbacks"),
    "Chunk": ("attempt",),
    "Checkpoints": ("failures",),
    "Ending": ("last_failure", "failed_draws", "failed_in_a_row", "judged", "misjudged"),
}  # fmt: skip
"""Fields that get their initial values. (A chunk keeps its failures: those that failed are measured last.)"""
NAMES = {
    cls: [name for name in cls.__struct_fields__ if name in ("attempt", "life", "number", "timer", "group", "groups")]
    for cls in RELATIONS
}
"""The fields of each order that only name something."""
SHOWN = ("kind", "index", "group", "replica", "version", "step", "task", "chunk", "cause", "count", "orders", "timer")
"""Fields of the events of a story."""
MOST_STATES = 1_000_000
NO_TIME_S = 0.0005
"""A deadline policy may act at once, because no time passes in a search."""
LAWFUL_FAILURES = ("the trainer is lost", "no group could be trained on")
"""How one failure may end a run: of its only prompt, or of the trainer where no checkpoint has what it trained."""


class SmallWorld:
    """A run whose every order of events is searched. `failure`: one may happen. `limits`: fields of `Limits`."""

    def __init__(
        self, batch: int, staleness: int, workers: int, *, replicas: int = 1, slots: int = 2, prompts: int = 3,
        failure: bool = True, names: Mapping[str, str] | None = None, **limits: Any,
    ) -> None:  # fmt: skip
        self.limits = Limits(
            train_batch_size=batch, max_staleness_steps=staleness, max_concurrent_groups=workers,
            infrastructure_attempts=2, data_attempts=1, deadline_timeout_s=NO_TIME_S, timeouts=Timeouts.every(None),
            **limits,
        )  # fmt: skip
        self.names = {**(names or {})}
        self.replicas, self.failure = replicas, failure
        self.source = GivenPrompts(prompts=prompts, slots=slots)
        self.lossless = self.names.get("deadline", "wait") == "wait" and not self.limits.over_sample
        """No group is dropped for a step."""
        values = {name: value if isinstance(value, str | int | float) else "" for name, value in limits.items()}
        changed = [*self.names.values(), *(f"{name} {value}".strip() for name, value in values.items())]
        sizes = [counted(replicas, "replica"), counted(prompts, "prompt"), "a failure" if failure else "no failure"]
        self.title = ", ".join([f"B {batch}, S {staleness}, K {workers}", *sizes, *changed])


class Found(NamedTuple):
    """What a search found. `story`: the law that is broken and the events that lead there; empty if there is none."""

    states: int
    ticks: int
    ends: int
    cpu_s: float
    story: str


def name_alike(facts: RunFacts) -> None:
    """Reset what decides nothing, and name groups and orders by their rank. The indexes of the state are void then."""
    live, orders = facts.groups.live, facts.orders
    ranks = {id: id if facts.checkpoints.tracks else rank for rank, id in enumerate(sorted(live))}
    facts.moves = {}
    if facts.ending.outcome is not None:
        force_setattr(facts.ending.outcome, "reason", "")
    for record in _records(facts):
        for name, value in _initial(type(record)):
            setattr(record, name, value)
    for group in live.values():
        group.id = ranks[group.id]
        if group.state != "aborted":
            group.resume_key = ()
        if group.state in ("generated", "batched"):
            group.failed_on, group.newest_version = -1, group.oldest_version
    facts.groups.live = {group.id: group for group in live.values()}
    facts.groups.ready = {ranks[id]: None for id in facts.groups.ready}
    facts.groups.queues = {name: {ranks[id]: None for id in queue} for name, queue in facts.groups.queues.items()}
    for step in facts.training.steps.values():
        step.groups = tuple([ranks.get(id, -1) for id in step.groups])
    for number, order in enumerate(orders.by_number.values()):
        order.number = number
        for name in NAMES[type(order.command)]:
            value = getattr(order.command, name)
            if name == "groups":
                value = tuple([ranks.get(id, -1) for id in value])
            elif name == "group":
                value = ranks.get(value, -1)
            else:
                value = number if name in ("number", "timer") else 0
            force_setattr(order.command, name, value)
    orders.by_number = {order.number: order for order in orders.by_number.values()}
    orders.next_number = len(orders.by_number)


def hash_state(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


@cache
def _initial(cls: type[Facts]) -> list[tuple[str, Any]]:
    counts = [one for one in fields(cls) if one.name in COUNTS[cls.__name__]]
    return [(one.name, {} if one.default is NODEFAULT else one.default) for one in counts]


def _records(facts: RunFacts) -> Iterator[Facts]:
    yield from (facts.training, facts.checkpoints, facts.ending)
    yield from facts.groups.live.values()
    yield from facts.training.steps.values()
    yield from facts.processes.values()
    for replica in facts.replicas.values():
        yield from (replica, replica.process)
    for validation in facts.validations.live.values():
        yield from validation.chunks


class Search:
    """All states of one run: those before its failure, then those after it, each with the fewest events first."""

    def __init__(self, world: SmallWorld) -> None:
        self.world = world
        self.encoder, self.decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RunFacts)
        self.fresh = Scheduler(world.limits, PolicySet.from_names(world.names))
        self.numbers: dict[bytes, int] = {}
        """The number of each state, by its hash."""
        self.parents, self.places = array("q"), array("q")
        """The state before each, and which of its answers leads there."""
        self.sources, self.targets = array("q"), array("q")
        """Two states for each event that is no failure: before and after it."""
        self.ends: list[int] = []
        self.queue: deque[tuple[int, bytes]] = deque()
        self.ticks = 0
        self.failed = False
        """The states that are searched now come after a failure."""

    def run(self) -> Found:
        cpu_s = time.process_time()
        story = self.find_all() or self.find_endless()
        return Found(len(self.parents), self.ticks, len(self.ends), time.process_time() - cpu_s, story)

    def find_all(self) -> str:
        """Find all states. Returns what is wrong."""
        self.add(self.first(), -1, -1)
        before: list[tuple[int, bytes]] = []
        while self.queue:
            before.append(self.queue.popleft())
            if story := self.follow(*before[-1], fault=False):
                return story
        self.failed = True
        for state in before if self.world.failure else ():
            if story := self.follow(*state, fault=True):
                return story
        while self.queue:
            if story := self.follow(*self.queue.popleft(), fault=False):
                return story
        return ""

    def follow(self, number: int, data: bytes, *, fault: bool) -> str:
        """Add the states that follow one. Returns what is wrong."""
        scheduler = self.scheduler(data)
        try:
            check_all(scheduler.state)
        except InvariantViolated as error:
            return self.story(number, str(error))
        every = enumerate(answers(scheduler.state, self.world.source))
        possible = [(place, answer.event) for place, answer in every if answer.fault == fault]
        if not possible and not fault:
            return self.story(number, "law 7: nothing can happen any more")
        for place, event in possible:
            if place != possible[0][0]:
                scheduler = self.scheduler(data)
            try:
                self.take(scheduler, event)
                reached = self.add(scheduler, number, place)
            except Exception as error:
                return self.story(number, str(error), place)
            if not fault:
                self.sources.append(number)
                self.targets.append(reached)
        return ""

    def find_endless(self) -> str:
        """What is wrong if no end can be reached from some state unless something fails."""
        ends, found = bytearray(len(self.parents)), True
        for number in self.ends:
            ends[number] = True
        while found:
            found = False
            for source, target in zip(reversed(self.sources), reversed(self.targets), strict=True):
                if ends[target] and not ends[source]:
                    ends[source] = found = True
        number = ends.find(0) or ends.rfind(0)  # without any end, the last state shows best what is repeated
        return self.story(number, "law 7: no end can be reached any more") if number >= 0 else ""

    # one state

    def first(self) -> Scheduler:
        scheduler = Scheduler(self.world.limits, self.fresh.policies)
        self.take(scheduler, RunStarted(replicas=self.world.replicas))
        return scheduler

    def scheduler(self, data: bytes) -> Scheduler:
        """A scheduler in that state. It shares what does not depend on it with all others, to save half the time."""
        scheduler, decisions = copy(self.fresh), copy(self.fresh.decisions)
        state = State(self.world.limits, facts=self.decoder.decode(data))
        scheduler.state, scheduler.view, scheduler.decisions = state, View(state), decisions
        decisions.state, decisions.view, scheduler._core = state, scheduler.view, Core(state, decisions)
        return scheduler

    def take(self, scheduler: Scheduler, event: Event) -> None:
        """Let an event come next, and then all acknowledgments of `INERT` orders. Raises: whatever is wrong."""
        for command in self.tick(scheduler, event):
            self.check_command(scheduler.state, command)
        self.acknowledge(scheduler)
        require(not scheduler.tick(()), "law of ticks: reacting again orders more", event=event)
        if scheduler.state.ending.outcome is not None:
            self.check_end(scheduler.state, scheduler.state.ending.outcome)

    def tick(self, scheduler: Scheduler, event: Event) -> tuple[Command, ...]:
        self.ticks += 1
        stamp(event, 0, 0.0)
        return scheduler.tick((event,))

    def acknowledge(self, scheduler: Scheduler) -> None:
        state = scheduler.state
        inert = [order for order in state.orders.all() if order.subject in INERT]
        up = tuple([order.number for order in inert if getattr(state.process_of(order.owner), "state", "") == "up"])
        if up:
            check_all(state)
            require(not self.tick(scheduler, OrderDone(orders=up)), "an acknowledgment decides something", orders=inert)

    def check_command(self, state: State, command: Command) -> None:
        """The laws about commands."""
        if isinstance(command, TrainStep):
            stale = max(command.staleness) > self.world.limits.max_staleness_steps
            require(not stale, "law 4: a group is trained too stale", staleness=command.staleness)
        elif isinstance(command, RetireWeights):
            takes = [one.id for one in state.replicas.by_id.values() if one.next_version == command.version]
            require(not takes, "law 6: weights are dropped that a replica takes", version=command.version, takes=takes)

    def check_end(self, state: State, outcome: FinishRun) -> None:
        """The laws about ends: one failure ends no run, and all prompts were drawn and trained, unless one failed."""
        check_all(state)
        if outcome.outcome != "finished":
            lawful = self.failed and outcome.reason.startswith(LAWFUL_FAILURES)
            require(lawful, "law 9: one failure ended the run", reason=outcome.reason)
            return
        ledger, prompts = state.groups.ledger, self.world.source.prompts
        lost = self.world.lossless and ledger.released > self.failed
        all_ended = ledger.consumed + ledger.released == ledger.drawn == prompts
        require(all_ended and not lost, "law 5: prompts were lost", drawn=ledger.drawn, by_phase=ledger.count)

    def add(self, scheduler: Scheduler, parent: int, place: int) -> int:
        """The number of the state of a scheduler, which is of no more use."""
        ended, data = scheduler.state.ending.outcome is not None, self.encode(scheduler.state.facts)
        number = self.numbers.setdefault(hash_state(data), len(self.parents))
        if number == len(self.parents):
            require(number < MOST_STATES, "law 7: there is no end of states")
            self.parents.append(parent)
            self.places.append(place)
            if ended:
                self.ends.append(number)
            else:
                self.queue.append((number, data))
        return number

    def encode(self, facts: RunFacts) -> bytes:
        """A state as bytes: the same for states that decide alike."""
        name_alike(facts)
        return self.encoder.encode(facts)

    def story(self, number: int, what: str, *last: int) -> str:
        """What is wrong, and the events that lead there: in a run whose groups and orders keep their names."""
        path, scheduler, lines = [*last], self.first(), list[str]()
        while number > 0:
            path.insert(0, self.places[number])
            number = self.parents[number]
        for place in path:
            event = list(answers(scheduler.state, self.world.source))[place].event
            shown = ", ".join(f"{name} {getattr(event, name)}" for name in SHOWN if hasattr(event, name))
            lines.append(f"  {len(lines) + 1}. {type(event).__name__} {shown}")
            try:
                self.take(scheduler, event)
                check_all(scheduler.state)
            except Exception as error:
                what = str(error)
        return "\n".join([f"{what}; with {self.world.title}, after", *lines])
