"""The commands of one event as they come up."""

from engine.commands import Command, DiscardGroups
from engine.ids import EventId, GroupId


class Orders:
    """Collects what one event leads to. `cause` is that event's id."""

    __slots__ = ("_commands", "_discards", "cause")

    def __init__(self) -> None:
        self.cause: EventId = -1
        self._commands: list[Command] = []
        self._discards: list[GroupId] = []

    def begin(self, cause: EventId) -> None:
        self.cause = cause
        self._commands = []
        self._discards = []

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def discard(self, *groups: GroupId) -> None:
        """The trajectories of groups will not be asked for again; one command tells of all."""
        self._discards += groups

    def take(self, last: Command | None = None) -> tuple[Command, ...]:
        if self._discards:
            self._commands.append(DiscardGroups(groups=tuple(self._discards), cause=self.cause))
        if last is not None:
            self._commands.append(last)
        return tuple(self._commands)
