"""The groups of a run: which there are, in which phase, and which may be started, resumed or taken next.

Written by `scheduling/groups.py` and `scheduling/steps.py`.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from operator import attrgetter

from msgspec import field

from engine.ids import GroupId, ReplicaId, StepId
from engine.states.checkpoints import Checkpoints
from engine.states.facts import Facts
from engine.states.group import Group, group_table
from engine.states.ledger import CONSUMED, PARKED, READY, RELEASED, RUNNING, UNREADY, WAITING, Deadlines, Ledger
from engine.states.limits import GENERATED, QUEUED, Limits
from engine.states.machine import Moves, Observer, Phase, SharedMachine
from engine.states.orders import OrderBook
from engine.states.replica import Replica
from engine.states.state_queues import StateQueues
from engine.states.training import Training

PHASES = tuple(Phase)


class GroupsFacts(Facts):
    """The groups that were drawn and have not ended, and what the run knows of them together."""

    live: dict[GroupId, Group] = {}
    """Groups that no step has trained on and that were not released."""
    ready: dict[GroupId, None] = {}
    """Those that a step may take, in the order they became ready."""
    queues: dict[str, dict[GroupId, None]] = {}
    """Those that wait for the work of each added state, oldest first."""
    ledger: Ledger = field(default_factory=Ledger)
    exhausted: bool = False
    """The source has no more prompts."""
    generated_at: float = 0.0
    """When a group was last generated."""
    loosest: int = 0
    """The largest S under which an open group may have been admitted."""
    over: int = 0
    """Number of groups that run beyond K after it was lowered. No other group starts until they have ended."""


class Groups:
    """The groups of a run, and the lists of those that may start, resume or be taken next."""

    def __init__(
        self, facts: GroupsFacts, limits: Limits, orders: OrderBook, training: Training, checkpoints: Checkpoints,
        replicas: Mapping[ReplicaId, Replica], moves: Moves, observe: Observer | None,
    ) -> None:  # fmt: skip
        """`replicas`: every replica ever seen."""
        self.facts, self._training, self._checkpoints = facts, training, checkpoints
        self._running_orders, self._replicas = orders.open["group"], replicas
        self.live, self.ready, self.ledger = facts.live, facts.ready, facts.ledger
        self.state_queues = StateQueues(facts.queues, limits.added_states, orders)
        table = group_table(limits.states_at(GENERATED), limits.states_at(QUEUED))
        self.machine = SharedMachine(table, moves, observe)
        self._phases = {state: int(phase) for state, phase in (table.phases or {}).items()}
        self._leave = {RUNNING: self._leave_running, PARKED: self._leave_parked, READY: self._leave_ready}
        self._enter = {
            PARKED: self._enter_parked, READY: self._enter_ready, CONSUMED: self._end, RELEASED: self._end,
        }  # fmt: skip
        """What changes when a group leaves or enters a phase."""
        if limits.states_at(QUEUED):
            self._leave[WAITING], self._enter[WAITING] = self._leave_waiting, self._enter_waiting
        self._index(limits.surplus)

    def _index(self, surplus: int) -> None:
        """Make the lists and counts that follow from the groups."""
        self.waiting: deque[GroupId] = deque()
        self.parked: dict[GroupId, None] = {}
        """Groups that wait for a replica to resume on. A dict for its order."""
        self.finishing: dict[GroupId, Replica] = {}
        """Running groups of which a trajectory has ended, and where they run."""
        self.ended = Counter[ReplicaId]()
        """Trajectories of running groups that have ended, by replica."""
        self.unrewarded = 0
        """Running groups whose trajectories have all ended, but not their rewards."""
        self.deadlines = Deadlines(surplus)
        for group in self.live.values():
            phase = self._phases[group.state]
            self.deadlines.count(group.deadline, phase)
            if group.state == QUEUED:
                self.waiting.append(group.id)
            elif group.state == "aborted":
                self.parked[group.id] = None
            elif phase == RUNNING and group.finished:
                self._count_ended(group, group.finished)

    def use(self, limits: Limits) -> None:
        """Use other bounds from now on. Groups keep their deadlines."""
        self.facts.loosest = max(self.facts.loosest, limits.max_staleness_steps)
        self.facts.over = max(0, self.ledger.running - limits.max_concurrent_groups)

    def settle(self, most_running: int) -> None:
        """At the end of a tick, count the groups beyond a lowered K again: they can only become fewer."""
        if self.facts.over:
            self.facts.over = min(self.facts.over, max(0, self.ledger.running - most_running))

    def draw(self, first: GroupId, count: int) -> None:
        for id in range(first, first + count):
            self.live[id] = Group(id)
            self.waiting.append(id)
        self.ledger.draw(count)

    def branch(self, consumed: Iterable[GroupId], released: Iterable[GroupId]) -> None:
        """Queue every group again that no train step holds any more, in the order of the draws. Groups that were live
        keep the failures that count against their retry budgets, and how often they hung."""
        consumed, released, live = tuple(consumed), tuple(released), dict(self.live)
        self.live.clear()
        self.live.update((id, Group(id)) for id in sorted((*live, *consumed, *released)))
        self.ready.clear()
        self.state_queues.clear()
        for id, before in live.items():
            group = self.live[id]
            group.attempt, group.exceeded = before.attempt, before.exceeded
            group.infrastructure_failures, group.data_failures = before.infrastructure_failures, before.data_failures
        self._index(self.deadlines.surplus)
        self.ledger.branch(waiting=len(self.live), consumed=len(consumed), released=len(released))

    # changes of state

    def fire(self, group: Group, trigger: str) -> None:
        """The only way to change the state of a group. Updates the books and lists of the phases that it leaves and
        enters."""
        before = group.state
        self.machine.fire(group, trigger)
        source, target = self._phases[before], self._phases[group.state]
        self.ledger.move(source, target)
        self.deadlines.move(group.deadline, source, target)
        leave, enter = self._leave.get(source), self._enter.get(target)
        if leave is not None:
            leave(group, before)
        if enter is not None:
            enter(group)

    def phase_of(self, state: str) -> Phase:
        """The phase of a state of groups."""
        return PHASES[self._phases[state]]

    def finish_trajectories(self, group: Group, finished: int) -> None:
        """Note that so many trajectories of a running group have ended."""
        self._count_ended(group, finished)

    def _count_ended(self, group: Group, finished: int) -> None:
        """Count trajectories of a running group that have ended."""
        if group.id in self.finishing:
            self._forget_ended(group)
        replica = self.finishing[group.id] = self._replicas[int(self._running_orders[group.id].owner)]
        group.finished = finished
        self.ended[replica.id] += finished
        self.unrewarded += finished == replica.samples

    def _forget_ended(self, group: Group) -> None:
        replica = self.finishing.pop(group.id)
        self.ended[replica.id] -= group.finished
        self.unrewarded -= group.finished == replica.samples

    def unready(self, until: StepId) -> list[Group]:
        """Started groups with deadline ≤ `until` that are not ready, in the order in which they started. Visits all
        live groups: only a batch that leaves surplus groups, and a fired deadline timer, may ask."""
        live = self.live.values()
        found = (group for group in live if group.deadline <= until and UNREADY[self._phases[group.state]])
        return sorted(found, key=attrgetter("started_at"))

    def _leave_waiting(self, group: Group, before: str) -> None:
        """`start_groups` removes the first group in `waiting` itself."""
        if before != QUEUED:
            self.state_queues.leave(before, group.id)
        elif self._phases[group.state] == WAITING:
            self.waiting.remove(group.id)

    def _enter_waiting(self, group: Group) -> None:
        """A queued group waits in the order of the draws, whenever added states finished their work on it."""
        if group.state == QUEUED:
            insort(self.waiting, group.id)
        else:
            self.state_queues.enter(group.state, group.id)

    def _leave_running(self, group: Group, before: str) -> None:
        if group.finished:
            self._forget_ended(group)
            group.finished = 0

    def _leave_parked(self, group: Group, before: str) -> None:
        if before == "aborted":
            del self.parked[group.id]
        else:
            self.state_queues.leave(before, group.id)

    def _leave_ready(self, group: Group, before: str) -> None:
        del self.ready[group.id]

    def _enter_parked(self, group: Group) -> None:
        if group.state == "aborted":
            self.parked[group.id] = None
        else:
            self.state_queues.enter(group.state, group.id)

    def _enter_ready(self, group: Group) -> None:
        self.ready[group.id] = None

    def _end(self, group: Group) -> None:
        """The group was trained on, or released."""
        del self.live[group.id]
        if self._checkpoints.tracks and self._phases[group.state] == RELEASED:
            self._checkpoints.release(group.id, self._training.steps_trained)
