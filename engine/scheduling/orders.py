"""The commands of one event as they come up. Each enters the order book as it is given."""

from engine.commands import Command, DiscardGroups, FinishRun
from engine.ids import EventId, GroupId
from engine.states.state import State


class Orders:
    """Collects what one event leads to. `cause` is that event's id."""

    __slots__ = ("_commands", "_discards", "_state", "cause")

    def __init__(self, state: State) -> None:
        self.cause: EventId = -1
        self._state = state
        self._commands: list[Command] = []
        self._discards: list[GroupId] = []

    @property
    def number(self) -> int:
        """What the next order is numbered in the book."""
        return self._state.orders.next_number

    def begin(self, cause: EventId) -> None:
        self.cause = cause
        self._commands = []
        self._discards = []

    def add(self, command: Command) -> None:
        self._commands.append(command)
        self._state.orders.add(command, self._state.now)

    def discard(self, *groups: GroupId) -> None:
        """The trajectories of groups will not be asked for again; one command tells of all."""
        self._discards += groups

    def end_run(self, outcome: str, reason: str) -> None:
        """The run is over: `finished`, `stopped` or `failed`. Why it was over first stays why."""
        if self._state.outcome is None:
            self._state.outcome = FinishRun(outcome=outcome, reason=reason, cause=self.cause)

    def take(self) -> tuple[Command, ...]:
        """The commands of the event, in order; the end of the run comes last."""
        if self._discards:
            self.add(DiscardGroups(groups=tuple(self._discards), number=self.number, cause=self.cause))
        if self._state.outcome is not None:
            self.add(self._state.outcome)
        return tuple(self._commands)
