"""The causal story of one prompt group: event → command → event, with times, versions and state changes.

`moment` calls it for each event of a replay. An event belongs to the story if it names the group, changed its state,
caused a command that names it, or concerns the replica that it runs on or the step that trains it.
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
    """One event of the story, and its effects on the group."""

    event: Event
    answers: tuple[EventId, str] | None
    """The event that caused the order which this event answers or reports on, and the order's name."""
    stale: bool
    """Whether the event is a stale echo: it answers an order that is no longer open, and changed nothing."""
    changes: tuple[str, ...]
    """Changes of the group's state."""
    commands: tuple[tuple[Command, str], ...]
    """Commands that name the group, each with a note."""

    def lines(self, group: GroupId) -> list[str]:
        back = f"  <- {self.answers[1]} of #{self.answers[0]}" if self.answers else ""
        echo = "  (stale echo: changes nothing)" if self.stale else ""
        lines = [f"{stamped(self.event)}{back}{echo}"]
        lines += [f"      {change}" for change in self.changes]
        for command, note in self.commands:
            without = tuple(name for name in ("groups", "staleness") if hasattr(command, name))
            words = worded(command, without=("group", *without))
            lines.append(f"      -> #{command.cause} {words}{f': {note}' if note else ''}")
        return lines


class Story:
    """Collects the chapters of one group while a record is replayed."""

    def __init__(self, group: GroupId) -> None:
        self.group = group
        self.chapters: list[Chapter] = []
        self._replica: ReplicaId | None = None
        """The replica that it runs on."""
        self._step: StepId | None = None
        """The step that has it in its batch."""
        self._echoes = 0

    def add(self, frame: Handled, changes: list[str], state: State) -> None:
        """Add the next event. `state`: the state after it. `changes`: state changes of this group."""
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
        """The text, with a marker line after event `mark`."""
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
        """The order that the event answers or reports on, from the order book."""
        if not state.orders.matched:
            return None
        order = state.orders.matched[-1].command
        return order.cause, type(order).__name__

    def _follow(self, commands: tuple[Command, ...]) -> None:
        """Update the group's replica and step."""
        for command in filter(self._named_by, commands):
            if isinstance(command, (StartGroup, ResumeGroup)):
                self._replica = command.replica
            elif isinstance(command, (ScoreBatch, TrainStep)):
                self._replica, self._step = None, command.step

    def _note(self, command: Command, state: State) -> str:
        """The note of a command: version and deadline for generating, position and staleness in a batch."""
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
