"""The causal story of one prompt group: event → command → event, with times, versions and changes of state.

Called by `at` for each event of a replay. An event belongs to the story if it names the group, if it changed the
group's state, if a command that answers it names the group, or if it is about the replica the group runs on or the
step that trains on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.commands import Command, ResumeGroup, ScoreBatch, StartGroup, TrainStep
from engine.events import (
    BatchScored,
    Event,
    ProcessLost,
    PromptsDrawn,
    ReplicaPaused,
    StepFailed,
    StepTrained,
    SyncFailed,
    WeightsInstalled,
)
from engine.ids import EventId, GroupId, ReplicaId, StepId
from engine.inspect.summary import stamped, worded
from engine.record import Handled
from engine.states.process import REPLICA
from engine.states.state import State

ABOUT_ITS_REPLICA = (ReplicaPaused, WeightsInstalled, SyncFailed)
ABOUT_ITS_STEP = (BatchScored, StepTrained, StepFailed)


@dataclass(frozen=True, slots=True)
class Chapter:
    """One event of the story and what followed from it for the group."""

    event: Event
    answers: tuple[EventId, str] | None
    """The event whose answer ordered this one, and the order."""
    stale: bool
    """The echo of something already over."""
    changes: tuple[str, ...]
    """Of the group's state."""
    commands: tuple[tuple[Command, str], ...]
    """Those that name the group, each with what is worth saying of it."""

    def lines(self, group: GroupId) -> list[str]:
        back = f"  <- {self.answers[1]} of #{self.answers[0]}" if self.answers else ""
        echo = "  (stale echo: changes nothing)" if self.stale else ""
        said = [f"{stamped(self.event)}{back}{echo}"]
        said += [f"      {change}" for change in self.changes]
        for command, note in self.commands:
            without = tuple(name for name in ("groups", "staleness") if hasattr(command, name))
            words = worded(command, without=("group", *without))
            said.append(f"      -> #{command.cause} {words}{f': {note}' if note else ''}")
        return said


class Story:
    """Collects the chapters of one group while a record is replayed."""

    def __init__(self, group: GroupId) -> None:
        self.group = group
        self.chapters: list[Chapter] = []
        self._replica: ReplicaId | None = None
        """Where it runs."""
        self._step: StepId | None = None
        """Which step has it in its batch."""
        self._echoes = 0

    def tell(self, frame: Handled, changes: list[str], state: State) -> None:
        """Take in the next event; `state` is that after it, `changes` are those of this group."""
        event = frame.event
        stale = state.stale_echoes > self._echoes
        self._echoes = state.stale_echoes
        commands = tuple((c, self._note(c, state)) for c in frame.commands if self._named_by(c))
        if commands or changes or self._named_in(event) or self._touched_by(event):
            self.chapters.append(
                Chapter(event, self._order_behind(state), stale and not changes, tuple(changes), commands)
            )
        self._follow(frame.commands)
        if self.group not in state.groups:
            self._replica = None

    def lines(self, mark: EventId | None = None) -> Iterator[str]:
        """The text; a line behind event `mark` says where the reader stands."""
        marked = mark is None
        for chapter in self.chapters:
            if not marked and mark is not None and chapter.event.id > mark:
                yield f"  ---- event {mark} is here ----"
                marked = True
            yield from chapter.lines(self.group)
        if not marked:
            yield f"  ---- event {mark} is here ----"

    def _named_in(self, event: Event) -> bool:
        if isinstance(event, PromptsDrawn):
            return event.first <= self.group < event.first + event.count
        return bool(getattr(event, "group", None) == self.group)

    def _touched_by(self, event: Event) -> bool:
        if isinstance(event, ProcessLost):
            return event.kind == REPLICA and event.index == self._replica
        if isinstance(event, ABOUT_ITS_REPLICA):
            return event.replica == self._replica
        return isinstance(event, ABOUT_ITS_STEP) and event.step == self._step

    def _named_by(self, command: Command) -> bool:
        return bool(getattr(command, "group", None) == self.group) or self.group in getattr(command, "groups", ())

    def _order_behind(self, state: State) -> tuple[EventId, str] | None:
        """What the order book says the event answers, or reports on."""
        if not state.orders.matched:
            return None
        order = state.orders.matched[-1].command
        return order.cause, type(order).__name__

    def _follow(self, commands: tuple[Command, ...]) -> None:
        """Where the group runs, and which step has it."""
        for command in filter(self._named_by, commands):
            if isinstance(command, (StartGroup, ResumeGroup)):
                self._replica = command.replica
            elif isinstance(command, (ScoreBatch, TrainStep)):
                self._replica, self._step = None, command.step

    def _note(self, command: Command, state: State) -> str:
        """Versions and deadlines of an order to generate, place and staleness of a batch."""
        if isinstance(command, (StartGroup, ResumeGroup)):
            replica = state.fleet.replicas.get(command.replica)
            at = f"the replica has version {replica.version}" if replica else ""
            group = state.groups.get(self.group)
            return f"{at}, deadline step {group.deadline}" if group else at
        groups: tuple[Any, ...] = getattr(command, "groups", ())
        if isinstance(command, TrainStep):
            place = groups.index(self.group)
            return f"place {place} of {len(groups)}, staleness {command.staleness[place]}"
        return f"with {len(groups) - 1} others" if len(groups) > 1 else ""
