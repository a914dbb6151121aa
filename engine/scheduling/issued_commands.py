"""Collects the commands of one event. Each enters the order book as soon as it is added."""

from engine.commands import Command, DiscardGroups, FinishRun, SetTimer
from engine.ids import EventId, GroupId
from engine.states.state import State

MOST_STARTS = 256
"""Maximum number of groups, and of replicas, that one event starts. A timer that fires at once starts the rest."""


class Orders:
    """The commands that one event causes. `cause`: the id of that event."""

    __slots__ = ("_commands", "_discards", "_state", "cause")

    def __init__(self, state: State) -> None:
        self.cause: EventId = -1
        self._state = state
        self._commands: list[Command] = []
        self._discards: list[GroupId] = []

    @property
    def number(self) -> int:
        """The book's number for the next order."""
        return self._state.orders.next_number

    def begin(self, cause: EventId) -> None:
        self.cause = cause
        self._commands = []
        self._discards = []

    def add(self, command: Command) -> None:
        self._commands.append(command)
        self._state.orders.add(command, self._state.now)

    def continue_at_once(self) -> None:
        """Set a timer that fires at once to start the rest, so that no event takes long."""
        state = self._state
        if state.fill_timer is None:
            state.fill_timer = state.new_timer()
            self.add(SetTimer(timer=state.fill_timer, delay_s=0.0, cause=self.cause))

    def discard(self, *groups: GroupId) -> None:
        """Discard the trajectories of groups. One command covers all discards of an event."""
        self._discards += groups

    def end_run(self, outcome: str, reason: str, *, again: bool = False) -> None:
        """End the run as `finished`, `stopped` or `failed`. The first call determines the outcome. `again`: the run
        begins again from its record if its budget allows."""
        state = self._state
        if state.outcome is not None:
            return
        if again and not state.draining:
            again = self._charge_restart()
            if not again:
                outcome = "failed"
                spent = f"; the run restarted {state.restarts} times without a train step (run_restarts)"
                reason += spent if state.restarts else ""
        else:
            again = False
        state.outcome = FinishRun(outcome=outcome, reason=reason, again=again, cause=self.cause)

    def _charge_restart(self) -> bool:
        """Whether the run may begin again from its record. A new train step resets the budget."""
        state = self._state
        if state.steps_trained > state.restarted_at:
            state.restarts, state.restarted_at = 0, state.steps_trained
        if state.restarts >= state.limits.run_restarts:
            return False
        state.restarts += 1
        return True

    def add_discards(self) -> None:
        """Order the discards of the event so far."""
        if self._discards:
            self.add(DiscardGroups(groups=tuple(self._discards), number=self.number, cause=self.cause))
            self._discards = []

    def take(self) -> tuple[Command, ...]:
        """The commands of the event, in order. `FinishRun` comes last."""
        self.add_discards()
        if self._state.outcome is not None:
            self.add(self._state.outcome)
        return tuple(self._commands)
