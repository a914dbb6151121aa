"""The commands of one tick, and what caused each. A command enters the order book as soon as it is added."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from msgspec.structs import force_setattr

from engine.commands import COMMANDS, CancelTimer, Command, DiscardGroups, FinishRun, SetTimer, StartProcess
from engine.events import (
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    ProcessUp,
    RowsFailed,
    RowsMeasured,
    StateFailed,
    StateLeft,
    TimerFired,
    WeightsInstalled,
)
from engine.ids import EventId, GroupId, ReplicaId
from engine.scheduling.work_times import mark
from engine.states.orders import FILL, Owner, stage_owner
from engine.states.process import REPLICA
from engine.states.state import State

MOST_STARTS = 256
"""Maximum number of groups, and of replicas, that one tick starts. A timer that fires at once starts the rest."""

MAKES_ROOM = (GroupGenerated, GroupAborted, GroupFailed, RowsMeasured, RowsFailed, WeightsInstalled)
"""Facts of a replica after which it may have room for groups."""
LEAVES_STATE = (StateLeft, StateFailed)
"""Facts after which an added state may have room for the work on another group."""
_NUMBERED = frozenset(command for command in COMMANDS if "number" in command.__struct_fields__)


class Orders:
    """The commands that one tick causes.

    `cause` is the fact that the next command names: the one being handled, or in a reaction the last of the tick unless
    another made the command possible.
    """

    __slots__ = ("_commands", "_discards", "_of_group", "_room", "_state", "cause", "changed_by", "fired")

    def __init__(self, state: State) -> None:
        self._state = state
        self.begin()

    def begin(self) -> None:
        """Begin a tick."""
        self.cause: EventId = -1
        self.changed_by: EventId = -1
        """The last fact of this tick that was about neither a group nor a timer; without any, the first about a timer;
        -1: all were about groups."""
        self.fired: dict[str, EventId] = {}
        """Fired timers on which nothing has acted yet, by name: the event of each."""
        self._commands: list[Command] = []
        self._discards: list[GroupId] = []
        self._of_group: dict[GroupId, EventId] = {}
        """The last fact of each group in this tick."""
        self._room: dict[Owner, list[EventId]] = {}
        """The facts of this tick that made room at each replica and added state, the last first."""

    def note(self, event: Event) -> None:
        """Begin to handle a fact. It is the cause of the commands from now on."""
        self.cause = event.id
        group = getattr(event, "group", None)
        if group is not None:
            self.note_group(group)
        if type(event) in MAKES_ROOM:
            self.note_room(event.replica)  # type: ignore[attr-defined]
        elif type(event) in LEAVES_STATE:
            self.note_room(stage_owner(event.state))  # type: ignore[attr-defined]
        elif type(event) is ProcessUp and event.kind == REPLICA:
            self.note_room(event.index)

    def note_group(self, group: GroupId) -> None:
        """The fact being handled is about a group."""
        self._of_group[group] = self.cause

    def note_room(self, owner: Owner) -> None:
        """The fact being handled makes room for work at a replica or an added state."""
        self._room.setdefault(owner, []).insert(0, self.cause)

    # causes of reactions

    @contextmanager
    def because(self, cause: EventId) -> Iterator[None]:
        """Name another fact as the cause, if there is one (-1: there is none)."""
        last, self.cause = self.cause, cause if cause >= 0 else self.cause
        try:
            yield
        finally:
            self.cause = last

    def cause_on(self, owner: Owner) -> EventId:
        """The fact that made room at a replica or an added state: the n-th start there has its n-th fact of this tick,
        or its last one. Without any, the last fact of the tick."""
        facts = self._room.get(owner)
        if not facts:
            return self.cause
        return facts.pop() if len(facts) > 1 else facts[0]

    def cause_of_sync(self, replica: ReplicaId) -> EventId:
        """The fact of this tick that answered the replica's sync order; without any, the present cause."""
        facts = self._state.orders.matched.items()
        answers = (fact for fact, orders in facts for one in orders if (one.subject, one.id) == ("sync", replica))
        return next(answers, self.cause)

    def cause_among(self, groups: Iterable[GroupId]) -> EventId:
        """The last fact of this tick about one of these groups; without any, the last fact of the tick."""
        known = self._of_group
        return max((known[group] for group in groups if group in known), default=self.cause) if known else self.cause

    def cause_of_work(self, group: GroupId, owner: Owner) -> EventId:
        """The last fact of this tick about a group; without any, the fact that made room at an added state."""
        known = self._of_group.get(group)
        return self.cause_on(owner) if known is None else known

    # orders

    def add(self, command: Command) -> None:
        """Give a command: an order gets its number in the book. Its cause is `cause`, unless it has one."""
        if command.cause < 0:
            force_setattr(command, "cause", self.cause)
        if type(command) in _NUMBERED:
            force_setattr(command, "number", self._state.orders.next_number)
        self._commands.append(command)
        order = self._state.orders.add(command, self._state.now)
        if order is not None and self._state.limit_check.least:
            mark(self._state, order, command.delay_s if isinstance(command, StartProcess) else 0.0)

    def discard(self, *groups: GroupId) -> None:
        """Discard the trajectories of groups, with one command for all discards of a tick."""
        self._discards += groups

    def add_discards(self) -> None:
        """Order the discards so far."""
        if self._discards:
            self.add(DiscardGroups(groups=tuple(self._discards)))
            self._discards = []

    # timers

    def set_timer(self, name: str, delay_s: float) -> None:
        """Set a timer, and cancel the one with this name that is already set."""
        self.cancel_timer(name)
        self.add(SetTimer(name=name, timer=self._state.orders.next_number, delay_s=delay_s))

    def limit_timer(self, name: str, since: float, limit_s: float | None) -> None:
        """Set a timer for `limit_s` after `since`, instead of one that is set; without a limit, none. Call it again
        after a change of the limit."""
        self.cancel_timer(name)
        if limit_s is not None:
            self.set_timer(name, max(0.0, limit_s - (self._state.now - since)))

    def cancel_timer(self, name: str) -> None:
        """Cancel a timer, if it is set."""
        order = self._state.orders.find("timer", name)
        if order is not None:
            self._state.limit_check.advance(order, self._state.now)
            self.add(CancelTimer(name=name, timer=order.number))

    def fire_timer(self, event: TimerFired) -> None:
        """Note that a timer has fired."""
        (order,) = self._state.orders.matched[event.id]
        self._state.limit_check.advance(order, self._state.now)
        self.fired[order.id] = event.id

    def continue_at_once(self) -> None:
        """Start the rest in another tick, so that no tick takes long."""
        if not self._state.orders.find("timer", FILL):
            self.set_timer(FILL, 0.0)

    # the end

    def end_run(self, outcome: str, reason: str, *, again: bool = False, drained: bool = False) -> None:
        """End the run as `finished`, `stopped` or `failed`. The first call determines the outcome. `again`: the run
        begins again from its record if its budget allows."""
        state = self._state
        ending = state.ending
        if ending.outcome is not None:
            return
        if again and not ending.draining:
            again = self._charge_restart()
            if not again:
                outcome = "failed"
                spent = f"; the run restarted {ending.restarts} times without a train step (run_restarts)"
                reason += spent if ending.restarts else ""
        else:
            again = False
        ending.outcome = FinishRun(outcome=outcome, reason=reason, again=again, drained=drained, cause=self.cause)

    def _charge_restart(self) -> bool:
        """Whether the run may begin again from its record. A new train step resets the budget."""
        state = self._state
        ending = state.ending
        if state.training.steps_trained > ending.restarted_at:
            ending.restarts, ending.restarted_at = 0, state.training.steps_trained
        if ending.restarts >= state.limits.run_restarts:
            return False
        ending.restarts += 1
        return True

    def take(self) -> tuple[Command, ...]:
        """The commands of the tick, in order. `FinishRun` comes last. A tick after the end of the run has none."""
        self.add_discards()
        outcome = self._state.ending.outcome
        if outcome is not None and self.cause >= 0:
            self.add(outcome)
        return tuple(self._commands)
